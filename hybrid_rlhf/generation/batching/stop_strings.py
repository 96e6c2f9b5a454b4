"""Whether a completion ends with a stop string.

Text is decoded only for tokens that can complete a stop string, since decoding takes longer than everything else that
is done with a token on the host. That is known of a token from what it decodes to alone and after itself: a stop string
ends within the new text, so the text contains it or begins with an end of it. Decoders drop a space in front of the
first token, hence both. Three kinds of tokens may always complete one: parts of a character; tokens of which decoding
twice does not begin with decoding once; and an apostrophe with the two tokens after it, where decoders that clean up
spaces change earlier text ("x 's" becomes "x's"). Before decoding, the texts of the last tokens are joined without
their spaces, about which decoders differ: where no stop string is in them, none is in what decoding returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_CHARACTER_TOKENS = 4
"""Most tokens of one character: one per byte."""
_CHANGED_TOKENS = 3
"""Last tokens whose text the last one may change."""
_PART = "\N{REPLACEMENT CHARACTER}"
_COMPLETES, _CHANGES = 1, 2
"""Flags of a token: it may complete a stop string; it may change the text before the tokens after it."""


class StopStrings:
    """The stop strings of requests with one tokenizer."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """Args: at least one stop string, and the text of tokens."""
        self._stops, self._decode = stops, decode
        self._ends = tuple({stop[start:] for stop in stops for start in range(len(stop))})
        self._longest = max(map(len, stops))
        self._tail = _CHARACTER_TOKENS * (1 + self._longest)  # the tail may start within a character
        self._joined = [] if any(stop.endswith(" ") for stop in stops) else [stop.replace(" ", "") for stop in stops]
        """The stop strings without spaces; none where a space completes one."""
        self._texts: dict[int, str] = {}
        """Of tokens without spaces, where it does not depend on the tokens before."""
        self._flags = _Flags(self._flags_of)

    def end(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes one of them; those from before it do not count."""
        flags = self._flags
        if not flags[token_ids[-1]] & _COMPLETES:
            for token in token_ids[-_CHANGED_TOKENS:]:
                if flags[token] & _CHANGES:
                    break
            else:
                return False
        if self._joined and not self._may_be_in(token_ids):
            return False
        tail = token_ids[-self._tail :]
        text = self._decode(tail)
        if not any(stop in text for stop in self._stops):
            return False
        before = self._decode(tail[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self._stops)

    def _may_be_in(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop string may be in the text of the last three tokens and of the tokens that it may begin in."""
        text, needed = "", self._longest
        for number, token in enumerate(reversed(token_ids)):
            own = self._texts.get(token)
            if own is None:
                return True
            text = own + text
            needed -= len(own) * (number >= _CHANGED_TOKENS)
            if needed <= 0:
                break
        return any(stop in text for stop in self._joined)

    def _flags_of(self, token: int) -> int:
        first, twice = self._decode([token]), self._decode([token, token])
        joined = first.replace(" ", "")
        if _PART not in twice and twice.replace(" ", "") == 2 * joined:
            self._texts[token] = joined
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
