"""A batch that accepts requests from other threads while it decodes.

`GenerationEngine.generate` decodes a list of prompts until all are finished. A server needs requests that enter and
leave at any step, tokens as soon as they are sampled, and cancellation. The scheduler is the same
(batching/continuous.py), and so are the tokens: those of a request depend only on its seed.

An exception in a step ends only the requests that cause it. The exception does not tell which ones these are, so the
running requests are tried in halves, down to single prompts with which decoding fails. The other requests continue from
the tokens that were delivered. If decoding also fails with a plain request, no request is the cause, and the batch
ends.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.backends.backend import GenerationBackend
from hybrid_rlhf.generation.backends.module import ModuleBackend
from hybrid_rlhf.generation.batching.arrivals import Arrivals
from hybrid_rlhf.generation.batching.continuous import BatchLoad
from hybrid_rlhf.generation.batching.grammar import compile_untrusted, compiled_grammar
from hybrid_rlhf.generation.batching.images import GivenImages
from hybrid_rlhf.generation.batching.requests import NewTokens, Request, RequestMaker, continue_requests
from hybrid_rlhf.generation.sampling import Completion, FinishReason, PromptLogprobs, SamplingParams, per_request
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.openmp import release_workers
from hybrid_rlhf.runtime.world import World

ResultT = TypeVar("ResultT")
_TRIAL_TOKENS = 3
"""Number of tokens after which a trial has succeeded; more than one, since on a GPU steps run ahead of their
results."""


@dataclass(frozen=True)
class StreamedToken:
    """One token of a sample."""

    prompt: int
    """Index of the prompt in its submission."""
    sample: int
    token_id: int
    logprob: float
    """As in Completion."""
    sampling_logprob: float
    """As in Completion."""
    finish_reason: FinishReason | None
    """Set with the last token of the sample; none before."""
    top: Sequence[tuple[int, float]] = ()
    """The most likely tokens with their log-probs, as many as were requested."""
    completion: Completion | None = None
    """The whole sample, with its last token; none before."""


Deliver = Callable[[list[StreamedToken]], None]
"""Receives the new tokens of a step; an empty list if the batch or the submission has ended. It must not block."""


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are completed together."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    sampling: SamplingParams | Sequence[SamplingParams]
    """For all prompts, or one per prompt, with the same n."""
    top_logprobs: int = 0
    """Number of most likely tokens to report with each token, at most MOST_TOP_LOGPROBS."""
    adapter: str | None = None
    """Name of an adapter of the engine; none: the model itself."""
    begun: Sequence[Sequence[Completion]] = ()
    """As in `GenerationEngine.generate`; nothing is delivered for finished samples."""
    record_routes: Sequence[bool] = ()
    """For each prompt, true to record the experts of its tokens; empty: for none."""
    first_sample: int = 0
    """Number of the first sample of each prompt, for those of one prompt and seed that are submitted by parts."""
    images: Sequence[GivenImages] = ()
    """As in `GenerationEngine.generate`."""


class Submitted(Protocol):
    """What `submit` returns."""

    @property
    def error(self) -> BaseException | None:
        """Exception that one of the requests caused in decoding, set before the last, empty delivery."""


class TokenSource(Protocol):
    """Completes prompts for other threads, and delivers the tokens."""

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the batch before it was closed."""

    def submit(self, batch: PromptBatch, deliver: Deliver) -> Submitted:
        """As `OpenBatch.submit`."""

    def cancel(self, submission: Any) -> None:
        """As `OpenBatch.cancel`."""


class RequestBatch(TokenSource, Protocol):
    """What a server needs: an open batch, or one that is closed and opened again."""

    rows: int
    max_tokens: int

    @property
    def vocab_size(self) -> int:
        """As in OpenBatch."""

    @property
    def load(self) -> BatchLoad:
        """As in OpenBatch."""

    @property
    def unfinished(self) -> int:
        """As in OpenBatch."""

    @property
    def kv_cache_bytes(self) -> int:
        """As in OpenBatch."""

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """As in OpenBatch."""

    def close(self) -> None:
        """As in OpenBatch."""

    def compiled_grammar(self, params: SamplingParams) -> object | None:
        """As in OpenBatch."""

    def compile_grammar(self, params: SamplingParams, wanted: Callable[[], bool]) -> object:
        """As in OpenBatch."""

    def prompt_logprobs(
        self, tokens: Sequence[int], *, adapter: str | None = None, top: int = 0, images: GivenImages = None
    ) -> Future[PromptLogprobs]:
        """As in OpenBatch."""


@dataclass(eq=False)
class Submission:
    """The requests of one `submit`."""

    samples: dict[Request, tuple[int, int]]
    """Unfinished requests, with the indices of their prompt and sample."""
    deliver: Deliver
    error: Exception | None = None
    """Exception that one of the requests caused in decoding, set before the last, empty delivery."""


