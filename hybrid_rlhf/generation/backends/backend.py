"""The protocol between the generation engine and what computes a batch.

The engine turns prompts into requests and requests into completions. A backend decides which requests run together,
holds the memory that this takes, and knows which weights it computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from hybrid_rlhf.generation.batching.requests import NewTokens, Request

BackendName = Literal["auto", "module"]
"""auto: native where the family table describes the model, else module; module: the Hugging Face module always."""


class GenerationBackend(Protocol):
    """Runs requests to their ends."""

    max_positions: int | None
    """Longest sequence that the model has positions for; none: no limit."""
    decode_bytes: int
    """Bytes of weights, keys and values that decoding has read on this rank; 0 where the backend does not count."""

    records_routes: bool
    """Whether it can record the experts of each token."""

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """Decode all requests, which tensor-parallel ranks must pass in the same order; yields after each step."""

    def close(self) -> None:
        """Release weights, KV cache and CUDA graphs. A backend is not used afterwards."""
