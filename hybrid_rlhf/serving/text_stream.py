"""The text of a completion while it is sampled.

A piece ends at a character boundary and contains no part of a stop string. Only the tokens since the last piece and
those of the piece before it are decoded again, since some tokenizers write a space only between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from hybrid_rlhf.data.chat.calls import ToolCall, read_reply, shown_so_far

if TYPE_CHECKING:  # it imports torch, which the board does not need
    from hybrid_rlhf.generation.sampling import FinishReason

_INCOMPLETE = "\ufffd"
"""Replacement character that decoding writes for the bytes of an incomplete character."""


class TextStream:
    """Turns tokens into pieces of text."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), *, drops_space: bool = False
    ) -> None:
        """Begin an empty text.

        Args:
            decode: returns the text of tokens.
            stop: strings that end the text and are not part of it.
            drops_space: true to drop a space at the beginning of the text.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._drops_space = drops_space
        self._tokens: list[int] = []
        """Tokens of the last piece, and those after it."""
        self._shown = 0
        """Number of these tokens whose text has been returned."""
        self._held = ""
        """Text that may be the beginning of a stop string."""

    def add(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> str:
        """The text that further tokens complete. The last token comes alone and returns the rest of the text."""
        self._tokens += tokens
        before = self._decode(self._tokens[: self._shown])
        through = self._decode(self._tokens)
        if finish_reason is None and (len(through) <= len(before) or through.endswith(_INCOMPLETE)):
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        text = through[len(before) :]
        if self._drops_space and text:
            text = text.removeprefix(" ")
            self._drops_space = False
        text = self._held + text
        end = len(text) - self._possible_stop(text)
        if finish_reason is not None:
            places = [text.find(stop) for stop in self._stop if finish_reason == "stop"]
            end = min((place for place in places if place >= 0), default=len(text))
        self._held = text[end:]
        return text[:end]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest suffix of a text that is a prefix of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((size for size in lengths if any(stop.startswith(text[-size:]) for stop in self._stop)), 0)


class ReplyStream:
    """Text and tool calls of a completion while it is sampled; text that may belong to a call is held until the end."""

    def __init__(self, text: TextStream, names: Collection[str]) -> None:
        """Take the text of the tokens, and the functions that may be called."""
        self._text = text
        self._names = names
        self._whole = ""
        self._shown = 0

    def add(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> tuple[str, Sequence[ToolCall]]:
        """Text and calls that further tokens complete. The last token comes alone and returns the rest."""
        piece = self._text.add(tokens, finish_reason)
        if not self._names:
            return piece, ()
        self._whole += piece
        before = self._shown
        if finish_reason is None:
            self._shown = max(before, shown_so_far(self._whole, self._names))
            return self._whole[before : self._shown], ()
        reply = read_reply(self._whole, self._names)
        return reply.content[before:], reply.calls
