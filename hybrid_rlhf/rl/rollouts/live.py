"""The open batch in which a rank samples across steps, with weights that change under running completions.

A sampler on ranks of its own decodes without pause: each weight sync writes into its weights between two decoding
steps. On the actor's ranks the batch is open only while the actor does not train; running completions then continue
from their tokens in the next one.

Each action of the main thread (prompts that begin, a weight sync, the end of a time slice) has a label, and
`OpenBatch.order` records in which decoding step it took effect. A batch that is given this order samples the same
tokens again.

Source: in-flight weight updates of PipelineRL (arXiv 2509.19128) and Magistral (arXiv 2506.10910, section 3.2);
interruptible generation of AReaL (arXiv 2505.24298, section 4.1).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.arrivals import Taken
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.open_batch import OpenBatch, StreamedToken, Submission
from hybrid_rlhf.generation.sampling import Completion, SamplingParams
from hybrid_rlhf.rl.batch import Episode
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner
from hybrid_rlhf.rl.rollouts.partial import AssignedPrompt
from hybrid_rlhf.runtime.observability.progress import ProgressLog

Order = list[Taken]
"""The decoding steps in which a batch took the labelled actions."""


Sample = Completion | Episode


@dataclass(eq=False)
class Ticket:
    """Prompts that were added together, or one turn of an episode."""

    prompts: list[AssignedPrompt]
    label: str
    on_finished: Callable[[int, int, Completion], None]
    """Receives the places of prompt and sample, and the sample; in any thread."""
    samples: list[list[Sample | None]]
    """Finished samples of each prompt."""
    submissions: list[tuple[Submission, list[int]]] = field(default_factory=list)
    """Submissions of the present batch, with the indices of their prompts."""
    error: BaseException | None = None
    """Exception that ended an episode."""
    is_turn: bool = False
    """True for a turn of an episode, which the first of the ranks that share the model asks for."""

    @property
    def is_finished(self) -> bool:
        """True if all samples are finished."""
        return all(sample is not None for samples in self.samples for sample in samples)

    @property
    def finished(self) -> list[list[Any]]:
        """Samples of each prompt, once all are finished."""
        return [[sample for sample in samples if sample is not None] for samples in self.samples]


@dataclass(frozen=True)
class _Turns:
    """Answers the turns of an episode."""

    live: LiveBatch
    label: str
    stop_token_ids: frozenset[int]
    max_positions: int | None

    def ask(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        turn: int,
        record_routes: bool,
        on_finished: Callable[[Completion], None],
    ) -> None:
        """Complete the tokens of the episode so far."""
        self.live.ask(ids, params, record_routes, f"{self.label}.{turn}", on_finished)


class LiveBatch:
    """Samples prompts in a batch that outlives a step."""

    def __init__(
        self,
        engine: SamplingEngine,
        config: RolloutConfig,
        *,
        stop: Mapping[str, Any],
        rows: int,
        environments: EpisodeRunner | None,
        recorded: Mapping[int, Order],
    ) -> None:
        """Take the engine that samples.

        Args:
            engine: samples on ranks of its own, or on the actor's.
            config: the rollout settings, with `streaming`.
            stop: arguments of `SamplingEngine.inference`.
            rows: largest number of completions of a rank that are decoded together.
            environments: runs multi-turn episodes; none: a completion is one turn.
            recorded: order of each step of an earlier run to repeat; empty: by arrival.
        """
        assert config.streaming is not None
        self._together = engine.generation_world
        self._engine = engine
        self._recompute_kv = config.streaming.recompute_kv
        self._stop = stop
        self._rows = rows
        self._environments = environments
        self._max_tokens = config.max_prompt_tokens + config.sampling.max_new_tokens
        self._recorded = recorded
        self.lasts = isinstance(engine, SeparateSampler)
        """True if the batch stays open between steps."""
        self._batch: OpenBatch | None = None
        self._weight_version = -1
        self._records_routes = False
        self._stop_token_ids = frozenset[int]()
        self._max_positions: int | None = None
        self._tickets: list[Ticket] = []
        """What the batch samples, or will when it is open again."""
        self._changed = threading.Condition()
        self._idle_seconds = 0.0
        self._order: Order = []
        """Order of closed batches that was not taken yet."""
        self._actions = 0

    @contextlib.contextmanager
    def current(self, step: int) -> Iterator[None]:
        """Context in which the actor's current weights decode; a batch that lasts goes on after it. Every rank enters.

        Args:
            step: number of the step.
        """
        if self.lasts:
            self._sync()
            yield
            return
        with self._engine.inference(**self._stop) as generation:
            if generation is None:
                yield
                return
            _capture_now(generation)
            with self._changed:
                self._open(generation, self._recorded.get(step, []))
                for ticket in self._tickets:
                    self._submit(ticket)
            try:
                yield
            finally:
                self._suspend()

    def add(self, prompts: Sequence[AssignedPrompt], progress: ProgressLog) -> Ticket:
        """Sample prompts from now on; in the context of `current`."""
        plays = self._environments is None or self._together.is_main
        samples: list[list[Sample | None]] = [[None] * prompt.params.n for prompt in prompts if plays]

        def finished(place: int, sample: int, result: Sample) -> None:
            with self._changed:
                samples[place][sample] = result
                progress.advance(1)
                self._changed.notify_all()

        ticket = Ticket(list(prompts), self._label("begin"), finished, samples)
        if self._environments is not None:
            if plays:
                self._play(ticket, finished)
            return ticket
        for place, prompt in enumerate(prompts):
            for sample, completion in enumerate(prompt.begun):
                if completion.finish_reason is not None:
                    samples[place][sample] = completion
        self._start(ticket)
        return ticket

    def ask(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        record_routes: bool,
        label: str,
        on_finished: Callable[[Completion], None],
    ) -> None:
        """Complete one turn of an episode; may be called in any thread."""
        prompt = AssignedPrompt(0, {"input_ids": ids}, params, record_routes)

        def finished(place: int, sample: int, completion: Completion) -> None:
            with self._changed:
                self._tickets.remove(ticket)
            on_finished(completion)

        ticket = Ticket([prompt], label, finished, [[None]], is_turn=True)
        self._start(ticket)

    def wait(self, ticket: Ticket) -> list[list[Any]]:
        """Wait for the samples of a ticket.

        Raises:
            BaseException: the exception that ended the batch or one of the samples.
        """
        with self._changed:
            self._changed.wait_for(lambda: ticket.is_finished or self._failure(ticket) is not None)
            failure = self._failure(ticket)
            if failure is not None:
                raise failure
            if ticket in self._tickets:
                self._tickets.remove(ticket)
        return ticket.finished

    def _start(self, ticket: Ticket) -> None:
        with self._changed:
            self._tickets.append(ticket)
            if self._batch is not None:
                self._submit(ticket)

    def _play(self, ticket: Ticket, finished: Callable[[int, int, Sample], None]) -> None:
        """Start the episodes of a ticket."""
        assert self._environments is not None

        def failed(error: BaseException) -> None:
            with self._changed:
                ticket.error = error
                self._changed.notify_all()

        for place, prompt in enumerate(ticket.prompts):
            for sample in range(prompt.params.n):
                self._environments.play(
                    prompt.row,
                    prompt.params,
                    sample,
                    _Turns(self, f"{ticket.label} {place}.{sample}", self._stop_token_ids, self._max_positions),
                    record_routes=prompt.recorded,
                    on_ended=partial(finished, place, sample),
                    on_error=failed,
                )

    def begun(self, tickets: Sequence[Ticket]) -> list[list[AssignedPrompt]]:
        """The prompts of each ticket with their tokens so far, for a checkpoint; without those of episodes, which begin
        again."""
        if self._batch is None or self._environments is not None:
            return [ticket.prompts for ticket in tickets]
        with self._batch.paused():
            return [self._with_tokens(ticket, self._batch) for ticket in tickets]

    def take_order(self) -> Order:
        """The order since the last call."""
        order = self._order
        self._order = []
        return order if self._batch is None else order + self._batch.take_order()

    @property
    def idle_seconds(self) -> float:
        """Time that this rank's batch was open and had nothing to decode."""
        return self._idle_seconds + (0.0 if self._batch is None else self._batch.idle_seconds)

    def close(self) -> None:
        """End the batch."""
        if self._batch is not None:
            with self._batch.paused(label=self._label("end")):  # in the same step on all ranks that share the model
                self._batch.close(wait=False)
            self._batch.close()

    def abandon(self) -> None:
        """Let the batch end by itself, after an error on this rank."""
        if self._batch is not None:
            self._batch.close(wait=False)

    def _failure(self, ticket: Ticket) -> BaseException | None:
        if ticket.error is not None:
            return ticket.error
        tickets = [ticket] if self._environments is None else self._tickets
        submissions = [submission for one in tickets for submission, _ in one.submissions]
        errors = [submission.error for submission in submissions if submission.error is not None]
        ended = None if self._batch is None else self._batch.failure
        return next(iter(errors), ended)

    def _label(self, action: str) -> str:
        """A label of the next action of the main thread; the same in a run that repeats this one."""
        self._actions += 1
        return f"{action} {self._actions}"

    def _sync(self) -> None:
        """Write the actor's current weights under running completions, and open the batch if it is not open yet."""
        label = self._label("weights")
        with contextlib.ExitStack() as stack:
            if self._batch is not None:
                stack.enter_context(self._batch.paused(label=label))
            generation = stack.enter_context(self._engine.inference(**self._stop))
            if generation is None:
                return
            _capture_now(generation)
            if self._batch is None:
                self._open(generation, [taken for number in sorted(self._recorded) for taken in self._recorded[number]])
            elif generation.weight_version != self._weight_version:
                self._batch.renew(generation.weight_version, recompute=self._recompute_kv)
            self._weight_version = generation.weight_version

    def _open(self, generation: GenerationEngine, order: Order) -> None:
        self._records_routes = generation.records_routes
        self._stop_token_ids = generation.stop_token_ids
        self._max_positions = generation.max_positions
        self._batch = generation.open(
            rows=self._rows,
            max_tokens=self._max_tokens,
            records_routes=generation.records_routes,
            order=order,
            world=self._together,
        )

    def _submit(self, ticket: Ticket) -> None:
        """Add the unfinished samples of a ticket to the batch; prompts with the same number of samples go together."""
        assert self._batch is not None
        ticket.submissions = []
        for samples in sorted({prompt.params.n for prompt in ticket.prompts}):
            places = [place for place, prompt in enumerate(ticket.prompts) if prompt.params.n == samples]
            prompts = [ticket.prompts[place] for place in places]
            submission = self._batch.submit(
                [prompt.row["input_ids"] for prompt in prompts],
                [prompt.params for prompt in prompts],
                partial(self._deliver, ticket, places),
                begun=[prompt.begun for prompt in prompts],
                record_routes=[prompt.recorded and self._records_routes for prompt in prompts],
                label=f"{ticket.label} x{samples}",
                sends=ticket.is_turn and self._together.size > 1,
            )
            ticket.submissions.append((submission, places))

    def _deliver(self, ticket: Ticket, places: Sequence[int], tokens: list[StreamedToken]) -> None:
        """Take finished samples, on the thread of the batch."""
        for token in tokens:
            if token.completion is not None:
                ticket.on_finished(places[token.prompt], token.sample, token.completion)
        if not tokens:
            with self._changed:
                self._changed.notify_all()

    def _suspend(self) -> None:
        """Close the batch between two steps; running completions keep their tokens."""
        batch = self._batch
        assert batch is not None
        with batch.paused(label=self._label("end")), self._changed:
            for ticket in self._tickets:
                ticket.prompts = self._with_tokens(ticket, batch)
                ticket.submissions = []
            batch.close(wait=False)
            self._batch = None
        batch.close()
        self._idle_seconds += batch.idle_seconds
        self._order += batch.take_order()

    def _with_tokens(self, ticket: Ticket, batch: OpenBatch) -> list[AssignedPrompt]:
        """The prompts of a ticket with their tokens so far, while the batch is paused."""
        samples: list[list[Any]] = [list(of_prompt) for of_prompt in ticket.samples]
        for submission, places in ticket.submissions:
            for (place, sample), completion in batch.completions(submission).items():
                samples[places[place]][sample] = completion
        begun = [[completion for completion in of_prompt if completion is not None] for of_prompt in samples]
        return [replace(prompt, begun=of_prompt) for prompt, of_prompt in zip(ticket.prompts, begun, strict=True)]


def _capture_now(generation: GenerationEngine) -> None:
    """Capture CUDA graphs now, while the batch waits: the main thread uses the device while the batch decodes."""
    assert isinstance(generation.backend, NativeBackend), "a stream has inference weights"
    generation.backend.capture_between_runs()
