"""Single tokens as text and bytes, as a token may be a part of a character; and the length of the longest token."""

from __future__ import annotations

import functools
import re
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_INCOMPLETE = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token for a byte in SentencePiece's vocabularies."""


_LETTERS: dict[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The byte that each letter of byte-level BPE stands for (GPT-2)."""


class TokenText:
    """Texts of the tokens of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # some tokenizers write a space only after another token
        self._before: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._shown = self._decode(self._before)
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """The text of a token within a text."""
        return self._of(token)[0]

    def content(self, token: int) -> bytes:
        """The bytes of a token; the bytes of a part of a character are not text."""
        return self._of(token)[1]

    def label(self, token: int) -> str:
        """The text of a token; for a part of a character its bytes, as in OpenAI's completions."""
        text, content = self._of(token)
        if _INCOMPLETE not in text or content == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _of(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            whole = self._decode([*self._before, token])
            text = whole[len(self._shown) :] if whole.startswith(self._shown) else self._decode([token])
            self._known[token] = text, text.encode() if _INCOMPLETE not in text else self._bytes(token, text)
        return self._known[token]

    def _bytes(self, token: int, text: str) -> bytes:
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        if all(letter in _LETTERS for letter in piece):
            return bytes(_LETTERS[letter] for letter in piece)
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of characters of the longest token, by which a text's length divided is a lower bound of its tokens."""
    return max(map(len, tokenizer.get_vocab()))


def characters(value: Any) -> int:
    """Number of characters of all texts in a JSON value."""
    count = 0
    waiting = [value]
    while waiting:  # without recursion, as a client may nest values arbitrarily deep
        item = waiting.pop()
        if isinstance(item, dict):
            count += sum(map(len, item))
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str):
            count += len(item)
    return count
