"""Times collectives of groups of ranks, and transfers between two or between hosts."""

from __future__ import annotations

import time
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_rlhf.planning.curves import Collective
from hybrid_rlhf.planning.machines.ranks import synchronize
from hybrid_rlhf.runtime.world import World

Times = dict[str, list[tuple[float, float, float]]]
"""By kind: (ranks, bytes, seconds); of a transfer, (senders, bytes of all of them, seconds)."""


_OF_ALL: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds in which all ranks of a group take part."""


def group_sizes(ranks: int) -> list[int]:
    """The sizes of groups that are measured: powers of two, and all."""
    return sorted({size for power in range(1, 11) if (size := 2**power) <= ranks} | ({ranks} if ranks > 1 else set()))


def time_collectives(world: World, sizes: list[int], *, local: int = 1) -> Times:
    """Seconds of each kind, group size and number of bytes; every rank calls, rank 0's are valid.

    Args:
        world: the ranks.
        sizes: in bytes.
        local: ranks of a host, whose hosts are measured whole; 1: any ranks. Transfers are from the first host to the
            second, by one of its ranks and by all at once.
    """
    times: Times = {kind: [] for kind in get_args(Collective)}
    for hosts in group_sizes(world.size // local):
        ranks = hosts * local
        group = dist.new_group(list(range(ranks)))
        if world.rank < ranks:
            for size in sizes:
                for kind in _OF_ALL:
                    times[kind].append((float(ranks), float(size), _time(kind, group, ranks, size, world)))
            for senders in sorted({1, local}) if hosts == 2 else ():
                if world.rank % local < senders:
                    for size in sizes:
                        seconds = _time("transfer", group, senders, size * senders, world, peers=local)
                        times["transfer"].append((float(senders), float(size * senders), seconds))
            dist.destroy_process_group(group)
        world.barrier()
    return times


def _time(
    kind: Collective, group: dist.ProcessGroup | None, ranks: int, size: int, world: World, *, peers: int = 1
) -> float:
    """Seconds of one; all ranks of the group make equally many calls. Rank r < `peers` transfers its part to rank
    r + `peers`."""
    whole = torch.zeros(max(ranks, size // 4 // ranks * ranks), device=world.device)
    part = torch.zeros(len(whole) // ranks, device=world.device)

    def call() -> None:
        if kind == "transfer":
            _transfer(group, whole if peers == 1 else part, world.rank, peers)
        else:
            _communicate(kind, group, whole, part)

    call()
    synchronize()  # or the clock begins while a GPU still runs the first call
    rounds = 2 if size >= 2**20 else 5
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    synchronize()
    return (time.perf_counter() - start) / rounds


def _communicate(kind: Collective, group: dist.ProcessGroup | None, whole: Tensor, part: Tensor) -> None:
    if kind == "all_reduce":
        dist.all_reduce(whole, group=group)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(whole, part, group=group)
    else:
        dist.reduce_scatter_tensor(part, whole, group=group)


def _transfer(group: dist.ProcessGroup | None, sent: Tensor, rank: int, peers: int) -> None:
    answer = sent[:1].clone()  # so that the sender's time covers the whole transfer
    if rank < peers:
        dist.send(sent, dst=rank + peers, group=group)
        dist.recv(answer, src=rank + peers, group=group)
    else:
        dist.recv(sent, src=rank - peers, group=group)
        dist.send(answer, dst=rank - peers, group=group)
