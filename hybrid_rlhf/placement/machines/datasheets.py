"""Modelled curves of GPUs from their data sheets, for plans for machines that are not at hand.

Peaks are of the vendor's data sheets (dense, without sparsity; one direction of a link). What of a peak is achieved is
an assumption, the same for all machines and stated below with its ground; measured curves (`hybrid-rlhf calibrate`)
replace all of it. Collectives follow the ring's cost (n - 1) / n x bytes / bandwidth + (n - 1) x latency, twice for an
all-reduce (Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1)). A product takes the longer of its arithmetic and its memory
traffic (the roofline, Williams et al. 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hybrid_rlhf.placement.curves import Collective, Curve, MachineCurves, Surface

PRODUCTS_ACHIEVED = 0.65
"""Part of the peak arithmetic that large bfloat16 products reach. Training reports 0.4 to 0.55 of peak for whole steps
(Megatron-LM, arXiv 2104.04473, table 1: 0.44 to 0.52 on A100); products alone reach more."""
ATTENTION_ACHIEVED = 0.45
"""Of a fused attention (FlashAttention-2, arXiv 2307.08691, abstract: 0.5 to 0.73 on A100, at long lengths)."""
MEMORY_ACHIEVED = 0.8
"""Part of the memory bandwidth that large copies reach; an assumption."""
LINK_ACHIEVED = 0.75
"""Part of a link that collectives reach at large sizes; an assumption."""
DECODE_MEMORY_ACHIEVED = 0.65
"""Of reading weights and cache in a decoding step, whose kernels are short; an assumption."""
LAUNCH_SECONDS = 5e-6
"""Of a kernel started from Python without a CUDA graph, once the queue is not empty."""
GRAPH_KERNEL_SECONDS = 2e-6
"""Between kernels inside a CUDA graph."""
LINK_LATENCY_SECONDS, HOSTS_LATENCY_SECONDS = 6e-6, 15e-6
"""Of a step of a ring within a host and between hosts."""
LOOP_SECONDS, LOOP_TOKENS_PER_SECOND = 8e-3, 4e5
"""Of a step outside its phases; an assumption. A core of an EPYC that other work shared took 11 ms for 242 tokens, 20
ms for 2,078, 73 ms for 8,267."""
LAYER_KERNELS, LAYER_BACKWARD_KERNELS, DECODE_LAYER_KERNELS = 20, 35, 8
"""Kernels of a layer beyond its products and attention: forward, backward, decoding."""
LAYER_PASSES, LAYER_BACKWARD_PASSES = 16, 24
"""Reads and writes of the hidden states in a layer beyond products: norms, rotation, residuals, the MLP's gate."""
MAX_RANKS = 1024


@dataclass(frozen=True)
class DataSheet:
    """Peaks of a GPU and its host."""

    name: str
    bfloat16_tflops: float
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
    ranks_per_host: int = 8


DATA_SHEETS = {
    sheet.name: sheet
    for sheet in (
        # NVIDIA H100 SXM: NVLink 4 (900 GB/s in both directions), PCIe 5 x16; DGX H100: eight 400 Gb/s cards.
        DataSheet("h100", 989, 67, 3350, 79.1, 450, 400, 64),
        # NVIDIA H200 SXM: an H100 with other memory.
        DataSheet("h200", 989, 67, 4800, 139.8, 450, 400, 64),
        # NVIDIA A100 SXM 80 GB: NVLink 3 (600 GB/s in both directions), PCIe 4 x16; DGX A100: eight 200 Gb/s cards.
        DataSheet("a100", 312, 19.5, 2039, 79.1, 300, 200, 32),
        # NVIDIA A100 SXM 40 GB, and A800 SXM: an A100 with 400 GB/s of NVLink.
        DataSheet("a100-40g", 312, 19.5, 1555, 39.4, 300, 200, 32),
        DataSheet("a800", 312, 19.5, 2039, 79.1, 200, 200, 32),
        # NVIDIA GeForce RTX 4090 (float32 accumulation): no NVLink and no peer access, so ranks talk through the host.
        DataSheet("4090", 165.2, 82.6, 1008, 23.6, 12, 1.25, 32),
    )
}


