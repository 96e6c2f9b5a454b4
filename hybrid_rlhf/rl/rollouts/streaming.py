"""Streaming rollouts: samplers decode without a barrier between steps, and a step trains on the oldest prompts.

With a largest lag of K, the prompts of the present step and of the next K are sampled at the same time. Prompts are
trained on in the order of the data: step s trains on the same prompts as in the synchronous loop, once all their
completions are finished. Other prompts have K steps of time to finish, so a long completion delays a step only if it
takes longer than K steps. Nothing that was sampled is discarded, and no completion overtakes another: the lengths that
are trained on are distributed as those that were started, and no token is more than K steps old. A prompt starts as
soon as its step is at most K updates away.

Source: bounded staleness by admission, AReaL (arXiv 2505.24298, section 4.2). Deviation: that admits by the number of
trajectories and trains on those that finish first, so short completions come first and the age of a long one has no
bound.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import StreamingConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.generation.batching.arrivals import Taken
from hybrid_rlhf.rl.batch import Rollout, restored_rows
from hybrid_rlhf.rl.rollouts.collector import AsyncSampler, SampledStep
from hybrid_rlhf.rl.rollouts.live import LiveBatch, Order, Ticket
from hybrid_rlhf.rl.rollouts.partial import AssignedPrompt, begun_state, restored_completions
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.json_lines import JsonLinesFile, drop_lines_after, read_lines
from hybrid_rlhf.runtime.world import World, shared_user_errors

ORDER_FILE = "order.jsonl"
"""The decoding steps in which prompts began and weights changed: `rollout.streaming.replay_order` of a later run."""


class StreamingSampler(AsyncSampler):
    """Takes prompts from a stream and samples them in the batch of a LiveBatch, for the steps of a run in order."""

    mixes_versions = True

    def __init__(
        self,
        sampler: RolloutSampler,
        config: StreamingConfig,
        *,
        prompts: Dataset,
        stream: RowStream,
        per_step: int,
        total_steps: int,
        folder: Path,
        greedy: bool = False,
    ) -> None:
        """Take the sampler and the prompts.

        Args:
            sampler: assigns prompts to ranks and makes rollouts.
            config: settings of streaming.
            prompts: the data set of prompts.
            stream: order of the prompts.
            per_step: prompts per step, before dynamic sampling.
            total_steps: steps of the run.
            folder: folder of the run, for order.jsonl.
            greedy: true to add one greedy completion to the samples of each prompt.
        """
        super().__init__(
            sampler, prompts=prompts, stream=stream, per_step=per_step, total_steps=total_steps, greedy=greedy
        )
        self._config = config
        self._tickets: dict[int, Ticket] = {}
        """This rank's prompts of each step that were added to the batch."""
        self._begun: dict[int, list[Any]] = {}
        """Completions so far of a checkpoint's prompts, on every rank, by number of the prompt."""
        self._folder = folder
        self._lines = JsonLinesFile(folder / ORDER_FILE)
        self._first = 1
        """The first step of this process."""
        self._left: float | None = None
        """Time when the last rollout was complete."""
        self._measured = (time.perf_counter(), 0.0)
        """Time of the last step's idle time, and idle time by then."""
        self._tensors: dict[str, Tensor] = {}

    def take(self, step: int) -> tuple[list[int], Rollout]:
        """Indices of the prompts of a step, and the completions that this rank holds; see AsyncSampler."""
        sampler = self.sampler
        start = time.perf_counter()
        live = sampler.live or self._opened(step)
        with live.current(step):
            self._admit(live, step)
            rows = self._ahead.pop(step).rows
            ticket = self._tickets.pop(step)
            with sampler.timers("generation"):
                # a rank that is done goes on with later prompts while it waits for the others
                with shared_user_errors(sampler.world):
                    samples = live.wait(ticket)
                live.finish_turns(step)
        rollout = sampler.held(ticket.prompts, samples)
        self.metrics = self._log_order(live, step)
        self.hidden_seconds = start - self._left if live.lasts and self._left is not None else 0.0
        self._left = time.perf_counter()
        return rows, rollout

    def begin(self, step: int) -> None:
        """Do nothing: prompts begin with the weights of each step."""

    def _opened(self, step: int) -> LiveBatch:
        """The batch of this rank, opened in the first step of this process. Every rank calls.

        Raises:
            UserError: on every rank, when the recorded order cannot be repeated.
        """
        sampler = self.sampler
        path = self._config.replay_order
        groups, group = sampler.engine.groups
        recorded: dict[int, Order] = {}
        with shared_user_errors(sampler.world):
            if path is not None:
                recorded = recorded_order(path, group=group, groups=groups, first=step)
        self._first = step
        self._measured = (time.perf_counter(), 0.0)
        prompts = -(-self.per_step // groups) * (1 + self._config.max_lag)
        return sampler.open_live(rows=prompts * (sampler.config.sampling.n + self.greedy), recorded=recorded)

    def _admit(self, live: LiveBatch, step: int) -> None:
        """Sample the prompts of the present step and of those that may begin in it."""
        for number in range(step, min(step + self._config.max_lag, self.total_steps) + 1):
            if number not in self._ahead:
                if self.stream.left <= 0:
                    break
                self._ahead[number] = self._next(number)
            if number not in self._tickets:
                mine = self._assigned(number)
                self._tickets[number] = live.add(mine, self.sampler.progress(mine, number))
        if self._tickets.keys() >= self._ahead.keys():
            self._begun.clear()

    def _assigned(self, step: int) -> list[AssignedPrompt]:
        """This rank's prompts of a step, with their completions in the checkpoint that the run resumed from."""
        prompts = self.sampler.assigned(self.prompts(self._ahead[step].rows), step=step, greedy=self.greedy)
        return [replace(prompt, begun=self._begun.get(self._number(step, prompt), [])) for prompt in prompts]

    def _number(self, step: int, prompt: AssignedPrompt) -> int:
        """Number of a prompt in the run, below 0 for its greedy completion."""
        number = (step - 1) * self.per_step + prompt.place
        return -1 - number if prompt.greedy else number

    # -- the recorded order

    def _log_order(self, live: LiveBatch, step: int) -> dict[str, float]:
        """Write what the batches of all ranks took since the last step, and return the metrics of their idle time."""
        before, idle_before = self._measured
        now, idle = self._measured = time.perf_counter(), live.idle_seconds
        engine = self.sampler.engine
        group = engine.groups[1] if engine.generation_world.is_main else None
        of_ranks = self.sampler.world.all_gather_objects(
            (group, live.take_order(), (idle - idle_before) / (now - before))
        )
        sampling = sorted(entry for entry in of_ranks if entry[0] is not None)
        if self.sampler.world.is_main:
            groups = [order for _, order, _ in sampling]
            self._lines.append([{"step": step, "opened": self._first, "groups": groups}])
        return {"rollout/sampler_idle_ratio": sum(idle for *_, idle in sampling) / len(sampling)}

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
        """The steps whose prompts are sampled, for a checkpoint. Every rank calls."""
        self._lines.flush()
        return super().state_dict()

    def carried_state(self, world: World) -> dict[str, Any]:
        """The completions so far, for a checkpoint; call on every rank after `state_dict`."""
        live = self.sampler.live
        begun = [] if live is None else live.begun([*self._tickets.values()])
        by_step = dict(zip(self._tickets, begun, strict=True))
        # an interrupted step resumes without a rollout, so that the batch has not taken what its checkpoint holds
        by_step |= {step: self._assigned(step) for step in self._ahead if step not in by_step}
        numbered = [
            replace(prompt, place=self._number(step, prompt))
            for step, prompts in by_step.items()
            for prompt in prompts
            if prompt.begun
        ]
        sends = self.sampler.engine.generation_world.is_main  # ranks that share the model have the same completions
        self._tensors, reasons = begun_state(numbered * sends, world)
        return {"prompts": [], "finish_reasons": reasons}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of this rank's completions so far, by name; call after the states."""
        return self._tensors

    def load_state_dict(
        self,
        state: Sequence[Mapping[str, Any]],
        shards: Sequence[Mapping[str, Tensor]],
        world: World,
        carried: Mapping[str, Any] | None = None,
    ) -> None:
        """Restore the state of a checkpoint, with the tensors of each of its ranks.

        Raises:
            UserError: on every rank, when the checkpoint holds completions of rollout.async_sampling or
                rollout.partial.
        """
        sampled = [
            entry["step"] for entry in state if restored_rows(Rollout, shards, f"ahead.{entry['step']}.", {}, world)
        ]
        require(
            not sampled and not (carried and carried["prompts"]),
            "the checkpoint holds completions of rollout.async_sampling or rollout.partial, got rollout.streaming: "
            "resume with that setting",
        )
        self._ahead = {entry["step"]: SampledStep(entry["rows"], None) for entry in state}
        if carried is not None:
            self._begun = restored_completions(shards, carried["finish_reasons"])

    def resume(self, taken: int) -> None:
        """Drop what an interrupted run has written to order.jsonl after a step."""
        if self.sampler.world.is_main:
            drop_lines_after(self._folder / ORDER_FILE, taken)


def copy_order(folder: Path, step: int, file: Path) -> int:
    """Copy the order of a run up to a step, as far as the process wrote it that computed the step, for `replay_order`.

    Args:
        folder: folder of the run.
        step: the last step.
        file: path of the copy.

    Returns:
        the first step of that process.

    Raises:
        UserError: if the run has no order of the step.
    """
    lines = read_lines(folder / ORDER_FILE)
    opened = next((line["opened"] for line in lines if line["step"] == step), None)
    if opened is None:
        raise UserError(
            f"a replay of a streaming run needs the order of step {step}, {folder / ORDER_FILE} has none: replay a "
            "step that it has"
        )
    kept = [json.dumps(line) + "\n" for line in lines if opened <= line["step"] <= step]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(kept))
    return int(opened)


