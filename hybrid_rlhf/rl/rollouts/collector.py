"""The completions of a step: sampled, scored, and those selected that the algorithm learns from.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) requests more prompts until the step has as many as it takes. It
requests those that are missing and no more, so that no accepted group is discarded; where the data or its rounds end,
the step is smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from datasets import Dataset

from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.functional.masking import spread
from hybrid_rlhf.planning.job import StepLengths
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.batch import Rollout
from hybrid_rlhf.rl.rewards.reward import COUNTS
from hybrid_rlhf.rl.rollouts.async_sampler import AsyncSampler
from hybrid_rlhf.rl.rollouts.partial import PartialRollouts
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.scoring import RolloutScorer


class NothingToLearn(Exception):
    """A step without a completion to learn from; the same on every rank."""

    def __init__(self, reason: str, metrics: dict[str, float]) -> None:
        super().__init__(reason)
        self.metrics = metrics


class Collector:
    """Takes prompts from a stream until a step has what it needs."""

    def __init__(
        self,
        sampler: RolloutSampler,
        scorer: RolloutScorer,
        algorithm: Algorithm,
        *,
        prompts: Dataset,
        stream: RowStream,
        per_step: int,
        total_steps: int,
        policy_lag: int = 0,
        extra_prompts: int = 0,
        partial: PartialRollouts | None = None,
    ) -> None:
        """Take the sampler, the scorer, the algorithm that selects, what AsyncSampler takes, and with partial rollouts
        the number of prompts in flight beyond those of a step.
        """
        self._sampler, self._scorer, self._algorithm = sampler, scorer, algorithm
        self._stream, self._per_step, self._policy_lag = stream, per_step, policy_lag
        self._extra_prompts = extra_prompts
        self.ahead = AsyncSampler(
            sampler,
            prompts=prompts,
            stream=stream,
            per_step=per_step,
            total_steps=total_steps,
            policy_lag=policy_lag,
            greedy=algorithm.wants_greedy,
            partial=partial,
        )
        self.sampled = StepLengths(0.0, ())
        """Lengths of all completions of the last step, selected or not; observations count as prompt."""

    def collect(self, step: int) -> Rollout:
        """The completions of a step; every rank calls, and gets the same.

        Raises:
            UserError: on every rank, for a reward component without a usable score.
            NothingToLearn: on every rank, when the algorithm selects none.
        """
        config, greedy = self._algorithm.config, self._algorithm.wants_greedy
        taken: list[int] = []
        parts, masks, wanted = [], [], self._per_step
        rows, sampled = self.ahead.take(step)
        if config.dynamic_sampling is None:  # refills would otherwise wait for the completions sampled ahead
            self.ahead.begin(step)
        for refills in itertools.count():
            scored = self._scorer.score(
                self.ahead.prompts(rows), sampled, first=len(taken), greedy=greedy, refill=refills > 0
            )
            assert scored.scores is not None and scored.penalties is not None and scored.groups is not None
            mask = self._algorithm.select(scored.scores, penalties=scored.penalties, groups=scored.groups)
            taken += rows
            parts.append(scored)
            masks.append(mask)
            wanted -= len(scored.groups[mask].unique())
            if config.dynamic_sampling is None or wanted <= 0 or refills == config.dynamic_sampling.max_refills:
                break
            rows = self._stream.take(wanted)
            if not rows:
                break
            # of the prompts that began in this step some may not be among the taken ones, but have their keys
            first = len(taken) + self._extra_prompts
            sampled = self._sampler.sample(self.ahead.prompts(rows), step=step, first=first, greedy=greedy)
        self.ahead.begin(step)
        return self._selected(_joined(parts), torch.cat(masks), taken)

    def _selected(self, whole: Rollout, mask: torch.Tensor, taken: Sequence[int]) -> Rollout:
        """The selected rows, with metrics of the whole and the row of each prompt in the data."""
        assert whole.groups is not None
        self.sampled = StepLengths.of(whole.response_mask.sum(dim=1).tolist(), tokens=int(whole.lengths.sum()))
        metrics = self._metrics(whole, mask, whole.groups)
        if not bool(mask.any()):
            least = self._algorithm.config.select_above
            above = "" if least is None else f", or none is above algorithm.select_above {least}"
            raise NothingToLearn(
                f"the algorithm selected none of {len(mask)} completions: the scores of each prompt are equal{above}",
                metrics,
            )
        rows = torch.tensor(taken, dtype=torch.long, device=whole.groups.device)
        selected = replace(whole, prompt_rows=rows[whole.groups]).select(mask)
        version = self._scorer.weight_version
        stale = selected.stale_updates(version)
        if self._extra_prompts:
            metrics |= selected.staleness(version)
        elif stale or self._policy_lag:
            metrics["rollout/stale_updates"] = stale
        return replace(selected, metrics=metrics)

    def _metrics(self, whole: Rollout, mask: torch.Tensor, groups: torch.Tensor) -> dict[str, float]:
        metrics = dict(whole.metrics)
        if not bool(mask.all()):  # the selected completions alone would look too good
            scores = whole.penalized_scores
            metrics |= {
                "objective/scores": float(scores.mean()),
                "objective/scores_std": spread(scores),
                "rollout/chosen_scores": float(scores[mask].mean()) if bool(mask.any()) else 0.0,
            }
        if self._algorithm.config.dynamic_sampling is not None:
            metrics["rollout/accepted_prompts"] = len(groups[mask].unique()) / len(groups.unique())
        return metrics


def _joined(parts: Sequence[Rollout]) -> Rollout:
    """Scored completions of different prompts as one rollout; metrics are means by completions, counts sums."""
    if len(parts) == 1:
        return parts[0]
    rows = [float(len(part)) for part in parts]
    metrics = {}
    for name in sorted({name for part in parts for name in part.metrics}):
        values = [part.metrics.get(name, 0.0) for part in parts]
        mean = sum(value * n for value, n in zip(values, rows, strict=True)) / max(sum(rows), 1)
        metrics[name] = sum(values) if name.endswith(COUNTS) else mean
    return replace(Rollout.joined(parts), metrics=metrics)
