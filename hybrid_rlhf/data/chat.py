"""Conversations to token ids, with a mask that puts the loss on what the assistant generates and nothing else.

Where the chat template marks what is generated (`{% generation %}`), its marks are taken. Otherwise each answer is put
behind the prompt that generation would give the model, so that training and rollouts see the same tokens: templates
drop earlier reasoning, end the last turn otherwise, or open one for thinking. Turns stay in one row as long as the text
only grows; where it does not, the next turn begins a row of its own.

An answer ends with its end-of-turn token: the first special token that the template puts behind the text of an answer,
or, of a template that puts none there (GLM-4), the one that opens the next turn.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.messages import REASONING_KEYS, Message, Tools
from hybrid_rlhf.data.template import ChatTemplate, leading_bos, render, token_ids

# Part of the cache key of tokenised rows: change it when the rules here change.
RULES_VERSION = 5
_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(f"{_OPEN}|{_CLOSE}")
_Spans = list[tuple[int, int]]
"""Where in a text the assistant speaks."""


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, whether it carries loss."""

    input_ids: list[int]
    loss_mask: list[bool]


def encode_conversation(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None, learn_from: int = 0
) -> list[Encoded]:
    """A conversation as one row, or as one a turn from where the template renders what was before anew.

    Args:
        messages: the turns.
        tokenizer: whose template renders them.
        tools: JSON schemas of the functions that the assistant may call.
        learn_from: turns before this one carry no loss.

    Raises:
        UserError: when the template refuses the messages.
    """
    template = ChatTemplate.of(tokenizer, tools)
    if template is not None and template.marks_generation:
        text, spans = template.generated(messages, tools)
        before = render(messages[:learn_from], tokenizer, tools=tools, add_generation_prompt=True) if learn_from else ""
        shared = len(os.path.commonprefix([before, text]))
        rows = [(text, [span for span in spans if span[0] >= shared])]
    else:
        rows = _rows(messages, tokenizer, tools, learn_from)
    return [_encode(text, spans, tokenizer) for text, spans in rows]


def encode_answer(
    prompt: Sequence[Message], answer: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *,
    tools: Tools | None = None,
) -> Encoded:  # fmt: skip
    """A prompt and its answer as one row; of an answer whose turns need several, the last.

    Raises:
        UserError: when the template refuses the messages.
    """
    return encode_conversation([*prompt, *answer], tokenizer, tools=tools, learn_from=len(prompt))[-1]


def answer_parts(
    prompt: Sequence[Message], answer: Message, tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None
) -> tuple[str, str]:
    """The text that generation begins from, and what it would then have to say for an answer, to the end of the row.

    Raises:
        UserError: when the template refuses the messages.
    """
    before, generated, _ = _turn([*prompt, answer], len(prompt), tokenizer, tools)
    return before, generated


def turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, list[int]] | None:
    """The end-of-turn token of a conversation's last answer, and what the template has after it: often a line break.

    None for a template whose answers have no such token, or that does not show a question and its answer.
    """
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        (encoded,) = encode_conversation(turns, tokenizer)
    except UserError:
        return None
    template = ChatTemplate.of(tokenizer)
    token = tokenizer.eos_token if template is None else template.end_token
    end = None if token is None else tokenizer.convert_tokens_to_ids(token)
    own = [place for place, learned in enumerate(encoded.loss_mask) if learned and encoded.input_ids[place] == end]
    if not own:
        return None
    return encoded.input_ids[own[-1]], encoded.input_ids[own[-1] + 1 :]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | list[int] | None) -> tuple[int, ...]:
    """Every token that ends a completion: eos, those of the model's generation config, the template's end of turn."""
    ids = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    end = turn_end(tokenizer)
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *ids, *([] if end is None else [end[0]])]))


def encode_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None
) -> list[int]:
    """A conversation up to where the assistant speaks next."""
    return token_ids(render(messages, tokenizer, tools=tools, add_generation_prompt=True), tokenizer)


def head_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None) -> int:
    """How many tokens come before the first user's text: BOS, system prompt, tools, the turn's header; 0 where the
    first turn behind the system's is another's."""
    first = next((place for place, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    if first == len(messages) or messages[first]["role"] != "user":
        return 0
    texts = [
        render([*messages[:first], {"role": "user", "content": content}], tokenizer, tools=tools)
        for content in ("q7asked", "w8said")
    ]
    head = os.path.commonprefix([*texts, render(messages, tokenizer, tools=tools)])
    return len(token_ids(head, tokenizer))


def answer_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """What an assistant said in the tokens behind its prompt, without special tokens.

    A plain turn has a space between name and text, which is no part of the text.
    """
    said = str(tokenizer.decode(ids, skip_special_tokens=True))
    return said if tokenizer.chat_template is not None else said.removeprefix(" ")


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, *, context: str = "") -> Encoded:
    """Plain text and eos, loss on all of it but not on a context before it, or BOS, where the tokenizer adds it."""
    before = leading_bos(context or text, tokenizer, plain=True)
    before += tokenizer(context, add_special_tokens=False)["input_ids"] if context else []
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)]
    return Encoded(before + ids, [False] * len(before) + [True] * len(ids))


