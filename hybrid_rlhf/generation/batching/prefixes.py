"""Finds a live request whose prompt shares a prefix with another prompt, in blocks of tokens.

A prefix is looked up by the chained hash of its blocks and then compared token by token, so that a hash collision is
never mistaken for a match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid_rlhf.generation.batching.requests import Request

BLOCK_TOKENS = 16
"""Tokens of a block; a shorter common prefix is computed again."""


class PrefixIndex:
    """Live requests, indexed by the prefixes of their prompts."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[Request, None]] = {}

    def add(self, request: Request) -> None:
        """Index a request whose slot holds the keys and values of its whole prompt."""
        for _, key in _prefix_keys(request.prompt):
            self._holders.setdefault(key, {})[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request, as its slot is reused; one that was never added is ignored."""
        for _, key in _prefix_keys(request.prompt):
            holders = self._holders.get(key, {})
            holders.pop(request, None)
            if not holders:
                self._holders.pop(key, None)

    def longest(self, prompt: Sequence[int]) -> tuple[Request | None, int]:
        """The request that shares the most blocks with a prompt, and their tokens; the last token is never shared."""
        found: tuple[Request | None, int] = (None, 0)
        for tokens, key in _prefix_keys(prompt):
            if tokens >= len(prompt) or key not in self._holders:
                break
            holder = next(iter(self._holders[key]))
            if list(holder.prompt[:tokens]) != list(prompt[:tokens]):
                break
            found = (holder, tokens)
        return found


def _prefix_keys(prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(tokens, key) of each prefix of full blocks."""
    key = 0
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        key = hash((key, tuple(prompt[end - BLOCK_TOKENS : end])))
        yield end, key
