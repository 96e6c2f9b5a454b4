"""What is learned of a conversation under the chat templates of model families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.data.chat.conversation import (
    EncodedSequence,
    encode_completion,
    encode_conversation,
    encode_prompt,
    encode_text,
    head_tokens,
    stop_token_ids,
    turn_end,
)
from hybrid_rlhf.data.chat.messages import Message, read_message, row_tools
from hybrid_rlhf.data.chat.template import refused, unrendered
from tests.support.errors import user_error
from tests.support.messages import assistant, user
from tests.support.templates import FAMILIES, Family, tokenizer_of
from tests.support.tiny import CHATML, tiny_tokenizer

USER, ANSWER = user("ask"), assistant("one")
MORE, SECOND = user("more"), assistant("two")
SYSTEM = {"role": "system", "content": "be kind"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
CALLED: list[Message] = [
    USER,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": "blue"},
    assistant("seen"),
]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "where"}}},
    },
}
ROWS: dict[str, list[Message]] = {
    "single": [USER, ANSWER],
    "multi": [USER, ANSWER, MORE, SECOND],
    "system": [SYSTEM, USER, ANSWER],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "because"}, MORE, {**SECOND, "reasoning_content": "hence"}],
    "tool": CALLED,
}
FAMILY = pytest.mark.parametrize("family", [pytest.param(family, id=name) for name, family in FAMILIES.items()])


def learned(row: EncodedSequence, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode([token for token, loss in zip(row.input_ids, row.loss_mask, strict=True) if loss])


@FAMILY
@pytest.mark.parametrize("kind", ROWS)
def test_what_is_learned_under_a_family_s_template(family: Family, kind: str) -> None:
    tokenizer, messages = tokenizer_of(family), ROWS[kind]
    tools = [LOOK] if kind == "tool" else None
    rows = encode_conversation(messages, tokenizer, tools=tools)
    assert [learned(row, tokenizer) for row in rows] == getattr(family, "single" if kind == "system" else kind)
    for message in messages:
        if message["role"] != "assistant":
            shown = [tokenizer.decode(row.input_ids) for row in rows]
            assert any(message["content"] in text for text in shown), "nothing of a row is dropped"


@FAMILY
def test_an_answer_stands_behind_the_prompt_of_its_generation(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    if "{% generation %}" in str(family.template):
        pytest.skip("its own marks are taken, on the conversation as a whole")
    for messages in (ROWS["single"], ROWS["multi"], ROWS["system"], ROWS["reasoning"]):
        answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        rows = encode_conversation(messages, tokenizer)
        prompts = [encode_prompt(messages[:turn], tokenizer) for turn in answers]
        begins = [
            (row.input_ids[:place])
            for row in rows
            for place in range(1, len(row.input_ids))
            if row.loss_mask[place] and not row.loss_mask[place - 1]
        ]
        assert begins == prompts


@FAMILY
def test_the_end_of_a_turn_is_what_the_template_puts_behind_an_answer(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    end = turn_end(tokenizer)
    if family.end is None:
        assert end is None
        return
    assert end is not None and tokenizer.convert_ids_to_tokens(end[0]) == family.end
    assert end[0] in stop_token_ids(tokenizer, None)
    (row,) = encode_conversation(ROWS["single"], tokenizer)
    assert row.input_ids[len(row.input_ids) - len(end[1]) - 1 :] == [end[0], *end[1]]


@FAMILY
@pytest.mark.parametrize("fast", [True, False])
def test_an_answer_is_one_row_with_the_loss_on_its_own_turns(
    family: Family, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(family)
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    row = encode_completion([USER, ANSWER, MORE], [SECOND], tokenizer)
    assert "two" in learned(row, tokenizer) and "one" not in learned(row, tokenizer)
    assert "one" in tokenizer.decode(row.input_ids)


def test_a_call_may_come_in_several_forms() -> None:
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    forms: list[Any] = [
        CALL,
        {"name": "look", "arguments": {"at": "sky"}},
        {"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}, "id": None},
    ]
    texts = set()
    for form in forms:
        message = read_message("row", {"role": "assistant", "content": None, "tool_calls": [form]})
        texts.add(learned(encode_conversation([USER, message], tokenizer)[0], tokenizer))
    assert texts == {'<call>{"name": "look", "arguments": {"at": "sky"}}</call><|im_end|>'}
    for wrong in (
        "look",
        {"function": "look"},
        {"name": "look", "arguments": "sky"},
        {"name": "look", "arguments": []},
    ):
        with user_error("tool call"):
            read_message("row", {"role": "assistant", "tool_calls": [wrong]})


def test_tools_are_a_list_or_its_json() -> None:
    assert row_tools("row", {"tools": [LOOK]}) == row_tools("row", {"tools": json.dumps([LOOK])}) == [LOOK]
    assert row_tools("row", {}) is row_tools("row", {"tools": None}) is row_tools("row", {"tools": "[]"}) is None
    with user_error("tools must be a list"):
        row_tools("row", {"tools": "look"})
    with user_error("JSON schemas"):
        row_tools("row", {"tools": ["look"]})


def test_text_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "sk"}]
    assert read_message("row", {"role": "user", "content": parts})["content"] == "ask"
    with user_error("must be text or a list of"):
        read_message("row", {"role": "user", "content": [{"type": "image", "image": "x.png"}]})


def test_what_a_template_has_no_place_for_is_counted() -> None:
    messages = [SYSTEM, *ROWS["reasoning"], *CALLED[1:]]
    found = {
        name: unrendered(messages, tokenizer_of(FAMILIES[name]), [LOOK])
        for name in ("qwen3", "llama 3", "gemma 2, no system, turns that alternate", "qwen3 without thinking")
    }
    assert found["qwen3"] == ["name", "tool_call_id"]
    assert sorted(found["llama 3"]) == [
        "name",
        "reasoning_content",
        "reasoning_content",
        "tool_call_id",
        "tool_calls",
        "tools",
    ]
    assert {"role system", "role tool"} < set(found["gemma 2, no system, turns that alternate"])
    closed = found["qwen3 without thinking"].count("reasoning_content (thinking is off)")
    assert closed == 2, "the prompt has closed its thoughts"
    assert [name for names in found.values() for name in names if refused(name)] == ["reasoning_content"] * 4
    assert "tool_calls" in unrendered(messages, tiny_tokenizer(None), None)
    empty: list[Message] = [{**USER, "channel": "", "annotations": []}, {**ANSWER, "weight": 0}]
    assert unrendered(empty, tiny_tokenizer(), None) == []
    assert unrendered([{**ANSWER, "final": False, "score": 0}], tiny_tokenizer(), None) == ["final", "score"]


def test_a_template_may_refuse_a_conversation_without_a_system_prompt() -> None:
    """The search for unrendered keys rendered a single user turn, which this template rejects, so every row failed."""
    refusal = "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    tokenizer = tiny_tokenizer(refusal + CHATML)
    assert unrendered([SYSTEM, USER, {**ANSWER, "refusal": "hm"}], tokenizer, None) == ["refusal"]
    (row,) = encode_conversation([SYSTEM, USER, ANSWER, MORE, SECOND], tokenizer)
    assert learned(row, tokenizer) == "one<|im_end|>two<|im_end|>"
    assert turn_end(tokenizer) == turn_end(tiny_tokenizer(CHATML))


@FAMILY
def test_a_turn_of_weight_0_has_no_loss(family: Family) -> None:
    """Under every template, the loss is that of the other turns, and the turn is still in the prompt of the next."""
    tokenizer = tokenizer_of(family)
    last = [learned(row, tokenizer) for row in encode_conversation(ROWS["multi"], tokenizer, learn_from=2)]
    rows = encode_conversation([USER, {**ANSWER, "weight": 0}, MORE, SECOND], tokenizer)
    assert [learned(row, tokenizer) for row in rows] == last and len(last) == 1 and "two" in last[0]
    assert "one" in tokenizer.decode(rows[0].input_ids) and "weight" not in tokenizer.decode(rows[0].input_ids)
    rows = encode_conversation([USER, ANSWER, MORE, {**SECOND, "weight": 0}], tokenizer)
    text = "".join(learned(row, tokenizer) for row in rows)
    assert "one" in text and "two" not in text


def test_without_a_template_calls_are_learned_as_json() -> None:
    tokenizer = tiny_tokenizer(None)
    (row,) = encode_conversation(CALLED, tokenizer)
    call = ' {"name": "look", "arguments": {"at": "sky"}}<|im_end|>'
    assert learned(row, tokenizer) == f"{call} seen<|im_end|>"
    text = f"Human: ask\n\nAssistant:{call}\n\nTool: blue\n\nAssistant: seen<|im_end|>\n\n"
    assert tokenizer.decode(row.input_ids) == text
    assert turn_end(tokenizer) == (tokenizer.eos_token_id, tokenizer("\n\n")["input_ids"])


def test_a_greeting_is_learned_where_it_can_be_prompted_for() -> None:
    greeted = [assistant("hello"), USER, ANSWER]
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    assert [learned(row, tokenizer) for row in encode_conversation(greeted, tokenizer)] == [
        "hello<|im_end|>one<|im_end|>"
    ]
    tokenizer = tokenizer_of(FAMILIES["qwen2.5, a system prompt of its own"])  # reads messages[0]
    assert [learned(row, tokenizer) for row in encode_conversation(greeted, tokenizer)][-1].endswith("one<|im_end|>")


def with_bos(adds: bool, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(template)
    if adds:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer


@pytest.mark.parametrize("adds", [True, False])
def test_plain_text_begins_with_bos_where_the_tokenizer_adds_one(adds: bool) -> None:
    tokenizer = with_bos(adds, None)
    bos = [tokenizer.bos_token_id] * adds
    own = tokenizer("abc")["input_ids"]
    assert own[: len(bos)] == bos and (own[0] == tokenizer.bos_token_id) == adds
    text = encode_text("abc", tokenizer)
    assert text.input_ids == [*own, tokenizer.eos_token_id]
    assert text.loss_mask == [False] * adds + [True] * 4
    encoded = encode_text("abc", tokenizer, context="ctx")
    assert encoded.input_ids[: len(bos) + 3] == [*bos, *tokenizer("ctx", add_special_tokens=False)["input_ids"]]
    assert encode_text(f"{tokenizer.bos_token}abc", tokenizer).input_ids.count(tokenizer.bos_token_id) == 1, "never two"
    prompt = encode_prompt([USER], tokenizer)
    (row,) = encode_conversation([USER, ANSWER], tokenizer)
    for ids in (prompt, row.input_ids, encode_completion([USER], [ANSWER], tokenizer).input_ids):
        assert ids[:1] == (bos or ids[:1]) and ids.count(tokenizer.bos_token_id) == adds
    assert row.input_ids[: len(prompt)] == prompt and len(row.input_ids) == len(row.loss_mask)
    assert learned(row, tokenizer) == " one<|im_end|>"


def test_a_template_writes_bos_itself_or_not_at_all() -> None:
    for template, count in ((CHATML, 0), ("{{ bos_token }}" + CHATML.replace("<|im_start|>", "<|endoftext|>"), 1)):
        tokenizer = with_bos(True, template.replace("<|im_start|>", "<|endoftext|>"))
        assert encode_prompt([USER], tokenizer).count(tokenizer.bos_token_id) == count
        assert encode_text("abc", tokenizer).input_ids[0] == tokenizer.bos_token_id, (
            "text is plain, whatever the template"
        )


def test_the_head_of_a_conversation_ends_where_its_first_user_speaks() -> None:
    heads = {
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n": tiny_tokenizer(),
        "<|im_start|>System: be kind\n\nHuman: ": with_bos(True, None),
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe kind<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n": tokenizer_of(FAMILIES["llama 3"]),
    }
    for head, tokenizer in heads.items():
        messages = [SYSTEM, USER, ANSWER, MORE]
        ids = encode_prompt(messages, tokenizer)
        assert tokenizer.decode(ids[: head_tokens(messages, tokenizer)]) == head
    assert head_tokens([ANSWER, USER], tiny_tokenizer()) == 0
