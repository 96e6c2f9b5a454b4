"""Text of a completion, piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.generation.sampling import FinishReason
from hybrid_rlhf.serving.text_stream import ReplyStream, TextStream
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def pieces(text: str, finish: FinishReason, stop: tuple[str, ...] = ()) -> list[str]:
    ids, stream = TOKENIZER(text)["input_ids"], TextStream(decode, stop)
    return [stream.add([token], finish if place == len(ids) - 1 else None) for place, token in enumerate(ids)]


def at_once(text: str, finish: FinishReason, stop: tuple[str, ...] = ()) -> str:
    """As an answer that is not streamed has it."""
    ids, stream = TOKENIZER(text)["input_ids"], TextStream(decode, stop)
    return stream.add(ids[:-1], None) + stream.add(ids[-1:], finish)


@settings(deadline=None)
@given(st.text(alphabet="ab é€😀\n", min_size=1, max_size=30))
def test_pieces_are_the_text_and_end_at_characters(text: str) -> None:
    found = pieces(text, "length")
    assert "".join(found) == text == at_once(text, "length")
    assert not any("\ufffd" in piece for piece in found)


@settings(deadline=None)
@given(
    st.text(alphabet="abc€", max_size=12),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_part_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    """A completion ends with the token that completes its first stop string."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    sampled = text[: min(ends)] if ends else text
    if sampled:
        found = pieces(sampled, "stop" if ends else "length", tuple(stops))
        cut = min((sampled.find(stop) for stop in stops if stop in sampled), default=len(sampled))
        assert "".join(found) == sampled[:cut]
        assert at_once(sampled, "stop" if ends else "length", tuple(stops)) == sampled[:cut]


def test_bytes_that_are_no_character_are_shown_at_the_end() -> None:
    stream, ids = TextStream(decode), TOKENIZER("€")["input_ids"]
    assert [stream.add(ids[:1], None), stream.add(ids[1:2], "length")] == ["", "\ufffd"]


CUT = [
    ('Hm.\n<tool_call>\n{"name": "f", "arg', "Hm.", 0),
    ("Hm.\n<tool_ca", "Hm.", 0),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call', "", 1),
    ("Hm. \n", "Hm. \n", 0),
]


@pytest.mark.parametrize(("text", "shown", "calls"), CUT)
def test_a_call_that_is_cut_is_no_text(text: str, shown: str, calls: int) -> None:
    """Clients showed its tag to people. Text that the model has ended itself stays as it is."""
    reasons: list[FinishReason] = ["length", "stop"]
    for reason in reasons:
        stream, ids = ReplyStream(TextStream(decode), {"f"}), TOKENIZER(text)["input_ids"]
        found = [stream.add([token], reason if place == len(ids) - 1 else None) for place, token in enumerate(ids)]
        said = "".join(piece.text for piece in found)
        assert said == shown if reason == "length" else text.endswith(said)
        assert [call.name for piece in found for call in piece.calls] == ["f"] * calls
