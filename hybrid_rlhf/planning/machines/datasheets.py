"""Modelled curves of GPUs from their data sheets, for plans for machines that are not at hand.

Peaks are of the vendor's data sheets (dense, without sparsity; one direction of a link). What of a peak is achieved is
an assumption, the same for all machines and stated below with its ground; measured curves (`hybrid-rlhf calibrate`)
replace all of it. A product takes the longer of its arithmetic and its memory traffic (the roofline, Williams et al.
2009); collectives are those of links.py.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml
from hybrid_rlhf.configs.sections.rules import nearest, require
from hybrid_rlhf.planning.curves import Curve, LinkSource, MachineCurves, Surface
from hybrid_rlhf.planning.machines.links import ETHERNET_GB_PER_SECOND, LINK_ACHIEVED, modelled_collectives, with_link
from hybrid_rlhf.runtime.files.reading import read_text

PRODUCTS_ACHIEVED = 0.65
"""Part of the peak arithmetic that large bfloat16 products reach. Training reports 0.4 to 0.55 of peak for whole steps
(Megatron-LM, arXiv 2104.04473, table 1: 0.44 to 0.52 on A100); products alone reach more."""
ATTENTION_ACHIEVED = 0.45
"""Part of the peak that a fused attention reaches (FlashAttention-2, arXiv 2307.08691, abstract: 0.5 to 0.73 on A100,
at long lengths)."""
MEMORY_ACHIEVED = 0.8
"""Part of the memory bandwidth that large copies reach; an assumption."""
DECODE_MEMORY_ACHIEVED = 0.65
"""Part of the memory bandwidth of reading weights and cache in a decoding step, whose kernels are short; an
assumption."""
LAUNCH_SECONDS = 5e-6
"""Seconds of a kernel started from Python without a CUDA graph, once the queue is not empty."""
GRAPH_KERNEL_SECONDS = 2e-6
"""Between kernels inside a CUDA graph."""
LINK_LATENCY_SECONDS = 4e-6
"""Latency of a step between GPUs of a host: a small all-reduce of eight takes six, 24 us, as NCCL's trees and NVLink
SHARP take 20 to 30 us; an assumption."""
LOOP_SECONDS = 8e-3
LOOP_TOKENS_PER_SECOND = 4e5
"""Time of a step outside its phases; an assumption. A core of an EPYC that other work shared took 11 ms for 242 tokens,
20 ms for 2,078, 73 ms for 8,267."""
LAYER_KERNELS = 20
LAYER_BACKWARD_KERNELS = 35
DECODE_LAYER_KERNELS = 8
"""Kernels of a layer beyond its products and attention: forward, backward, decoding."""
LAYER_PASSES = 16
LAYER_BACKWARD_PASSES = 24
"""Reads and writes of the hidden states in a layer beyond products: norms, rotation, residuals, the MLP's gate."""


