"""The memory of a phase of a step on the device of a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import LoopConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.shapes import BatchShape

AnyStep = SFTConfig | RewardConfig | PreferenceStepConfig | RLConfig


class Room(NamedTuple):
    """Required and available bytes of a phase in one memory."""

    needed: float
    available: float
    of_host: bool = False
    """True for the memory of the host, false for that of the device."""

    @property
    def missing(self) -> float:
        """Required minus available bytes; negative if some are left."""
        return self.needed - self.available


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a phase of a step on ranks that hold the same roles."""

    name: str
    need: MemoryUse
    machine: Device
    note: str = ""
    ranks: tuple[int, ...] = (0,)
    tower: MemoryUse | None = None
    """The part of the vision tower in it, where rows may have images."""

    @property
    def ranks_in_words(self) -> str:
        """The ranks in words; empty if these are all ranks of the machine."""
        return "" if len(self.ranks) == self.machine.ranks else in_words(self.ranks)

    @property
    def title(self) -> str:
        """The name of the phase, with its ranks unless these are all."""
        return f"{self.name} on {ranks}" if (ranks := self.ranks_in_words) else self.name

    @property
    def total(self) -> float:
        """Bytes that the device of the rank must have; a CPU is its own host."""
        return self.part(self.need)

    def part(self, use: MemoryUse) -> float:
        """Bytes of some of its memory on that device."""
        return use.device + (use.host if self.machine.device.type == "cpu" else 0.0)

    @property
    def timed_as(self) -> str:
        """The timed phase that it is part of: the updates of actor and critic are one."""
        return self.name.split()[-1]

    @property
    def tightest(self) -> Room:
        """The device or the host, whichever has less left."""
        device = Room(self.total, self.machine.device_bytes)
        if self.machine.host_bytes is None:
            return device
        host = Room(self.need.host, self.machine.host_bytes, of_host=True)
        return max(device, host, key=lambda room: room.missing)

    @property
    def fits(self) -> bool:
        """True if device and host have enough memory."""
        return self.tightest.missing <= 0


def largest_misfit(phases: Iterable[PhaseMemory]) -> PhaseMemory | None:
    """The phase where most memory is missing; None if everything fits."""
    misfits = [phase for phase in phases if not phase.fits]
    return max(misfits, key=lambda phase: phase.tightest.missing, default=None)


def longest_row(rollout: RolloutConfig) -> int:
    """Largest number of tokens of a prompt with its completion."""
    return rollout.max_prompt_tokens + rollout.sampling.max_new_tokens


def micro_batch(
    train: LoopConfig,
    model: ModelConfig,
    rows: int,
    length: int,
    *,
    device: str,
    sides: int = 1,
    head_tokens: int | None = None,
    prefix: int = 0,
    sharing: int = 1,
    backward: bool = True,
    alike: int | None = None,
    image_tokens: int | None = None,
) -> BatchShape:
    """The largest micro-batch of a rank, or its part of one.

    Args:
        train: limits of micro-batches.
        model: number of ranks that compute the tokens of a row, or rows, together.
        rows: rows of an update on this rank.
        length: tokens of the longest row.
        device: type of the device.
        sides: sequences per row; two where completions are compared.
        head_tokens: tokens per row whose log-prob is computed; None: all.
        prefix: tokens of a row that are computed once for `sharing` rows.
        sharing: number of these rows.
        backward: false in a pass without gradient, whose micro-batches are larger.
        alike: number of sequences that have the same images; None: the sides of a row.
        image_tokens: tokens of a row that can be those of images; None: all.
    """
    size, limits = train.micro_batch_size, train.micro_batches(device, model)
    limit = limits.tokens * (1 if backward else limits.forward_factor)
    if prefix:
        rest = length - prefix
        whole, left = divmod(limit, prefix + sharing * rest)
        at_once = whole * sharing + max(0, (left - prefix) // rest) if size is None else size
    else:
        at_once = limit // (length * sides) if size is None else size
    sequences = max(1, min(at_once, rows * model.ranks_together)) * sides
    wanted = sequences * (length if head_tokens is None else head_tokens)
    part = -(-length // model.sequence_parallel)
    images = -(-sequences // (alike or sides)) * (length if image_tokens is None else image_tokens)
    return BatchShape(sequences, part, -(-wanted // model.ranks_together), prefix, sharing, device, images)
