"""The open batch in which a rank samples across steps, with weights that change under running completions.

A sampler on ranks of its own decodes without pause: each weight sync writes into its weights between two decoding
steps. So do vLLM's servers, which go on from the tokens so far. On the actor's ranks the batch is open only while the
actor does not train; running completions then continue from their tokens in the next one.

Source: in-flight weight updates of PipelineRL (arXiv 2509.19128) and Magistral (arXiv 2506.10910, section 3.2);
interruptible generation of AReaL (arXiv 2505.24298, section 4.1).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.continuous import BatchLoad
from hybrid_rlhf.generation.batching.images import GivenImages
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.open_batch import Deliver, OpenBatch, PromptBatch, StreamedToken, Submission
from hybrid_rlhf.generation.sampling import Completion, PromptLogprobs, SamplingParams, per_request
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner
from hybrid_rlhf.rl.rollouts.in_flight import AssignedPrompt
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.observability.progress import ProgressLog

ResultT = TypeVar("ResultT")
Sample = Completion | list[Episode]
"""A completion, or an episode with its sequences."""


@dataclass(eq=False)
class Ticket:
    """Prompts that were added together, or those of a turn."""

    prompts: list[AssignedPrompt]
    name: str | None
    """The same on all ranks that share the model; None for a turn, which the first of them sends to the others."""
    on_tokens: Callable[[list[StreamedToken]], None]
    """Receives the tokens of each decoding step, on the thread of the batch."""
    samples: list[list[Sample | None]]
    """Finished samples of each prompt."""
    submissions: list[tuple[Submission, list[int]]] = field(default_factory=list)
    """Submissions of the present batch, with the indices of their prompts."""
    error: BaseException | None = None
    """Exception that ended one of the samples."""
    top_logprobs: int = 0
    """Number of most likely tokens that are reported with each token."""
    is_turn: bool = False
    """True for a turn of an episode, which the first of the ranks that share the model asks for."""

    @property
    def is_finished(self) -> bool:
        """True if all samples are finished."""
        return all(sample is not None for samples in self.samples for sample in samples)

    @property
    def finished(self) -> list[list[Any]]:
        """Completions of each prompt, or sequences of its episodes, once all samples are finished."""
        return [
            [row for sample in samples for row in (sample if isinstance(sample, list) else [sample])]
            for samples in self.samples
        ]


@dataclass(eq=False)
class _Turns:
    """Answers the turns of an episode."""

    live: LiveBatch
    record_routes: bool
    stop_token_ids: frozenset[int]
    max_positions: int | None

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the batch."""
        return self.live.failure

    def submit(self, batch: PromptBatch, deliver: Deliver) -> Ticket:
        """Complete prompts, as `OpenBatch.submit` does; there are no adapters."""
        batch = replace(batch, record_routes=[self.record_routes] * len(batch.prompts))
        return self.live.submit(batch, deliver)

    def cancel(self, submission: Ticket) -> None:
        """End a submission."""
        self.live.cancel(submission)


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
    ) -> None:
        """Take the engine that samples.

        Args:
            engine: samples on ranks of its own, or on the actor's.
            config: the rollout settings.
            stop: arguments of `SamplingEngine.inference`.
            rows: largest number of completions of a rank that are decoded together.
            environments: runs multi-turn episodes; None if a completion is one turn.
        """
        self._together = engine.generation_world
        self._engine = engine
        self._recompute_kv = config.recompute_kv
        self._stop = stop
        self._environments = environments
        self.rows = rows
        self.max_tokens = config.max_prompt_tokens + config.sampling.max_new_tokens
        self.lasts = engine.samples_while_training
        """True if the batch stays open between steps."""
        self._batch: OpenBatch | None = None
        self._weight_version = -1
        self._records_routes = False
        self._stop_token_ids = frozenset[int]()
        self._max_positions: int | None = None
        self._tickets: list[Ticket] = []
        """What the batch samples, or will when it is open again."""
        self._changed = threading.Condition()
        self._served: contextlib.ExitStack | None = None
        """What serves the episodes; None before the batch was opened."""
        self._is_closed = False
        self._vocab_size = 0
        self._idle_seconds = 0.0
        self._actions = 0

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Context in which the actor's current weights decode; a batch that lasts goes on after it. Every rank
        enters."""
        if self.lasts:
            self._sync()
            yield
            return
        with self._engine.inference(**self._stop) as generation:
            if generation is None:
                yield
                return
            _capture_now(generation)
            with self.decoding(generation):
                yield

    @contextlib.contextmanager
    def decoding(self, generation: GenerationEngine) -> Iterator[None]:
        """Context in which an engine decodes; running completions continue from their tokens in the next one."""
        with self._changed:
            self._open(generation)
            for ticket in self._tickets:
                self._submit(ticket)
        try:
            yield
        finally:
            self._suspend()

    def add(self, prompts: Sequence[AssignedPrompt], progress: ProgressLog) -> Ticket:
        """Sample prompts from now on; in the context of `current` or `decoding`."""
        plays = self._environments is None or self._together.is_main
        samples: list[list[Sample | None]] = [[None] * prompt.params.n for prompt in prompts if plays]

        def finished(tokens: list[StreamedToken]) -> None:
            for token in tokens:
                if token.completion is not None:
                    progress.advance(1)

        ticket = Ticket(list(prompts), self._name("begin"), finished, samples)
        if self._environments is not None:
            if plays:
                self._play(ticket, progress)
            return ticket
        for place, prompt in enumerate(prompts):
            for sample, completion in enumerate(prompt.begun):
                if completion.finish_reason is not None:
                    samples[place][sample] = completion
        self._start(ticket)
        return ticket

    def submit(self, batch: PromptBatch, deliver: Deliver) -> Ticket:
        """Complete the prompts of a turn, as `OpenBatch.submit` does; may be called in any thread.

        Raises:
            RuntimeError: when the batch has ended.
        """
        sampling = per_request(batch.sampling, len(batch.prompts))
        records = batch.record_routes or [False] * len(sampling)
        images = batch.images or [None] * len(sampling)
        prompts = [
            AssignedPrompt(0, {"input_ids": ids}, params, recorded, images=given)
            for ids, params, recorded, given in zip(batch.prompts, sampling, records, images, strict=True)
        ]
        samples: list[list[Sample | None]] = [[None] * params.n for params in sampling]
        ticket = Ticket(prompts, None, deliver, samples, top_logprobs=batch.top_logprobs, is_turn=True)
        self._start(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a turn; nothing is delivered for it afterwards."""
        with self._changed:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            submissions = ticket.submissions
            ticket.submissions = []
            batch = self._batch
        for submission, _ in submissions:
            if batch is not None:
                batch.cancel(submission)

    def wait(self, ticket: Ticket) -> list[list[Any]]:
        """Wait for the samples of a ticket.

        Raises:
            BaseException: the exception that ended the batch or one of the samples.
        """
        with self._changed:
            self._changed.wait_for(lambda: ticket.is_finished or (self.failure or ticket.error) is not None)
            if (failure := self.failure or ticket.error) is not None:
                raise failure
            if ticket in self._tickets:
                self._tickets.remove(ticket)
        return ticket.finished

    def finish_turns(self) -> None:
        """Wait for half of the turns that have begun, so that their tools answer while the actor trains.

        Not for all: a long turn continues in the next time slice. Returns at once if the batch stays open.
        """
        if self.lasts:
            return
        with self._changed:
            begun = {ticket for ticket in self._tickets if ticket.is_turn}
            self._changed.wait_for(
                lambda: self.failure is not None or 2 * len(begun.intersection(self._tickets)) <= len(begun)
            )

    def _start(self, ticket: Ticket) -> None:
        with self._changed:
            if self._is_closed:
                raise RuntimeError("a batch takes turns until it is closed, this one was closed")
            if self._batch is not None:
                self._submit(ticket)
            self._tickets.append(ticket)

    def _play(self, ticket: Ticket, progress: ProgressLog) -> None:
        """Start the episodes of a ticket."""
        assert self._environments is not None

        def ended(place: int, sample: int, future: Future[list[Episode]]) -> None:
            with self._changed:
                error = future.exception()
                if error is None:
                    ticket.samples[place][sample] = future.result()
                    progress.advance(1)
                else:
                    ticket.error = error
                self._changed.notify_all()

        for place, prompt in enumerate(ticket.prompts):
            for sample in range(prompt.params.n):
                turns = _Turns(self, prompt.recorded, self._stop_token_ids, self._max_positions)
                episode = self._environments.play(prompt.row, prompt.params, sample, turns)
                episode.add_done_callback(partial(ended, place, sample))

    def begun(self, tickets: Sequence[Ticket]) -> list[list[AssignedPrompt]]:
        """The prompts of each ticket with their tokens so far, for a checkpoint; without those of episodes, which begin
        again."""
        if self._batch is None or self._environments is not None:
            return [ticket.prompts for ticket in tickets]
        with self._batch.paused():
            return [self._with_tokens(ticket, self._batch) for ticket in tickets]

    @property
    def idle_seconds(self) -> float:
        """Time that this rank's batch was open and had nothing to decode."""
        return self._idle_seconds + (0.0 if self._batch is None else self._batch.idle_seconds)

    def close(self) -> None:
        """End the batch, and the turns that it has not completed."""
        if self._batch is not None:
            with self._batch.paused(name=self._name("end")):  # in the same step on all ranks that share the model
                self._batch.close(wait=False)
            self._batch.close()
        with self._changed:
            self._is_closed = True
            turns = [ticket for ticket in self._tickets if ticket.is_turn]
        for ticket in turns:
            ticket.on_tokens([])
        if self._served is not None:
            self._served.close()

    def abandon(self) -> None:
        """Let the batch end by itself, after an error on this rank."""
        if self._batch is not None:
            self._batch.close(wait=False)
        self._is_closed = True
        if self._served is not None:
            self._served.close()

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the present batch."""
        return None if self._batch is None else self._batch.failure

    # -- what a server of this batch needs

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """As `OpenBatch.call`, while the batch is open.

        Raises:
            RuntimeError: between two steps, and where several ranks share the model, which would have to call too.
        """
        return self._only_batch().call(function)

    def compiled_grammar(self, params: SamplingParams) -> object:
        """The grammar of a run, which its config has; it is compiled when it is needed."""
        return params.response_format

    def compile_grammar(self, params: SamplingParams, wanted: Callable[[], bool]) -> object:
        """As `compiled_grammar`."""
        return self.compiled_grammar(params)

    def prompt_logprobs(
        self, tokens: Sequence[int], *, adapter: str | None = None, top: int = 0, images: GivenImages = None
    ) -> Future[PromptLogprobs]:
        """As `OpenBatch.prompt_logprobs`, with the errors of `call`."""
        return self._only_batch().prompt_logprobs(tokens, adapter=adapter, top=top, images=images)

    def _only_batch(self) -> OpenBatch:
        batch = self._batch
        if batch is None or self._together.size > 1:
            raise RuntimeError("calls need an open batch and a model on one rank")
        return batch

    @property
    def load(self) -> BatchLoad:
        """Load of the present batch."""
        return BatchLoad() if self._batch is None else self._batch.load

    @property
    def unfinished(self) -> int:
        """Number of unfinished samples."""
        return 0 if self._batch is None else self._batch.unfinished

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return self._vocab_size

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that the present batch reserves for keys and values."""
        return 0 if self._batch is None else self._batch.kv_cache_bytes

    def _name(self, action: str) -> str:
        """A name of the next action of the main thread, the same on all ranks that share the model."""
        self._actions += 1
        return f"{action} {self._actions}"

    def _sync(self) -> None:
        """Write the actor's current weights under running completions, and open the batch if it is not open yet."""
        name = self._name("weights")
        with contextlib.ExitStack() as stack:
            if self._batch is not None:
                stack.enter_context(self._batch.paused(name=name))
            generation = stack.enter_context(self._engine.inference(**self._stop))
            if generation is None:
                return
            _capture_now(generation)
            if self._batch is None:
                self._open(generation)
            elif generation.weight_version != self._weight_version:
                self._batch.renew(generation.weight_version, recompute=self._recompute_kv)
            self._weight_version = generation.weight_version

    def _open(self, generation: GenerationEngine) -> None:
        self._records_routes = generation.records_routes
        self._stop_token_ids = generation.stop_token_ids
        self._max_positions = generation.max_positions
        self._batch = generation.open(
            rows=self.rows,
            max_tokens=self.max_tokens,
            records_routes=generation.records_routes,
            world=self._together,
        )
        self.max_tokens = self._batch.max_tokens
        self._vocab_size = self._batch.vocab_size
        if self._served is None:
            self._served = contextlib.ExitStack()
            if self._environments is not None and self._together.is_main:
                self._served.enter_context(self._environments.serve(self))

    def _submit(self, ticket: Ticket) -> None:
        """Add the unfinished samples of a ticket to the batch; prompts with the same number of samples go together."""
        assert self._batch is not None
        ticket.submissions = []
        for samples in sorted({prompt.params.n for prompt in ticket.prompts}):
            places = [place for place, prompt in enumerate(ticket.prompts) if prompt.params.n == samples]
            prompts = [ticket.prompts[place] for place in places]
            batch = PromptBatch(
                [prompt.row["input_ids"] for prompt in prompts],
                [prompt.params for prompt in prompts],
                top_logprobs=ticket.top_logprobs,
                begun=[prompt.begun for prompt in prompts],
                record_routes=[prompt.recorded and self._records_routes for prompt in prompts],
                images=[prompt.images for prompt in prompts],
            )
            submission = self._batch.submit(
                batch,
                partial(self._deliver, ticket, places),
                name=ticket.name and f"{ticket.name} x{samples}",
                sends=ticket.is_turn and self._together.size > 1,
            )
            ticket.submissions.append((submission, places))

    def _deliver(self, ticket: Ticket, places: Sequence[int], tokens: list[StreamedToken]) -> None:
        """Take finished samples, on the thread of the batch."""
        with self._changed:
            for token in tokens:
                if token.completion is not None:
                    ticket.samples[places[token.prompt]][token.sample] = token.completion
            has_ended = not tokens and bool(ticket.submissions)  # not because it is to continue in the next batch
            if has_ended:
                errors = [submission.error for submission, _ in ticket.submissions]
                ticket.error = next((error for error in errors if error is not None), None)
            if ticket.is_turn and (has_ended or ticket.is_finished) and ticket in self._tickets:
                self._tickets.remove(ticket)
            self._changed.notify_all()
        if tokens or (ticket.is_turn and has_ended):
            ticket.on_tokens(tokens)

    def _suspend(self) -> None:
        """Close the batch between two steps; running completions keep their tokens."""
        batch = self._batch
        assert batch is not None
        if batch.failure is not None:
            self._batch = None
            return
        with batch.paused(name=self._name("end")), self._changed:
            self._batch = None
            for ticket in self._tickets:
                ticket.prompts = self._with_tokens(ticket, batch)
                ticket.submissions = []
            batch.close(wait=False)
        batch.close()
        self._idle_seconds += batch.idle_seconds

    def _with_tokens(self, ticket: Ticket, batch: OpenBatch) -> list[AssignedPrompt]:
        """The prompts of a ticket with their tokens so far, while the batch is paused."""
        samples: list[list[Any]] = [list(of_prompt) for of_prompt in ticket.samples]
        for submission, places in ticket.submissions:
            for (place, sample), completion in batch.completions(submission).items():
                samples[places[place]][sample] = completion
        return [
            replace(prompt, begun=[completion for completion in of_prompt if completion is not None])
            for prompt, of_prompt in zip(ticket.prompts, samples, strict=True)
        ]


def _capture_now(generation: GenerationEngine) -> None:
    """Capture CUDA graphs now, while the batch waits: the main thread uses the device while the batch decodes."""
    if isinstance(generation.backend, NativeBackend):
        generation.backend.capture_between_runs()
