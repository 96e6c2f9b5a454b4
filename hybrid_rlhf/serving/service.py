"""From the body of a request to tokens: prompts are rendered, checked, admitted to the open batch, and streamed.

A request becomes a job on a separate thread, since tokenizing takes time; everything else runs on the server's event
loop, to which the batch delivers tokens from its thread.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.chat.template import leading_bos, render, render_unfinished, token_ids
from hybrid_rlhf.data.images.expansion import RowImages
from hybrid_rlhf.data.images.references import ImageReference, read_reference
from hybrid_rlhf.generation.batching.images import GivenImages, PromptImages
from hybrid_rlhf.generation.image_loading import ImageReader
from hybrid_rlhf.generation.open_batch import PromptBatch, RequestBatch, StreamedToken, Submitted, TokenSource
from hybrid_rlhf.generation.sampling import Completion, SamplingParams
from hybrid_rlhf.serving.bodies import (
    ChatBody,
    CompletionBody,
    ContextTooLong,
    DetokenizeBody,
    GenerationBody,
    KeyRejected,
    TokenizeBody,
)
from hybrid_rlhf.serving.conversations import (
    NOT_READ,
    check_text,
    read_messages,
    request_errors,
    take_images,
)
from hybrid_rlhf.serving.formats import grammar_key, response_format
from hybrid_rlhf.serving.metrics import ServerMetrics
from hybrid_rlhf.serving.token_text import TokenText, characters, longest_token
from hybrid_rlhf.serving.turns import Turns

ResultT = TypeVar("ResultT")
_COMPILING = ThreadPoolExecutor(1, "grammars")
"""The queue of all grammars: a thread of its own, as they would hold those that read bodies."""


class QueueFull(Exception):
    """The largest number of requests is waiting."""

    code = "queue_full"


class UnknownModel(Exception):
    """A request names another model than the served one."""

    key = "model"
    code = "model_not_found"


class UnknownEpisode(Exception):
    """A request names an episode that is not running."""

    code = "episode_not_found"


class BatchEnded(Exception):
    """The server stops."""

    code = "stopped"


class BatchFailed(Exception):
    """Decoding has failed, and the server ends."""

    code = "failed"


class RequestFailed(Exception):
    """Decoding with this request has failed."""

    code = "request_failed"


@dataclass(frozen=True)
class Prompt:
    """A prompt of a request."""

    ids: list[int]
    images: PromptImages | None = None
    references: Sequence[ImageReference] = ()
    """Those of `images`."""


@dataclass(frozen=True)
class Job:
    """The prompts of a request, and how they are completed."""

    prompts: list[list[int]]
    sampling: SamplingParams
    top_logprobs: int = 0
    """Number of most likely tokens reported with each token."""
    seeds: Sequence[int] = ()
    """Seed of each prompt; empty: derived from the seed of `sampling`."""
    record: Callable[[int, Completion], None] | None = None
    """Called with the index of a prompt and a completion, when it ends and before its last token is delivered."""
    adapter: str | None = None
    """Adapter of all prompts; None: the model itself."""
    grammar: object | None = None
    """Keeps the grammar of `sampling` compiled; None: it has none, or `Service.compiled` compiles it."""
    images: Sequence[GivenImages] = ()
    """As in PromptBatch."""


class _Deliveries:
    """Passes the tokens of all streams to the event loop, which is woken once per step and not once per stream: each
    wake-up would take the interpreter from the thread that decodes."""

    def __init__(self) -> None:
        self._pending: deque[tuple[asyncio.Queue[list[StreamedToken]], list[StreamedToken]]] = deque()
        self._woken = False

    def add(
        self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[list[StreamedToken]], tokens: list[StreamedToken]
    ) -> None:
        """Put tokens into a queue of the loop; called on another thread."""
        self._pending.append((queue, tokens))
        if not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # first, so that tokens added from now on wake the loop again
        while self._pending:
            queue, tokens = self._pending.popleft()
            queue.put_nowait(tokens)


class TokenStream:
    """The tokens of a job, which is submitted at once and cancelled by `close`."""

    def __init__(self, service: Service, job: Job, *, whole: bool) -> None:
        """Submit a job; `whole`: its tokens are needed when a completion ends."""
        self._service = service
        self._batch = service.source
        self._job = job
        self._metrics = service.metrics
        self._start = time.perf_counter()
        self._steps: asyncio.Queue[list[StreamedToken]] = asyncio.Queue()
        self._kept: list[StreamedToken] = []
        """Tokens of a whole answer, until a completion ends: they are not needed earlier."""
        self._is_new = True
        self._unfinished = len(job.prompts) * job.sampling.n
        loop = asyncio.get_running_loop()

        def deliver(tokens: list[StreamedToken]) -> None:
            if tokens and self._is_new:
                self._metrics.first_token_seconds.observe(time.perf_counter() - self._start)
                self._is_new = False
            self._metrics.completion_tokens.inc(len(tokens))
            if whole and tokens:
                self._kept += tokens
                if all(token.finish_reason is None for token in tokens):
                    return
                tokens = self._kept
                self._kept = []
            service.deliveries.add(loop, self._steps, tokens)

        seeded = [replace(job.sampling, seed=seed) for seed in job.seeds]
        try:
            self._submission = self._batch.submit(
                PromptBatch(job.prompts, seeded or job.sampling, job.top_logprobs, job.adapter, images=job.images),
                deliver,
            )
        except RuntimeError as error:
            raise _ended(self._batch) from error
        service.running += 1
        self._metrics.prompt_tokens.inc(sum(map(len, job.prompts)))

    async def steps(self) -> AsyncIterator[list[StreamedToken]]:
        """Yield the new tokens of each step; for a whole answer, the tokens of all steps until a completion ends.

        Raises:
            BatchEnded: when the batch is closed before.
            BatchFailed: when the batch fails before.
            RequestFailed: when decoding with this request fails.
        """
        while self._unfinished:
            tokens = await self._steps.get()
            if not tokens:
                raise _ended(self._batch, self._submission)
            self._unfinished -= sum(token.finish_reason is not None for token in tokens)
            for token in tokens:
                if self._job.record is not None and token.completion is not None:
                    self._job.record(token.prompt, token.completion)
            yield tokens
        self._metrics.request_seconds.observe(time.perf_counter() - self._start)

    def close(self) -> None:
        """Cancel the unfinished completions; called once."""
        self._batch.cancel(self._submission)
        self._service.running -= 1


class Service:
    """The service of one model."""

    def __init__(
        self,
        batch: RequestBatch,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        sampling: SamplingParams,
        max_queue: int,
        metrics: ServerMetrics | None = None,
        adapters: Sequence[str] = (),
        allows_lark: bool = False,
        image_reader: Callable[[], ImageReader] | None = None,
        max_image_pixels: int = 2**20,
        placeholders: Collection[int] = (),
    ) -> None:
        """Take the batch and its settings.

        Args:
            batch: the model's open batch.
            tokenizer: tokenizer of the model.
            name: name of the model in requests.
            sampling: values for keys that a request lacks.
            max_queue: largest number of waiting completions.
            metrics: metrics to count; None creates new ones.
            adapters: names of adapters that requests may give in place of the model's.
            allows_lark: true if requests may have grammars in Lark.
            image_reader: as in GenerationEngine; None: requests must be text.
            max_image_pixels: larger images are scaled down.
            placeholders: token ids that stand for images.
        """
        self.batch = batch
        self.tokenizer = tokenizer
        self.name = name
        self.turns = Turns(batch)
        """What submits the prompts to it."""
        self.metrics = ServerMetrics(self.turns) if metrics is None else metrics
        self.adapter: str | None = None
        """Adapter of all completions; None: the model itself."""
        self.version = "0"
        """Version of the weights or of the adapter, which answers contain."""
        self.running = 0
        """Number of requests that are being answered."""
        self.admits = asyncio.Event()
        """Set unless requests wait for other weights."""
        self.admits.set()
        self.deliveries = _Deliveries()
        self.defaults = sampling
        self.max_queue = max_queue
        self.allows_lark = allows_lark
        self._image_reader = image_reader
        self._max_image_pixels = max_image_pixels
        self._placeholders = placeholders
        self._most_characters = batch.max_tokens * longest_token(tokenizer)
        self.adapters = {name: self.with_adapter(name, name) for name in adapters}
        """Services of the adapters."""

    @cached_property
    def token_text(self) -> TokenText:
        """The text of the model's single tokens."""
        return TokenText(self.tokenizer)

    def of_model(self, name: str) -> Service:
        """The service of the model that a request names: this one, or an adapter's.

        Raises:
            UnknownModel: when there is no such model.
        """
        service = self.adapters.get(name, self)
        service.check_name(name)
        return service

    def with_adapter(self, name: str, adapter: str, *, version: str = "0") -> Service:
        """The service of an adapter of the model, by its names in requests and in the engine."""
        service = copy.copy(self)
        service.name = name
        service.adapter = adapter
        service.adapters = {}
        service.version = version
        service.running = 0
        return service

    @property
    def failed(self) -> bool:
        """True if the batch has failed."""
        return self.batch.failure is not None

    def job(self, body: GenerationBody) -> Job:
        """The prompts of a request to this model; called on any thread.

        Raises:
            QueueFull: when too many requests wait.
            UserError: when the request cannot be completed.
        """
        wanted = body.completions
        if wanted > self._most_completions:
            raise UserError(
                f"a request has at most {self._most_completions} completions (prompts x n), got {wanted}: send several "
                "requests"
            )
        self._check_queue(wanted)
        given = [self.prompt(body)] if isinstance(body, ChatBody) else list(map(Prompt, self._prompts(body)))
        for prompt in given:
            self._check_ids(body.prompt_key, prompt.ids)
            self._check_placeholders(body.prompt_key, prompt)
        prompts = [prompt.ids for prompt in given]
        longest = max(map(len, prompts), default=0)
        sampling, grammar = self._constrained(self.sampling(body, longest_prompt=longest), body, prompts)
        if longest + sampling.max_new_tokens > self.batch.max_tokens:
            raise ContextTooLong(
                body.prompt_key,
                f"must leave room in the maximum context length of {self.batch.max_tokens} tokens, got {longest} "
                f"tokens and {body.key_of('max_new_tokens')} {sampling.max_new_tokens}: shorten one of them",
            )
        for prompt in given:
            if prompt.references and self._image_reader is not None:
                self._image_reader().prepare(prompt.references)
        images = [prompt.images for prompt in given]
        return Job(prompts, sampling, body.alternatives or 0, adapter=self.adapter, grammar=grammar, images=images)

    async def compiled(self, body: GenerationBody, job: Job) -> Job:
        """The job of a request with its grammar compiled. Grammars of all requests are compiled one after another; if
        this is cancelled, that of the request is not, or not to its end.

        Raises:
            KeyRejected: for a grammar that does not compile within its limits.
        """
        if job.sampling.response_format is None or job.grammar is not None:
            return job
        left = threading.Event()
        work = partial(self.batch.compile_grammar, job.sampling, lambda: not left.is_set())
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(_COMPILING, work)
        except UserError as error:
            raise _grammar_rejected(body, error) from error
        finally:
            left.set()
        return replace(job, grammar=grammar)

    def _constrained(
        self, sampling: SamplingParams, body: GenerationBody, prompts: Sequence[Sequence[int]]
    ) -> tuple[SamplingParams, object | None]:
        """Sampling parameters with the grammar of a request, and what keeps it compiled if it is."""
        if not self.allows_lark and (body.response_format or {}).get("type") == "lark":
            raise KeyRejected(
                "response_format",
                "must be text, json_object or json_schema, got lark: start the server with --allow_lark",
            )
        try:
            given = response_format(body, self.tokenizer, prompts[0] if prompts else ())
            if given is None:
                return sampling, None
            sampling = replace(sampling, response_format=given)
            return sampling, self.batch.compiled_grammar(sampling)
        except KeyRejected:
            raise
        except UserError as error:
            raise _grammar_rejected(body, error) from error

    def sampling(self, body: GenerationBody, *, longest_prompt: int) -> SamplingParams:
        """The sampling parameters of a request.

        Raises:
            UserError: for a value outside of its range.
        """
        sampling = body.sampling(self.defaults, longest=self.batch.max_tokens - longest_prompt)
        if sampling.min_new_tokens > sampling.max_new_tokens:
            raise KeyRejected(
                "min_tokens",
                f"must be at most max_tokens {sampling.max_new_tokens}, got {sampling.min_new_tokens}: lower it",
            )
        for text in sampling.stop:
            check_text(text, "stop")
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("logit_bias", sampling.logit_bias)
        return sampling

    def check_name(self, name: str) -> None:
        """Raise UnknownModel unless this is the name of the served model."""
        if name != self.name:
            known = ", ".join(dict.fromkeys([self.name, *self.adapters]))
            raise UnknownModel(f"the model of this server is {known}, got {name[:100]!r}: name it")

    def start(self, job: Job, *, whole: bool) -> TokenStream:
        """Submit a job.

        Args:
            job: the prompts.
            whole: true if the answer is sent at its end, not token by token.

        Raises:
            QueueFull: when too many requests wait.
            UserError: when the job is longer than a sequence may be.
            BatchEnded: when the server stops.
        """
        self._check_queue(len(job.prompts) * job.sampling.n)
        return TokenStream(self, job, whole=whole)

    @property
    def source(self) -> TokenSource:
        """What completes the prompts."""
        return self.turns

    @property
    def _most_completions(self) -> int:
        return self.batch.rows + self.max_queue

    def _check_queue(self, wanted: int) -> None:
        unfinished = self.turns.unfinished
        if unfinished + wanted > self._most_completions:
            raise QueueFull(
                f"{unfinished} completions run or wait, the limit is {self._most_completions}: try again later"
            )

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Call a function on the thread that uses the device.

        Raises:
            BatchEnded: when the server stops.
        """
        try:
            return self.batch.call(function)
        except RuntimeError as error:
            raise _ended(self.batch) from error

    async def prompt_tokens(self, prompt: Sequence[int], images: GivenImages, *, top: int) -> list[StreamedToken]:
        """The tokens of a prompt with their log-probs, that of the first one NaN, and the most likely tokens."""
        try:
            future = self.batch.prompt_logprobs(prompt, adapter=self.adapter, top=top, images=images)
        except RuntimeError as error:
            raise _ended(self.batch) from error
        known = await asyncio.wrap_future(future)
        values = zip(prompt, [math.nan, *known.logprobs], [[], *known.top], strict=True)
        return [StreamedToken(0, 0, token, logprob, logprob, None, likely) for token, logprob, likely in values]

    def prompt(self, body: ChatBody) -> Prompt:
        """The prompt of a chat request."""
        if body.prompt_token_ids is not None:
            return Prompt(body.prompt_token_ids)
        messages, images = self.conversation(body)
        text = self.rendered(body, messages)
        if images is None or self._image_reader is None:
            return Prompt(token_ids(text, self.tokenizer))
        with request_errors("messages"):
            ids = token_ids(images.expanded([text])[0], self.tokenizer)
            images.require_no_others(ids, len(images.references), self.tokenizer)
        return Prompt(ids, self._image_reader().prompt_images(ids, images.references), images.references)

    @property
    def image_refusal(self) -> str:
        """Why requests must be text; empty: they may have images."""
        return NOT_READ if self._image_reader is None else ""

    def read_images(self, uris: Mapping[str, str]) -> RowImages:
        """Decode the images of a request, by their keys, until they are longer than a sequence may be."""
        assert self._image_reader is not None, "images are not refused"
        reader = self._image_reader()
        images = RowImages(reader.layout, [])
        tokens = 0
        for key, uri in uris.items():
            with request_errors(key):
                image = read_reference(uri, "it", folder=None, max_pixels=self._max_image_pixels)
            images.references.append(image)
            tokens += reader.layout.tokens(image.width, image.height)
            if tokens >= self.batch.max_tokens:
                raise ContextTooLong(
                    key, f"must fit in the maximum context length of {self.batch.max_tokens} tokens: scale images down"
                )
        return images

    def rendered(self, body: ChatBody, messages: Sequence[Message]) -> str:
        """The text of the prompt of a chat request."""
        settings: dict[str, Any] = {"tools": body.used_tools, "variables": body.chat_template_kwargs}
        with request_errors("messages"):
            if body.continue_final_message:
                return render_unfinished(messages, self.tokenizer, **settings)
            return render(messages, self.tokenizer, add_generation_prompt=body.add_generation_prompt, **settings)

    def _prompts(self, body: GenerationBody) -> list[list[int]]:
        assert isinstance(body, CompletionBody)
        return [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]

    def conversation(self, body: ChatBody) -> tuple[list[Message], RowImages | None]:
        """The conversation of a request, as chat templates read it, and its images; None: it has none."""
        conversation, uris = take_images("messages", body.messages, refusal=self.image_refusal)
        self._check_texts(body, conversation)
        messages, keys = read_messages("messages", conversation)
        return messages, self.read_images({key: uris[key] for key in keys}) if keys else None

    def _check_texts(self, body: ChatBody, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse texts that are too long for any tokenization, or not Unicode."""
        count = sum(map(characters, (messages, body.tools, body.chat_template_kwargs)))
        self._check_characters("messages", count)
        check_text(json.dumps(body.chat_template_kwargs, ensure_ascii=False), "chat_template_kwargs")
        check_text(json.dumps(body.tools, ensure_ascii=False), "tools")

    def encode(self, text: str, *, adds_bos: bool = True) -> list[int]:
        """Token ids of plain text, with BOS if the tokenizer adds it."""
        self._check_characters("prompt", len(text))
        check_text(text, "prompt")
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*(leading_bos(text, self.tokenizer, plain=True) if adds_bos else ()), *ids]

    def tokenized(self, body: TokenizeBody) -> dict[str, Any]:
        """The tokens of a text or a conversation, in vLLM's form."""
        chat = body.conversation()
        if chat is not None:
            ids = self.prompt(chat).ids
        else:
            ids = self.encode(body.prompt or "", adds_bos=body.add_special_tokens)
        texts = {"token_strs": self.tokenizer.convert_ids_to_tokens(ids)} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": self.batch.max_tokens, "tokens": ids, **texts}

    def detokenized(self, body: DetokenizeBody) -> dict[str, Any]:
        """The text of tokens, special ones included."""
        self._check_ids("tokens", body.tokens)
        return {"prompt": self.tokenizer.decode(body.tokens)}

    def _check_ids(self, key: str, ids: Iterable[int]) -> None:
        most = self.batch.vocab_size - 1
        unknown = next((token for token in ids if not 0 <= token <= most), None)
        if unknown is not None:
            raise KeyRejected(key, f"must be token ids in 0..{most}, got {unknown}: remove it")

    def _check_placeholders(self, key: str, prompt: Prompt) -> None:
        found = next((token for token in prompt.ids if token in self._placeholders), None)
        if found is not None and prompt.images is None:
            shown = self.tokenizer.convert_ids_to_tokens(found)
            raise KeyRejected(
                key, f"must not have {shown} ({found}), which stands for an image: send image_url with a data URI"
            )

    def _check_characters(self, key: str, count: int) -> None:
        """Refuse a text that is too long for any tokenization, before it is tokenized."""
        if count > self._most_characters:
            raise ContextTooLong(
                key,
                f"must fit in the maximum context length of {self.batch.max_tokens} tokens, got {count} characters: "
                "shorten it",
            )


def _grammar_rejected(body: GenerationBody, error: UserError) -> KeyRejected:
    return KeyRejected(grammar_key(body), str(error).removeprefix("response_format "))


def _ended(batch: TokenSource, submission: Submitted | None = None) -> Exception:
    """The reason why no more tokens are delivered, as an exception."""
    if submission is not None and submission.error is not None:
        return RequestFailed(f"decoding has failed with this request ({submission.error!r:.200}): change it")
    if batch.failure is not None:
        return BatchFailed("decoding has failed and the server ends: send the request again after its restart")
    return BatchEnded("the server stops: send the request again later")
