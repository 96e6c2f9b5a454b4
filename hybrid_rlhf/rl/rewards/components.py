"""Interface of a reward component and its inputs. A component starts on this rank's rows of a rollout, and returns
their scores later.

There are two steps because functions and endpoints run in the background during the forwards of models. A component
does not raise for rows that it cannot score. It returns a reason per row, so that all ranks run the same collectives
and stop together. Functions, endpoints, and reward models with another tokenizer read the rollout as text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rewards import OnFailure, RewardComponentConfig
from hybrid_rlhf.data.chat.conversation import completion_text
from hybrid_rlhf.data.chat.messages import Message, Tools, row_tools
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, WRITTEN
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.rl.images import ImagesOf
from hybrid_rlhf.rl.rewards.verifiers.verdicts import Verdict
from hybrid_rlhf.rl.sharing import LocalRows
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.world import World

RESERVED = ("prompts", "completions")
"""Arguments of a reward function that are not columns."""


@dataclass(frozen=True)
class CompletionTexts:
    """Completions with their prompts. All lists have one entry per completion."""

    prompts: list[list[Message]]
    """Conversations before the completion."""
    completions: list[str]
    """Completions without special tokens. The turns of an episode are joined by newlines, without observations."""
    columns: dict[str, list[Any]]
    """Other columns of the data by name; None where a row lacks the column."""
    images: list[list[ImageReference]] | None = None
    """Images of the prompts, each <image> in their text; None where there are none, or no component reads them."""

    def __len__(self) -> int:
        return len(self.completions)

    @classmethod
    def read(cls, prompts: Sequence[Mapping[str, Any]], rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Self:
        """The text of a rollout.

        Args:
            prompts: rows of `load_prompt_data`, with `prompt` and `columns` as JSON.
            rollout: rows on the host, with the places of their prompts in `groups`.
            tokenizer: tokenizer of the actor.

        Raises:
            UserError: for a data column with the name of an argument of reward functions.
        """
        columns = [json.loads(row["columns"]) for row in prompts]
        names = list(dict.fromkeys(name for row_columns in columns for name in row_columns))
        for name in RESERVED:
            if name in names:
                raise UserError(
                    f"{' and '.join(RESERVED)} are arguments of a reward function, "
                    f"the data has a column {name!r}: rename it"
                )
        places = rollout.groups.tolist()
        return cls(
            [read_prompt(prompts[place]) for place in places],
            [
                _sampled_text(ids, sampled, tokenizer)
                for ids, sampled in zip(rollout.input_ids, rollout.response_mask, strict=True)
            ],
            {name: [columns[place].get(name) for place in places] for name in names},
        )

    def select(self, indices: Sequence[int]) -> Self:
        """Some rows, in the given order."""
        return type(self)(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
            None if self.images is None else [self.images[i] for i in indices],
        )

    def tools(self, place: int) -> Tools | None:
        """Tools that the assistant may call in a completion."""
        return row_tools("the row", {"tools": self.columns["tools"][place]}) if "tools" in self.columns else None


def read_prompt(row: Mapping[str, Any]) -> list[Message]:
    """The conversation of a row of `load_prompt_data`, with <image> for each image."""
    messages: list[Message] = json.loads(row["prompt"].replace(IMAGE_MARK, WRITTEN))
    return messages


def _sampled_text(ids: Tensor, mask: Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of the sampled tokens of a row, ids [T] under mask [T]; consecutive tokens form a turn."""
    places = mask.nonzero().flatten()
    cuts = ((places[1:] - places[:-1]) > 1).nonzero().flatten() + 1
    turns = torch.tensor_split(ids[places], cuts)
    return "\n".join(completion_text(turn.tolist(), tokenizer) for turn in turns)


_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardBatch:
    """This rank's rows of a rollout, for one component."""

    rows: LocalRows[Rollout]
    """Rows on this rank, by number."""
    micro_batches: list[list[int | None]]
    """Numbers of the rows; None is an empty row. Every rank of the component has the same number of micro-batches."""
    texts: CompletionTexts
    """Text of the rows `numbers`, in their order; empty if no component reads text."""
    images_of: ImagesOf = lambda rollout: None
    """Returns the images of rows."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of this rank's rows, without empty rows."""
        return [row for row in chain.from_iterable(self.micro_batches) if row is not None]


