"""Tokenises conversations, with a loss mask on exactly what the assistant generates.

If the chat template marks generated text (`{% generation %}`), its marks are used. Otherwise each assistant turn
follows the prompt that generation would give to the model, so that training and rollouts use the same tokens: templates
drop earlier reasoning, end the last turn differently, or open a thinking block. Turns share a row as long as each
prompt extends the text so far; otherwise the next turn begins a new row.

An assistant turn ends with its end-of-turn token: the first special token that the template writes after the turn's
text. If there is none (GLM-4), it is the token that opens the next turn.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import REASONING_KEYS, Message, Tools, is_learned
from hybrid_rlhf.data.chat.template import SYSTEM_TURN, ChatTemplate, leading_bos, render, token_ids

RULES_VERSION = 8
"""Part of the cache key of tokenised rows; increase it when tokenisation changes."""
_OPEN = "<think>"
_CLOSE = "</think>"
_THINKING_MARK = re.compile(f"{_OPEN}|{_CLOSE}")
_Spans = list[tuple[int, int]]
"""Character ranges of a text that the assistant generates."""


@dataclass(frozen=True)
class EncodedSequence:
    """Token ids, and which of them carry loss."""

    input_ids: list[int]
    loss_mask: list[bool]


def encode_conversation(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None, learn_from: int = 0
) -> list[EncodedSequence]:
    """Encode a conversation as one row, or as several where the template renders earlier turns differently.

    Args:
        messages: the turns.
        tokenizer: its chat template renders them.
        tools: JSON schemas of the functions that the assistant may call.
        learn_from: turns before this index carry no loss; nor do assistant turns of weight 0.

    Raises:
        UserError: if the template rejects the messages.
    """
    template = ChatTemplate.of(tokenizer, tools)
    learned = [turn >= learn_from and is_learned(message) for turn, message in enumerate(messages)]
    if template is not None and template.marks_generation:
        rows = [_marked(messages, template, tools, learned)]
    else:
        rows = _rows(messages, tokenizer, tools, learned)
    return [_encode(text, spans, tokenizer) for text, spans in rows]


def encode_completion(
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
) -> EncodedSequence:
    """Encode a prompt and its completion as one row; if the completion's turns need several rows, the last.

    Raises:
        UserError: if the template rejects the messages.
    """
    return encode_conversation([*prompt, *completion], tokenizer, tools=tools, learn_from=len(prompt))[-1]


def completion_parts(
    prompt: Sequence[Message], completion: Message, tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None
) -> tuple[str, str]:
    """The text of the prompt as generation receives it, and that of the completion to the end of the row.

    Raises:
        UserError: if the template rejects the messages.
    """
    before, generated, _ = _turn([*prompt, completion], len(prompt), tokenizer, tools)
    return before, generated


def turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, list[int]] | None:
    """The end-of-turn token of the last assistant turn, and the tokens that follow it in the template, often a newline.

    None if the template has no such token, or cannot render one user turn and one assistant turn, with or without a
    system prompt.
    """
    turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        (encoded,) = encode_conversation(turns, tokenizer)
    except UserError:
        try:
            (encoded,) = encode_conversation([SYSTEM_TURN, *turns], tokenizer)
        except UserError:
            return None
    template = ChatTemplate.of(tokenizer)
    token = tokenizer.eos_token if template is None else template.end_token
    end = None if token is None else tokenizer.convert_tokens_to_ids(token)
    ends = [i for i, has_loss in enumerate(encoded.loss_mask) if has_loss and encoded.input_ids[i] == end]
    if not ends:
        return None
    return encoded.input_ids[ends[-1]], encoded.input_ids[ends[-1] + 1 :]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | list[int] | None) -> tuple[int, ...]:
    """All tokens that end a completion: EOS, those of the model's generation config, the template's end-of-turn
    token."""
    ids = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    end = turn_end(tokenizer)
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *ids, *([] if end is None else [end[0]])]))


def encode_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None
) -> list[int]:
    """Encode a conversation up to the beginning of the next assistant turn."""
    return token_ids(render(messages, tokenizer, tools=tools, add_generation_prompt=True), tokenizer)


def head_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None) -> int:
    """The number of tokens before the text of the first user turn: BOS, system prompt, tools, the turn's header; 0 if
    the first turn after the system prompt is not a user turn."""
    first = next((turn for turn, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    if first == len(messages) or messages[first]["role"] != "user":
        return 0
    texts = [
        render([*messages[:first], {"role": "user", "content": content}], tokenizer, tools=tools)
        for content in ("q7asked", "w8said")
    ]
    head = os.path.commonprefix([*texts, render(messages, tokenizer, tools=tools)])
    return len(token_ids(head, tokenizer))


def completion_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a completion's tokens, without special tokens.

    Without a chat template, the space after the role name is not part of the text.
    """
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    return text if tokenizer.chat_template is not None else text.removeprefix(" ")


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, *, context: str = "") -> EncodedSequence:
    """Encode plain text and EOS with loss on all tokens, after a context and BOS (if the tokenizer adds it) without."""
    before = leading_bos(context or text, tokenizer, plain=True)
    before += tokenizer(context, add_special_tokens=False)["input_ids"] if context else []
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)]
    return EncodedSequence(before + ids, [False] * len(before) + [True] * len(ids))


