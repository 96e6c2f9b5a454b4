"""Conversations of any form under every chat template that an installed package publishes.

Nothing of a row is dropped, doubled or turned into other text in silence; its tokens are those of transformers' own
rendering; the loss is where the package `renderers` has it, which writes families' turns without their templates.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from renderers import Renderer, config_from_name, create_renderer
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import completion_text, encode_conversation
from hybrid_rlhf.data.chat.messages import REASONING_KEYS, Message, is_learned
from hybrid_rlhf.data.chat.reasoning import answer_of
from hybrid_rlhf.data.chat.template import ChatTemplate
from hybrid_rlhf.data.chat.unrendered import refused
from hybrid_rlhf.data.encoding import encode_labelled_row, encode_preference_row, encode_prompt_row, encode_sft_row
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import ConversationRow, read_sft_row
from tests.support.published import KINDS, WORD, conversations, published_templates, published_tokenizer

LIMIT = 1_000_000
LOST_REASONING = ("<think> in content", *REASONING_KEYS)


@dataclass(frozen=True)
class Encoded:
    """A row as training reads it."""

    record: ConversationRow
    rows: list[dict[str, Any]]
    tokenizer: PreTrainedTokenizerFast
    counted: list[str]

    def texts(self) -> list[str]:
        return [self.tokenizer.decode(columns["input_ids"]) for columns in self.rows]

    def learned(self) -> list[str]:
        pairs = [zip(columns["input_ids"], columns["loss_mask"], strict=True) for columns in self.rows]
        return [self.tokenizer.decode([token for token, loss in pair if loss]) for pair in pairs]


def encoded(row: Row, name: str, kind: str) -> Encoded:
    """Rejects the example if the row is refused."""
    tokenizer = published_tokenizer(name, kind)
    try:
        record = read_sft_row("f:1", row)
        rows = encode_sft_row("f:1", row, tokenizer, LIMIT)
    except UserError:
        rows = []
    counted = [part for columns in rows for part in json.loads(columns["ignored"])]
    assume(rows and not any(map(refused, counted)))
    return Encoded(record, rows, tokenizer, counted)


def words(value: Any) -> list[str]:
    return WORD.findall(json.dumps(value))


def check_conservation(name: str, kind: str, row: Row) -> None:
    found = encoded(row, name, kind)
    learned = Counter(word for text in found.learned() for word in WORD.findall(text))
    shown = [Counter(WORD.findall(text)) for text in found.texts()]
    is_excused = any(part.endswith(("answer)", "(no loss)")) for part in found.counted)
    drops_reasoning = any(part.startswith(LOST_REASONING) for part in found.counted)
    for message in row["messages"]:
        has_loss = message["role"] == "assistant" and message.get("weight") != 0
        for key in ("content", "tool_calls", *REASONING_KEYS):
            for place, word in enumerate(words(message.get(key))):
                is_reasoning = key in REASONING_KEYS or (place == 0 and "<think>" in str(message[key]))
                assert max(text[word] for text in shown) <= 1, f"{word} in {key} is doubled"
                if not (is_excused or (drops_reasoning and is_reasoning)):
                    assert any(word in text for text in shown), f"{word} in {key} is dropped"
                    assert learned[word] == has_loss, f"{word} in {key} is learned {learned[word]} times"


def check_tokens(name: str, kind: str, row: Row) -> None:
    """Each answer stands behind the tokens of transformers' generation prompt, and ends as transformers renders it; or
    the loss is where transformers finds a template's own marks."""
    found = encoded(row, name, kind)
    messages, tools, tokenizer = found.record.messages, found.record.tools, found.tokenizer
    assume("<think>" not in str(row) and not any(part.startswith(("role", "tool_calls")) for part in found.counted))
    turns = [{key: value for key, value in message.items() if key != "weight"} for message in messages]

    def rendered(end: int, **options: Any) -> Any:
        return tokenizer.apply_chat_template(turns[:end], tools=tools, **options)

    learned = [turn for turn, message in enumerate(messages) if turn and is_learned(message)]
    try:
        prompts = [rendered(turn, tokenize=False, add_generation_prompt=True) for turn in learned]
        throughs = [rendered(turn + 1, tokenize=False) for turn in learned]
        assume(all(word in throughs[-1] for turn in turns[: learned[-1]] for word in words(turn.get("content"))))
    except (TemplateError, TypeError):  # a form of content or of arguments that the template does not take as it is
        assume(False)
    template = ChatTemplate.of(tokenizer)
    if template is not None and template.marks_generation:
        assume(len(found.rows) == 1 and "weight" not in str(row))
        marked = rendered(learned[-1] + 1, return_assistant_tokens_mask=True, return_dict=True)
        mask = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
        # Without whitespace: transformers tokenises the whole, where the end of a prompt joins the answer.
        marked_text = tokenizer.decode([token for token, loss in mask if loss])
        assert "".join(found.learned()[0].split()) == "".join(marked_text.split())
        return
    for turn, prompt, through in zip(learned, prompts, throughs, strict=True):
        extends = through.startswith(prompt)
        if not extends and not prompt.rstrip().endswith(("<think>", "</think>", "<channel|>")):
            continue  # the template does not render the turn behind its own prompt (Gemma 4: text beside calls)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        own = [columns for columns in found.rows if columns["loss_mask"][len(ids) : len(ids) + 1] == [True]]
        own = [columns for columns in own if columns["input_ids"][: len(ids)] == ids]
        assert own, f"no row has turn {turn} behind its prompt {prompt!r}"
        if extends:
            end = [*own[0]["loss_mask"], False].index(False, len(ids))
            answer = tokenizer.decode(own[0]["input_ids"][len(ids) : end]).strip()
            shown = through[len(prompt) :].strip()
            # GLM ends a turn with the token that opens the next.
            assert shown.startswith(answer) or answer.removeprefix(shown).strip() in tokenizer.all_special_tokens


