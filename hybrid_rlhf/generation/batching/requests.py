"""State of one running completion: its tokens so far, and its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hybrid_rlhf.generation.batching.stop_strings import StopStrings
from hybrid_rlhf.generation.sampling import Completion, FinishedShare, FinishReason, SamplingParams


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
    limit: TokenLimit | None = None
    """Token limit shared by all requests of the call; none: each runs to its end."""
    delivered: int = 0
    """Number of tokens that an open batch has delivered."""

    def continue_from(self, completion: Completion) -> None:
        """Take the tokens of a completion that an earlier call began."""
        self.begun = completion
        self.finish_reason = completion.finish_reason
        self.token_ids = list(completion.token_ids)
        self.logprobs = list(completion.logprobs)
        self.sampling_logprobs = list(completion.sampling_logprobs)

    def rewind(self, tokens: int) -> None:
        """Drop all but the first `tokens` tokens of the completion, and its finish reason."""
        for values in (self.token_ids, self.logprobs, self.sampling_logprobs, self.top):
            del values[tokens:]
        self.finish_reason = None

    @property
    def begun_tokens(self) -> int:
        """Number of tokens that an earlier call sampled."""
        return 0 if self.begun is None else len(self.begun.token_ids)

    @property
    def new_tokens(self) -> int:
        """Number of tokens that this call has sampled."""
        return len(self.token_ids) - self.begun_tokens

    @property
    def ended(self) -> bool:
        """True if this call samples no more tokens of the request."""
        return self.finish_reason is not None or (self.limit is not None and self.new_tokens >= self.limit.tokens)

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and completion so far."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Token ids of prompt and completion so far."""
        return [*self.prompt, *self.token_ids]

    @property
    def attended_tokens(self) -> int:
        """Number of tokens whose keys and values decoding has read: for each new token but the first, all tokens before
        it."""
        decoded = self.decoded_tokens
        return decoded * (len(self.prompt) + self.begun_tokens) + decoded * (decoded + 1) // 2

    @property
    def decoded_tokens(self) -> int:
        """Number of new tokens without the first, which the prefill samples."""
        return max(0, self.new_tokens - 1)

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
        if token in self.stop or self._ends_with_stop_string():
            self.finish_reason = "stop"
        elif len(self.token_ids) == len(self.uniforms):
            self.finish_reason = "length"
        if self.finish_reason is not None and self.limit is not None:
            self.limit.observe(self)

    def _ends_with_stop_string(self) -> bool:
        if self.stop_strings is None or len(self.token_ids) < self.params.min_new_tokens:
            return False
        return self.stop_strings.end(self.token_ids)

    def completion(self, weight_version: int) -> Completion:
        """Return the completion of this call, without tokens beyond the limit."""
        if self.begun is not None and self.begun.finish_reason is not None:
            return self.begun
        reason = self.finish_reason
        fetch_routes = self.fetch_routes
        count = len(self.token_ids)
        if self.limit is not None and self.new_tokens > self.limit.tokens:
            count = self.begun_tokens + int(self.limit.tokens)
            reason = None
            fetch_routes = None
        routes = None
        if fetch_routes is not None:
            routes = np.pad(fetch_routes().numpy(), ((0, 1), (0, 0), (0, 0)), constant_values=-1)
        versions = [] if self.begun is None else self.begun.weight_versions
        versions = versions + [weight_version] * (count - len(versions))
        return Completion(
            self.token_ids[:count], self.logprobs[:count], reason, self.sampling_logprobs[:count], versions, routes
        )


class TokenLimit:
    """Maximum number of new tokens per completion in a call with a FinishedShare; it decreases as prompts finish.

    Requests do not all begin in the same step, so some may exceed the new limit; those tokens are discarded.
    """

    def __init__(self, share: FinishedShare, requests: Sequence[Request]) -> None:
        """Args: the share, and all requests of the call, some of which may already be finished."""
        self.tokens = math.inf
        self._share = share
        self._added = dict.fromkeys((request.prompt_index for request in requests), 0)
        self._running = Counter(request.prompt_index for request in requests if request.finish_reason is None)
        self._lower()

    def observe(self, request: Request) -> None:
        """Record a finished request, and lower the limit if enough prompts have finished."""
        index = request.prompt_index
        self._running[index] -= 1
        self._added[index] = max(self._added[index], request.new_tokens)
        if not self._running[index]:
            self._lower()

    def _lower(self) -> None:
        finished = sorted(added for index, added in self._added.items() if not self._running[index])
        if len(finished) < self._share.prompts or any(self._running[index] for index in self._share.required):
            return
        enough = finished[self._share.prompts - 1] if self._share.prompts else 0
        self.tokens = max([enough, *(self._added[index] for index in self._share.required)])


@dataclass(frozen=True)
class DecodeWork:
    """Decoding work of a rank."""

    bytes: int = 0
    """Bytes of weights, keys and values that decoding has read; 0 if the backend does not count them."""
    steps: int = 0
    """Number of steps with decoding rows."""

    def __add__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(self.bytes + other.bytes, self.steps + other.steps)

    def __sub__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(self.bytes - other.bytes, self.steps - other.steps)


NewTokens = list[tuple[Request, int]]
"""Tokens of one step, each with the request that it was appended to."""
