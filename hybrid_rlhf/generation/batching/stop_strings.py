"""Detection of stop strings at the end of a completion.

Text is decoded only for tokens that can complete a stop string, since decoding takes longer than all other work per
token on the host. A token can complete one if the text that it adds contains a stop string or begins with the end of
one. That text is taken from decoding the token alone and twice in a row, because decoders drop a space in front of the
first token. Three kinds of tokens are always treated as completing: parts of a character; tokens for which the text of
two does not begin with the text of one; and an apostrophe with the two tokens after it, where decoders that clean up
spaces change earlier text ("x 's" becomes "x's"). Before decoding, the texts of the last tokens are joined without
spaces, since decoders differ in spaces: if the joined text contains no stop string, neither does the decoded text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_CHARACTER_TOKENS = 4
"""Maximum number of tokens per character: one per byte."""
_CHANGED_TOKENS = 3
"""Number of last tokens whose text the last one may change."""
_PART = "\N{REPLACEMENT CHARACTER}"
_COMPLETES = 1
"""Flag of a token that may complete a stop string."""
_CHANGES = 2
"""Flag of a token that, together with later tokens, may change earlier text."""


class StopStrings:
    """The stop strings of requests with one tokenizer."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """Args: at least one stop string, and a function from token ids to text."""
        self._stops = stops
        self._decode = decode
        self._longest = max(map(len, stops))
        self._tail = _CHARACTER_TOKENS * (1 + self._longest)  # the tail may start within a character
        self._joined = [] if any(stop.endswith(" ") for stop in stops) else [stop.replace(" ", "") for stop in stops]
        """The stop strings without spaces; empty if one of them ends with a space."""
        self._texts: dict[int, str] = {}
        """Text of tokens without spaces, for tokens whose text does not depend on the tokens before."""
        self._flags = functools.cache(self._flags_of)

    def end(self, token_ids: Sequence[int]) -> bool:
        """True if the last token completes a stop string. Earlier occurrences do not count."""
        flags = self._flags
        if not flags(token_ids[-1]) & _COMPLETES:
            for token in token_ids[-_CHANGED_TOKENS:]:
                if flags(token) & _CHANGES:
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
        """True if a stop string may be in the last text: that of the last three tokens and those in which it may
        begin."""
        text = ""
        needed = self._longest
        for number, token in enumerate(reversed(token_ids)):
            piece = self._texts.get(token)
            if piece is None:
                return True
            text = piece + text
            needed -= len(piece) * (number >= _CHANGED_TOKENS)
            if needed <= 0:
                break
        return any(stop in text for stop in self._joined)

    def _flags_of(self, token: int) -> int:
        first = self._decode([token])
        twice = self._decode([token, token])
        joined = first.replace(" ", "")
        if _PART not in twice and twice.replace(" ", "") == 2 * joined:
            self._texts[token] = joined
        completes = _PART in twice or not twice.startswith(first)
        for text in (first, " " + first, twice[len(first) :]):
            completes |= any(_may_end(stop, text) for stop in self._stops)
        return completes * _COMPLETES | ("'" in twice) * _CHANGES


def _may_end(stop: str, text: str) -> bool:
    """True if a text contains a stop string, or begins with the end of one."""
    return stop in text or any(stop.endswith(text[:length]) for length in range(1, min(len(text), len(stop)) + 1))


@functools.lru_cache(maxsize=8)
def stop_strings(tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...]) -> StopStrings:
    """Return the stop strings of a tokenizer. Objects are cached, with the flags that they have computed."""
    return StopStrings(stops, tokenizer.decode)
