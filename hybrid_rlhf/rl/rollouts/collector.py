"""The completions of each step, scored and selected by the algorithm.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) requests more prompts until enough groups of completions are
accepted. It requests as many as are missing, so that no accepted group is discarded; if the data or the permitted
rounds end before, the step is smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.metrics import score_metrics, staleness_metrics
from hybrid_rlhf.rl.rewards.reward import COUNTS
from hybrid_rlhf.rl.rollouts.advantages import NothingToLearn
from hybrid_rlhf.rl.rollouts.curriculum import Curriculum
from hybrid_rlhf.rl.rollouts.scoring import RolloutScorer
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.rl.types import Rollout, SampledTokens
from hybrid_rlhf.runtime.world import World


class Collector:
    """Takes prompts from a stream until a step has enough completions."""

    def __init__(self, stream: StepStream, scorer: RolloutScorer, algorithm: Algorithm) -> None:
        """Take the stream of steps, the scorer, and the algorithm that selects."""
        self.stream = stream
        self._scorer = scorer
        self._algorithm = algorithm
        self._world = stream.sampler.world
        self.sampled = SampledTokens([], 0)
        """Token counts of the last step."""

    def collect(self, step: int) -> Rollout:
        """The completions of a step that this rank holds. Every rank calls.

        Raises:
            UserError: on every rank, for a reward component without a usable score.
            NothingToLearn: on every rank, when the algorithm selects none.
        """
        config = self._algorithm.config
        stream = self.stream
        taken: list[int] = []
        parts = []
        masks = []
        wanted = stream.per_step
        rows, sampled = stream.take(step)
        for refills in itertools.count():
            if len(sampled.numbered(self._world)):  # an environment may fail in all episodes of a refill
                scored = self._scorer.score(
                    stream.prompts(rows), sampled, first=len(taken), greedy=stream.greedy, refill=refills > 0
                )
                mask = self._mask(scored)
                parts.append(scored)
                masks.append(mask)
                if config.dynamic_sampling is not None:
                    wanted -= sum(self._world.all_gather_objects(len(scored.groups[mask].unique())))
            taken += rows
            if config.dynamic_sampling is None or wanted <= 0 or refills == config.dynamic_sampling.max_refills:
                break
            rows = stream.row_stream.take(wanted)
            if not rows:
                break
            sampled = stream.sampler.sample(
                stream.prompts(rows), step=step, first=len(taken), greedy=stream.greedy, may_be_empty=True
            )
        return self._selected(_joined(parts, self._world), torch.cat(masks), taken)

    def _mask(self, scored: Rollout) -> Tensor:
        """[n] bool, the rows to learn from; a row without a score is none where the algorithm selects by scores."""
        config = self._algorithm.config
        assert scored.scores is not None and scored.penalties is not None
        known = scored.has_score
        mask = torch.full_like(
            known, config.dynamic_sampling is None and not config.selects and not config.learns_pairs
        )
        mask[known] = self._algorithm.select(
            scored.scores[known], penalties=scored.penalties[known], groups=scored.groups[known]
        )
        return mask

    def _selected(self, whole: Rollout, mask: torch.Tensor, taken: Sequence[int]) -> Rollout:
        """The selected rows, with metrics of all rows and the data set's row of each prompt."""
        index = whole.numbered(self._world)
        self.sampled = SampledTokens(index.responses.tolist(), int(index.lengths.sum()))
        ages = whole.staleness(self._scorer.weight_version)
        columns = torch.stack([mask, whole.has_score, whole.penalized_scores, whole.groups, ~whole.stopped], dim=1)
        chosen, known, scores, groups, truncated, *stale = index.gather(
            torch.cat([columns, ages], dim=1)
        ).T.contiguous()
        chosen = chosen.bool()
        known = known.bool()
        metrics = {**whole.metrics, **self.stream.metrics, **self._metrics(scores.float(), chosen, groups)}
        if not bool(chosen.all()):  # the selected completions alone would look too good
            metrics |= score_metrics(scores.float(), known, groups, is_rewarded=whole.is_rewarded)
            metrics["completions/mean_length"] = float(index.responses.float().mean())
            metrics["completions/clipped_ratio"] = float(truncated.float().mean())
        if isinstance(self.stream.row_stream, Curriculum):
            assert whole.scores is not None
            metrics |= self.stream.row_stream.observe(
                index.gather(whole.scores)[known], groups=groups[known], rows=taken
            )
        if not bool(chosen.any()):
            raise NothingToLearn(
                f"the algorithm selected none of {len(chosen)} completions: {self._algorithm.why_none_is_selected}",
                metrics,
            )
        rows = torch.tensor(taken, dtype=torch.long, device=whole.groups.device)
        selected = replace(whole, prompt_rows=rows[whole.groups]).select(mask)
        staleness = staleness_metrics(torch.stack(stale, dim=1)[chosen], index.responses[chosen])
        if self.stream.max_lag or staleness["rollout/stale_updates"]:
            metrics |= staleness
        return replace(selected, metrics=metrics, index=index if chosen.all() else selected.numbered(self._world))

    def _metrics(self, scores: Tensor, mask: Tensor, groups: Tensor) -> dict[str, float]:
        """Metrics of what is selected, from the scores [N] of all completions, which of them are, and prompts."""
        metrics = {}
        if not bool(mask.all()):
            metrics["rollout/chosen_scores"] = float(scores[mask].mean()) if bool(mask.any()) else 0.0
        if self._algorithm.config.dynamic_sampling is not None:
            metrics["rollout/accepted_prompts"] = len(groups[mask].unique()) / len(groups.unique())
        return metrics


def _joined(parts: Sequence[Rollout], world: World) -> Rollout:
    """Scored completions of different prompts as one rollout; metrics are means over completions, counts are summed.
    Every rank calls."""
    if len(parts) == 1:
        return parts[0]
    rows = world.total(torch.tensor([float(len(part)) for part in parts])).tolist()
    metrics = {}
    for name in sorted({name for part in parts for name in part.metrics}):
        values = [part.metrics.get(name, 0.0) for part in parts]
        mean = sum(value * n for value, n in zip(values, rows, strict=True)) / max(sum(rows), 1)
        metrics[name] = sum(values) if name.endswith(COUNTS) else mean
    return replace(Rollout.joined(parts), metrics=metrics)
