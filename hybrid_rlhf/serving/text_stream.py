"""The text of a completion while it is sampled.

A piece ends at a character boundary and shows no part of a stop string. Only the tokens since the last piece and those
of the piece before it are decoded again, since some tokenizers write a space only between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from hybrid_rlhf.data.chat.calls import ToolCall, read_reply, shown_so_far

if TYPE_CHECKING:  # it imports torch, which the board does without
    from hybrid_rlhf.generation.sampling import FinishReason

_INCOMPLETE = "\ufffd"
"""What decoding writes for the bytes of a character that has not ended."""


class TextStream:
    """Turns tokens into pieces of text."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), *, drops_space: bool = False
    ) -> None:
        """Begin.

        Args:
            decode: text of tokens.
            stop: strings that end the text and are not part of it.
            drops_space: whether a space at the beginning is not part of it.
        """
        self._decode, self._stop, self._drops_space = decode, tuple(stop), drops_space
        self._tokens: list[int] = []
        """Those of the last piece, and those after it."""
        self._shown = 0
        """How many of these are in pieces."""
        self._held = ""
        """Text that may be the beginning of a stop string."""

    def add(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> str:
        """The text that further tokens complete; the rest of the text with the last one, which comes alone."""
        self._tokens += tokens
        before, through = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        if finish_reason is None and (len(through) <= len(before) or through.endswith(_INCOMPLETE)):
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        text = through[len(before) :]
        if self._drops_space and text:
            text, self._drops_space = text.removeprefix(" "), False
        text = self._held + text
        end = len(text) - self._possible_stop(text)
        if finish_reason is not None:
            places = [text.find(stop) for stop in self._stop if finish_reason == "stop"]
            end = min((place for place in places if place >= 0), default=len(text))
        self._held = text[end:]
        return text[:end]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of a text with which a stop string begins."""
        longest = max(map(len, self._stop), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((size for size in lengths if any(stop.startswith(text[-size:]) for stop in self._stop)), 0)


class ReplyStream:
    """Text and tool calls of a completion while it is sampled: what may be part of a call waits for the end."""

    def __init__(self, text: TextStream, names: Collection[str]) -> None:
        """Args: the text of the tokens, and the functions that may be called."""
        self._text, self._names = text, names
        self._whole, self._shown = "", 0

    def add(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> tuple[str, Sequence[ToolCall]]:
        """What further tokens complete; the rest of the text, and the calls, with the last one, which comes alone."""
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
