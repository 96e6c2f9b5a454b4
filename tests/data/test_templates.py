"""What is learned of a conversation under the chat templates of model families."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.data.chat.conversation import (
    completion_text,
    encode_completion,
    encode_conversation,
    encode_prompt,
    encode_text,
    head_tokens,
    stop_token_ids,
    turn_end,
)
from hybrid_rlhf.data.chat.messages import Message, read_message, row_tools
from hybrid_rlhf.data.chat.reasoning import answer_of
from hybrid_rlhf.data.chat.template import set_plain_template
from hybrid_rlhf.data.chat.unrendered import refused, unrendered
from hybrid_rlhf.data.rows.formats import read_sft_row
from hybrid_rlhf.data.rows.stepwise import encode_steps
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from tests.data.rows import learned
from tests.support.errors import user_error
from tests.support.messages import assistant, user
from tests.support.published import KINDS, published_tokenizer
from tests.support.templates import FAMILIES, Family, tokenizer_of
from tests.support.tiny import CHATML, byte_tokenizer, tiny_tokenizer

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


@pytest.mark.parametrize("has_bos", [False, True])
def test_the_template_saved_for_a_model_without_one_writes_the_trained_tokens(has_bos: bool, tmp_path: Path) -> None:
    """And the library reads a tokenizer with it as it reads one without."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    if has_bos:
        tokenizer.bos_token = "<|im_start|>"
        tokens = [("<|im_start|>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=tokens)
    before = [encode_conversation(row, tokenizer) for row in (*ROWS.values(), [*CALLED, MORE, SECOND])]
    prompts = [encode_prompt(row[:1], tokenizer) for row in ROWS.values()]
    set_plain_template(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    saved = load_tokenizer(str(tmp_path))
    assert [encode_conversation(row, saved) for row in (*ROWS.values(), [*CALLED, MORE, SECOND])] == before
    assert completion_text(saved(" one")["input_ids"], saved).lstrip("\u2581") == "one"
    for row, (encoded, *_) in zip(ROWS.values(), before, strict=False):
        ids = saved.apply_chat_template(row, tokenize=True, return_dict=False)
        assert ids[: len(encoded.input_ids)] == encoded.input_ids and encoded.input_ids[0] == ids[0]
        assert saved.decode(ids).endswith("\n\n")
    for row, prompt in zip(ROWS.values(), prompts, strict=True):
        assert saved.apply_chat_template(row[:1], add_generation_prompt=True, return_dict=False) == prompt


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


def test_a_call_may_come_in_several_forms() -> None:
    forms: list[Any] = [
        CALL,
        {"name": "look", "arguments": {"at": "sky"}},
        {"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}, "id": None},
    ]
    for form in forms:
        (call,) = read_message("row", {"role": "assistant", "content": None, "tool_calls": [form]})["tool_calls"]
        assert {**call, "id": CALL["id"]} == CALL
    for wrong in (
        "look",
        {"function": "look"},
        {"name": "look", "arguments": "sky"},
        {"name": "look", "arguments": []},
    ):
        with user_error("tool call"):
            read_message("row", {"role": "assistant", "tool_calls": [wrong]})


def test_tools_are_a_list_or_its_json() -> None:
    for tools in ([LOOK], LOOK, json.dumps([LOOK]), json.dumps(LOOK), [json.dumps(LOOK)]):
        assert row_tools("row", {"tools": tools}) == [LOOK]
    assert row_tools("row", {}) is row_tools("row", {"tools": None}) is row_tools("row", {"tools": "[]"}) is None
    with user_error("tools must be a list"):
        row_tools("row", {"tools": "look"})
    with user_error("JSON schemas"):
        row_tools("row", {"tools": ["look"]})


def test_what_a_template_has_no_place_for_is_counted() -> None:
    messages = [SYSTEM, *ROWS["reasoning"], *CALLED]
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
    inline = {**ANSWER, "content": "<think>\nhm\n</think>\n\none"}
    dropping = tiny_tokenizer(
        CHATML.replace("message['content'] +", "message['content'].split('</think>')[-1].lstrip() +").replace(
            "assistant\n' }}", "assistant\n<think>\n\n</think>\n\n' }}"
        )
    )
    assert unrendered([USER, inline, MORE, ANSWER], dropping, None) == ["<think> in content (thinking is off)"]
    assert unrendered([USER, inline], tiny_tokenizer(), None) == []
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
@pytest.mark.parametrize("fast", [True, False])
def test_a_turn_of_the_prompt_or_of_weight_0_has_no_loss(
    family: Family, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under every template, the loss is that of the other turns, and the turn is still in the prompt of the next."""
    tokenizer = tokenizer_of(family)
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    answer = encode_completion([USER, ANSWER, MORE], [SECOND], tokenizer)
    (weighted,) = encode_conversation([USER, {**ANSWER, "weight": 0}, MORE, SECOND], tokenizer)
    for row in (answer, weighted):
        assert learned(row, tokenizer) == learned(answer, tokenizer)
        assert "two" in learned(row, tokenizer) and "one" not in learned(row, tokenizer)
        text = tokenizer.decode(row.input_ids)
        assert "one" in text and "weight" not in text
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
    text = encode_text("abc", tokenizer)
    assert text.input_ids == [*own, tokenizer.eos_token_id]
    assert text.loss_mask == [False] * adds + [True] * 4
    encoded = encode_text("abc", tokenizer, context="ctx")
    assert encoded.input_ids[: len(bos) + 3] == [*bos, *tokenizer("ctx", add_special_tokens=False)["input_ids"]]
    assert encode_text(f"{tokenizer.bos_token}abc", tokenizer).input_ids.count(tokenizer.bos_token_id) == 1, "never two"
    prompt = encode_prompt([USER], tokenizer)
    (row,) = encode_conversation([USER, ANSWER], tokenizer)
    for ids in (prompt, row.input_ids, encode_completion([USER], [ANSWER], tokenizer).input_ids):
        assert ids[: len(bos)] == bos and ids.count(tokenizer.bos_token_id) == adds
    assert row.input_ids[: len(prompt)] == prompt and learned(row, tokenizer) == " one<|im_end|>"


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["word", "\nword", "\n\nword", "  word"])
@pytest.mark.parametrize("template", [CHATML, FAMILIES["smollm3, marks of its own"].template, None])
def test_an_answer_does_not_join_its_prompt(kind: str, text: str, template: str | None) -> None:
    """The last line break of the prompt joined the answer's: training had other tokens than generation."""
    tokenizer = deepcopy(published_tokenizer("trl/qwen3", kind))
    tokenizer.chat_template = template
    end = "</s>" if template is None else "<|im_end|>"
    turns = [USER, assistant(text), MORE, assistant(text)]
    rows = [*encode_conversation(turns, tokenizer), encode_completion(turns[:3], turns[3:], tokenizer)]
    learned_turns = 0
    for row in rows:
        for start in range(1, len(row.loss_mask)):
            if row.loss_mask[start] and not row.loss_mask[start - 1]:
                learned_turns += 1
                prompts = [encode_prompt(turns[:turn], tokenizer) for turn in (1, 3)]
                assert row.input_ids[:start] in prompts
                stop = row.loss_mask.index(False, start) if False in row.loss_mask[start:] else len(row.loss_mask)
                said_ids = row.input_ids[start:stop]
                pieces = "".join(tokenizer.convert_ids_to_tokens(said_ids))
                shown = pieces.replace("\u010a", "\n").replace("\u0120", " ").replace("\u2581", " ")
                assert shown == (" " if template is None else "") + text + end
                if kind == "bytes":
                    assert said_ids == tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert learned_turns == 3, "each turn once, and the last again as a completion"
    if template in (CHATML, None):
        steps = encode_steps([USER], f"{text}\n\nend", tokenizer, "\n\nend")
        assert steps.input_ids[: steps.first] == encode_prompt([USER], tokenizer)


@pytest.mark.parametrize(
    "template", [CHATML, None, FAMILIES["qwen3"].template, CHATML.replace("['content']", "['content'] | trim")]
)
def test_a_prompt_that_ends_with_the_assistant_is_continued(template: str | None) -> None:
    """Its turn was closed and another one opened."""
    tokenizer = tiny_tokenizer(template)
    begun = assistant("end it ")
    prompt = encode_prompt([USER, begun], tokenizer)
    rest = " now"
    assert tokenizer.decode(prompt).endswith(("end it ", "end it"))
    more = [] if template == FAMILIES["qwen3"].template else [MORE, SECOND]
    row = encode_completion([USER, begun], [assistant(rest), *more], tokenizer)
    assert row.input_ids[: len(prompt)] == prompt and not any(row.loss_mask[: len(prompt)])
    assert learned(row, tokenizer).split("<")[0].strip() == "now"
    (row,) = encode_conversation([USER, begun, assistant(rest)], tokenizer, continued=1)
    whole = encode_conversation([USER, assistant("end it  now")], tokenizer)[0]
    assert tokenizer.decode(row.input_ids) == tokenizer.decode(whole.input_ids)
    assert row.input_ids[: len(prompt)] == prompt and not any(row.loss_mask[: len(prompt)])
    read = read_sft_row("f:1", {"prompt": [USER, begun], "completion": rest})
    assert read.continued == 1 and read.messages == [USER, begun, assistant(rest)]
    for turns, following in (
        ([USER, {"role": "assistant", "tool_calls": [CALL]}], ANSWER),
        ([USER, begun], {**ANSWER, "reasoning": "x"}),
    ):
        with user_error("can only continue the text"):
            encode_completion(turns, [following], tokenizer)
    with user_error("must have content .* no tool calls"):
        encode_prompt([USER, {"role": "assistant", "tool_calls": [CALL]}], tokenizer)


HARMONY = """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>functions to=assistant<|message|>' + m.content + '<|end|>' }}
{%- elif m.tool_calls %}
{%- set later = namespace(final=false) %}
{%- for n in messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}{% set later.final = true %}{% endif %}{% endfor %}
{%- if not later.final and (m.content or m.thinking) %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|channel|>commentary<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""  # noqa: E501


def test_every_part_of_a_turn_of_gpt_oss_is_learned() -> None:
    """After a call with reasoning, the last turn lost its channel and reasoning; text beside a call took its loss."""
    special = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"]
    tokenizer = byte_tokenizer(["</s>", *special], HARMONY, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    call: Message = {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "blue"}
    final = {**assistant("seen"), "thinking": "so"}
    called = '<|start|>assistant to=look<|channel|>commentary<|message|>{"at": "sky"}<|call|>'
    last = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>seen<|return|>"
    for first, thought in (({**call, "thinking": "t"}, "t"), ({**call, "content": "beside"}, "beside")):
        turns = [USER, first, result, first, result, final]
        part = f"<|channel|>analysis<|message|>{thought}<|end|>{called}"
        rows = encode_conversation(turns, tokenizer)
        assert [learned(row, tokenizer) for row in rows] == [part + part + last]
        assert learned(encode_completion(turns[:5], turns[5:], tokenizer), tokenizer) == last
        assert rows[0].input_ids[: len(encode_prompt(turns[:5], tokenizer))] == encode_prompt(turns[:5], tokenizer)
    assert unrendered([USER, {**call, "tool_calls": [CALL, CALL]}], tokenizer, None) == ["tool_calls (after the first)"]
    shown = CHATML.replace(
        "message['content']", "(message.tool_calls[0].function | tojson if message.tool_calls else message.content)"
    )
    assert unrendered([{**call, "content": "beside"}], tiny_tokenizer(shown), None) == ["content (beside tool_calls)"]
    assert refused("tool_calls (after the first)") and refused("content (beside tool_calls)")


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
def test_a_prompt_may_open_reasoning_in_any_marks(marks: tuple[str, str]) -> None:
    """In others than <think>, the answer was learned within the open block, without the reasoning and its end."""
    opened, closed = marks
    template = (
        CHATML.replace("message['content'] +", f"message['content'].split('{closed}')[-1] +")
        + f"{{% if add_generation_prompt %}}{opened}\n{{% endif %}}"
    )
    tokenizer = tiny_tokenizer(template)
    for reasoning in ("because", ""):
        thought = {"reasoning_content": reasoning} if reasoning else {}
        (row,) = encode_conversation([USER, {**ANSWER, **thought}], tokenizer)
        assert learned(row, tokenizer) == f"{reasoning}\n{closed}\n\none<|im_end|>"


def test_marks_of_reasoning_are_part_of_the_text_of_a_completion() -> None:
    """Marks that are special tokens were left out, so that drafts were judged as the answer."""
    template = CHATML.replace(
        "'\n' + ", "'\n' + ('[THINK]' + message.thinking + '[/THINK]' if message.thinking else '') + "
    )
    tokenizer = byte_tokenizer(
        ["</s>", "<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]"], template, eos_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]"]})
    ids = tokenizer("[THINK]19[/THINK]9 \u00e9<|im_end|></s>", add_special_tokens=False)["input_ids"]
    assert completion_text(ids, tokenizer) == "[THINK]19[/THINK]9 \u00e9"
    tokenizer.chat_template = CHATML
    assert completion_text(ids, tokenizer) == "199 \u00e9", "this template has no such marks"
    for mark in ("</think>", "</seed:think>", "[/THINK]", "\u25c1/think\u25b7"):
        assert answer_of(f"a {mark} b{mark}\nc") == "\nc"
    assert answer_of("a <think> b") == "a <think> b"
