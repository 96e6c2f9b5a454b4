"""The completions of each step: sampled at the step, or ahead of it while earlier steps train, then scored and
selected by the algorithm.

With a policy lag of k, step s samples from the weights after step s - 1 - k, and the first k + 1 steps from the initial
weights. The lag is constant, not an upper bound, so results do not depend on the timing of threads, and a resumed run
continues bit for bit. Source: bounded staleness, Ho et al. 2013 (SSP); for RLHF Noukhovitch et al. 2024 (arXiv
2410.18252), and AReaL (arXiv 2505.24298, section 5.2), whose correction of the loss is `algorithm.correction.method`.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) requests more prompts until enough groups of completions are
accepted. It requests as many as are missing, so that no accepted group is discarded; if the data or the permitted
rounds end before, the step is smaller.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.configs.algorithms import RAFTConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.batch import Rollout, SampledTokens, restored_rows, with_prefix
from hybrid_rlhf.rl.metrics import score_metrics, staleness_metrics
from hybrid_rlhf.rl.rewards.reward import COUNTS
from hybrid_rlhf.rl.rollouts.advantages import NothingToLearn
from hybrid_rlhf.rl.rollouts.curriculum import Curriculum
from hybrid_rlhf.rl.rollouts.partial import PartialRollouts, RolloutPart
from hybrid_rlhf.rl.rollouts.sampler import Pending, RolloutSampler, SamplingCost, cancel
from hybrid_rlhf.rl.rollouts.scoring import RolloutScorer
from hybrid_rlhf.runtime.world import World


@dataclass
class SampledStep:
    """A step whose completions are sampled ahead."""

    rows: list[int]
    """Indices of its prompts in the data set."""
    completions: Pending | Rollout | UserError | None
    """None if a checkpoint has no completions of the step; an error is raised at the step."""
    measured: SamplingCost = SamplingCost()
    part: RolloutPart | None = None
    """This group's share of a partial rollout. `rows` are then the prompts that begin in it and, once it is sampled,
    the prompts that it has finished."""


class AsyncSampler:
    """Takes prompts from a stream and samples their completions, for the steps of a run in order."""

    mixes_versions = False
    """True if the tokens of a step may be of several weight versions."""

    def __init__(
        self,
        sampler: RolloutSampler,
        *,
        prompts: Dataset,
        stream: RowStream,
        per_step: int,
        total_steps: int,
        policy_lag: int = 0,
        greedy: bool = False,
        partial: PartialRollouts | None = None,
    ) -> None:
        """Take the sampler and the prompts.

        Args:
            sampler: samples completions.
            prompts: the data set of prompts.
            stream: order of the prompts.
            per_step: prompts per step, before dynamic sampling.
            total_steps: steps of the run.
            policy_lag: policy lag in steps; 0: sample at the step.
            greedy: true to add one greedy completion to the samples of each prompt.
            partial: carries prompts from rollout to rollout; None: each rollout finishes its own prompts.
        """
        self.sampler = sampler
        self.stream = stream
        self._prompts = prompts
        self._partial = partial
        self.per_step = per_step
        self.total_steps = total_steps
        self.policy_lag = policy_lag
        self.greedy = greedy
        self.extra_prompts = 0 if partial is None else partial.extra
        """Prompts in flight beyond those of a step."""
        self.mixes_versions = self.mixes_versions or partial is not None
        self._ahead: dict[int, SampledStep] = {}
        self.hidden_seconds = 0.0
        """Seconds of sampling for the last step that overlapped with training."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step's sampling, the same on every rank."""

    @property
    def has_next(self) -> bool:
        """True if there are prompts for another step."""
        return bool(self._ahead) or self._prompts_left

    @property
    def _prompts_left(self) -> bool:
        return self.stream.left > 0 or (self._partial is not None and self._partial.any_in_flight)

    def take(self, step: int) -> tuple[list[int], Rollout]:
        """Indices of the prompts of a step, and the completions that this rank holds; `groups` are places among these
        prompts. Every rank calls, in the order of steps.

        Raises:
            UserError: on every rank, when an environment fails on any.
        """
        ahead = self._ahead.pop(step, None) or self._next(step)
        self.hidden_seconds = 0.0
        if ahead.completions is None:
            prompts = self.prompts(ahead.rows)
            sampled = self.sampler.sample(prompts, step=step, greedy=self.greedy, part=ahead.part)
            return (ahead.rows, sampled) if self._partial is None else self._partial.end(sampled, self.sampler.world)
        start = time.perf_counter()
        if isinstance(ahead.completions, Pending):
            self.sampler.await_in_step(ahead.completions)
        waited = time.perf_counter() - start
        self._finish(ahead)
        if isinstance(ahead.completions, UserError):
            raise ahead.completions
        assert isinstance(ahead.completions, Rollout)
        self.hidden_seconds = max(0.0, ahead.measured.seconds - waited)
        return ahead.rows, ahead.completions

    def begin(self, step: int) -> None:
        """Start sampling steps after this one, up to the policy lag, with the current weights. Every rank calls."""
        for number in range(step + 1, min(step + self.policy_lag, self.total_steps) + 1):
            if number not in self._ahead and self._prompts_left:
                ahead = self._ahead[number] = self._next(number)
                prompts = self.prompts(ahead.rows)
                ahead.completions = self.sampler.begin(prompts, step=number, greedy=self.greedy, part=ahead.part)

    def _next(self, step: int) -> SampledStep:
        """A step with the next prompts of the stream."""
        if self._partial is None:
            return SampledStep(self.stream.take(self.per_step), None)
        first = self.stream.taken
        rows = self.stream.take(self._partial.wanted(step))
        return SampledStep(rows, None, part=self._partial.begin(step, rows, first=first))

    def resume(self, taken: int) -> None:
        """Continue a run that has taken the completions of a number of steps, an interrupted one included;
        `load_state_dict` was called before if a checkpoint exists."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context around the training loop: cancels pending rollouts at its end."""
        try:
            yield
        finally:
            cancel([ahead.completions for ahead in self._ahead.values() if isinstance(ahead.completions, Pending)])

    def state_dict(self) -> list[dict[str, Any]]:
        """The steps sampled ahead, for a checkpoint; waits for their completions. Every rank calls."""
        for ahead in self._ahead.values():
            self._finish(ahead)
        return [{"step": step, "rows": ahead.rows} for step, ahead in self._ahead.items()]

    def carried_state(self, world: World) -> dict[str, Any] | None:
        """The prompts that partial rollouts carry, for a checkpoint; call on every rank after `state_dict`."""
        sampler = self.sampler.engine
        sends = sampler.world.is_member and sampler.generation_world.is_main
        return None if self._partial is None else self._partial.state_dict(world, sends=sends)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of this rank's completions that are sampled ahead or carried, by name; call after the states."""
        named = {} if self._partial is None else dict(self._partial.tensors())
        for step, ahead in self._ahead.items():
            if isinstance(ahead.completions, Rollout) and len(ahead.completions):
                named |= with_prefix(_prefix(step), ahead.completions.tensors())
        return named

    def load_state_dict(
        self,
        state: Sequence[Mapping[str, Any]],
        shards: Sequence[Mapping[str, Tensor]],
        world: World,
        carried: Mapping[str, Any] | None = None,
    ) -> None:
        """Restore the state of a checkpoint, with the tensors of each of its ranks.

        Raises:
            UserError: on every rank, when prompts are carried and this run has no partial rollouts.
        """
        require(
            self._partial is not None or not (carried and carried["prompts"]),
            "the checkpoint holds prompts that partial rollouts have begun, got rollout.partial null: give "
            "--rollout.partial.extra_prompts",
        )
        if self._partial is not None and carried is not None:
            self._partial.load_state_dict(
                carried,
                shards,
                lambda place, prompt: self.sampler.assign(
                    self._prompts[prompt.row], step=prompt.step, index=prompt.place, place=place
                ),
            )
        for entry in state:
            step = entry["step"]
            ahead = self._ahead[step] = SampledStep(entry["rows"], None)
            stored = restored_rows(Rollout, shards, _prefix(step), {}, world)
            if stored is not None:
                ahead.completions = stored
            elif self._partial is not None:
                ahead.part = self._partial.begin(step, [], first=self.stream.taken)

    def _finish(self, ahead: SampledStep) -> None:
        """Wait for completions. An error, the same on all ranks, is stored, so that a checkpoint can be written."""
        if not isinstance(ahead.completions, Pending):
            return
        try:
            ahead.completions, ahead.measured = self.sampler.finish(ahead.completions)
            if self._partial is not None:
                ahead.rows, ahead.completions = self._partial.end(ahead.completions, self.sampler.world)
        except UserError as error:
            ahead.completions = error
            if self._partial is not None:
                ahead.rows = []  # its prompts are among those in flight

    def prompts(self, rows: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows of the data set by index."""
        return [self._prompts[row] for row in rows]


def _prefix(step: int) -> str:
    return f"ahead.{step}."


class Collector:
    """Takes prompts from a stream until a step has enough completions."""

    def __init__(self, ahead: AsyncSampler, scorer: RolloutScorer, algorithm: Algorithm) -> None:
        """Take the sampler of the steps, the scorer, and the algorithm that selects."""
        self.ahead = ahead
        self._scorer = scorer
        self._algorithm = algorithm
        self._world = ahead.sampler.world
        self.sampled = SampledTokens([], 0)
        """Token counts of the last step."""

    def collect(self, step: int) -> Rollout:
        """The completions of a step that this rank holds. Every rank calls.

        Raises:
            UserError: on every rank, for a reward component without a usable score.
            NothingToLearn: on every rank, when the algorithm selects none.
        """
        config = self._algorithm.config
        ahead = self.ahead
        taken: list[int] = []
        parts = []
        masks = []
        wanted = ahead.per_step
        rows, sampled = ahead.take(step)
        if config.dynamic_sampling is None:  # refills would otherwise wait for the completions sampled ahead
            ahead.begin(step)
        for refills in itertools.count():
            if len(sampled.numbered(self._world)):  # an environment may fail in all episodes of a refill
                scored = self._scorer.score(
                    ahead.prompts(rows), sampled, first=len(taken), greedy=ahead.greedy, refill=refills > 0
                )
                assert scored.groups is not None
                mask = self._mask(scored)
                parts.append(scored)
                masks.append(mask)
                if config.dynamic_sampling is not None:
                    wanted -= sum(self._world.all_gather_objects(len(scored.groups[mask].unique())))
            taken += rows
            if config.dynamic_sampling is None or wanted <= 0 or refills == config.dynamic_sampling.max_refills:
                break
            rows = ahead.stream.take(wanted)
            if not rows:
                break
            # prompts that began in this step have used keys even if they are not among the taken ones
            first = len(taken) + ahead.extra_prompts
            sampled = ahead.sampler.sample(
                ahead.prompts(rows), step=step, first=first, greedy=ahead.greedy, may_be_empty=True
            )
        ahead.begin(step)
        return self._selected(_joined(parts, self._world), torch.cat(masks), taken)

    def _mask(self, scored: Rollout) -> Tensor:
        """[n] bool, the rows to learn from; a row without a score is none where the algorithm selects by scores."""
        config = self._algorithm.config
        assert scored.scores is not None and scored.penalties is not None and scored.groups is not None
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
        assert whole.groups is not None
        index = whole.numbered(self._world)
        self.sampled = SampledTokens(index.responses.tolist(), int(index.lengths.sum()))
        ages = whole.staleness(self._scorer.weight_version)
        columns = torch.stack([mask, whole.has_score, whole.penalized_scores, whole.groups, ~whole.stopped], dim=1)
        chosen, known, scores, groups, truncated, *stale = index.gather(
            torch.cat([columns, ages], dim=1)
        ).T.contiguous()
        chosen = chosen.bool()
        known = known.bool()
        metrics = {**whole.metrics, **self.ahead.metrics, **self._metrics(scores.float(), chosen, groups)}
        if not bool(chosen.all()):  # the selected completions alone would look too good
            metrics |= score_metrics(scores.float(), known, groups, is_rewarded=whole.is_rewarded)
            metrics["completions/mean_length"] = float(index.responses.float().mean())
            metrics["completions/clipped_ratio"] = float(truncated.float().mean())
        if isinstance(self.ahead.stream, Curriculum):
            assert whole.scores is not None
            metrics |= self.ahead.stream.observe(index.gather(whole.scores)[known], groups=groups[known], rows=taken)
        if not bool(chosen.any()):
            config = self._algorithm.config
            least = config.select_above if isinstance(config, RAFTConfig) else None
            above = "" if least is None else f", or none is above algorithm.select_above {least}"
            raise NothingToLearn(
                f"the algorithm selected none of {len(chosen)} completions: the scores of each prompt are equal{above}",
                metrics,
            )
        rows = torch.tensor(taken, dtype=torch.long, device=whole.groups.device)
        selected = replace(whole, prompt_rows=rows[whole.groups]).select(mask)
        staleness = staleness_metrics(torch.stack(stale, dim=1)[chosen], index.responses[chosen])
        if self.ahead.mixes_versions:
            metrics |= staleness
        elif staleness["rollout/stale_updates"] or self.ahead.policy_lag:
            metrics["rollout/stale_updates"] = staleness["rollout/stale_updates"]
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