class OpenBatch:
    """Decodes on a separate thread until it is closed. All methods may be called from any thread."""

    def __init__(
        self,
        backend: GenerationBackend,
        maker: RequestMaker,
        *,
        rows: int,
        max_tokens: int,
        memory_share: float | None = None,
        weight_version: int = 0,
        records_routes: bool = False,
        world: World | None = None,
    ) -> None:
        """Start the thread; arguments as in `GenerationEngine.open`."""
        self._backend = backend
        self._maker = maker
        limit = maker.max_positions
        self.rows = rows
        self.max_tokens = max_tokens if limit is None else min(max_tokens, limit)
        self._memory_share = memory_share
        self._weight_version = weight_version
        self._shares_model = world is not None and world.size > 1
        self._arrivals = Arrivals(
            rows=rows,
            max_tokens=self.max_tokens,
            memory_share=memory_share,
            records_routes=records_routes,
            world=world,
            remake=lambda batch: [request for request in self._requests(batch) if not request.ended],
        )
        self._paused_seconds = 0.0
        self._lock = threading.Lock()
        self._owners: dict[Request, Submission] = {}
        self.failure: BaseException | None = None
        """Exception that ended the batch before it was closed; none: it runs, or was closed."""
        self.ended: Future[None] = Future()
        """Completed when the batch has been closed or has failed."""
        self._has_progress = True
        """True if a token was delivered since the last failure."""
        started: Future[None] = Future()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._run, args=(started, torch.get_num_threads(), stream), name="open-batch", daemon=True
        )
        self._arrivals.call(lambda: None if started.done() else started.set_result(None))
        release_workers()  # worker threads of this thread: the batch's thread needs the cores
        self._thread.start()
        started.result()

    def __enter__(self) -> Self:
        """Return the batch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the batch."""
        self.close()

    @property
    def load(self) -> BatchLoad:
        """Numbers of running and waiting requests; those that arrived during the present step are not counted yet."""
        return self._backend.load

    @property
    def idle_seconds(self) -> float:
        """Time that the batch has waited for requests, or while it was paused."""
        return self._arrivals.idle_seconds + self._paused_seconds

    @property
    def unfinished(self) -> int:
        """Number of unfinished samples."""
        return len(self._owners)

    def submit(
        self, batch: PromptBatch, deliver: Deliver, *, name: str | None = None, sends: bool = False
    ) -> Submission:
        """Complete prompts with the same tokens as `GenerationEngine.generate`.

        Args:
            batch: the prompts.
            deliver: called on the thread of the batch after each step with tokens of these prompts.
            name: the same on all ranks that share the model, unique in the batch; none: a number of this rank.
            sends: this is the first of the tensor-parallel ranks, and the others do not make this call.

        Raises:
            UserError: as in `generate`, and if prompt and completion are longer than `max_tokens`.
            RuntimeError: when the batch has ended.
        """
        sampling = per_request(batch.sampling, len(batch.prompts))
        batch = replace(batch, sampling=sampling)  # with the seeds that were drawn
        for index, (prompt, params) in enumerate(zip(batch.prompts, sampling, strict=True)):
            if len(prompt) + params.max_new_tokens > self.max_tokens:
                raise UserError(
                    f"prompt and completion must have at most {self.max_tokens} tokens together, prompt {index} has "
                    f"{len(prompt)} and max_new_tokens is {params.max_new_tokens}: shorten one of them"
                )
        requests = self._requests(batch)
        running = [request for request in requests if not request.ended]
        submission = Submission({request: (request.prompt_index, request.sample) for request in running}, deliver)
        with self._lock:
            if self._arrivals.closed:
                raise RuntimeError("an open batch takes requests until it is closed, this one was closed")
            for request in running:
                request.delivered = len(request.token_ids)
                self._owners[request] = submission
            self._arrivals.add(running, name=name, specification=batch if sends else None)
        return submission

    def _requests(self, batch: PromptBatch) -> list[Request]:
        requests = self._maker.requests(
            batch.prompts, batch.sampling, first_sample=batch.first_sample, images=batch.images
        )
        continue_requests(requests, batch.begun)
        number = self._maker.adapter_number(batch.adapter)
        for request in requests:
            request.top_logprobs = batch.top_logprobs
            request.adapter = number
            if batch.record_routes:
                request.records_routes = batch.record_routes[request.prompt_index]
        return requests

    def compiled_grammar(self, params: SamplingParams) -> object | None:
        """What keeps the grammar of sampling parameters compiled, if it is; None: `compile_grammar` compiles it."""
        return compiled_grammar(self._maker.grammar_key(params))

    def compile_grammar(self, params: SamplingParams, wanted: Callable[[], bool]) -> object:
        """Compile the grammar of sampling parameters, which nobody has checked, within limits of time and memory;
        returns what keeps it compiled, so that `submit` need not do it.

        Args:
            params: the sampling parameters, with a response format.
            wanted: returns false when the grammar is not needed any more.

        Raises:
            UserError: for a grammar that does not compile within the limits.
        """
        return compile_untrusted(self._maker.grammar_key(params), wanted)

    def completions(self, submission: Submission) -> dict[tuple[int, int], Completion]:
        """Unfinished samples of a submission as they are, by the indices of their prompts and samples; the batch must
        be paused."""
        return {place: request.completion(self._weight_version) for request, place in submission.samples.items()}

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary; token ids are smaller."""
        return self._backend.vocab_size

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes reserved for keys and values; 0 for the module backend, whose cache grows."""
        return self._backend.kv_cache_bytes

    def cancel(self, submission: Submission) -> None:
        """End the requests of a submission at the next step; nothing is delivered for them afterwards. Those of
        tensor-parallel ranks are decoded to their ends: cancellations are not broadcast to the other ranks."""
        with self._lock:
            unfinished = list(submission.samples)
            submission.samples = {}
            for request in unfinished:
                self._owners.pop(request, None)
        if not self._shares_model:
            self._arrivals.cancel(unfinished)

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Call a function between two steps on the thread of the batch, which is the only one that may use the
        device."""
        result: Future[ResultT] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function())
            except Exception as error:  # noqa: BLE001 - the caller receives it
                result.set_exception(error)

        with self._lock:
            if self._arrivals.closed:
                raise RuntimeError("an open batch makes calls until it is closed, this one was closed")
            self._arrivals.call(run)
        return result

    @contextlib.contextmanager
    def paused(self, *, name: str | None = None) -> Iterator[None]:
        """Context in which the batch waits between two steps, and the calling thread may use the device.

        The tokens of all earlier steps are delivered before. `name` is as in `submit`.
        """
        reached: Future[float] = Future()
        resumed = threading.Event()

        def hold() -> None:
            reached.set_result(time.perf_counter())
            resumed.wait()

        with self._lock:
            if self._arrivals.closed:
                raise RuntimeError("an open batch can be paused until it is closed, this one was closed")
            self._arrivals.call(hold, drains=True, name=name)
        start = reached.result()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - start
            resumed.set()

    def renew(self, weight_version: int, *, recompute: bool) -> None:
        """Continue with weights that were written in place while the batch was paused; call it before the pause ends.

        Args:
            weight_version: version of the weights, recorded for every further token.
            recompute: compute the keys and values of running requests again; false: keep those of the older weights.
        """
        assert not isinstance(self._backend, ModuleBackend), "a module's weights are its own"
        with self._lock:
            for request in self._owners:
                request.stamp(self._weight_version)
        self._weight_version = weight_version
        self._backend.renew(recompute=recompute)

    def prompt_logprobs(
        self, tokens: Sequence[int], *, adapter: str | None = None, top: int = 0, images: GivenImages = None
    ) -> Future[PromptLogprobs]:
        """Return a future with the log-probs of a prompt, and the `top` most likely tokens at each place; those of
        image tokens are -inf."""
        read = self._maker.read_images(tokens, images)
        self._maker.check_images(0, tokens, read)
        number = self._maker.adapter_number(adapter)
        return self.call(lambda: self._backend.prompt_logprobs(tokens, number, top, read))

    def close(self, *, wait: bool = True) -> None:
        """End the batch after the present step. Unfinished submissions receive their last, empty delivery.

        `wait`: return when it has ended; false while the batch is paused.
        """
        with self._lock:
            self._arrivals.close()
        if wait:
            self._thread.join()

    def _run(self, started: Future[None], threads: int, stream: torch.cuda.Stream | None) -> None:
        torch.set_num_threads(threads)  # a setting per thread, like the stream
        if stream is not None:
            torch.cuda.set_stream(stream)  # sets the device too
        try:
            self._decode(started)
        except BaseException as error:  # noqa: BLE001 - reported by `failure`, or by the constructor
            self.failure = error
            if started.done():
                logger.error("an open batch has failed, its requests end without an answer", exc_info=error)
            else:
                started.set_exception(error)
        with self._lock:
            self._arrivals.close()
            submissions = {id(submission): submission for submission in self._owners.values()}
            self._owners.clear()
        self._arrivals.take()  # makes the pending calls
        for submission in submissions.values():
            self._hand(submission, [])
        self.ended.set_result(None)

    def _decode(self, started: Future[None]) -> None:
        """Decode until the batch is closed."""
        while True:
            try:
                for new in self._backend.run_open(self._arrivals):
                    self._deliver(new)
                return
            except Exception as error:
                if not started.done() or self._shares_model:  # other ranks may not have failed
                    raise
                self._isolate(error)

    def _deliver(self, new: NewTokens) -> None:
        steps: dict[Submission, list[StreamedToken]] = {}
        with self._lock:
            for request, token in new:
                owner = self._owners.get(request)
                if owner is None:
                    continue
                self._has_progress = True
                request.delivered = len(request.token_ids)
                place = owner.samples[request]
                ended = request.finish_reason
                logprobs = request.logprobs[-1], request.sampling_logprobs[-1]
                top = request.top[-1] if request.top else ()
                whole = None if ended is None else request.completion(self._weight_version)
                steps.setdefault(owner, []).append(StreamedToken(*place, token, *logprobs, ended, top, whole))
                if ended is not None:
                    del self._owners[request], owner.samples[request]
        for owner, tokens in steps.items():
            self._hand(owner, tokens)

    def _hand(self, submission: Submission, tokens: list[StreamedToken]) -> None:
        try:
            submission.deliver(tokens)
        except Exception:
            logger.exception("an open batch could not deliver tokens, the requests that wait for them are cancelled")
            self.cancel(submission)

    # -- after an exception in a step

    def _isolate(self, error: Exception) -> None:
        """End the requests with which decoding fails, and continue the others.

        Raises:
            Exception: the error of decoding a plain request, if that fails too.
        """
        logger.error("decoding has failed: the requests that cause it end with an error", exc_info=error)
        self._reset(error)
        running = self._taken()
        failed: dict[Request, Exception] = {}
        if not self._backend.continues:
            ended = RuntimeError("a request that was decoded together with this one has failed")
            failed = {request: ended for request in running if request.delivered}
        if untried := [request for request in running if request not in failed]:
            failed |= self._failing(_by_prompt(untried))
            plain = self._maker.requests([[0]], SamplingParams(temperature=0.0, max_new_tokens=1))
            if failed and (failure := self._trial(plain)[0]) is not None:
                raise failure
        if not failed and not self._has_progress:  # they fail only together
            failed = dict.fromkeys(running, error)
        self._has_progress = False
        self._fail(failed)
        self._arrivals.add(self._taken())

    def _taken(self) -> list[Request]:
        """Return the unfinished requests that the backend has taken."""
        with self._lock:
            return [request for request in self._owners if not self._arrivals.has(request)]

    def _reset(self, error: Exception) -> None:
        """Release the resources of the failed step; requests keep the tokens that were delivered."""
        traceback.clear_frames(error.__traceback__)
        self._backend.reset()
        for request in self._taken():
            request.rewind(request.delivered)

    def _failing(self, prompts: list[list[Request]]) -> dict[Request, Exception]:
        """Return the requests with which decoding fails, and the exceptions."""
        if len(prompts) > 1 and not self._backend.continues:  # the backend would finish one batch before the next
            return {request: error for prompt in prompts for request, error in self._failing([prompt]).items()}
        requests = [request for prompt in prompts for request in prompt]
        error, untried = self._trial(requests)
        if error is None:
            return self._failing(_by_prompt(untried)) if 0 < len(untried) < len(requests) else {}
        if len(prompts) == 1:
            return dict.fromkeys(prompts[0], error)
        half = len(prompts) // 2
        return {**self._failing(prompts[:half]), **self._failing(prompts[half:])}

    def _trial(self, requests: list[Request]) -> tuple[Exception | None, list[Request]]:
        """Decode a few tokens of requests and discard them; returns the exception, if any, and the requests without
        room."""
        rows = min(len(requests), self.rows)
        arrivals = Arrivals(rows=rows, max_tokens=self.max_tokens, memory_share=self._memory_share)
        arrivals.add(requests)
        failure: Exception | None = None
        untried: list[Request] = []
        try:
            for _ in self._backend.run_open(arrivals):
                untried = [
                    request
                    for request in requests
                    if not (request.ended or len(request.token_ids) >= request.delivered + _TRIAL_TOKENS)
                ]
                if len(untried) <= self._backend.load.waiting:  # for rows or memory
                    arrivals.close()
        except Exception as error:  # noqa: BLE001 - the caller decides
            logger.error("decoding %d requests alone has failed", len(requests), exc_info=error)
            self._reset(failure := error)
        for request in requests:
            request.rewind(request.delivered)
        return failure, untried

    def _fail(self, failed: dict[Request, Exception]) -> None:
        """End the submissions of failed requests."""
        ended = set[Submission]()
        with self._lock:
            for request, error in failed.items():
                if (owner := self._owners.get(request)) is not None:
                    owner.error = error
                    ended.add(owner)
            for submission in ended:
                for request in submission.samples:
                    del self._owners[request]
                submission.samples = {}
        for submission in ended:
            self._hand(submission, [])


def _by_prompt(requests: Sequence[Request]) -> list[list[Request]]:
    """Group adjacent requests by prompt."""
    return [list(group) for _, group in itertools.groupby(requests, key=lambda request: request.prompt_index)]
