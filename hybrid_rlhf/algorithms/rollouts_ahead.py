"""The completions that each step begins with: sampled when it is due, or some steps before, beside training.

With a staleness of k, step s samples from the weights that step s - 1 - k left, and the first k + 1 steps from those
of the start. That is fixed, not a bound that luck fills: so a run gives the same numbers whenever its threads get
around to their work, and a run that was stopped goes on bit for bit.

Source: bounded staleness, Ho et al. 2013 (SSP); for RLHF Noukhovitch et al. 2024 (arXiv 2410.18252), and AReaL
(arXiv 2505.24298, section 5.2), whose correction of the loss is `ppo.sampler_correction`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.algorithms.experience import Sequences, taken_from, under
from hybrid_rlhf.algorithms.prompt_sampling import Measured, Pending, PromptSampler, cancel
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.runtime.world import World


@dataclass
class _Ahead:
    """Of a step to come."""

    rows: list[int]
    """Of its prompts in the data."""
    completions: Pending | Sequences | UserError | None
    """None where they could not be had when a checkpoint was written; the error is raised when the step is due."""
    measured: Measured = Measured()


class RolloutsAhead:
    """Takes prompts from a stream for the steps of a run, and has them sampled."""

    def __init__(
        self,
        sampler: PromptSampler,
        *,
        prompts: Dataset,
        stream: RowStream,
        per_step: int,
        total_steps: int,
        max_staleness: int = 0,
        greedy: bool = False,
    ) -> None:
        """Get ready.

        Args:
            sampler: completes.
            prompts: the data.
            stream: which of them come next.
            per_step: prompts that a step begins with.
            total_steps: of the run.
            max_staleness: steps that are sampled ahead; 0: none.
            greedy: see PromptSampler.
        """
        self._sampler, self._prompts, self._stream, self._per_step = sampler, prompts, stream, per_step
        self._total_steps, self._max_staleness, self._greedy = total_steps, max_staleness, greedy
        self._ahead: dict[int, _Ahead] = {}
        self.hidden_seconds = 0.0
        """What sampling the completions that were taken last took beside the training of earlier steps."""

    @property
    def is_left(self) -> bool:
        """Whether there is a next step."""
        return bool(self._ahead or self._stream.left)

    def take(self, step: int) -> tuple[list[int], Sequences]:
        """A step's first prompts, by their rows in the data, and their completions; every rank calls, step by step.

        Raises:
            UserError: on every rank, as environments say.
        """
        ahead = self._ahead.pop(step, None) or _Ahead(self._stream.take(self._per_step), None)
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
        assert isinstance(ahead.completions, Sequences)
        self.hidden_seconds = max(0.0, ahead.measured.seconds - waited)
        self._sampler.actor.tell_sampled_ahead(decode_bytes=ahead.measured.decode_bytes)
        return ahead.rows, ahead.completions

    def begin(self, step: int) -> None:
        """Start on the steps that may be ahead of one, with the current weights; every rank calls."""
        for number in range(step + 1, min(step + self._max_staleness, self._total_steps) + 1):
            if number not in self._ahead and self._stream.left:
                rows = self._stream.take(self._per_step)
                pending = self._sampler.begin(self.prompts(rows), step=number, greedy=self._greedy)
                self._ahead[number] = _Ahead(rows, pending)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the loop: what is still being sampled when it ends early is not waited for."""
        try:
            yield
        finally:
            cancel([ahead.completions for ahead in self._ahead.values() if isinstance(ahead.completions, Pending)])

    def state_dict(self) -> list[dict[str, Any]]:
        """Which steps are ahead, for a checkpoint, once they are sampled; every rank calls."""
        for ahead in self._ahead.values():
            self._finish(ahead)
        return [{"step": step, "rows": ahead.rows} for step, ahead in self._ahead.items()]

    def tensors(self) -> dict[str, Tensor]:
        """Their completions by name, after `state_dict`."""
        named: dict[str, Tensor] = {}
        for step, ahead in self._ahead.items():
            if isinstance(ahead.completions, Sequences):
                named |= under(_prefix(step), ahead.completions.tensors())
        return named

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], world: World) -> None:
        """Go on from a checkpoint."""
        for part in state:
            named = taken_from(_prefix(part["step"]), tensors)
            moved = {name: tensor.to(world.device) for name, tensor in named.items()}
            self._ahead[part["step"]] = _Ahead(part["rows"], Sequences(**moved) if moved else None)

    def _finish(self, ahead: _Ahead) -> None:
        """Wait for completions; an error that all ranks share is kept, so that a checkpoint can still be written."""
        if not isinstance(ahead.completions, Pending):
            return
        try:
            ahead.completions, ahead.measured = self._sampler.finish(ahead.completions)
        except UserError as error:
            ahead.completions = error

    def prompts(self, rows: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows of the data."""
        return [self._prompts[row] for row in rows]


def _prefix(step: int) -> str:
    return f"ahead.{step}."
