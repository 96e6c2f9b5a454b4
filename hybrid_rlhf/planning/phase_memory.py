"""The device of a rank, and the memory of a phase of a step on it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.configs.sections.training import LoopConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.shapes import BatchShape

AnyStep = SFTConfig | RewardConfig | PreferenceStepConfig | RLConfig
GPU_RESERVE_GIB = 2.0
"""Memory of a GPU that CUDA, its libraries and fragmentation take; an assumption."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts: rank r is on host r // ranks_per_host."""

    ranks: int
    ranks_per_host: int

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.ranks // self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.ranks_per_host

    def hosts_of(self, ranks: tuple[int, ...]) -> int:
        """On how many hosts ascending ranks are."""
        return len({self.host_of(rank) for rank in ranks})


@dataclass(frozen=True)
class Device:
    """The machine, as one rank sees it."""

    device: torch.device
    ranks: int
    device_bytes: float
    """Memory of the rank's device; on a CPU its share of the free memory."""
    host_bytes: float | None = None
    """The rank's share of the host's free memory, where the host is not the device; none: not known."""
    ranks_per_host: int | None = None
    """None: all of them."""

    @property
    def cluster(self) -> Cluster:
        """All ranks on their hosts."""
        return Cluster(self.ranks, self.ranks_per_host or self.ranks)


def own_device(ranks: int, *, local: int) -> Device:
    """This machine, as one of so many ranks sees it, `local` of which share its host."""
    free = psutil.virtual_memory().available / local
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), ranks, free, ranks_per_host=local)
    total = torch.cuda.get_device_properties(0).total_memory
    return Device(torch.device("cuda"), ranks, total - GPU_RESERVE_GIB * 2**30, free, local)


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a phase of a step on ranks that hold the same."""

    name: str
    need: MemoryUse
    machine: Device
    note: str = ""
    ranks: tuple[int, ...] = (0,)

    @property
    def ranks_in_words(self) -> str:
        """The ranks, if these are not all of the machine's."""
        return "" if len(self.ranks) == self.machine.ranks else in_words(self.ranks)

    @property
    def title(self) -> str:
        """The phase, and its ranks if these are not all."""
        return f"{self.name} on {ranks}" if (ranks := self.ranks_in_words) else self.name

    @property
    def total(self) -> float:
        """Bytes that the device of the rank must have; a CPU is its own host."""
        return self.need.device + (self.need.host if self.machine.device.type == "cpu" else 0.0)

    @property
    def timed_as(self) -> str:
        """The timed phase that it is part of: the updates of actor and critic are one."""
        return self.name.split()[-1]

    @property
    def fits(self) -> bool:
        """True if device and host have enough memory."""
        host = self.machine.host_bytes
        return self.total <= self.machine.device_bytes and (host is None or self.need.host <= host)


def micro_batch(
    train: LoopConfig,
    model: ModelConfig,
    rows: int,
    length: int,
    *,
    sides: int = 1,
    head_tokens: int | None = None,
) -> BatchShape:
    """The largest micro-batch of a rank, or its part of one.

    Args:
        train: limits of micro-batches.
        model: number of ranks that compute the tokens of a row, or rows, together.
        rows: rows of an update on this rank.
        length: tokens of the longest row.
        sides: sequences per row; two where completions are compared.
        head_tokens: tokens per row whose log-prob is computed; none: all.
    """
    size = train.micro_batch_size
    at_once = train.micro_batches(model).tokens // (length * sides) if size is None else size
    sequences = max(1, min(at_once, rows * model.ranks_together)) * sides
    wanted = sequences * (length if head_tokens is None else head_tokens)
    return BatchShape(sequences, -(-length // model.sequence_parallel), -(-wanted // model.ranks_together))
