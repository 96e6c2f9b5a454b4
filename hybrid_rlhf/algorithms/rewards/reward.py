"""The reward of a rollout: the weighted sum of its parts, each logged by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.algorithms.rewards.answers import Answers
from hybrid_rlhf.algorithms.rewards.endpoint import EndpointPart
from hybrid_rlhf.algorithms.rewards.functions import FunctionPart
from hybrid_rlhf.algorithms.rewards.models import ModelPart, RetokenizingModelPart, reads_the_same
from hybrid_rlhf.algorithms.rewards.parts import Ratings, RewardPart, Share
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rewards import RewardPartConfig, require_distinct_names
from hybrid_rlhf.data.chat import turn_end
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World, mistakes_shared

logger = logging.getLogger(LOGGER_NAME)
COUNTS = ("/failures", "/dropped")
"""Ends of the metrics that are counts; the others are means."""
_NO_TEXT = Answers([], [], {})


@dataclass(frozen=True)
class RewardReport:
    """What the reward says of a rollout."""

    scores: Tensor
    """[N] float32, whole on every rank."""
    dropped: list[int]
    """Rows that are to count nowhere."""
    metrics: dict[str, float]
    """reward/NAME/mean and /std of a part's own scores, over all ranks, before its weight; /failures and /dropped count
    completions without a usable one."""


class Reward:
    """Scores completions by weighted parts."""

    def __init__(self, parts: Sequence[RewardPart], world: World) -> None:
        # Models are asked first: their forwards run while the others work in the background.
        self._parts = sorted(parts, key=lambda part: part.in_background)
        self._world = world
        self._logged = len(parts) > 1 or not all(isinstance(part, ModelPart) for part in parts)
        self.packs = all(part.packs for part in parts)
        """Whether no part pads its batches."""

    @torch.no_grad()
    def __call__(
        self, sequences: Sequences, micro_batches: list[list[int | None]], answers: Callable[[], Answers], *,
        may_drop_all: bool = False,
    ) -> RewardReport:  # fmt: skip
        """Score a rollout; every rank calls, each with its own rows.

        Args:
            sequences: the rollout, whole on every rank.
            micro_batches: this rank's rows, None for an empty one; each row is on exactly one rank, and every rank
                has equally many micro-batches.
            answers: the rollout as text; called once, and only if a part reads text.
            may_drop_all: whether it is no mistake if no row is left.

        Raises:
            UserError: on every rank, when a part whose on_failure is stop has no usable score for a row on any, or
                all rows are dropped and may not be.
        """
        share = Share(sequences, micro_batches, _NO_TEXT)
        if any(part.reads_text for part in self._parts):
            share = Share(sequences, micro_batches, answers().select(share.rows))
        pending = [part.begin(share) for part in self._parts]
        ratings = [finish() for finish in pending]
        values, told, failed = self._whole(share, ratings)
        self._judge(ratings, failed, may_drop_all)
        dropped = self._dropped(failed)
        weights = torch.tensor([part.weight for part in self._parts], dtype=torch.float32, device=values.device)
        return RewardReport(
            (weights[:, None] * values).sum(dim=0),
            dropped.nonzero().flatten().tolist(),
            self._metrics(values, told.bool() & ~dropped, failed),
        )

    def _whole(self, share: Share, ratings: Sequence[Ratings]) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, who has an opinion, and failures of all ranks: [parts, N] float32 each, 0 where there is none."""
        table = torch.zeros(3, len(ratings), len(share.sequences.input_ids))
        rows = torch.tensor(share.rows, dtype=torch.long)
        for part, rating in enumerate(ratings):
            table[0, part, rows] = torch.tensor([value or 0.0 for value in rating.values])
            table[1, part, rows] = torch.tensor([float(value is not None) for value in rating.values])
            table[2, part, rows[list(rating.failures)]] = 1.0
        # Each row was filled by one rank and is zero on the others.
        values, told, failed = self._world.all_reduce(table.to(self._world.device))
        return values, told, failed

    def _judge(self, ratings: Sequence[Ratings], failed: Tensor, may_drop_all: bool) -> None:
        """Stop, or say what is dropped or scored 0; alike on every rank."""
        counts = failed.sum(dim=1).tolist()
        if not any(counts):
            return
        reasons = self._world.all_gather_objects([next(iter(rating.failures.values()), None) for rating in ratings])
        for place, part in enumerate(self._parts):
            if not counts[place]:
                continue
            reason = next(told[place] for told in reasons if told[place] is not None)
            where = f"for {counts[place]:.0f} of {failed.shape[1]} completions"
            if part.on_failure == "stop":
                raise UserError(
                    f"reward part {part.name} must give a number or None a completion, it did not {where}: {reason}; "
                    "mend it, or set its on_failure to drop or zero"
                )
            if self._world.is_main:
                what = "is scored 0" if part.on_failure == "zero" else "drops its rows"
                logger.warning("reward part %s %s %s: %s", part.name, what, where, reason)
            if part.on_failure == "drop" and not may_drop_all and bool(self._dropped(failed).all()):
                raise UserError(
                    f"reward parts must leave completions to learn from, all {failed.shape[1]} of a rollout are "
                    f"dropped, {counts[place]:.0f} by {part.name}: {reason}; mend it"
                )

    def _dropped(self, failed: Tensor) -> Tensor:
        """[N] bool, rows without a usable score of a part that drops them."""
        dropping = [part.on_failure == "drop" for part in self._parts]
        return failed[torch.tensor(dropping, dtype=torch.bool, device=failed.device)].any(dim=0)

    def _metrics(self, values: Tensor, told: Tensor, failed: Tensor) -> dict[str, float]:
        if not self._logged:
            return {}
        metrics = {}
        for place, part in enumerate(self._parts):
            opinions = values[place][told[place]]
            if len(opinions):
                metrics[f"reward/{part.name}/mean"] = float(opinions.mean())
                metrics[f"reward/{part.name}/std"] = float(opinions.std(correction=0))
            if part.on_failure != "stop":
                count = COUNTS[0] if part.on_failure == "zero" else COUNTS[1]
                metrics[f"reward/{part.name}{count}"] = float(failed[place].sum())
        return metrics


def build_reward(
    parts: Sequence[RewardPartConfig],
    world: World,
    *,
    tokenizer: PreTrainedTokenizerBase,
    resolve: Callable[[str], str],
    load_tokenizer: Callable[[str], PreTrainedTokenizerBase],
    build_engine: Callable[[str], ModelEngine],
) -> Reward:
    """A reward from its config; every rank calls.

    Args:
        parts: of the sum; none where an environment gives the reward.
        world: the ranks that share rollouts.
        tokenizer: the actor's.
        resolve: the path of a model, as the config has it, to one that can be loaded.
        load_tokenizer: the tokenizer of a resolved path.
        build_engine: a frozen engine of the role reward of a resolved path.

    Raises:
        UserError: on every rank, for two parts of one name, or a function or a key that any rank cannot find.
    """
    require_distinct_names(parts)
    background: dict[str, RewardPart] = {}
    with mistakes_shared(world):
        for part in parts:
            if part.model is None:
                kind = FunctionPart if part.function is not None else EndpointPart
                background[part.label] = kind(part, device=world.device)

    def build(part: RewardPartConfig) -> RewardPart:
        if part.model is None:
            return background[part.label]
        path = resolve(part.model)
        own, engine = load_tokenizer(path), build_engine(path)
        if part.steps == "last" and reads_the_same(own, tokenizer):
            return ModelPart(part, engine, end=turn_end(tokenizer))
        return RetokenizingModelPart(part, engine, own)

    return Reward([build(part) for part in parts], world)
