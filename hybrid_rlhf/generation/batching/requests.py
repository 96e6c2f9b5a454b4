"""Requests: made from prompts after checks against the model, and the state of each running completion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.generation.batching.grammar import Grammar, GrammarKey, grammar_of, require_grammars, source_of
from hybrid_rlhf.generation.batching.images import GivenImages, PromptImages
from hybrid_rlhf.generation.batching.stop_strings import StopStrings, stop_strings
from hybrid_rlhf.generation.sampling import (
    Completion,
    FinishReason,
    SamplingParams,
    per_request,
    uniform_stream,
)
from hybrid_rlhf.runtime.observability.logs import logger


@dataclass(eq=False)
class Request:
    """One sample of a prompt."""

    prompt: Sequence[int]
    prompt_index: int
    params: SamplingParams
    stop: frozenset[int]
    """All stop tokens, including those of the engine."""
    uniforms: np.ndarray
    """One number in [0, 1) per token; their number is the maximum length of the completion."""
    stop_strings: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    """Versions of the weights that sampled the first tokens; the present weights sampled the others."""
    finish_reason: FinishReason | None = None
    top_logprobs: int = 0
    """Number of most likely tokens reported with each token, at most MOST_TOP_LOGPROBS."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each token, the most likely tokens with their log-probs, most likely first; empty without `top_logprobs`."""
    records_routes: bool = False
    """True if the completion reports the experts of its tokens."""
    fetch_routes: Callable[[], Tensor] | None = None
    """For a finished request that records routes: returns those of all tokens but the last, which no layer has read."""
    begun: Completion | None = None
    """The part of the completion that an earlier call sampled."""
    adapter: int = 0
    """Number of the adapter; 0: none."""
    delivered: int = 0
    """Number of tokens that an open batch has delivered."""
    grammar: Grammar | None = None
    """Grammar of the completion; none: any token may follow."""
    images: PromptImages | None = None
    """Images of the prompt."""
    sample: int = 0
    """Number among the samples of the prompt."""
    streams: bool = True
    """True if each token is appended when it is sampled; false: continuous batching may append several later."""

    def continue_from(self, completion: Completion) -> None:
        """Take the tokens of a completion that an earlier call began."""
        self.begun = completion
        self.finish_reason = completion.finish_reason
        self.extend(completion.token_ids, completion.logprobs, completion.sampling_logprobs)
        self.weight_versions = list(completion.weight_versions)
        self._restart_grammar()

    def stamp(self, weight_version: int) -> None:
        """Record the version of the weights that sampled the tokens so far, before newer weights continue."""
        self.weight_versions += [weight_version] * (len(self.token_ids) - len(self.weight_versions))

    def rewind(self, tokens: int) -> None:
        """Drop all but the first `tokens` tokens of the completion, and its finish reason."""
        for values in (self.token_ids, self.logprobs, self.sampling_logprobs, self.weight_versions, self.top):
            del values[tokens:]
        self.finish_reason = None
        self._restart_grammar()

    def _restart_grammar(self) -> None:
        """Bring the grammar to the tokens so far, without the stop token."""
        if self.grammar is not None and not self.ended:
            self.grammar.restart(self.token_ids)

    @property
    def ended(self) -> bool:
        """True if no more tokens of the request are sampled."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and completion so far."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Numbers of tokens so far, of the prompt, and at most of the completion."""
        return self.tokens, len(self.prompt), len(self.uniforms)

    @property
    def all_token_ids(self) -> list[int]:
        """Token ids of prompt and completion so far."""
        return [*self.prompt, *self.token_ids]

    @property
    def keys(self) -> list[int]:
        """What the prefix tree compares: all token ids, but for image tokens the keys of their images."""
        return self.all_token_ids if self.images is None else self.images.keyed(self.all_token_ids)

    def attended_tokens(self, window: int | None) -> int:
        """Number of tokens whose keys and values decoding has read: for each decoded token, all up to itself within a
        window."""
        decoded = self.decoded_tokens
        window = self.tokens if window is None else window
        beyond = min(decoded, max(0, self.tokens - 1 - window))  # with more before them than the window
        others = decoded - beyond
        return beyond * window + others * (self.tokens - beyond) - others * (others + 1) // 2

    @property
    def decoded_tokens(self) -> int:
        """Number of tokens that this call has sampled, without the first, which the prefill samples."""
        begun = 0 if self.begun is None else len(self.begun.token_ids)
        return max(0, len(self.token_ids) - begun - 1)

    def extend(self, tokens: Iterable[float], logprobs: Iterable[float], sampling_logprobs: Iterable[float]) -> None:
        """Append several tokens, of which none is the last."""
        self.token_ids += map(int, tokens)
        self.logprobs += logprobs
        self.sampling_logprobs += sampling_logprobs

    def append(self, token: int, logprob: float, sampling_logprob: float, *top: float) -> None:
        """Append a token, and set the finish reason if it is the last. `top`: the most likely tokens, then their
        log-probs."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        if self.top_logprobs:
            count = self.top_logprobs
            half = len(top) // 2
            self.top.append(
                [(int(candidate), value) for candidate, value in zip(top[:half][:count], top[half:], strict=False)]
            )
        if self.grammar is not None and token in self.stop:
            self.grammar.end()
        elif self.grammar is not None:
            self.grammar.append(token)
        if token in self.stop or self._ends_with_stop_string():
            self.finish_reason = "stop"
        elif len(self.token_ids) == len(self.uniforms):
            self.finish_reason = "length"

    def _ends_with_stop_string(self) -> bool:
        if self.stop_strings is None or len(self.token_ids) < self.params.min_new_tokens:
            return False
        return self.stop_strings.end(self.token_ids)

    def completion(self, weight_version: int) -> Completion:
        """Return the completion so far; tokens without a weight version are of this one."""
        if self.begun is not None and self.begun.finish_reason is not None:
            return self.begun
        routes = None
        if self.fetch_routes is not None:
            routes = np.pad(self.fetch_routes().numpy(), ((0, 1), (0, 0), (0, 0)), constant_values=-1)
        self.stamp(weight_version)
        values = self.sampling_logprobs[:], self.weight_versions[:], routes
        return Completion(self.token_ids[:], self.logprobs[:], self.finish_reason, *values)


def continue_requests(requests: Sequence[Request], begun: Sequence[Sequence[Completion]]) -> None:
    """Give requests the tokens of the completions that an earlier call began."""
    for index, samples in groupby(requests, key=lambda request: request.prompt_index):
        for request, completion in zip(samples, begun[index] if index < len(begun) else (), strict=False):
            request.continue_from(completion)


@dataclass(frozen=True)
class DecodeWork:
    """Decoding work of a rank."""

    bytes: int = 0
    """Bytes of weights, keys and values that decoding has read; 0 if the backend does not count them."""
    steps: int = 0
    """Number of steps with decoding rows."""
    operations: float = 0.0
    """Floating-point operations of decoding, without those of recurrences; counted where the bytes are."""

    def __add__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(self.bytes + other.bytes, self.steps + other.steps, self.operations + other.operations)

    def __sub__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(self.bytes - other.bytes, self.steps - other.steps, self.operations - other.operations)


NewTokens = list[tuple[Request, int]]
"""Tokens of one step, each with the request that it was appended to."""


_MOST_TOP_K = 2**31 - 1
_TOKEN_KEYS = ("stop_token_ids", "logit_bias")
"""Sampling parameters with token ids."""
_CHANGES_WITH_LENGTH = " (original_max_position_embeddings; in longer sequences its rotary positions all change)"


@dataclass
class RequestMaker:
    """Makes the requests of an engine."""

    max_positions: int | None
    """Longest sequence that the model has positions for; none: no limit."""
    trained_positions: int | None
    """Longest sequence that the model was trained for, if it computes positions; none: unknown."""
    vocab_size: int
    stop_token_ids: frozenset[int]
    """Tokens that end every completion."""
    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer for stop strings; none: stop strings are refused."""
    adapters: dict[str, int]
    """Numbers, from 1 on, of the adapters that a prompt may choose, by name."""
    reads_images: bool = False
    """True if prompts may have images."""
    banned_ids: Sequence[int] = ()
    """Tokens with probability 0: placeholders of images and videos."""
    prompt_images: Callable[[Sequence[int], Sequence[ImageReference]], PromptImages | None] = lambda ids, images: None
    """Reads the images of a prompt, of which there is at least one."""

    def adapter_number(self, name: str | None) -> int:
        """Return the number of an adapter, from 1 on; 0: the model itself.

        Raises:
            UserError: if there is no adapter of this name.
        """
        if name is not None and name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise UserError(f"an adapter must be one of the engine's, {known}, got {name}: name one of them")
        return 0 if name is None else self.adapters[name]

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        first_sample: int = 0,
        images: Sequence[GivenImages] = (),
    ) -> list[Request]:
        """Return one request per sample of each prompt; arguments as in `GenerationEngine.generate`, and the number of
        the first sample."""
        params_of_prompts = per_request(sampling, len(prompts))
        if images and len(images) != len(prompts):
            raise UserError(f"images are one per prompt, got {len(images)} for {len(prompts)}: give None for some")
        read = [
            self.read_images(prompt, given)
            for prompt, given in zip(prompts, images or [None] * len(prompts), strict=True)
        ]
        for index, (prompt, params) in enumerate(zip(prompts, params_of_prompts, strict=True)):
            self._check_tokens(index, prompt, params)
            self.check_images(index, prompt, read[index])
        if any(params.stop for params in params_of_prompts) and self.tokenizer is None:
            raise UserError("stop needs a tokenizer, the engine has none: use stop_token_ids")
        return [
            Request(
                list(prompt),
                index,
                params,
                self._stop(params),
                uniform_stream(params.seed or 0, sample, self._longest_completion(index, prompt, params)),
                stop_strings(self.tokenizer, params.stop) if params.stop and self.tokenizer is not None else None,
                grammar=self.grammar(params),
                images=read[index],
                sample=sample,
            )
            for index, (prompt, params) in enumerate(zip(prompts, params_of_prompts, strict=True))
            for sample in range(first_sample, first_sample + params.n)
        ]

    def _stop(self, params: SamplingParams) -> frozenset[int]:
        """All tokens that end a completion."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_token_ids)

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """A new state of the grammar of a response format; None without one.

        Raises:
            UserError: for a grammar that does not compile, or an engine that has no tokenizer for it.
        """
        return None if params.response_format is None else grammar_of(*self.grammar_key(params))

    def grammar_key(self, params: SamplingParams) -> GrammarKey:
        """The grammar of a response format and what it is compiled for; raises UserError as `grammar`."""
        if self.tokenizer is None:
            raise UserError("response_format needs a tokenizer, the engine has none: give it one")
        require_grammars()
        assert params.response_format is not None
        return source_of(params.response_format), self.tokenizer, self.vocab_size, self._stop(params)

    def _check_tokens(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise UserError if a prompt is empty, a token of it or a stop token is not in the vocabulary, or top_k does
        not fit in int32.
        """
        if isinstance(prompt, (str, int)):
            raise UserError(f"a prompt is a list of token ids, prompt {index} is {prompt!r:.40}: encode its text")
        if not len(prompt):
            raise UserError(f"a prompt has at least one token, prompt {index} has none: drop it")
        most = self.vocab_size - 1
        named = ((f"prompt {index}", prompt), *((key, [*getattr(params, key)]) for key in _TOKEN_KEYS))
        for name, tokens in named:
            if len(tokens) and (min(tokens) < 0 or max(tokens) > most):
                unknown = next(token for token in tokens if not 0 <= token <= most)
                raise UserError(f"token ids must be in 0..{most}, {name} has {unknown}: remove it")
        if params.top_k > _MOST_TOP_K:
            raise UserError(f"top_k must be at most {_MOST_TOP_K}, got {params.top_k}: lower it")

    def read_images(self, prompt: Sequence[int], given: GivenImages) -> PromptImages | None:
        """Return the images of a prompt."""
        return given if isinstance(given, PromptImages) else self.prompt_images(prompt, given) if given else None

    def check_images(self, index: int, prompt: Sequence[int], images: PromptImages | None) -> None:
        """Raise UserError unless each placeholder in a prompt is a token of its images."""
        if images is not None and not self.reads_images:
            raise UserError(
                "images need inference weights of a model that reads them, got other weights: leave them out"
            )
        placeholders = sum(list(prompt).count(token) for token in self.banned_ids)
        given = 0 if images is None else len(images.keys)
        if placeholders != given:
            raise UserError(
                f"a prompt has one placeholder per token of its images, prompt {index} has {placeholders} for {given}: "
                "give its images, or remove the placeholders"
            )

    def _longest_completion(self, index: int, prompt: Sequence[int], params: SamplingParams) -> int:
        """Maximum number of tokens of a completion: max_new_tokens, or the positions that the prompt leaves."""
        limit = self.max_positions
        trained = self.trained_positions
        if limit is None:
            if trained is not None and len(prompt) + params.max_new_tokens > trained:
                _warn_of_untrained_positions(trained)
            return params.max_new_tokens
        if len(prompt) >= limit:
            why = "" if trained is None or trained <= limit else _CHANGES_WITH_LENGTH
            raise UserError(
                f"the model has {limit} positions{why}, prompt {index} has {len(prompt)} tokens: shorten the prompt"
            )
        return min(params.max_new_tokens, limit - len(prompt))


@functools.cache
def _warn_of_untrained_positions(trained: int) -> None:
    """Log a warning, once for each context length, because rollouts create many engines."""
    logger.warning(
        "prompt and max_new_tokens exceed the model's context length of %d tokens (max_position_embeddings): what is "
        "sampled beyond it may be worse",
        trained,
    )
