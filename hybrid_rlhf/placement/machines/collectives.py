"""Times collectives of groups of ranks, transfers between two, and how much ranks of a host slow each other down."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.placement.curves import Collective
from hybrid_rlhf.placement.machines.ranks import median_seconds
from hybrid_rlhf.runtime.world import World

Times = dict[str, list[tuple[float, float, float]]]
"""By kind: (ranks, bytes, seconds)."""
_KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "transfer")


def group_sizes(ranks: int) -> list[int]:
    """The sizes of groups that are measured: powers of two, and all."""
    return sorted({size for power in range(1, 11) if (size := 2**power) <= ranks} | ({ranks} if ranks > 1 else set()))


def time_collectives(world: World, sizes: list[int]) -> Times:
    """Seconds of each kind, group size and number of bytes; every rank calls, rank 0's are valid."""
    found: Times = {kind: [] for kind in _KINDS}
    for ranks in group_sizes(world.size):
        group = dist.new_group(list(range(ranks)))
        for size in sizes:
            for kind in _KINDS:
                if world.rank < ranks and (kind != "transfer" or ranks == 2):
                    seconds = _time(kind, group, ranks, size, world)
                    found[kind].append((float(ranks), float(size), seconds))
        world.barrier()
    return found


def time_sharing(world: World) -> list[tuple[float, float]]:
    """(ranks that compute at once, seconds over those of one alone); every rank calls, rank 0's are valid.

    The work is that of a layer, forward and backward, with activations larger than a core's own cache, because ranks
    share memory bandwidth as well as cores.
    """
    tokens, width = (1024, 256) if world.device.type == "cpu" else (4096, 4096)
    x = torch.randn(tokens, width, device=world.device)
    up, down = (torch.nn.Parameter(torch.randn(n, k, device=world.device)) for n, k in ((3 * width, width),) * 2)

    def work() -> None:
        for _ in range(3):
            hidden = functional.gelu(functional.linear(x, up))
            functional.layer_norm(x + functional.linear(hidden, down.t()), [width]).square().sum().backward()

    found: list[tuple[float, float]] = []
    for ranks in [1, *group_sizes(world.size)]:
        world.barrier()
        seconds = median_seconds(work, least_seconds=0.5) if world.rank < ranks else 0.0
        world.barrier()
        found.append((float(ranks), seconds))
    return [(ranks, seconds / found[0][1]) for ranks, seconds in found] if world.is_main else []


def _time(kind: Collective, group: dist.ProcessGroup | None, ranks: int, size: int, world: World) -> float:
    """Seconds of one; all ranks of the group make equally many calls."""
    whole = torch.zeros(max(ranks, size // 4 // ranks * ranks), device=world.device)
    part = torch.zeros(len(whole) // ranks, device=world.device)

    def call() -> None:
        _communicate(kind, group, whole, part, world.rank)

    call()
    rounds = 2 if size >= 2**20 else 5
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def _communicate(kind: Collective, group: dist.ProcessGroup | None, whole: Tensor, part: Tensor, rank: int) -> None:
    if kind == "all_reduce":
        dist.all_reduce(whole, group=group)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(whole, part, group=group)
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole, group=group)
    elif rank == 0:
        dist.send(whole, dst=1, group=group)
        dist.recv(part[:1], src=1, group=group)  # so that the sender's time covers the whole transfer
    else:
        dist.recv(whole, src=0, group=group)
        dist.send(part[:1], dst=0, group=group)