def recorded_order(path: str, *, group: int | None, groups: int, first: int) -> dict[int, Order]:
    """The order of each step of an earlier run, for a sampling group.

    Args:
        path: order.jsonl of that run.
        group: index of the group; none: this rank does not sample.
        groups: number of groups.
        first: the first step to take.

    Raises:
        UserError: when the file cannot be read, or is of a run that began elsewhere or on other ranks.
    """
    try:
        lines = [line for line in read_lines(Path(path)) if line["step"] >= first]
        orders = {line["step"]: [[Taken(*entry) for entry in of] for of in line["groups"]] for line in lines}
        opened = {line["opened"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"rollout.streaming.replay_order must be the order.jsonl of a run, got {path} ({error}): give such a file"
        ) from error
    require(
        bool(lines),
        f"rollout.streaming.replay_order must have a line for step {first}, got {path} without: give another file",
    )
    require(
        opened == {first},
        f"rollout.streaming.replay_order repeats a run from where it started, got {path}, which started at steps "
        f"{sorted(opened)}, while this one starts at {first}: resume from the same checkpoint",
    )
    found = {len(of) for of in orders.values()}
    require(
        found == {groups},
        f"rollout.streaming.replay_order is for {groups} sampling ranks, got {path} of {sorted(found)}: use the same "
        "placement",
    )
    return {} if group is None else {step: of[group] for step, of in orders.items()}