def _marked(
    messages: Sequence[Message], template: ChatTemplate, tools: Tools | None, learned: Sequence[bool]
) -> tuple[str, _Spans]:
    """The text of a conversation and the marks of its learned turns.

    Marks are assigned to turns by counting those of the conversation up to each turn: the text of a turn may depend on
    the turns that follow.
    """
    text, spans = template.generated(messages, tools)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    learned_spans: _Spans = []
    first = 0
    for number, turn in enumerate(turns, start=1):
        end = number == len(turns)
        if not end and learned[turn] == learned[turns[number]]:
            continue  # the next turn decides about the marks of both
        last = len(spans) if end else len(template.generated(messages[: turns[number]], tools)[1])
        learned_spans += spans[first:last] if learned[turn] else []
        first = last
    return text, learned_spans


def _rows(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Tools | None, learned: Sequence[bool]
) -> list[tuple[str, _Spans]]:
    """Each learned turn after its own prompt; turns whose prompt extends the text so far share a row.

    Text after the last span of a row belongs to that row only. An assistant turn at the beginning of a conversation is
    learned if the template can render a prompt for it.
    """
    rows: list[tuple[str, _Spans]] = []
    for turn, has_loss in enumerate(learned):
        if not has_loss:
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
    """The prompt of an assistant turn, the text from there to the end of the row, and how much of it is generated."""
    message = messages[turn]
    history = messages[:turn]
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
    text_end = _text_end(generated, template.turn_suffix, str(message.get("content", "")).strip(), template.special)
    if (end_token := template.special.search(generated, text_end)) is not None:
        return before, generated, end_token.end()
    next_role = "tool" if "tool_calls" in message else "user"
    generated += template.turn_opening(messages[turn + 1]["role"] if turn + 1 < len(messages) else next_role)
    return before, generated, len(generated)


def _text_end(generated: str, suffix: str | None, content: str, special: re.Pattern[str]) -> int:
    """Position at which the text of an assistant turn ends: before the template's suffix, or the last special token.

    Tool calls may have another suffix than text, and a template may change the text.
    """
    if suffix is not None and generated.endswith(suffix):
        return len(generated) - len(suffix)
    last = max((match.start() for match in special.finditer(generated)), default=-1)
    for limit in (last, len(generated)):
        if content and limit >= 0 and (start := generated.rfind(content, 0, limit)) >= 0:
            return start + len(content)
    return len(generated) if last < 0 else last


def _as_prompted(
    before: str, through: str, history: str, message: Message, special: re.Pattern[str]
) -> tuple[str, str]:
    """Prompt and generated text if the template renders an assistant turn differently after a generation prompt.

    The generation prompt may open a thinking block that the rendered turn lacks, or close one that it has. The
    generated text is then the message's reasoning with the end of the block and the content, or the content alone.
    """
    shared = len(os.path.commonprefix([before, through]))
    marks = [match for pattern in (special, _THINKING_MARK) for match in pattern.finditer(through)]
    shared = min([shared, *(match.start() for match in marks if match.start() < shared < match.end())])
    opening = before[len(os.path.commonprefix([history, before])) :]
    content = str(message.get("content", ""))
    thinking, closed, answer = content.rpartition(_CLOSE)
    reasoning = next((str(message[key]) for key in REASONING_KEYS if key in message), thinking.rpartition(_OPEN)[2])
    answer = (answer if closed else content).strip()
    start = through.rfind(answer, shared) if answer else -1
    if start >= 0:
        rest = through[start:]
    elif _CLOSE in through[shared:]:
        rest = through[shared:].rpartition(_CLOSE)[2].lstrip()
    elif _OPEN in opening:
        rest = through[shared:]
    else:  # the content does not appear in the rendered text: learn the turn as rendered
        return through[:shared], through[shared:]
    if opening.rfind(_OPEN) > opening.rfind(_CLOSE):
        rest = f"{reasoning.strip()}\n{_CLOSE}\n\n{rest}"
    return before, rest


def _encode(text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> EncodedSequence:
    """Tokenise a text once; tokens that end inside a span carry loss.

    A byte-level token may include the space before a span.
    """
    if not tokenizer.is_fast:
        return _encode_in_parts(text, spans, tokenizer)
    encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, stops = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=bool)
    for begin, end in spans:
        mask |= (stops > begin) & (starts < end) & (starts != stops)
    bos = leading_bos(text, tokenizer)
    return EncodedSequence([*bos, *encoding["input_ids"]], [False] * len(bos) + mask.tolist())


def _encode_in_parts(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> EncodedSequence:
    """Tokenise the pieces of a text inside and outside of spans separately, for tokenizers without offsets."""
    ids = leading_bos(text, tokenizer)
    mask = [False] * len(ids)
    position = 0
    for begin, end in [*spans, (len(text), len(text))]:
        for piece, has_loss in ((text[position:begin], False), (text[begin:end], True)):
            tokens = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += tokens
            mask += [has_loss] * len(tokens)
        position = end
    return EncodedSequence(ids, mask)
