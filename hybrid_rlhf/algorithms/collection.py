"""A step's completions: sampled, rated, and those chosen that the algorithm learns from.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) goes on with more prompts until it has as many as a step takes.
It asks for those that are missing and no more, so that no group that it accepts is ever thrown away; where the data or
its rounds end, the step is a smaller one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from datasets import Dataset

from hybrid_rlhf.algorithms.on_policy import OnPolicyAlgorithm
from hybrid_rlhf.algorithms.rollout import Rollout
from hybrid_rlhf.algorithms.rollouts_ahead import RolloutsAhead
from hybrid_rlhf.algorithms.scoring import Rated
from hybrid_rlhf.data.loaders import RowStream


@dataclass(frozen=True)
class Collected:
    """What a step learns from."""

    chosen: Rated
    prompts: list[int]
    """Of each completion the row of its prompt in the data."""
    metrics: dict[str, float]
    sampled_tokens: tuple[float, float]
    """Of all completions, chosen or not, and of these with their prompts."""


class NothingToLearn(Exception):
    """The algorithm chose none of a rollout's completions; the same on every rank."""

    def __init__(self, reason: str, metrics: dict[str, float]) -> None:
        super().__init__(reason)
        self.metrics = metrics


class Collector:
    """Takes prompts from a stream until a step has what it needs."""

    def __init__(
        self, rollout: Rollout, algorithm: OnPolicyAlgorithm, *, prompts: Dataset, stream: RowStream,
        per_step: int, total_steps: int, max_staleness: int = 0,
    ) -> None:  # fmt: skip
        """Take who samples and chooses, and the rest as RolloutsAhead does."""
        self._rollout, self._algorithm = rollout, algorithm
        self._stream, self._per_step = stream, per_step
        self.ahead = RolloutsAhead(
            rollout.sampler, prompts=prompts, stream=stream, per_step=per_step, total_steps=total_steps,
            max_staleness=max_staleness, greedy=algorithm.wants_greedy,
        )  # fmt: skip

    def collect(self, step: int) -> Collected:
        """The completions of a step; every rank calls, and gets the same.

        Raises:
            UserError: on every rank, as the reward's parts say.
            NothingToLearn: on every rank, when the algorithm chose none.
        """
        config, greedy = self._algorithm.config, self._algorithm.wants_greedy
        taken: list[int] = []
        parts, masks, wanted = [], [], self._per_step
        rows, sequences = self.ahead.take(step)
        if not config.dynamic_sampling:  # else refills would wait for what is ahead
            self.ahead.begin(step)
        for refills in itertools.count():
            rated = self._rollout.rate(
                self.ahead.prompts(rows), sequences, first=len(taken), greedy=greedy, refill=refills > 0
            )
            mask = self._algorithm.select(rated.scores, penalties=rated.penalties, groups=rated.prompts)
            taken += rows
            parts.append(rated)
            masks.append(mask)
            wanted -= len(rated.prompts[mask].unique())
            if not config.dynamic_sampling or wanted <= 0 or refills == config.max_refills:
                break
            rows = self._stream.take(wanted)
            if not rows:
                break
            sequences = self._rollout.sample(self.ahead.prompts(rows), step=step, first=len(taken), greedy=greedy)
        self.ahead.begin(step)
        whole, mask = Rated.joined(parts), torch.cat(masks)
        metrics, tokens = self._metrics(whole, mask), whole.sequences
        sampled = float(tokens.response_mask.sum()), float(tokens.lengths.sum())
        if not bool(mask.any()):
            least = "" if config.select_above is None else f", or none is above ppo.select_above {config.select_above}"
            raise NothingToLearn(
                f"the algorithm chose none of {len(mask)} completions, the scores of a prompt's are all alike{least}",
                metrics,
            )
        chosen = whole.select(mask)
        return Collected(chosen, [taken[place] for place in chosen.prompts.tolist()], metrics, sampled)

    def _metrics(self, whole: Rated, mask: torch.Tensor) -> dict[str, float]:
        metrics = dict(whole.metrics)
        if not bool(mask.all()):  # the chosen alone would flatter
            scores = whole.penalised
            metrics |= {
                "objective/scores": float(scores.mean()),
                "objective/scores_std": float(scores.std(correction=0)),
                "rollout/chosen_scores": float(scores[mask].mean()) if bool(mask.any()) else 0.0,
            }
        if self._algorithm.config.dynamic_sampling:
            metrics["rollout/accepted_prompts"] = len(whole.prompts[mask].unique()) / len(whole.prompts.unique())
        return metrics
