"""The completions that each step begins with: sampled when it is due, or some steps before, beside training.

With a staleness of k, step s samples from the weights that step s - 1 - k left, and the first k + 1 steps from those
of the start. That is fixed, not a bound that luck fills: so a run gives the same numbers whenever its threads get
around to their work, and a run that was stopped goes on bit for bit.

Source: bounded staleness, Ho et al. 2013 (SSP); for RLHF Noukhovitch et al. 2024 (arXiv 2410.18252), and AReaL
(arXiv 2505.24298, section 5.2), whose correction of the loss is `ppo.sampler_correction`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.algorithms.prompt_sampling import Pending, PromptSampler
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.runtime.world import World


@dataclass
class _Ahead:
    """Of a step to come."""

    rows: list[int]
    """Of its prompts in the data."""
    completions: Pending | Sequences


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

    @property
    def is_left(self) -> bool:
        """Whether there is a next step."""
        return bool(self._ahead or self._stream.left)

    def take(self, step: int) -> tuple[list[int], Sequences]:
        """A step's first prompts, by their rows in the data, and their completions; every rank calls, step by step.

        Those of the steps that may be ahead are begun.

        Raises:
            UserError: on every rank, as environments say.
        """
        ahead = self._ahead.pop(step, None)
        if ahead is None:
            rows = self._stream.take(self._per_step)
            completions = self._sampler.sample(self._at(rows), step=step, greedy=self._greedy)
        else:
            rows, completions = ahead.rows, self._finished(ahead)
        self._begin(step)
        return rows, completions

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the loop: what is still being sampled when it ends early is not waited for."""
        try:
            yield
        finally:
            for ahead in self._ahead.values():
                if isinstance(ahead.completions, Pending):
                    ahead.completions.cancel()

    def state_dict(self) -> list[dict[str, Any]]:
        """Which steps are ahead, for a checkpoint, once they are sampled; every rank calls."""
        for ahead in self._ahead.values():
            ahead.completions = self._finished(ahead)
        return [{"step": step, "rows": ahead.rows} for step, ahead in self._ahead.items()]

    def tensors(self) -> dict[str, Tensor]:
        """Their completions by name, after `state_dict`."""
        return {
            f"ahead.{step}.{name}": tensor
            for step, ahead in self._ahead.items()
            if isinstance(ahead.completions, Sequences)
            for name, tensor in ahead.completions.tensors().items()
        }

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], world: World) -> None:
        """Go on from a checkpoint."""
        for part in state:
            prefix = f"ahead.{part['step']}."
            named = {
                name.removeprefix(prefix): tensor.to(world.device)
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            self._ahead[part["step"]] = _Ahead(part["rows"], Sequences(**named))

    def _begin(self, step: int) -> None:
        """Start on the steps that follow, as many as may be ahead."""
        copied: GenerationEngine | None = None
        for number in range(step + 1, min(step + self._max_staleness, self._total_steps) + 1):
            if number in self._ahead:
                continue
            rows = self._stream.take(self._per_step)
            if not rows:
                return
            copied = copied or self._sampler.copied()
            pending = self._sampler.begin(copied, self._at(rows), step=number, greedy=self._greedy)
            self._ahead[number] = _Ahead(rows, pending)

    def _finished(self, ahead: _Ahead) -> Sequences:
        if isinstance(ahead.completions, Pending):
            return self._sampler.finish(ahead.completions)
        return ahead.completions

    def _at(self, rows: Sequence[int]) -> list[Mapping[str, Any]]:
        return [self._prompts[row] for row in rows]