@dataclass(frozen=True)
class DataSheet:
    """Peaks of a GPU and its host."""

    name: str
    """Name of the machine in tables."""
    bfloat16_tflops: float
    """Dense, without sparsity, with float32 accumulation."""
    float32_tflops: float
    """With TF32 tensor cores off, as torch's default."""
    memory_gb_per_second: float
    device_gib: float
    """Memory that a process can use."""
    link_gb_per_second: float
    """Between GPUs of a host, one direction per GPU."""
    hosts_gb_per_second: float
    """Between hosts, one direction, all network cards of a host together."""
    host_link_gb_per_second: float
    """Between a GPU and its host's memory, one direction."""
    cards_per_host: int = 8
    """Network cards of a host, over which its GPUs are divided."""
    ranks_per_host: int = 8
    """GPUs of a host."""
    host_gib: float | None = None
    """Memory of a host that a run can use; null: unknown and not checked."""
    device: str = ""
    """A part of the name by which torch knows the GPU."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(
                not isinstance(value, int | float) or (math.isfinite(value) and value > 0),
                f"{each.name} of a data sheet must be above 0, got {value}: see docs/placement.md",
            )


DATA_SHEETS = {
    sheet.name: sheet
    for sheet in (
        # name, TFLOP/s in bfloat16 and float32, GB/s and GiB of memory, GB/s between GPUs, between hosts, to the host
        # NVIDIA B200 SXM: NVLink 5 (1,800 GB/s in both directions), PCIe 5 x16; DGX B200: eight 400 Gb/s cards.
        DataSheet("b200", 2250, 75, 8000, 178.4, 900, 400, 64, device="B200"),
        # NVIDIA H100 SXM: NVLink 4 (900 GB/s in both directions), PCIe 5 x16; DGX H100: eight 400 Gb/s cards.
        DataSheet("h100", 989, 67, 3350, 79.1, 450, 400, 64, device="H100"),
        # NVIDIA H200 SXM: an H100 with other memory.
        DataSheet("h200", 989, 67, 4800, 139.8, 450, 400, 64, device="H200"),
        # NVIDIA A100 SXM 80 GB: NVLink 3 (600 GB/s in both directions), PCIe 4 x16; DGX A100: eight 200 Gb/s cards.
        DataSheet("a100", 312, 19.5, 2039, 79.1, 300, 200, 32, device="A100-SXM4-80GB"),
        # NVIDIA A100 SXM 40 GB, and A800 SXM: an A100 with 400 GB/s of NVLink.
        DataSheet("a100-40g", 312, 19.5, 1555, 39.4, 300, 200, 32, device="A100-SXM4-40GB"),
        DataSheet("a800", 312, 19.5, 2039, 79.1, 200, 200, 32, device="A800"),
        # NVIDIA L40S and A10G: GPUs talk over PCIe 4 x16; AWS g6e.48xlarge and g5.48xlarge: 400 and 100 Gb/s.
        DataSheet("l40s", 362, 91.6, 864, 44.3, 25, 50, 32, cards_per_host=4, device="L40S"),
        DataSheet("a10g", 70, 31.5, 600, 22.0, 12, 12.5, 32, cards_per_host=1, device="A10G"),
        # NVIDIA GeForce RTX 4090 and 3090 (float32 accumulation): ranks talk through the host, without NVLink and
        # peer access; 10 Gb/s Ethernet.
        DataSheet("4090", 165.2, 82.6, 1008, 23.6, 12, 1.25, 32, cards_per_host=1, device="RTX 4090"),
        DataSheet("3090", 71, 35.6, 936, 23.6, 12, 1.25, 32, cards_per_host=1, device="RTX 3090"),
        # AMD Instinct MI300X: seven links of 64 GB/s in each direction, PCIe 5 x16; eight 400 Gb/s cards.
        DataSheet("mi300x", 1307, 163.4, 5300, 191.5, 448, 400, 64, device="MI300X"),
    )
}


def sheet_of(machine: str) -> DataSheet:
    """The data sheet with a name, or of a YAML file.

    Raises:
        UserError: when the file cannot be read, has an unknown or a wrong key, or misses one.
    """
    if machine in DATA_SHEETS:
        return DATA_SHEETS[machine]
    given = parse_yaml(read_text(machine, "--machine must name a data sheet"), machine)
    known = {each.name: each for each in fields(DataSheet)}
    for key, value in given.items():
        require(key in known, f"unknown key {key} in {machine}: the nearest is {nearest(str(key), known)}")
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
    return DataSheet(**{"name": Path(machine).stem, **given})


def modelled_curves(sheet: DataSheet, *, link_gib_per_second: float | None = None) -> MachineCurves:
    """The curves of a machine from its data sheet.

    Args:
        sheet: the machine.
        link_gib_per_second: bandwidth between hosts, one direction per host; none: the data sheet's.
    """
    memory = 1e9 * sheet.memory_gb_per_second * MEMORY_ACHIEVED
    decode_memory = 1e9 * sheet.memory_gb_per_second * DECODE_MEMORY_ACHIEVED
    half = (2, 1e12 * sheet.bfloat16_tflops * PRODUCTS_ACHIEVED)
    rates = {"bfloat16": half, "float16": half, "float32": (4, 1e12 * sheet.float32_tflops * PRODUCTS_ACHIEVED)}

    def products(bandwidth: float, launch: float) -> dict[str, Surface]:
        return {
            name: Surface.of(
                (weight, rows, launch + max(2 * weight * rows / peak, size * weight / bandwidth))
                for weight in (2.0**power for power in range(12, 35, 2))
                for rows in (2.0**power for power in range(23))
            )
            for name, (size, peak) in rates.items()
        }

    def line(latency: float, rate: float) -> Curve:
        return Curve.line(latency, 1 / rate)

    link = 1e9 * sheet.link_gb_per_second * LINK_ACHIEVED
    attention_rate = 1e12 * sheet.bfloat16_tflops * ATTENTION_ACHIEVED
    host_link = 1e9 * sheet.host_link_gb_per_second * LINK_ACHIEVED
    host = MachineCurves(
        machine=sheet.name,
        source="modelled",
        device="cuda",
        ranks_per_host=sheet.ranks_per_host,
        products=products(memory, LAUNCH_SECONDS),
        decode_products=products(decode_memory, GRAPH_KERNEL_SECONDS),
        attention=line(LAUNCH_SECONDS, attention_rate),
        layer=line(LAYER_KERNELS * LAUNCH_SECONDS, memory / (2 * LAYER_PASSES)),
        layer_backward=line(LAYER_BACKWARD_KERNELS * LAUNCH_SECONDS, memory / (2 * LAYER_BACKWARD_PASSES)),
        head=line(20 * LAUNCH_SECONDS, memory / (4 * 6)),  # float32 logits: about six reads and writes
        cache_reads=line(GRAPH_KERNEL_SECONDS, decode_memory),
        decode_layer=line(DECODE_LAYER_KERNELS * GRAPH_KERNEL_SECONDS, memory / (2 * LAYER_PASSES)),
        decode_step=line(1.5e-3, 1 / 2e-6),  # Python between two graphs, and a few microseconds a row
        copies=line(LAUNCH_SECONDS, memory / 2),
        host_link=line(1e-5, host_link),
        optimizer=line(1e-3, memory / 30),  # reads and writes weights, gradients, moments: about 30 bytes each
        host_optimizer=line(1e-3, 1.2e9),  # parameters per second of a host's share of cores: an assumption
        collectives=modelled_collectives(link, LINK_LATENCY_SECONDS),
        between_hosts={},
        calls={
            "forward": 1e-3,
            "backward": 1e-3,
            "step": 3e-3,
            "generation": 5e-2,
            "completion": 5e-5,
        },
        gathered=dict.fromkeys(("forward", "backward"), Curve.of([(1, 2e-4)])),
        loop=line(LOOP_SECONDS, LOOP_TOKENS_PER_SECOND),
        overlap=0.8,
    )
    return _with_sheet_link(host, sheet, link_gib_per_second)


def with_usual_link(curves: MachineCurves, gib_per_second: float | None = None) -> MachineCurves:
    """Measured curves with a link between hosts of a bandwidth; none: that of the GPU's data sheet, or Ethernet."""
    sheet = next((each for each in DATA_SHEETS.values() if each.device and each.device in curves.machine), None)
    if sheet is not None:
        return _with_sheet_link(curves, sheet, gib_per_second)
    if gib_per_second is not None:
        return with_link(curves, gib_per_second, source="given")
    return with_link(curves, ETHERNET_GB_PER_SECOND * 1e9 / 2**30, source="data sheet")


def _with_sheet_link(curves: MachineCurves, sheet: DataSheet, gib_per_second: float | None) -> MachineCurves:
    """The curves with a link between hosts, of which a rank uses at most a network card of the data sheet."""
    of_sheet = sheet.hosts_gb_per_second * 1e9 / 2**30
    used = of_sheet if gib_per_second is None else gib_per_second
    ranks_to_fill = max(1.0, used / (of_sheet / sheet.cards_per_host))
    source: LinkSource = "data sheet" if gib_per_second is None else "given"
    return with_link(curves, used, source=source, ranks_to_fill=ranks_to_fill)
