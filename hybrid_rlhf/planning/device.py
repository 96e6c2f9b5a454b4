"""Where a step runs: ranks on hosts, and the memory that each has."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

GPU_RESERVE_GIB = 2.0
"""Memory of a GPU that CUDA, its libraries and fragmentation take; an assumption."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts: rank r is on host r // ranks_per_host."""

    ranks: int
    ranks_per_host: int

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.ranks))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.ranks // self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.ranks_per_host


@dataclass(frozen=True)
class Device:
    """The machine, as one rank sees it."""

    device: torch.device
    ranks: int
    device_bytes: float
    """Memory of the rank's device; on a CPU its share of the free memory."""
    host_bytes: float | None = None
    """The rank's share of the host's free memory if the host is not the device; None: unknown."""
    ranks_per_host: int | None = None
    """None: all ranks are on one host."""

    @property
    def cluster(self) -> Cluster:
        """All ranks on their hosts."""
        return Cluster(self.ranks, self.ranks_per_host or self.ranks)


def own_device(ranks: int, *, local: int) -> Device:
    """This machine as one of its ranks sees it; `local` of them share its host."""
    free = psutil.virtual_memory().available / local
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), ranks, free, ranks_per_host=local)
    total = torch.cuda.get_device_properties(0).total_memory
    return Device(torch.device("cuda"), ranks, total - GPU_RESERVE_GIB * 2**30, free, local)
