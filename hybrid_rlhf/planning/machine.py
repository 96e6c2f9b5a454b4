"""Machines: five numbers that say how fast a rank is, and how its host is built.

The five are the rate of matrix products, the memory bandwidth, the time of a launch, and bandwidth and latency of the
link between ranks. `hybrid-rlhf calibrate` measures them on this machine (calibration.py); data sheets have the
vendors' peaks (dense, without sparsity; one direction of a link). Hosts are joined by a network, which has a bandwidth
and a latency of its own.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml
from hybrid_rlhf.configs.sections.rules import nearest, require
from hybrid_rlhf.planning.device import GPU_RESERVE_GIB, Device
from hybrid_rlhf.runtime.files.reading import read_text
from hybrid_rlhf.runtime.observability.profiling import PEAKS

NetworkSource = Literal["measured", "given", "data sheet"]
_RETIRED = {
    "bfloat16_tflops": "tflops has the rate of products in the dtype of training",
    "float32_tflops": "tflops has the rate of products in the dtype of training",
}


@dataclass(frozen=True)
class Machine:
    """Speed of a rank, and its host."""

    name: str
    """Name in tables."""
    tflops: float
    """Matrix products in the dtype of training: bfloat16 on a GPU, float32 on a CPU."""
    memory_gb_per_second: float
    """Bandwidth of the rank's memory, bytes read and bytes written."""
    device_gib: float
    """Memory that a process can use."""
    link_gb_per_second: float
    """Between ranks of a host, one direction of a rank."""
    hosts_gb_per_second: float
    """Between hosts, one direction, all network cards of a host together."""
    host_link_gb_per_second: float
    """Between a GPU and the memory of its host, one direction."""
    launch_microseconds: float = 20.0
    """Time of the host for each operation of a model that is launched from Python."""
    link_latency_microseconds: float = 4.0
    """Latency of a message within a host."""
    hosts_latency_microseconds: float = 15.0
    """Latency of a message between hosts."""
    cards_per_host: int = 8
    """Network cards of a host, over which its ranks are divided."""
    ranks_per_host: int = 8
    host_gib: float | None = None
    """Memory of a host that a run can use; null: unknown and not checked."""
    device: str = ""
    """A part of the name by which torch knows the GPU."""
    cores: int | None = None
    """Cores that the ranks of a host share; null: each rank has a GPU."""
    network_source: NetworkSource = "data sheet"
    """Where the speed of the network is from."""
    measured: bool = False
    """True if the speeds were measured, false if they are peaks of a data sheet."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            require(
                not number or (math.isfinite(value) and value > 0),
                f"{each.name} of a data sheet must be above 0, got {value}: see docs/placement.md",
            )

    @property
    def type(self) -> Literal["cpu", "cuda"]:
        """Type of the ranks' devices."""
        return "cuda" if self.cores is None else "cpu"

    @property
    def network_gib_per_second(self) -> float:
        """Bandwidth between hosts in GiB."""
        return self.hosts_gb_per_second * 1e9 / 2**30

    def with_network(self, gib_per_second: float) -> Machine:
        """The machine with a given bandwidth between hosts."""
        return replace(self, hosts_gb_per_second=gib_per_second * 2**30 / 1e9, network_source="given")

    def with_measured_network(self, gb_per_second: float, latency: float) -> Machine:
        """The machine with the network as measured by all ranks of its hosts; the latency in microseconds."""
        measured = replace(self, hosts_gb_per_second=gb_per_second, hosts_latency_microseconds=latency)
        return replace(measured, network_source="measured")

    def with_sheet(self) -> Machine:
        """A measured machine with the fields that only the data sheet of its GPU has; unchanged if there is none."""
        sheet = next((each for each in DATA_SHEETS.values() if each.device and each.device in self.name), None)
        if sheet is None:
            return self
        names = ("hosts_gb_per_second", "host_link_gb_per_second", "cards_per_host", "device")
        return replace(self, **{name: getattr(sheet, name) for name in names})

    def rank(self, ranks: int) -> Device:
        """The memory of a GPU of this machine, in a run of a number of ranks."""
        host_bytes = None if self.host_gib is None else self.host_gib * 2**30 / self.ranks_per_host
        return Device(torch.device("cuda"), ranks, (self.device_gib - GPU_RESERVE_GIB) * 2**30, host_bytes)


