"""Turns of requests in an open batch: samples enter it one by one, those of requests that have none there first.

A request of many samples leaves the last row to others, so that a short one does not wait for all of them. Requests
with none in the batch wait in it, as prompts are computed together.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.open_batch import Deliver, PromptBatch, RequestBatch, StreamedToken, Submitted
from hybrid_rlhf.generation.sampling import per_request


@dataclass(eq=False)
class Turn:
    """One request."""

    batch: PromptBatch
    deliver: Deliver
    waiting: deque[tuple[int, int]]
    """Prompts and samples that are not in the batch yet."""
    running: int = 0
    """Number of samples in the batch."""
    parts: list[Submitted] = field(default_factory=list)
    is_open: bool = True
    """False after it was cancelled, or has failed."""
    error: BaseException | None = None
    """As in Submission."""


class Turns:
    """Submits requests to a batch by parts. Used on any thread."""

    def __init__(self, batch: RequestBatch) -> None:
        """Take the batch."""
        self.batch = batch
        self._lock = threading.RLock()
        self._waiting: dict[Turn, None] = {}
        """Requests with samples that are not in the batch, in order of arrival."""
        self._running = 0

    @property
    def failure(self) -> BaseException | None:
        """As in OpenBatch."""
        return self.batch.failure

    @property
    def unfinished(self) -> int:
        """Number of unfinished samples."""
        with self._lock:
            return self.batch.unfinished + sum(len(turn.waiting) for turn in self._waiting)

    def submit(self, batch: PromptBatch, deliver: Deliver) -> Turn:
        """As `OpenBatch.submit`, with the same tokens."""
        sampling = per_request(batch.sampling, len(batch.prompts))
        samples = deque((prompt, sample) for prompt, params in enumerate(sampling) for sample in range(params.n))
        turn = Turn(replace(batch, sampling=sampling), deliver, samples)
        with self._lock:
            self._waiting[turn] = None
            try:
                self._admit()
            except UserError:  # others must not wait for its samples
                self.cancel(turn)
                raise
        return turn

    def cancel(self, turn: Turn) -> None:
        """As `OpenBatch.cancel`."""
        with self._lock:
            for part in turn.parts:
                self.batch.cancel(part)
            turn.parts.clear()
            turn.waiting.clear()
            turn.is_open = False
            self._waiting.pop(turn, None)
            self._running -= turn.running
            turn.running = 0
            self._admit()

    def _admit(self) -> None:
        """Submit the samples whose turn it is."""
        rows = self.batch.rows
        counts: dict[tuple[Turn, int], list[int]] = {}
        while self._waiting:
            turn = min(self._waiting, key=lambda turn: turn.running)
            if self._running >= (max(1, rows - 1) if turn.running else rows + rows // 8):
                break
            prompt, sample = turn.waiting.popleft()
            counts.setdefault((turn, prompt), []).append(sample)
            turn.running += 1
            self._running += 1
            if not turn.waiting:
                del self._waiting[turn]
        for (turn, prompt), samples in counts.items():
            self._submit(turn, prompt, samples)

    def _submit(self, turn: Turn, prompt: int, samples: list[int]) -> None:
        batch = turn.batch
        params = replace(batch.sampling[prompt], n=len(samples))  # type: ignore[index]
        part = replace(
            batch,
            prompts=[batch.prompts[prompt]],
            sampling=[params],
            first_sample=samples[0],
            images=batch.images[prompt : prompt + 1],
        )

        def deliver(tokens: list[StreamedToken]) -> None:
            if not tokens:
                self._fail(turn)
                return
            turn.deliver([replace(token, prompt=prompt) for token in tokens] if prompt else tokens)
            ended = sum(token.finish_reason is not None for token in tokens)
            if ended:
                with self._lock:
                    if turn.is_open:
                        turn.running -= ended
                        self._running -= ended
                        self._admit()

        try:
            turn.parts.append(self.batch.submit(part, deliver))
        except RuntimeError:  # the batch has ended
            self._fail(turn)

    def _fail(self, turn: Turn) -> None:
        """End a request, one part of which has failed, or whose batch has ended."""
        with self._lock:
            if not turn.is_open:
                return
            turn.error = next((part.error for part in turn.parts if part.error is not None), None)
            self.cancel(turn)
        turn.deliver([])
