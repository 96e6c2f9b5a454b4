"""Measures the five numbers of a machine, and the network between hosts: what `hybrid-rlhf calibrate` runs.

Three of them are of one rank, measured in this process; those of a link need processes on all of its ranks
(cli/machine/link.py).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.utils import benchmark
from transformers import LlamaConfig, LlamaModel

from hybrid_rlhf.planning.machine import Machine
from hybrid_rlhf.planning.micro_batches import LAYER_LAUNCHES
from hybrid_rlhf.planning.step_time import tree_depth
from hybrid_rlhf.runtime.world import World

_ETHERNET_GB_PER_SECOND = 1.25
"""Network of hosts without a data sheet: 10 Gb/s Ethernet."""
_HOST_LINK_GB_PER_SECOND = 25.0
"""Link between a GPU without a data sheet and its host: PCIe 4."""
_LAYERS = (2, 10)
"""Layers of two models, whose difference in time is that of layers alone."""
_SMALL_BYTES = 256
_ROUNDS = 7


class Link(NamedTuple):
    """A measured link."""

    gb_per_second: float
    """One direction of a rank, or of a host."""
    latency_microseconds: float


def calibrate(ranks: int, link: Link | None) -> Machine:
    """Measure a rank of this machine.

    Args:
        ranks: number of ranks of a host.
        link: measured link between these ranks; None for one rank.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    memory = _memory_gb_per_second(device)
    return Machine(
        torch.cuda.get_device_name(0) if gpu else "this CPU",
        tflops=_tflops(device),
        memory_gb_per_second=memory,
        device_gib=(torch.cuda.get_device_properties(0).total_memory if gpu else psutil.virtual_memory().total) / 2**30,
        link_gb_per_second=memory if link is None else link.gb_per_second,
        hosts_gb_per_second=_ETHERNET_GB_PER_SECOND,
        host_link_gb_per_second=_HOST_LINK_GB_PER_SECOND,
        launch_microseconds=launch_microseconds(device),
        link_latency_microseconds=1.0 if link is None else link.latency_microseconds,
        cards_per_host=1,
        ranks_per_host=ranks,
        cores=None if gpu else available_cores(),
        measured=True,
    ).with_sheet()


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def time_link(world: World) -> Link:
    """Time all-gathers of all ranks; every rank calls. Between hosts, the link of a host that its ranks share."""
    large = 2**28 if world.device.type == "cuda" else 2**24
    part = torch.zeros(large // 4 // world.size, device=world.device)
    whole = torch.zeros(len(part) * world.size, device=world.device)
    small = torch.zeros(_SMALL_BYTES // 4, device=world.device)
    latency = _seconds(lambda: dist.all_reduce(small)) / (2 * tree_depth(world.size))
    seconds = _seconds(lambda: dist.all_gather_into_tensor(whole, part))
    sent = (world.size - 1) / world.size * 4 * len(whole)
    return Link(sent / max(seconds, 1e-9) / 1e9, 1e6 * latency)


def _tflops(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    first, second = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / _seconds(lambda: first @ second) / 1e12


def _memory_gb_per_second(device: torch.device) -> float:
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * len(source) / _seconds(lambda: target.copy_(source)) / 1e9


def launch_microseconds(device: torch.device) -> float:
    """Time of an operation of a layer that is too small to compute for longer than its launch."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)

    def seconds(layers: int) -> float:
        config = LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2
        )
        with device:
            model = LlamaModel(config)

        return _seconds(torch.no_grad()(lambda: model(ids, use_cache=False)))

    fewer, more = map(seconds, _LAYERS)
    return 1e6 * (more - fewer) / (_LAYERS[1] - _LAYERS[0]) / LAYER_LAUNCHES


def _seconds(call: Callable[[], object]) -> float:
    """Median time of a call on one thread, as launchers start several ranks on a host; after a warm-up."""
    timer = benchmark.Timer("call()", globals={"call": call})
    return statistics.median(timer.timeit(1).mean for _ in range(_ROUNDS))
