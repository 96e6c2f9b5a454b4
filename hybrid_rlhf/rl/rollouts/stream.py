"""The stream of steps: which prompts are sampled in a step, and on which ones it trains.

With `rollout.max_lag` K, the prompts of the present step and of the next K are in flight at the same time. Step s
trains on the prompts that the synchronous loop (K = 0) would give it, in the order of the data, once all their
completions are finished. Other prompts have K steps of time to finish, so a long completion delays a step only if it
takes longer than K steps. Nothing that was sampled is discarded, and no completion overtakes another: the lengths that
are trained on are distributed as those that were started, and no token is more than K steps old.

On the actor's ranks sampling and training take turns. A time slice ends with the decoding step in which the last
completion of the present step finishes; as many rows are decoded together as one step has completions, oldest first. It
depends on tokens alone where memory holds these rows, so that a run resumes bit for bit. Episodes of an environment,
and a sampler that decodes while the actor trains, use a batch that outlives a step (live.py): there it depends on time
which tokens are of which weights.

Source: bounded staleness by admission, AReaL (arXiv 2505.24298, section 4.2). Deviation: that admits by the number of
trajectories and trains on those that finish first, so short completions come first and the age of a long one has no
bound. Unfinished completions continue with newer weights: partial rollouts, Kimi k1.5 (arXiv 2501.12599, section 2.6).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.rl.rollouts.in_flight import AssignedPrompt, begun_state, restored_completions
from hybrid_rlhf.rl.rollouts.live import LiveBatch, Ticket
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.world import World, shared_user_errors


@dataclass
class _Step:
    """A step whose prompts are in flight."""

    rows: list[int]
    """Indices of its prompts in the data set."""
    prompts: list[AssignedPrompt]
    """Those that this rank samples, with their completions before this time slice."""
    ticket: Ticket | None = None
    """The prompts in the live batch; None if they were not added."""


class StepStream:
    """Takes prompts from a stream and samples their completions, for the steps of a run in order."""

    def __init__(
        self,
        sampler: RolloutSampler,
        *,
        prompts: Dataset,
        stream: RowStream,
        per_step: int,
        total_steps: int,
        max_lag: int = 0,
        greedy: bool = False,
    ) -> None:
        """Take the sampler and the prompts.

        Args:
            sampler: samples completions.
            prompts: the data set of prompts.
            stream: order of the prompts.
            per_step: prompts per step, before dynamic sampling.
            total_steps: steps of the run.
            max_lag: number of further steps whose prompts are in flight.
            greedy: true to add one greedy completion to the samples of each prompt.
        """
        self.sampler = sampler
        self.row_stream = stream
        self._prompts = prompts
        self.per_step = per_step
        self.total_steps = total_steps
        self.max_lag = max_lag
        self.greedy = greedy
        self._ahead: dict[int, _Step] = {}
        """Steps in flight, in their order."""
        self.hidden_seconds = 0.0
        """Seconds of sampling for the last step that overlapped with training."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step's sampling, the same on every rank."""
        self._left: float | None = None
        """Time when the last rollout was complete."""
        self._measured = (time.perf_counter(), 0.0)
        """Time of the last step's idle time, and idle time by then."""

    @property
    def has_next(self) -> bool:
        """True if there are prompts for another step."""
        return bool(self._ahead) or self.row_stream.left > 0

    def take(self, step: int) -> tuple[list[int], Rollout]:
        """Indices of the prompts of a step, and the completions that this rank holds; `groups` are places among these
        prompts. Every rank calls, in the order of steps.

        Raises:
            UserError: on every rank, when an environment fails on any.
        """
        for number in range(step, min(step + self.max_lag, self.total_steps) + 1):
            if number not in self._ahead and self.row_stream.left > 0:
                rows = self.row_stream.take(self.per_step)
                self._ahead[number] = _Step(rows, self._assigned(number, rows))
        present = self._ahead.pop(step)
        if self.max_lag and self.sampler.outlives_steps:
            return present.rows, self._sampled_live(step, present)
        waiting = [prompt for ahead in self._ahead.values() for prompt in ahead.prompts]
        rollout, waiting = self.sampler.complete(present.prompts, waiting, step=step)
        for ahead in self._ahead.values():
            ahead.prompts, waiting = waiting[: len(ahead.prompts)], waiting[len(ahead.prompts) :]
        return present.rows, rollout

    def prompts(self, rows: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows of the data set by index."""
        return [self._prompts[row] for row in rows]

    def _assigned(self, step: int, rows: Sequence[int]) -> list[AssignedPrompt]:
        return self.sampler.assigned(self.prompts(rows), step=step, greedy=self.greedy)

    def _number(self, step: int, prompt: AssignedPrompt) -> int:
        """Number of a prompt in the run, below 0 for its greedy completion."""
        number = (step - 1) * self.per_step + prompt.place
        return -1 - number if prompt.greedy else number

    # -- a batch that outlives the step

    def _sampled_live(self, step: int, present: _Step) -> Rollout:
        """The completions of the present step, while those of later steps are decoded too."""
        sampler = self.sampler
        start = time.perf_counter()
        live = sampler.live or self._opened()
        with live.current():
            for number, ahead in ((step, present), *self._ahead.items()):
                if ahead.ticket is None:
                    ahead.ticket = live.add(ahead.prompts, sampler.progress(ahead.prompts, number))
            assert present.ticket is not None
            with sampler.timers("generation"):
                # a rank that is done goes on with later prompts while it waits for the others
                with shared_user_errors(sampler.world):
                    samples = live.wait(present.ticket)
                live.finish_turns()
        rollout = sampler.held(present.ticket.prompts, samples)
        self.metrics = self._idle_ratio(live)
        self.hidden_seconds = start - self._left if live.lasts and self._left is not None else 0.0
        self._left = time.perf_counter()
        return rollout

    def _opened(self) -> LiveBatch:
        """The batch of this rank, opened in the first step of this process."""
        sampler = self.sampler
        self._measured = (time.perf_counter(), 0.0)
        prompts = -(-self.per_step // sampler.engine.groups[0]) * (1 + self.max_lag)
        return sampler.open_live(rows=prompts * (sampler.config.sampling.n + self.greedy))

    def _idle_ratio(self, live: LiveBatch) -> dict[str, float]:
        """Metrics of the idle time of all ranks since the last step."""
        before, idle_before = self._measured
        now, idle = self._measured = time.perf_counter(), live.idle_seconds
        engine = self.sampler.engine
        samples = engine.groups[1] is not None and engine.generation_world.is_main
        idles = self.sampler.world.all_gather_objects((idle - idle_before) / (now - before) if samples else None)
        sampling = [idle for idle in idles if idle is not None]
        return {"rollout/sampler_idle_ratio": sum(sampling) / len(sampling)}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context around the training loop: closes the batch at its end."""
        try:
            yield
        except BaseException:
            if self.sampler.live is not None:
                self.sampler.live.abandon()
            raise
        if self.sampler.live is not None:
            self.sampler.live.close()

    # -- checkpoints

    def state_dict(self) -> list[dict[str, Any]]:
        """The steps in flight, for a checkpoint."""
        return [{"step": step, "rows": ahead.rows} for step, ahead in self._ahead.items()]

    def carried_state(self, world: World) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
        """The completions so far, for a checkpoint, None without a lag; and the tensors of those of this rank, by name.
        Every rank calls."""
        if not self.max_lag and not self._ahead:
            return None, {}
        live = self.sampler.live
        tickets = [ahead.ticket for ahead in self._ahead.values() if ahead.ticket is not None]
        in_batch = iter([] if live is None else live.begun(tickets))
        numbered = [
            replace(prompt, place=self._number(step, prompt))
            for step, ahead in self._ahead.items()
            for prompt in (ahead.prompts if ahead.ticket is None else next(in_batch))
            if prompt.begun
        ]
        sends = self.sampler.engine.generation_world.is_main  # ranks that share the model have the same completions
        tensors, reasons = begun_state(numbered * sends, world)
        return {"finish_reasons": reasons}, tensors

    def load_state_dict(
        self,
        state: Sequence[Mapping[str, Any]],
        shards: Sequence[Mapping[str, Tensor]],
        carried: Mapping[str, Any] | None = None,
    ) -> None:
        """Restore the state of a checkpoint, with the tensors of each of its ranks.

        Raises:
            UserError: on every rank, when an earlier version wrote the checkpoint with rollout.async_sampling or
                rollout.partial.
        """
        sampled = any(name.startswith("ahead.") for shard in shards for name in shard)
        require(
            not sampled and not (carried and carried.get("prompts")),
            "the checkpoint holds completions of rollout.async_sampling or rollout.partial, got rollout.max_lag "
            f"{self.max_lag}: resume with the version that wrote it, or start a new run",
        )
        begun = {} if carried is None else restored_completions(shards, carried["finish_reasons"])
        for entry in state:
            step = entry["step"]
            prompts = self._assigned(step, entry["rows"])
            self._ahead[step] = _Step(
                entry["rows"],
                [replace(prompt, begun=begun.get(self._number(step, prompt), ())) for prompt in prompts],
            )
