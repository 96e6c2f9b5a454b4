"""Completions for each step, sampled at the step or ahead of it while earlier steps train.

With a policy lag of k, step s samples from the weights after step s - 1 - k, and the first k + 1 steps from the initial
weights. The lag is constant, not an upper bound, so results do not depend on the timing of threads, and a resumed run
continues bit for bit.

Source: bounded staleness, Ho et al. 2013 (SSP); for RLHF Noukhovitch et al. 2024 (arXiv 2410.18252), and AReaL
(arXiv 2505.24298, section 5.2), whose correction of the loss is `algorithm.correction.method`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.rl.batch import Rollout, with_prefix, without_prefix
from hybrid_rlhf.rl.rollouts.sampler import Pending, RolloutSampler, SamplingCost, cancel
from hybrid_rlhf.runtime.world import World


@dataclass
class _SampledStep:
    """A step whose completions are sampled ahead."""

    rows: list[int]
    """Numbers of its prompts in the data."""
    completions: Pending | Rollout | UserError | None
    """None if a checkpoint has no completions of the step; an error is raised at the step."""
    measured: SamplingCost = SamplingCost()


class AsyncSampler:
    """Takes prompts from a stream and samples their completions, for the steps of a run in order."""

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
    ) -> None:
        """Take the sampler and the prompts.

        Args:
            sampler: samples completions.
            prompts: the data set of prompts.
            stream: order of the prompts.
            per_step: prompts per step, before dynamic sampling.
            total_steps: steps of the run.
            policy_lag: policy lag in steps; 0: sample at the step.
            greedy: see RolloutSampler.sample.
        """
        self._sampler, self._prompts, self._stream, self._per_step = sampler, prompts, stream, per_step
        self._total_steps, self._policy_lag, self._greedy = total_steps, policy_lag, greedy
        self._ahead: dict[int, _SampledStep] = {}
        self.hidden_seconds = 0.0
        """Seconds of sampling for the last step that overlapped with training."""

    @property
    def has_next(self) -> bool:
        """Whether there are prompts for another step."""
        return bool(self._ahead or self._stream.left)

    def take(self, step: int) -> tuple[list[int], Rollout]:
        """Numbers of the prompts of a step, and their completions. Every rank calls, in the order of steps.

        Raises:
            UserError: on every rank, when an environment fails on any.
        """
        ahead = self._ahead.pop(step, None) or _SampledStep(self._stream.take(self._per_step), None)
        self.hidden_seconds = 0.0
        if ahead.completions is None:
            return ahead.rows, self._sampler.sample(self.prompts(ahead.rows), step=step, greedy=self._greedy)
        start = time.perf_counter()
        if isinstance(ahead.completions, Pending):
            self._sampler.await_in_step(ahead.completions)
        waited = time.perf_counter() - start
        self._finish(ahead)
        if isinstance(ahead.completions, UserError):
            raise ahead.completions
        assert isinstance(ahead.completions, Rollout)
        self.hidden_seconds = max(0.0, ahead.measured.seconds - waited)
        return ahead.rows, ahead.completions

    def begin(self, step: int) -> None:
        """Start sampling steps after this one, up to the policy lag, with the current weights. Every rank calls."""
        for number in range(step + 1, min(step + self._policy_lag, self._total_steps) + 1):
            if number not in self._ahead and self._stream.left:
                rows = self._stream.take(self._per_step)
                pending = self._sampler.begin(self.prompts(rows), step=number, greedy=self._greedy)
                self._ahead[number] = _SampledStep(rows, pending)

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

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the steps sampled ahead, by name; call after `state_dict`."""
        named: dict[str, Tensor] = {}
        for step, ahead in self._ahead.items():
            if isinstance(ahead.completions, Rollout):
                named |= with_prefix(_prefix(step), ahead.completions.tensors())
        return named

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], world: World) -> None:
        """Restore the state of a checkpoint."""
        for entry in state:
            named = without_prefix(_prefix(entry["step"]), tensors)
            completions = Rollout.from_tensors(named, world.device) if named else None
            self._ahead[entry["step"]] = _SampledStep(entry["rows"], completions)

    def _finish(self, ahead: _SampledStep) -> None:
        """Wait for completions. An error, the same on all ranks, is stored, so that a checkpoint can be written."""
        if not isinstance(ahead.completions, Pending):
            return
        try:
            ahead.completions, ahead.measured = self._sampler.finish(ahead.completions)
        except UserError as error:
            ahead.completions = error

    def prompts(self, rows: Sequence[int]) -> list[Mapping[str, Any]]:
        """Prompts of the data by number."""
        return [self._prompts[row] for row in rows]


def _prefix(step: int) -> str:
    return f"ahead.{step}."
