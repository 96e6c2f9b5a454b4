"""The text of a completion while it is sampled.

A piece ends at a character boundary and contains no part of a stop string. Only the tokens since the last piece and
those of the piece before it are decoded again, since some tokenizers write a space only between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybrid_rlhf.data.chat.calls import ToolCall, before_tag, read_reply, shown_so_far

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
        end = len(text) - _possible_beginning(text, self._stop)
        if finish_reason is not None:
            places = [text.find(stop) for stop in self._stop if finish_reason == "stop"]
            end = min((place for place in places if place >= 0), default=len(text))
        self._held = text[end:]
        return text[:end]


class ReasoningSplit:
    """Divides the text of a completion into its reasoning and the rest, at the marks of the template."""

    def __init__(self, opening: str, closing: str, *, is_open: bool, header: str = "") -> None:
        """Begin a text.

        Args:
            opening: text that opens the reasoning, at the beginning of the completion.
            closing: text that closes it.
            is_open: the prompt has opened the reasoning.
            header: text before the answer, which is no part of it; more reasoning may precede it.
        """
        self._opening = opening
        self._closing = closing
        self._header = header
        self._is_undecided = not is_open
        self._is_open = is_open
        self._skips_space = is_open
        """True at the beginning of the reasoning, and after it."""
        self._held = ""

    def add(self, piece: str, *, ends: bool) -> tuple[str, str]:
        """Reasoning and other text that a further piece completes; `ends`: it is the last one."""
        self._held += piece
        reasoning = ""
        while True:
            if self._is_undecided:
                begun = self._held.lstrip()
                marks = [mark for mark in (self._opening, self._header) if mark]
                if not ends and any(mark != begun and mark.startswith(begun) for mark in marks):
                    return reasoning, ""
                self._is_undecided = False
                self._is_open = begun.startswith(self._opening)
                self._skips_space |= self._is_open
                if self._is_open:
                    self._held = begun[len(self._opening) :]
                elif self._header and begun.startswith(self._header):
                    self._held = begun[len(self._header) :]
            if self._is_open:
                before, closing, after = self._held.partition(self._closing)
                held = 0 if closing or ends else _possible_beginning(before, (self._closing,))
                reasoning += self._without_space(before[: len(before) - held])
                self._held = after if closing else before[len(before) - held :]
                if not closing:
                    return reasoning, ""
                self._is_open = False
                self._skips_space = True
                self._is_undecided = bool(self._header)
                continue
            text = self._without_space(self._held)
            self._held = ""
            return reasoning, text

    def _without_space(self, text: str) -> str:
        """A text, without the white space at the beginning of a part."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text


def _possible_beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of a text that is a prefix of a mark, but not all of it."""
    longest = max(map(len, marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((size for size in lengths if any(mark.startswith(text[-size:]) for mark in marks)), 0)


class ReplyPiece(NamedTuple):
    """A part of a completion."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()


class ReplyStream:
    """Text, reasoning and tool calls of a completion while it is sampled; text that may belong to a call is held until
    the end."""

    def __init__(
        self,
        text: TextStream,
        names: Collection[str],
        reasoning: ReasoningSplit | None = None,
        *,
        requires_call: bool = False,
    ) -> None:
        """Take the text of the tokens, the functions that may be called, and what divides off the reasoning;
        `requires_call`: text that is no whole call is the beginning of one, and is not shown."""
        self._text = text
        self._names = names
        self._requires_call = requires_call
        self._reasoning = reasoning
        self._whole = ""
        self._shown = 0

    def add(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> ReplyPiece:
        """What further tokens complete. The last token comes alone and returns the rest."""
        piece = self._text.add(tokens, finish_reason)
        reasoning = ""
        if self._reasoning is not None:
            reasoning, piece = self._reasoning.add(piece, ends=finish_reason is not None)
        if not self._names:
            return ReplyPiece(piece, reasoning)
        self._whole += piece
        before = self._shown
        if finish_reason is None:
            self._shown = max(before, shown_so_far(self._whole, self._names))
            return ReplyPiece(self._whole[before : self._shown], reasoning)
        reply = read_reply(self._whole, self._names)
        is_cut = finish_reason == "length"
        content = reply.content[: before_tag(reply.content) * (not self._requires_call) if is_cut else None]
        return ReplyPiece(content[before:], reasoning, reply.calls)