RENDERERS = {
    "trl/qwen3": "qwen3",
    "trl/qwen3_5_think": "qwen3.5",
    "trl/qwen3_6": "qwen3.6",
    "trl/qwen3_8": "qwen3.8",
    "trl/qwen3_vl": "qwen3-vl",
    "trl/gemma4": "gemma4",
    "trl/gemma4_v5": "gemma4",
    "trl/glm4moe": "glm-4.5",
    "trl/llama3_2": "llama-3",
    "trl/nemotron_3_nano": "nemotron-3",
    "trl/nemotron_3_ultra": "nemotron-3-ultra",
    "trl/nemotron_3_5_lightning": "nemotron-3.5",
}


@cache
def renderer_of(name: str) -> Renderer:
    return create_renderer(published_tokenizer(name, "bytes"), config_from_name(RENDERERS[name]))


def check_loss(name: str, kind: str, row: Row) -> None:
    """Of each turn, the text that the renderer of its family calls sampled."""
    found = encoded(row, name, "bytes")
    messages, tools, tokenizer = found.record.messages, found.record.tools, found.tokenizer
    assume("<think>" not in str(row) and not any(part.startswith(("role", *LOST_REASONING)) for part in found.counted))
    segments = []
    for columns in found.rows:
        mask = [False, *columns["loss_mask"], False]
        edges = [place for place in range(len(mask) - 1) if mask[place] != mask[place + 1]]
        runs = zip(edges[::2], edges[1::2], strict=True)
        segments += [tokenizer.decode(columns["input_ids"][begin:end]) for begin, end in runs]
    turns = [turn for turn, message in enumerate(messages) if turn and is_learned(message)]
    renderer = renderer_of(name)
    for turn, segment in zip(turns, segments, strict=True):
        try:
            rendered = renderer.render([_in_one_key(message) for message in messages[: turn + 1]], tools=tools)
        except ValueError:  # the renderer has no place for several system turns
            assume(False)
        pairs = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        sampled = tokenizer.decode([token for token, of, loss in pairs if of == turn and loss])
        assert _thoughtful(segment) == _thoughtful(sampled), f"turn {turn}: {segment!r} != {sampled!r}"


