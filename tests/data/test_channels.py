"""Completions of gpt-oss: reasoning and answer are messages in channels, whose headers are special tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybrid_rlhf.data.chat.calls import ToolCall, read_reply, shown_so_far
from hybrid_rlhf.data.chat.conversation import completion_text, encode_conversation, encode_prompt
from hybrid_rlhf.data.chat.reasoning import answer_of, text_decoder
from hybrid_rlhf.data.chat.template import ChatTemplate, render
from hybrid_rlhf.serving.text_stream import ReasoningSplit
from tests.data.rows import learned
from tests.support.messages import assistant, user
from tests.support.templates import FAMILIES, tokenizer_of

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALLED = '<|channel|>commentary json<|message|>{"at": "sky"}'
TOKENIZER = tokenizer_of(FAMILIES["gpt-oss, channels, another end in history"])


@pytest.mark.parametrize(
    ("said", "reasoning", "answer"),
    [
        (f"{ANALYSIS}19{NEXT}{FINAL}9", "19", "9"),
        (f"{FINAL}9", "", "9"),
        (f"{ANALYSIS}1{NEXT}{ANALYSIS}9{NEXT}{FINAL}9 é", "19", "9 é"),
        (f"{ANALYSIS}19", "19", ""),
        (f"{ANALYSIS}19{NEXT} to=functions.look{CALLED}", "19", f" to=functions.look{CALLED}"),
    ],
)
def test_the_channels_of_a_completion_are_its_reasoning_and_its_answer(said: str, reasoning: str, answer: str) -> None:
    """Their headers were left out: rewards, verifiers and clients read "analysis19assistantfinal9"."""
    ids = TOKENIZER(f"{said}<|return|>", add_special_tokens=False)["input_ids"]
    assert completion_text(ids, TOKENIZER) == text_decoder(TOKENIZER)(ids) == said
    if FINAL in said:
        assert answer_of(said) == answer
    template = ChatTemplate.of(TOKENIZER)
    assert template is not None and template.thinking_marks == (ANALYSIS, NEXT)
    for size in (1, 5, len(said)):
        split = ReasoningSplit(*template.thinking_marks, is_open=False, header=FINAL)
        found = [split.add(said[place : place + size], ends=False) for place in range(0, len(said), size)]
        thought, rest = map("".join, zip(*found, split.add("", ends=True), strict=True))
        assert (thought, rest.strip()) == (reasoning, answer.strip())


def test_the_text_of_a_completion_is_a_turn_of_the_conversation() -> None:
    """A second turn of a chat, and rows of sampled texts: the template of gpt-oss refuses the marks in a content."""
    said = f"{ANALYSIS}so{NEXT}{FINAL}seen"
    apart = {**assistant("seen"), "thinking": "so"}
    for later in ([], [user("and?"), assistant("two")]):
        whole, parts = ([user("q"), turn, *later] for turn in (assistant(said), apart))
        assert render(whole, TOKENIZER) == render(parts, TOKENIZER)
        assert encode_conversation(whole, TOKENIZER) == encode_conversation(parts, TOKENIZER)
    (row,) = encode_conversation([user("q"), assistant(said)], TOKENIZER)
    assert learned(row, TOKENIZER) == f"{said}<|return|>", "as it was sampled"
    assert row.input_ids[: row.loss_mask.index(True)] == encode_prompt([user("q")], TOKENIZER)
    for text in (f"see {FINAL}", f"{FINAL}a{NEXT}{FINAL}b", ANALYSIS):
        assert text in render([user(text), assistant(text)], TOKENIZER), "no text of a completion"


@pytest.mark.parametrize(
    "text", [f" to=functions.look{CALLED}", '<|channel|>commentary to=functions.look json<|message|>{"at": "sky"}']
)
def test_calls_in_the_channel_of_commentary_are_read(text: str) -> None:
    call = ToolCall("look", {"at": "sky"})
    assert read_reply(text, {"look"}).calls == [call] and shown_so_far(text, {"look"}) == 0
    assert read_reply(text.replace("look", "else"), {"look"}).content == text.replace("look", "else")
    given: dict[str, Any] = {"name": "look", "arguments": {"at": "sky"}}
    rendered = render([user("q"), {"role": "assistant", "tool_calls": [{"function": given}]}], TOKENIZER)
    written = rendered.rpartition("<|start|>assistant")[2].removesuffix("<|call|>")
    assert read_reply(written, {"look"}).calls == [call], json.dumps(written)
