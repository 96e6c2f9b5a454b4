"""Whether drafts pay, as measured in the run: steps with and without drafts in turns, then the faster kind for longer.

A step with drafts takes longer and may keep several tokens of a row. Drafts pay if its tokens per row exceed the ratio
of the two kinds' times; tokens per row make the comparison independent of rows that end meanwhile. Times are medians
over a few steps, of the slowest tensor-parallel rank, so that all ranks decide the same. Which steps have drafts does
not change the tokens.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)
MEASURED_STEPS = 4
"""Steps of each kind that are measured; the first one after a change of kind is not."""
KEPT_STEPS = 128
"""Steps after which both kinds are measured again."""


class DraftTrial:
    """Decides for each step whether rows have drafts; one trial goes on over all calls of an engine."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Take what tells the time in seconds."""
        self._clock = clock
        self.drafting = True
        """Whether the next step has drafts."""
        self.pays: bool | None = None
        """What the last comparison found; none before the first."""
        self._last: float | None = None
        """When the last step of this call ended."""
        self._seconds: list[float] = []
        """Times of the steps measured since the last change."""
        self._changed = True
        """Whether the kind of step has changed since the last one that was recorded."""
        self._rows = self._tokens = 0
        self._drafted = (0.0, 0.0)
        """Time and tokens per row of the measured steps with drafts."""
        self._measuring = True

    def begin(self) -> None:
        """Note that a call begins: the time since the last step belongs to something else."""
        self._last = None

    def record(self, *, rows: int, tokens: int, prefill: bool, world: World) -> None:
        """Record a step that ended now. Tensor-parallel ranks call after the same steps.

        Args:
            rows: that decoded.
            tokens: kept of these rows.
            prefill: whether the step computed chunks of prompts too; its time is not used.
            world: the tensor-parallel ranks.
        """
        now = self._clock()
        last, self._last = self._last, now
        if prefill or not rows or last is None:
            return
        if self._changed:
            self._changed = False
            return
        self._seconds.append(now - last)
        self._rows, self._tokens = self._rows + rows, self._tokens + tokens
        if len(self._seconds) == (MEASURED_STEPS if self._measuring else KEPT_STEPS):
            self._next(world)

    def _next(self, world: World) -> None:
        """Measure the other kind of step, compare both, or measure again."""
        if not self._measuring:
            self._set(drafting=True, measuring=True)
        elif self.drafting:
            self._drafted = statistics.median(self._seconds), self._tokens / self._rows
            self._set(drafting=False, measuring=True)
        else:
            self._compare(statistics.median(self._seconds), world)
            assert self.pays is not None
            self._set(drafting=self.pays, measuring=False)

    def _set(self, *, drafting: bool, measuring: bool) -> None:
        self._changed = drafting != self.drafting
        self.drafting, self._measuring = drafting, measuring
        self._seconds, self._rows, self._tokens = [], 0, 0

    def _compare(self, plain_seconds: float, world: World) -> None:
        seconds, tokens = self._drafted
        slowest = torch.tensor([seconds, plain_seconds], dtype=torch.float64, device=world.device)
        seconds, plain_seconds = world.all_reduce(slowest, dist.ReduceOp.MAX).tolist()
        # A step with drafts computes all that one without does: that it took less time is noise.
        pays = tokens * plain_seconds > max(seconds, plain_seconds)
        if world.is_main and pays != self.pays:
            logger.info(
                "speculative decoding is %s: steps with drafts keep %.2f tokens per row and take %.2f times as long",
                "on" if pays else "off",
                tokens,
                seconds / plain_seconds if plain_seconds else float("inf"),
            )
        self.pays = pays
