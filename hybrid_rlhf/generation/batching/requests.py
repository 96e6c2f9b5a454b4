"""One running completion: its tokens so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hybrid_rlhf.generation.sampling import Completion, FinishReason, SamplingParams

Detokenize = Callable[[Sequence[int]], str]
_CHARACTER_TOKENS = 4
"""Most tokens of one character: one per byte."""


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
    detokenize: Detokenize | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    records_routes: bool = False
    """Whether the completion reports the experts of its tokens."""
    fetch_routes: Callable[[], Tensor] | None = None
    """Of a finished request that does: returns them, for all tokens but the last, which no layer has read."""

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
        """Tokens whose keys and values decoding has read: for each token except the first, all before it."""
        decoded = max(0, len(self.token_ids) - 1)
        return decoded * len(self.prompt) + decoded * (decoded + 1) // 2

    def append(self, token: int, logprob: float, sampling_logprob: float) -> None:
        """Add a token, and set the finish reason if it is the last."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        if token in self.stop or self._ends_with_stop_string():
            self.finish_reason = "stop"
        elif len(self.token_ids) == len(self.uniforms):
            self.finish_reason = "length"

    def _ends_with_stop_string(self) -> bool:
        if not self.params.stop or self.detokenize is None:
            return False
        if len(self.token_ids) < self.params.min_new_tokens:
            return False
        longest = 1 + max(map(len, self.params.stop))  # the tail may start within a character
        tail = self.token_ids[-_CHARACTER_TOKENS * longest :]
        text = self.detokenize(tail)
        if not any(stop in text for stop in self.params.stop):
            return False
        before = self.detokenize(tail[:-1])  # a stop string from before min_new_tokens does not count
        return any(text.count(stop) > before.count(stop) for stop in self.params.stop)

    def completion(self, weight_version: int) -> Completion:
        """The result of a finished request."""
        assert self.finish_reason is not None
        routes = None
        if self.fetch_routes is not None:
            routes = np.pad(self.fetch_routes().numpy(), ((0, 1), (0, 0), (0, 0)), constant_values=-1)
        return Completion(
            self.token_ids, self.logprobs, self.finish_reason, self.sampling_logprobs, weight_version, routes
        )


@dataclass(frozen=True)
class DecodeWork:
    """What decoding has done on a rank."""

    bytes: int = 0
    """Of weights, keys and values that decoding has read, those for rejected drafts not counted; 0 where the backend
    does not count."""
    steps: int = 0
    """Steps in which rows decoded."""
    row_steps: int = 0
    """Rows of all these steps."""
    tokens: int = 0
    """Kept of these rows; as many as `row_steps` without drafts."""
    drafted: int = 0
    """Tokens of drafts."""
    accepted: int = 0
    """Of these, tokens that were kept."""

    def __add__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, other: DecodeWork) -> DecodeWork:
        return DecodeWork(**{name: value - getattr(other, name) for name, value in vars(self).items()})


NewTokens = list[tuple[Request, int]]
"""Tokens of one step, with the requests that they were appended to."""
