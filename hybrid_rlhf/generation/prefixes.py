"""Which live request holds a prefix of a prompt, found in blocks of tokens.

A prefix is found by the chained hash of its blocks and then compared token by token, so that a collision costs a
comparison and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid_rlhf.generation.requests import Request

BLOCK_TOKENS = 16
"""A shorter common prefix is computed again."""


class PrefixIndex:
    """Requests by the prefixes of their prompts."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[Request, None]] = {}

    def add(self, request: Request) -> None:
        """Its slot holds the keys and values of its whole prompt."""
        for _, key in _prefix_keys(request.prompt):
            self._holders.setdefault(key, {})[request] = None

    def remove(self, request: Request) -> None:
        """Its slot is given to another; one that was never added is no mistake."""
        for _, key in _prefix_keys(request.prompt):
            holders = self._holders.get(key, {})
            holders.pop(request, None)
            if not holders:
                self._holders.pop(key, None)

    def longest(self, prompt: Sequence[int]) -> tuple[Request | None, int]:
        """The request that shares the most blocks with a prompt, and how many tokens; never the last one."""
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
    """(tokens, key) of each prefix of whole blocks."""
    key = 0
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        key = hash((key, tuple(prompt[end - BLOCK_TOKENS : end])))
        yield end, key
