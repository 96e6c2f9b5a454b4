"""One running completion: its tokens so far, and when it ends."""

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
    """All stop tokens, those of the engine included."""
    uniforms: np.ndarray
    """One number in [0, 1) per token, up to the longest completion."""
    stop_strings: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    top_logprobs: int = 0
    """How many of the most likely tokens are reported with each token, at most MOST_TOP_LOGPROBS."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each token these, the most likely first, with the log-probs of `logprobs`; none without `top_logprobs`."""
    records_routes: bool = False
    """Whether the completion reports the experts of its tokens."""
    fetch_routes: Callable[[], Tensor] | None = None
    """Of a finished request that does: returns them, for all tokens but the last, which no layer has read."""
    begun: Completion | None = None
    """What an earlier call sampled of it."""
    adapter: int = 0
    """Number of its adapter; 0: none."""
    limit: TokenLimit | None = None
    """Of all requests of the call; none: each runs to its end."""
    delivered: int = 0
    """Tokens that an open batch has given out."""

    def continue_from(self, completion: Completion) -> None:
        """Take the tokens of a completion that an earlier call began."""
        self.begun, self.finish_reason = completion, completion.finish_reason
        self.token_ids, self.logprobs = list(completion.token_ids), list(completion.logprobs)
        self.sampling_logprobs = list(completion.sampling_logprobs)

    def rewind(self, tokens: int) -> None:
        """Forget all but the first tokens of the completion, and its end."""
        for values in (self.token_ids, self.logprobs, self.sampling_logprobs, self.top):
            del values[tokens:]
        self.finish_reason = None

    @property
    def begun_tokens(self) -> int:
        """Tokens of the completion that an earlier call sampled."""
        return 0 if self.begun is None else len(self.begun.token_ids)

    @property
    def new_tokens(self) -> int:
        """Tokens of the completion that this call has sampled."""
        return len(self.token_ids) - self.begun_tokens

    @property
    def ended(self) -> bool:
        """Whether this call samples no more tokens of it."""
        return self.finish_reason is not None or (self.limit is not None and self.new_tokens >= self.limit.tokens)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and completion so far."""
        return [*self.prompt, *self.token_ids]

    @property
    def attended_tokens(self) -> int:
        """Tokens whose keys and values decoding has read: for each new token except the first, all before it."""
        decoded = self.decoded_tokens
        return decoded * (len(self.prompt) + self.begun_tokens) + decoded * (decoded + 1) // 2

    @property
    def decoded_tokens(self) -> int:
        """New tokens except the first, which the prefill samples."""
        return max(0, self.new_tokens - 1)

    def append(self, token: int, logprob: float, sampling_logprob: float, *top: float) -> None:
        """Add a token, and set the finish reason if it is the last; `top`: the likely tokens, then their log-probs."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        if self.top_logprobs:
            kept, half = self.top_logprobs, len(top) // 2
            self.top.append([(int(other), value) for other, value in zip(top[:half][:kept], top[half:], strict=False)])
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
        """The result of the call, without tokens beyond its limit."""
        if self.begun is not None and self.begun.finish_reason is not None:
            return self.begun
        reason, fetch_routes, kept = self.finish_reason, self.fetch_routes, len(self.token_ids)
        if self.limit is not None and self.new_tokens > self.limit.tokens:
            kept, reason, fetch_routes = self.begun_tokens + int(self.limit.tokens), None, None
        routes = None
        if fetch_routes is not None:
            routes = np.pad(fetch_routes().numpy(), ((0, 1), (0, 0), (0, 0)), constant_values=-1)
        versions = [] if self.begun is None else self.begun.weight_versions
        versions = versions + [weight_version] * (kept - len(versions))
        return Completion(
            self.token_ids[:kept], self.logprobs[:kept], reason, self.sampling_logprobs[:kept], versions, routes
        )


class TokenLimit:
    """Most new tokens of any completion of a call with a FinishedShare: it falls as prompts finish.

    Requests may be beyond it when it falls, as they do not all begin in the same step: those tokens are discarded.
    """

    def __init__(self, share: FinishedShare, requests: Sequence[Request]) -> None:
        """Take all requests of the call, in which some may be finished already."""
        self.tokens = math.inf
        self._share, self._added = share, dict.fromkeys((request.prompt_index for request in requests), 0)
        self._running = Counter(request.prompt_index for request in requests if request.finish_reason is None)
        self._lower()

    def observe(self, request: Request) -> None:
        """Note that a request has finished."""
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
    """What decoding has done on a rank."""

    bytes: int = 0
    """Bytes of weights, keys and values that decoding has read; 0 where the backend does not count."""
    steps: int = 0
    """Steps in which rows decoded."""

    def __add__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(**{name: value - getattr(other, name) for name, value in vars(self).items()})


NewTokens = list[tuple[Request, int]]
"""Tokens of one step, with the requests that they were appended to."""
