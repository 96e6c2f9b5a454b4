"""Conversations to token ids, with a mask that puts the loss on assistant tokens and their end-of-turn token.

The tokenizer's own chat template is used where there is one; without one, turns are `Human:` and `Assistant:`
paragraphs, as in DeepSpeed-Chat, and an answer ends with eos. Assistant spans are found by rendering the conversation
turn by turn, which needs no marks in the template; a template for which that cannot work is refused.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.rows import Message

# Part of the cache key of tokenised rows: change it when the rules here change.
RULES_VERSION = 4
_PLAIN_NAMES = {"system": "System", "user": "Human", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, whether it carries loss."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class _Span:
    """Where in a text an assistant's turn is; the end-of-turn token begins at `said` or after it."""

    begin: int
    said: int
    end: int


def encode_conversation(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, learn_from: int = 0
) -> Encoded:
    """A whole conversation; loss on what the assistant says, its end-of-turn token included, and on nothing else.

    Args:
        messages: the turns.
        tokenizer: whose template renders them.
        learn_from: turns before this one carry no loss.

    Raises:
        UserError: for a template that renders a conversation differently once it goes on.
    """
    text = render(messages, tokenizer)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < learn_from:
            continue
        before = render(messages[:turn], tokenizer, add_generation_prompt=True)
        through = render(messages[: turn + 1], tokenizer)
        if not text.startswith(through) or not through.startswith(before):
            start = len(os.path.commonprefix([before, text]))
            raise UserError(
                f"the chat template renders a turn anew once the next is there, at {text[start : start + 20]!r}: "
                "give the tokenizer a template whose text only grows"
            )
        spans.append(_span(text, len(before), len(through), message["content"].strip(), tokenizer))
    return _encode(text, spans, tokenizer)


def _span(text: str, begin: int, end: int, content: str, tokenizer: PreTrainedTokenizerBase) -> _Span:
    """A turn. Its last special token ends it, unless the content has that too; a template may change the content."""
    last = max((text.rfind(token, begin, end) for token in tokenizer.all_special_tokens), default=-1)
    for limit in (last, end):
        if limit >= 0 and (place := text.rfind(content, begin, limit)) >= 0:
            return _Span(begin, place + len(content), end)
    return _Span(begin, end if last < 0 else last, end)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, list[int]] | None:
    """The end-of-turn token of a conversation's last answer, and what the template has after it: often a line break.

    None for a template whose answers have no such token, or that does not show a question and its answer.
    """
    try:
        encoded = encode_conversation(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer
        )
    except UserError:
        return None
    own = [place for place, learned in enumerate(encoded.loss_mask) if learned]
    if not own or encoded.input_ids[own[-1]] not in tokenizer.all_special_ids:
        return None
    return encoded.input_ids[own[-1]], encoded.input_ids[own[-1] + 1 :]


def encode_prompt(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A conversation up to where the assistant speaks next."""
    return _ids(render(messages, tokenizer, add_generation_prompt=True), tokenizer)


def answer_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """What an assistant said in the tokens behind its prompt, without special tokens.

    A plain turn has a space between name and text, which is no part of the text.
    """
    said = str(tokenizer.decode(ids, skip_special_tokens=True))
    return said if tokenizer.chat_template is not None else said.removeprefix(" ")


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, *, context: str = "") -> Encoded:
    """Plain text and eos, loss on all of it but not on a context before it."""
    before = _ids(context, tokenizer) if context else []
    ids = [*_ids(text, tokenizer), int(tokenizer.eos_token_id)]
    return Encoded(before + ids, [False] * len(before) + [True] * len(ids))


def render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool = False
) -> str:
    """A conversation as text, special tokens spelt out."""
    if not messages and not add_generation_prompt:
        return ""
    if tokenizer.chat_template is None:
        return _render_plain(messages, tokenizer, add_generation_prompt)
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template does not compile (line {error.lineno}: {error.message}): mend it beside the tokenizer"
        ) from error
    except Exception as error:  # noqa: BLE001 - templates raise jinja's errors and whatever they like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"the chat template refuses the roles {[m['role'] for m in messages]} ({reason}): reorder the turns"
        ) from error


def _render_plain(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool) -> str:
    parts = []
    for message in messages:
        end = tokenizer.eos_token if message["role"] == "assistant" else ""
        parts.append(f"{_PLAIN_NAMES[message['role']]}: {message['content']}{end}\n\n")
    return "".join(parts) + (f"{_PLAIN_NAMES['assistant']}:" if add_generation_prompt else "")


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode(text: str, spans: Sequence[_Span], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Tokenise once; tokens that begin inside a span carry loss, up to the first special token behind what was said.

    What was said may have special tokens of its own, as a reasoner's `<think>`. A byte-level token may reach back over
    the space before a span; it counts as the span's if it ends inside.
    """
    if not tokenizer.is_fast:
        return _encode_in_parts(text, spans, tokenizer)
    encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    special = set(tokenizer.all_special_ids)
    mask = [False] * len(ids)
    for span in spans:
        for index, (start, stop) in enumerate(offsets):
            if stop <= span.begin or start >= span.end or start == stop:
                continue
            mask[index] = True
            if ids[index] in special and start >= span.said:
                break  # the end of the turn; what the template adds after it is not the assistant's
    return Encoded(ids, mask)


def _encode_in_parts(text: str, spans: Sequence[_Span], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """For tokenizers without offsets: the text is cut at the spans' edges and each piece tokenised alone."""
    special = set(tokenizer.all_special_ids)
    ids: list[int] = []
    mask: list[bool] = []
    place = 0
    for span in [*spans, _Span(len(text), len(text), len(text))]:
        edges = (place, span.begin, span.said, span.end)
        outside, said, behind = (
            _ids(text[start:end], tokenizer) if end > start else [] for start, end in pairwise(edges)
        )
        stop = next((i + 1 for i, token in enumerate(behind) if token in special), len(behind))
        ids += outside + said + behind
        mask += [False] * len(outside) + [True] * (len(said) + stop) + [False] * (len(behind) - stop)
        place = span.end
    return Encoded(ids, mask)