DATA_SHEETS = {
    sheet.name: sheet
    for sheet in (
        # name, peaks, GiB of memory, GB/s between GPUs, between hosts, to the host
        # NVIDIA B200 SXM: NVLink 5 (1,800 GB/s in both directions), PCIe 5 x16; DGX B200: eight 400 Gb/s cards.
        Machine("b200", *PEAKS["B200"], 178.4, 900, 400, 64, device="B200"),
        # NVIDIA H100 SXM: NVLink 4 (900 GB/s in both directions), PCIe 5 x16; DGX H100: eight 400 Gb/s cards.
        Machine("h100", *PEAKS["H100"], 79.1, 450, 400, 64, device="H100"),
        # NVIDIA H200 SXM: an H100 with other memory.
        Machine("h200", *PEAKS["H200"], 139.8, 450, 400, 64, device="H200"),
        # NVIDIA A100 SXM 80 GB: NVLink 3 (600 GB/s in both directions), PCIe 4 x16; DGX A100: eight 200 Gb/s cards.
        Machine("a100", *PEAKS["A100-SXM4-80GB"], 79.1, 300, 200, 32, device="A100-SXM4-80GB"),
        # NVIDIA A100 SXM 40 GB, and A800 SXM: an A100 with 400 GB/s of NVLink.
        Machine("a100-40g", *PEAKS["A100"], 39.4, 300, 200, 32, device="A100-SXM4-40GB"),
        Machine("a800", *PEAKS["A800"], 79.1, 200, 200, 32, device="A800"),
        # NVIDIA L40S and A10G: GPUs talk over PCIe 4 x16; AWS g6e.48xlarge and g5.48xlarge: 400 and 100 Gb/s.
        Machine("l40s", *PEAKS["L40S"], 44.3, 25, 50, 32, cards_per_host=4, device="L40S"),
        Machine("a10g", *PEAKS["A10G"], 22.0, 12, 12.5, 32, cards_per_host=1, device="A10G"),
        # NVIDIA GeForce RTX 4090 and 3090 (float32 accumulation): ranks talk through the host, without NVLink and
        # peer access; 10 Gb/s Ethernet.
        Machine("4090", *PEAKS["RTX 4090"], 23.6, 12, 1.25, 32, cards_per_host=1, device="RTX 4090"),
        Machine("3090", *PEAKS["RTX 3090"], 23.6, 12, 1.25, 32, cards_per_host=1, device="RTX 3090"),
        # AMD Instinct MI300X: seven links of 64 GB/s in each direction, PCIe 5 x16; eight 400 Gb/s cards.
        Machine("mi300x", *PEAKS["MI300X"], 191.5, 448, 400, 64, device="MI300X"),
    )
}


def sheet_of(machine: str) -> Machine:
    """The data sheet with a name, or of a YAML file.

    Raises:
        UserError: when the file cannot be read, has an unknown or a wrong key, or misses one.
    """
    if machine in DATA_SHEETS:
        return DATA_SHEETS[machine]
    given = parse_yaml(read_text(machine, "--machine must name a data sheet"), machine)
    known = {each.name: each for each in fields(Machine) if each.name not in ("measured", "network_source", "cores")}
    for key, value in given.items():
        hint = _RETIRED.get(key) or f"the nearest is {nearest(str(key), known)}"
        require(key in known, f"unknown key {key} in {machine}: {hint}")
        kind = str if known[key].type == "str" else int if known[key].type == "int" else int | float
        require(
            (isinstance(value, kind) and not isinstance(value, bool)) or (value is None and known[key].default is None),
            f"{key} in {machine} must be a {'text' if kind is str else 'number'}, got {value!r}: change it",
        )
    needed = [name for name, each in known.items() if each.default is MISSING and name != "name"]
    missing = [name for name in needed if name not in given]
    require(
        not missing, f"{machine} must have all numbers of a data sheet, got none for {', '.join(missing)}: add them"
    )
    return Machine(**{"name": Path(machine).stem, **given})
