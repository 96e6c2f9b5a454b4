"""The protocol between the generation engine and what computes a batch.

The engine turns prompts into requests and requests into completions. A backend decides which requests run together,
holds the memory that this takes, and knows which weights it computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from hybrid_rlhf.generation.batching.arrivals import Arrivals
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
from hybrid_rlhf.generation.batching.rows import BatchLoad

BackendName = Literal["auto", "module"]
"""auto: native where the family table describes the model, else module; module: the Hugging Face module always."""


class GenerationBackend(Protocol):
    """Runs requests to their ends."""

    max_positions: int | None
    """Longest sequence that the model has positions for; none: no limit."""
    trained_positions: int | None
    """Longest sequence that the model was trained for, where it computes positions; none: unknown."""
    vocab_size: int
    work: DecodeWork
    """Of all calls so far; zeros where the backend does not count."""

    records_routes: bool
    """Whether it can record the experts of each token."""
    continues: bool
    """Whether requests may begin with tokens of an earlier call, and end before they are finished."""

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """Decode all requests, which tensor-parallel ranks must pass in the same order; yields after each step."""

    def run_open(self, arrivals: Arrivals) -> Iterator[NewTokens]:
        """Decode requests as they arrive, until `arrivals` is closed; yields after each step. On one rank only.

        The backend allocates its memory before it takes the first request, and runs nothing else meanwhile.

        Raises:
            UserError: when memory has no room for one request of the longest kind.
        """

    @property
    def load(self) -> BatchLoad:
        """What runs and waits in `run_open`; zeros otherwise."""

    @property
    def kv_cache_bytes(self) -> int:
        """Reserved for keys and values; 0 where the cache grows with its rows."""

    def prompt_logprobs(self, tokens: Sequence[int], adapter: int = 0) -> list[float]:
        """Log-probs of all tokens but the first, at temperature 1, with the adapter of this number; 0: none."""

    def reset(self) -> None:
        """Release the KV cache and what else an exception in `run_open` may have left inconsistent."""

    def close(self) -> None:
        """Release weights, KV cache and CUDA graphs. A backend is not used afterwards."""
