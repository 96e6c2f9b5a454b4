"""Stop strings are found where decoding the end of the completion for every token finds them, and almost without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.generation.batching.stop_strings import StopStrings

PIECES = ["a", "b", "ab", "User", ":", "\n", "\n\n", ".", ",", "'", "s", "t", "n", "n't", "'s", "x", "é", "日", "#"]
SPACED = ["a", "b", "User", ".", "'", "'s", "n't", "x", "日", " "]
STOPS = [("\nUser:",), (" a", "b."), ("x'",), ("日本", "é"), ("aba",), ("x ", "a  b"), ("don",), ("User",)]


def decoder_of(kind: str, *, cleans: bool) -> PreTrainedTokenizerFast:
    """A vocabulary of pieces, with and without a space in front, and of bytes, that decodes as a kind of tokenizer."""
    if kind == "byte-level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        given = [*alphabet, *("".join(part for part, _ in encode(piece)) for piece in [*PIECES, "e日", "\u672cb"])]
        given += ["".join(part for part, _ in encode(" " + piece)) for piece in SPACED]
        given += [encode("日")[0][0][:2], encode("日")[0][0][2:] + "a"]
        found = decoders.ByteLevel()
    elif kind == "wordpiece":
        given, found = [*PIECES, *("##" + piece for piece in PIECES)], decoders.WordPiece(cleanup=cleans)
    elif kind == "word ends":
        given, found = [*PIECES, *(piece + "</w>" for piece in PIECES)], decoders.BPEDecoder(suffix="</w>")
    else:
        given = [
            *PIECES,
            *("▁" + piece.replace(" ", "▁") for piece in SPACED),
            "▁",
            *(f"<0x{n:02X}>" for n in range(256)),
        ]
        strip = [decoders.Strip(" ", 1, 0)] if kind == "one space stripped" else []
        found = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(given))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.decoder = found
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=cleans)


def ends(decode: Callable[[Sequence[int]], str], stops: Sequence[str], ids: Sequence[int]) -> bool:
    """Whether the last token completes a stop string, by decoding."""
    tail = ids[-4 * (1 + max(map(len, stops))) :]
    text, before = decode(tail), decode(tail[:-1])
    return any(text.count(stop) > before.count(stop) for stop in stops)


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("kind", ["byte-level", "one space stripped", "no space stripped", "wordpiece", "word ends"])
def test_no_stop_string_is_missed(kind: str, cleans: bool) -> None:
    """Parts of characters, spaces that decoders drop or move, and text that a later token changes."""
    tokenizer, draws = decoder_of(kind, cleans=cleans), random.Random(0)
    decode, found = tokenizer.decode, 0
    for stops in STOPS:
        strings, near = StopStrings(stops, decode), {*"".join(stops), "'", " "}
        likely = [token for token in range(len(tokenizer)) if near & {*decode([token, token])}]
        for _ in range(4):
            ids = draws.choices(likely, k=40) if draws.random() < 0.8 else draws.choices(range(len(tokenizer)), k=40)
            for length in range(1, len(ids) + 1):
                expected = ends(decode, stops, ids[:length])
                assert strings.end(ids[:length]) == expected, (stops, decode(ids[:length]))
                found += expected
    assert found


def test_tokens_that_complete_nothing_are_not_decoded() -> None:
    """Decoding took 14 to 38 us for every token of every completion with stop strings."""
    tokenizer, decoded = decoder_of("byte-level", cleans=False), []
    strings = StopStrings(("\nUser:", "</answer>"), lambda ids: decoded.append(ids) or tokenizer.decode(ids))
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in ("a", "b", "User", "x", "n")] * 50
    assert not any(strings.end(ids[:length]) for length in range(1, len(ids) + 1))
    assert len(decoded) <= 2 * 5, "each distinct token alone and twice, and no text"
