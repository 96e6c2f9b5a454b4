"""Whether a completion ends with a stop string.

Text is decoded only for tokens that can complete a stop string, since decoding takes longer than everything else that
is done with a token on the host. That is known of a token from what it decodes to alone and after itself: a stop string
ends within the new text, so the text contains it or begins with an end of it. Decoders drop a space in front of the
first token, hence both. Three kinds of tokens are always decoded: parts of a character; tokens of which decoding twice
does not begin with decoding once; and an apostrophe with the two tokens after it, where decoders that clean up spaces
change earlier text ("x 's" becomes "x's").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_CHARACTER_TOKENS = 4
"""Most tokens of one character: one per byte."""
_PART = "\N{REPLACEMENT CHARACTER}"
_COMPLETES, _CHANGES = 1, 2
"""Flags of a token: it may complete a stop string; it may change the text before the tokens after it."""


class StopStrings:
    """The stop strings of requests with one tokenizer."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """Args: at least one stop string, and the text of tokens."""
        self._stops, self._decode = stops, decode
        self._ends = tuple({stop[start:] for stop in stops for start in range(len(stop))})
        longest = 1 + max(map(len, stops))  # the tail may start within a character
        self._tail = _CHARACTER_TOKENS * longest
        self._flags = _Flags(self._flags_of)

    def end(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes one of them; those from before it do not count."""
        flags = self._flags
        if not flags[token_ids[-1]] & _COMPLETES:
            for token in token_ids[-3:]:
                if flags[token] & _CHANGES:
                    break
            else:
                return False
        tail = token_ids[-self._tail :]
        text = self._decode(tail)
        if not any(stop in text for stop in self._stops):
            return False
        before = self._decode(tail[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self._stops)

    def _flags_of(self, token: int) -> int:
        first, twice = self._decode([token]), self._decode([token, token])
        completes = _PART in twice or not twice.startswith(first)
        for text in (first, " " + first, twice[len(first) :]):
            completes |= text.startswith(self._ends) or any(stop in text for stop in self._stops)
        return completes * _COMPLETES | ("'" in twice) * _CHANGES


class _Flags(dict[int, int]):
    """Of tokens, computed when they first occur."""

    def __init__(self, flags_of: Callable[[int], int]) -> None:
        super().__init__()
        self._flags_of = flags_of

    def __missing__(self, token: int) -> int:
        self[token] = flags = self._flags_of(token)
        return flags


@functools.lru_cache(maxsize=8)
def stop_strings(tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...]) -> StopStrings:
    """The stop strings of a tokenizer, with what earlier calls have learned about its tokens."""
    return StopStrings(stops, tokenizer.decode)