def _rows(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Tools | None, learn_from: int
) -> list[tuple[str, _Spans]]:
    """Each answer behind its own prompt, those that grow from one another in one row.

    What follows the last span of a row is a part of that row and of no later turn.
    A greeting, which answers nothing, is learned where the template can prompt for it.
    """
    rows: list[tuple[str, _Spans]] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < learn_from:
            continue
        try:
            before, generated, stop = _turn(messages, turn, tokenizer, tools)
        except UserError:
            if turn == 0 and len(messages) > 1:
                continue
            raise
        spans = [(len(before), len(before) + stop)]
        if rows:
            text, earlier = rows[-1]
            if before.startswith(text[: earlier[-1][1]]):
                spans = earlier + spans
                rows.pop()
        rows.append((before + generated, spans))
    return rows


def _turn(
    messages: Sequence[Message], turn: int, tokenizer: PreTrainedTokenizerBase, tools: Tools | None
) -> tuple[str, str, int]:
    """The prompt of an answer, the answer to the end of the row, and how much of it is the assistant's."""
    message, history = messages[turn], messages[:turn]
    before = render(history, tokenizer, tools=tools, add_generation_prompt=True)
    through = render(messages[: turn + 1], tokenizer, tools=tools)
    template = ChatTemplate.of(tokenizer, tools)
    if template is None:
        generated = through[len(before) :]
        return before, generated, len(generated.removesuffix("\n\n"))
    if through.startswith(before):
        generated = through[len(before) :]
    else:
        before, generated = _as_prompted(
            before, through, render(history, tokenizer, tools=tools), message, template.special
        )
    said = _said(generated, template.answer_end, str(message.get("content", "")).strip(), template.special)
    if (found := template.special.search(generated, said)) is not None:
        return before, generated, found.end()
    answering = "tool" if "tool_calls" in message else "user"
    generated += template.opening(messages[turn + 1]["role"] if turn + 1 < len(messages) else answering)
    return before, generated, len(generated)


def _said(generated: str, end: str | None, content: str, special: re.Pattern[str]) -> int:
    """Where the text of an answer ends: before what the template puts behind it, or its last special token.

    A call of tools may end otherwise than a text, and a template may change the text.
    """
    if end is not None and generated.endswith(end):
        return len(generated) - len(end)
    last = max((found.start() for found in special.finditer(generated)), default=-1)
    for limit in (last, len(generated)):
        if content and limit >= 0 and (place := generated.rfind(content, 0, limit)) >= 0:
            return place + len(content)
    return len(generated) if last < 0 else last


def _as_prompted(
    before: str, through: str, history: str, message: Message, special: re.Pattern[str]
) -> tuple[str, str]:
    """Prompt and answer where the template shows an answer otherwise than it prompts for it.

    The prompt may open a block of thoughts that the answer is shown without, or close one that the answer is shown
    with. What is generated then is the message's own reasoning and the end of the block, or the answer alone.
    """
    shared = len(os.path.commonprefix([before, through]))
    marks = [found for pattern in (special, _THOUGHT) for found in pattern.finditer(through)]
    shared = min([shared, *(found.start() for found in marks if found.start() < shared < found.end())])
    opening = before[len(os.path.commonprefix([history, before])) :]
    content = str(message.get("content", ""))
    thought, closed, answer = content.rpartition(_CLOSE)
    reasoning = next((str(message[key]) for key in REASONING_KEYS if key in message), thought.rpartition(_OPEN)[2])
    answer = (answer if closed else content).strip()
    place = through.rfind(answer, shared) if answer else -1
    if place >= 0:
        rest = through[place:]
    elif _CLOSE in through[shared:]:
        rest = through[shared:].rpartition(_CLOSE)[2].lstrip()
    elif _OPEN in opening:
        rest = through[shared:]
    else:  # nothing of the answer is found again: it is learned as it is shown
        return through[:shared], through[shared:]
    if opening.rfind(_OPEN) > opening.rfind(_CLOSE):
        rest = f"{reasoning.strip()}\n{_CLOSE}\n\n{rest}"
    return before, rest


def _encode(text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Tokenise once; tokens that begin inside a span carry loss.

    A byte-level token may reach back over the space before a span; it counts as the span's if it ends inside.
    """
    if not tokenizer.is_fast:
        return _encode_in_parts(text, spans, tokenizer)
    encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [False] * len(encoding["input_ids"])
    for begin, end in spans:
        for index, (start, stop) in enumerate(encoding["offset_mapping"]):
            if stop > begin and start < end and start != stop:
                mask[index] = True
    bos = leading_bos(text, tokenizer)
    return Encoded([*bos, *encoding["input_ids"]], [False] * len(bos) + mask)


def _encode_in_parts(text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """For tokenizers without offsets: the text is cut at the spans' edges and each piece tokenised alone."""
    ids = leading_bos(text, tokenizer)
    mask = [False] * len(ids)
    place = 0
    for begin, end in [*spans, (len(text), len(text))]:
        for piece, own in ((text[place:begin], False), (text[begin:end], True)):
            tokens = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += tokens
            mask += [own] * len(tokens)
        place = end
    return Encoded(ids, mask)
