"""What a part of the reward is: it begins on this rank's rows of a rollout, and later tells a score for each.

Why in two steps: functions and endpoints work in the background while the models' forwards run. A part never raises
for what it cannot score. It says why, row by row, so that all ranks go through the same collectives and stop together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import ClassVar, Self, cast

import numpy as np
import torch

from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.algorithms.rewards.answers import Answers
from hybrid_rlhf.configs.rewards import OnFailure, RewardPartConfig
from hybrid_rlhf.runtime.logs import shortened

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Share:
    """This rank's rows of a rollout."""

    sequences: Sequences
    """The whole rollout."""
    micro_batches: list[list[int | None]]
    """Rows of it that are this rank's; None is an empty row. Every rank has equally many micro-batches."""
    answers: Answers
    """The text of `rows`, in their order; empty when no part reads text."""

    @property
    def rows(self) -> list[int]:
        """This rank's rows without the empty ones."""
        return [row for row in chain.from_iterable(self.micro_batches) if row is not None]


@dataclass(frozen=True)
class Ratings:
    """What a part says of this rank's rows."""

    values: list[float | None]
    """A score a row; None: no opinion."""
    failures: dict[int, str] = field(default_factory=dict)
    """Why there is no usable score, by place in values, where it is None."""

    @classmethod
    def failed(cls, count: int, reason: str) -> Self:
        """No usable score for any of some rows, for one reason."""
        return cls([None] * count, dict.fromkeys(range(count), reason))

    @classmethod
    def read(cls, values: object, count: int, *, show: Callable[[object], str] = repr) -> Self:
        """What a function or an endpoint returned, checked.

        Args:
            values: right are a list, a tuple, an array or a tensor of numbers or None.
            count: how many there must be.
            show: a wrong value as a message may have it.
        """
        values = _plain(values)
        if not isinstance(values, (list, tuple)):
            return cls.failed(count, f"got a {type(values).__name__} in place of a list")
        if len(values) != count:
            return cls.failed(count, f"got {len(values)} values for {count} completions")
        values = [_plain(value) for value in values]
        failures = {
            place: f"got {shortened(show(value))} for a completion"
            for place, value in enumerate(values)
            if value is not None and not _is_score(value)
        }
        return cls(
            [None if v is None or i in failures else float(cast(float, v)) for i, v in enumerate(values)], failures
        )

    def mended(self, later: Ratings) -> Ratings:
        """With what a later try says of the rows that have no usable score yet."""
        values = [later.values[i] if i in self.failures else value for i, value in enumerate(self.values)]
        return Ratings(values, {i: later.failures[i] for i in self.failures if i in later.failures})

    def after(self, tries: int) -> Ratings:
        """With the number of tries in the reasons, where there was more than one."""
        if tries == 1:
            return self
        return Ratings(self.values, {i: f"{reason} (try {tries})" for i, reason in self.failures.items()})

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The ratings of consecutive rows as one."""
        values: list[float | None] = []
        failures: dict[int, str] = {}
        for part in parts:
            failures |= {len(values) + place: reason for place, reason in part.failures.items()}
            values += part.values
        return cls(values, failures)


class RewardPart(ABC):
    """One weighted part of the reward."""

    reads_text: ClassVar[bool] = True
    """Whether it needs the rollout's text."""
    in_background: ClassVar[bool] = True
    """False: it computes while it is asked for its ratings, with every rank beside it."""

    packs = True
    """Whether its batches, if it has any, pass without padding."""

    def __init__(self, config: RewardPartConfig) -> None:
        self.name = config.label
        self.weight = config.weight
        self.on_failure: OnFailure = config.on_failure

    @abstractmethod
    def begin(self, share: Share) -> Callable[[], Ratings]:
        """Start on this rank's rows; calling what is returned waits for their ratings."""


def _is_score(value: object) -> bool:
    """A number that float32 holds; NaN compares false."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(cast(float, value)) <= _LARGEST


def _plain(value: object) -> object:
    """Arrays and tensors, also those of one number, as Python has them."""
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value