def modelled_curves(sheet: DataSheet, *, link_gib_per_second: float | None = None) -> MachineCurves:
    """The curves of a machine from its data sheet.

    Args:
        sheet: the machine.
        link_gib_per_second: bandwidth between hosts, one direction per host; none: the data sheet's.
    """
    memory = 1e9 * sheet.memory_gb_per_second * MEMORY_ACHIEVED
    decode_memory = 1e9 * sheet.memory_gb_per_second * DECODE_MEMORY_ACHIEVED
    rates = {"bfloat16": (2, sheet.bfloat16_tflops), "float16": (2, sheet.bfloat16_tflops)}
    rates["float32"] = (4, sheet.float32_tflops)

    def products(bandwidth: float, launch: float) -> dict[str, Surface]:
        return {
            name: _surface(
                _powers(2**12, 2**34, 4),
                lambda weight, rows, size=size, peak=peak: (
                    launch  # type: ignore[misc]
                    + max(2 * weight * rows / (1e12 * peak * PRODUCTS_ACHIEVED), size * weight / bandwidth)
                ),
                _powers(1, 2**22, 2),
            )
            for name, (size, peak) in rates.items()
        }

    link = 1e9 * sheet.link_gb_per_second * LINK_ACHIEVED
    between = sheet.hosts_gb_per_second * 1e9 * LINK_ACHIEVED
    if link_gib_per_second is not None:
        between = link_gib_per_second * 2**30 * LINK_ACHIEVED
    attention_rate = 1e12 * sheet.bfloat16_tflops * ATTENTION_ACHIEVED
    host_link = 1e9 * sheet.host_link_gb_per_second * LINK_ACHIEVED
    return MachineCurves(
        machine=sheet.name,
        source="modelled",
        device="cuda",
        device_gib=sheet.device_gib,
        ranks_per_host=sheet.ranks_per_host,
        products=products(memory, LAUNCH_SECONDS),
        decode_products=products(decode_memory, GRAPH_KERNEL_SECONDS),
        attention=_line(LAUNCH_SECONDS, attention_rate),
        layer=_line(LAYER_KERNELS * LAUNCH_SECONDS, memory / (2 * LAYER_PASSES)),
        layer_backward=_line(LAYER_BACKWARD_KERNELS * LAUNCH_SECONDS, memory / (2 * LAYER_BACKWARD_PASSES)),
        head=_line(20 * LAUNCH_SECONDS, memory / (4 * 6)),  # float32 logits: about six reads and writes
        cache_reads=_line(GRAPH_KERNEL_SECONDS, decode_memory),
        decode_layer=_line(DECODE_LAYER_KERNELS * GRAPH_KERNEL_SECONDS, memory / (2 * LAYER_PASSES)),
        decode_step=_line(1.5e-3, 1 / 2e-6),  # Python between two graphs, and a few microseconds a row
        copies=_line(LAUNCH_SECONDS, memory / 2),
        host_link=_line(1e-5, host_link),
        optimizer=_line(1e-3, memory / 30),  # reads and writes weights, gradients, moments: about 30 bytes each
        host_optimizer=_line(1e-3, 1.2e9),  # parameters per second of a host's share of cores: an assumption
        collectives=_collectives(lambda ranks: link, LINK_LATENCY_SECONDS),
        # a ring over whole hosts uses all cards of a host, and no more than the links within it
        between_hosts=_collectives(lambda ranks: min(link, between), HOSTS_LATENCY_SECONDS),
        calls={
            "forward": 1e-3,
            "backward": 1e-3,
            "step": 3e-3,
            "generation": 5e-2,
            "completion": 5e-5,
        },
        gathered=dict.fromkeys(("forward", "backward"), Curve.of([(1, 2e-4)])),
        loop=_line(LOOP_SECONDS, LOOP_TOKENS_PER_SECOND),
        overlap=0.8,
    )


def _collectives(bandwidth: Callable[[float], float], latency: float) -> dict[str, Surface]:
    ranks, sizes = [2.0 * 2**power for power in range(10)], _powers(2**8, 2**38, 4)
    moved: dict[Collective, Callable[[float], float]] = {
        "all_reduce": lambda n: 2 * (n - 1) / n,
        "all_gather": lambda n: (n - 1) / n,
        "reduce_scatter": lambda n: (n - 1) / n,
        "transfer": lambda n: 1.0,
    }
    steps: dict[Collective, Callable[[float], float]] = {
        "all_reduce": lambda n: 2 * min(n - 1, 16),  # NCCL takes trees where rings would be long
        "all_gather": lambda n: min(n - 1, 64),
        "reduce_scatter": lambda n: min(n - 1, 64),
        "transfer": lambda n: 1.0,
    }
    return {
        kind: _surface(
            ranks,
            lambda n, size, kind=kind: steps[kind](n) * latency + moved[kind](n) * size / bandwidth(n),  # type: ignore[misc]
            sizes,
        )
        for kind in moved
    }


def _surface(firsts: Iterable[float], seconds: Callable[[float, float], float], sizes: list[float]) -> Surface:
    return Surface(tuple((first, Curve.of((size, seconds(first, size)) for size in sizes)) for first in firsts))


def _line(latency: float, rate: float) -> Curve:
    """latency + size / rate, at sizes two apart: between them the curve bends as the sum does, within a few percent."""
    return Curve.of((size, latency + size / rate) for size in _powers(1, 2**60, 2))


def _powers(first: float, last: float, step: float) -> list[float]:
    sizes = [float(first)]
    while sizes[-1] < last:
        sizes.append(sizes[-1] * step)
    return sizes
