"""The protocol between the generation engine and what computes a batch.

The engine turns prompts into requests and requests into completions. A backend decides which requests run together,
and owns their memory and the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from hybrid_rlhf.generation.batching.arrivals import Arrivals
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
from hybrid_rlhf.generation.batching.rows import BatchLoad

BackendName = Literal["auto", "module"]
"""auto: native if the family table describes the model, else module; module: always the Hugging Face module."""


class GenerationBackend(Protocol):
    """Computes the completions of requests."""

    max_positions: int | None
    """Longest sequence that the model has positions for; none: no limit."""
    trained_positions: int | None
    """Longest sequence that the model was trained for, if it computes positions; none: unknown."""
    vocab_size: int
    work: DecodeWork
    """Decoding work of all calls so far; zeros if the backend does not count it."""

    records_routes: bool
    """True if the backend can record the experts of each token."""
    continues: bool
    """True if requests may begin with tokens of an earlier call, and may be returned before they are finished."""

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """Decode all requests; yields the new tokens of each step. Tensor-parallel ranks pass them in the same
        order."""

    def run_open(self, arrivals: Arrivals) -> Iterator[NewTokens]:
        """Decode requests as they arrive, until `arrivals` is closed; yields the new tokens of each step. One rank
        only.

        The backend allocates its memory before it takes the first request, and runs nothing else until it returns.

        Raises:
            UserError: when one request of the maximum length does not fit in memory.
        """

    @property
    def load(self) -> BatchLoad:
        """Numbers of running and waiting requests in `run_open`; zeros otherwise."""

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes reserved for keys and values; 0 if the cache grows with its rows."""

    def prompt_logprobs(self, tokens: Sequence[int], adapter: int = 0) -> list[float]:
        """Log-probs of all tokens but the first, at temperature 1. `adapter` is the number of an adapter; 0: none."""

    def reset(self) -> None:
        """Release the KV cache and other state that an exception in `run_open` may have left inconsistent."""

    def close(self) -> None:
        """Release weights, KV cache and CUDA graphs. The backend cannot be used afterwards."""