def _in_one_key(message: Message) -> Message:
    """With reasoning where renderers read it."""
    reasoning = [message[key] for key in REASONING_KEYS if key in message]
    return {"content": "", **message, **({"reasoning_content": reasoning[0]} if reasoning else {})}


def _thoughtful(text: str) -> str:
    """Without the opening of reasoning, which the prompt may have, an empty block, the end of GLM's turns and the line
    breaks between its calls, and with null as JSON has it."""
    text = re.sub(r"<\|(user|observation)\|>$", "", text.lstrip().removeprefix("<think>").lstrip())
    return re.sub(r">\s+<", "><", text.removeprefix("</think>").strip().replace(",None]", ",null]"))


def check_pairs(name: str, kind: str, row: Row) -> None:
    """Answers of pairs and of labelled rows stand behind the tokens of the prompt that a rollout has."""
    tokenizer = published_tokenizer(name, kind)
    messages = row["messages"]
    turn = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    answer = {key: value for key, value in messages[turn].items() if key != "weight"}
    shared = {"prompt": messages[:turn], **{key: row[key] for key in row if key == "tools"}}
    pair = {**shared, "chosen": [answer], "rejected": [{"role": "assistant", "content": "no"}]}
    try:
        (prompt,) = encode_prompt_row("f:1", shared, tokenizer, LIMIT)
        (chosen,) = encode_preference_row("f:1", pair, tokenizer, LIMIT)
        (labelled,) = encode_labelled_row("f:1", {**shared, "completion": [answer], "label": True}, tokenizer, LIMIT)
    except UserError:
        assume(False)
    template = ChatTemplate.of(tokenizer)
    assume(template is not None and not template.marks_generation)
    assume(not any(refused(part) for part in json.loads(chosen["ignored"])))
    ids = prompt["input_ids"]
    assert len(chosen["responses"]) == 2 and labelled["responses"] == chosen["responses"][:1]
    for response, mask in zip(chosen["responses"], chosen["masks"], strict=True):
        assert (response[: len(ids)], mask.index(True)) == (ids, len(ids)), tokenizer.decode(response)
        assert mask == labelled["masks"][0] or response is not chosen["responses"][0]


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.faults)])
@pytest.mark.parametrize(
    ("check", "names"),
    [
        (check_conservation, published_templates()),
        (check_tokens, published_templates()),
        (check_loss, RENDERERS),
        (check_pairs, published_templates()),
    ],
)
def test_nothing_of_a_row_is_lost(check: Callable[[str, str, Row], None], names: Collection[str], count: int) -> None:
    """Refused or counted, it may be."""
    # `make test` has the same examples each time, `make faults` others.
    is_fixed = count == 200
    usual = check is not check_conservation

    @settings(max_examples=count, derandomize=is_fixed, deadline=None, suppress_health_check=list(HealthCheck))
    @given(name=st.sampled_from(sorted(names)), kind=st.sampled_from(KINDS), row=conversations(usual=usual))
    def run(name: str, kind: str, row: Row) -> None:
        check(name, kind, row)

    run()


def test_the_answer_in_the_text_of_a_completion_is_its_content() -> None:
    """Whatever marks reasoning: rewards and verifiers would judge drafts."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "w1x", "reasoning_content": "w2x"}]
    found = {}
    for name in published_templates():
        tokenizer = published_tokenizer(name, "bytes")
        row = encode_conversation(turns, tokenizer)[-1]
        if "w2x" in tokenizer.decode(row.input_ids):
            learned = [token for token, loss in zip(row.input_ids, row.loss_mask, strict=True) if loss]
            found[name] = answer_of(completion_text(learned, tokenizer)).strip()
    assert len(found) > 20 and set(found.values()) == {"w1x"}, found


def test_packages_publish_templates() -> None:
    """Else these tests test nothing."""
    assert len(published_templates()) >= 70