@dataclass(frozen=True)
class ComponentScores:
    """Scores of a component for this rank's rows."""

    values: list[float | None]
    """One score per row; None: the component does not apply to the row, or failed."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reasons of failures, by index in values; their values are None."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """Scores of a verifier with their reasons, by index in values."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are summed over ranks, for the metrics of a component that counts."""

    @classmethod
    def failed(cls, count: int, reason: str) -> Self:
        """The same failure for all rows."""
        return cls([None] * count, dict.fromkeys(range(count), reason))

    @classmethod
    def read(cls, values: object, count: int, *, show: Callable[[object], str] = repr) -> Self:
        """Check what a function or an endpoint returned.

        Args:
            values: the returned object; valid is a list, tuple, array or tensor of numbers, booleans (1 and 0) or None.
            count: expected number of values.
            show: formats an invalid value for a message.
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

    def filled_from(self, later: ComponentScores) -> ComponentScores:
        """Failed rows replaced by those of a later attempt."""
        values = [later.values[i] if i in self.failures else value for i, value in enumerate(self.values)]
        return ComponentScores(values, {i: later.failures[i] for i in self.failures if i in later.failures})

    def with_tries(self, tries: int) -> ComponentScores:
        """The number of attempts appended to the reasons, if there is more than one."""
        if tries == 1:
            return self
        return ComponentScores(self.values, {i: f"{reason} (try {tries})" for i, reason in self.failures.items()})

    @classmethod
    def join(cls, batches: Sequence[Self]) -> Self:
        """Scores of consecutive batches of rows as one."""
        values: list[float | None] = []
        failures: dict[int, str] = {}
        for batch in batches:
            failures |= {len(values) + place: reason for place, reason in batch.failures.items()}
            values += batch.values
        return cls(values, failures)


class RewardComponent(ABC):
    """One weighted component of the reward."""

    reads_text: ClassVar[bool] = True
    """True if it needs the text of the rollout."""
    reads_images = False
    """True if it needs the images of the prompts beside the text."""
    in_background = True
    """False: it computes in the main thread when its scores are requested, on every rank."""

    reads_groups: ClassVar[bool] = False
    """True if it compares the completions of a prompt, which are then on one rank; it has no ranks of its own."""
    counts: ClassVar[bool] = False
    """True if its scores have counts."""
    columns: Sequence[str] = ()
    """Columns of the data that it reads."""
    max_failure_fraction = 1.0
    """Largest fraction of the completions of a step that may fail."""

    packs = True
    """True if its micro-batches, if any, have no padding."""
    shares_prefixes = True
    """True if it computes the common tokens of rows that begin alike once, if it computes tokens."""
    world: World | None = None
    """The ranks that share the rows; None for all ranks."""
    logged_alone = True
    """True if its scores are logged even when it is the only component, when they are also the scores of the
    rollout."""

    def __init__(self, config: RewardComponentConfig) -> None:
        self.name = config.label
        self.weight = config.weight
        self.on_failure: OnFailure = config.on_failure

    def require_columns(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Check that the data has the columns that it needs, as `require_columns`."""
        require_columns(self.name, self.columns, rows)

    @abstractmethod
    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Start on this rank's rows; the returned function waits for their scores."""

    def metrics(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by the ends of their names, from its counts over all ranks."""
        return {}


def require_columns(component: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Check that the data has the columns that a component needs; rows are read until all are found.

    Raises:
        UserError: when no row has one of them.
    """
    missing = [*columns]
    present: dict[str, object] = {}
    for row in rows if missing else ():
        missing = [column for column in missing if column not in row]
        if not missing:
            return
        present |= row
    if missing:
        nested = [name for name, value in present.items() if isinstance(value, Mapping) and missing[0] in value]
        raise UserError(
            f"reward component {component} needs the column {' and '.join(missing)}, the data has "
            f"{', '.join(['prompt', *present])}: "
            + (
                f"give the source columns: {{{missing[0]}: {nested[0]}.{missing[0]}}}"
                if nested
                else "rename or add it, or read another"
            )
        )


def _is_score(value: object) -> bool:
    """Return True if a value is a number within float32's range, or a boolean; False for NaN."""
    return isinstance(value, Real) and abs(cast(float, value)) <= _LARGEST


def _plain(value: object) -> object:
    """Arrays and tensors, also scalars, as Python objects."""
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value
