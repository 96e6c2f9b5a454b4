"""Conversations to token ids, with a mask that puts the loss on assistant tokens and their end-of-turn token.

The tokenizer's own chat template is used where there is one; without one, turns are `Human:` and `Assistant:`
paragraphs, as in DeepSpeed-Chat, and an answer ends with eos. Assistant spans are found by rendering the conversation
turn by turn, which needs no marks in the template; a template for which that cannot work is refused.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.rows import Message

# Part of the cache key of tokenised rows: change it when the rules here change.
RULES_VERSION = 3
_PLAIN_NAMES = {"system": "System", "user": "Human", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, whether it carries loss."""

    input_ids: list[int]
    loss_mask: list[bool]


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
        spans.append((len(before), len(through)))
    return _encode(text, spans, tokenizer)


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


def _encode(text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Tokenise once; tokens that begin inside a span carry loss, up to its first special token.

    A byte-level token may reach back over the space before a span; it counts as the span's if it ends inside.
    """
    if not tokenizer.is_fast:
        return _encode_in_parts(text, spans, tokenizer)
    encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    special = set(tokenizer.all_special_ids)
    mask = [False] * len(ids)
    for begin, end in spans:
        for index, (start, stop) in enumerate(offsets):
            if stop <= begin or start >= end or start == stop:
                continue
            mask[index] = True
            if ids[index] in special and start >= begin:
                break  # the end of the turn; what the template adds after it is not the assistant's
    return Encoded(ids, mask)


def _encode_in_parts(text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """For tokenizers without offsets: the text is cut at the spans' edges and each piece tokenised alone."""
    special = set(tokenizer.all_special_ids)
    ids: list[int] = []
    mask: list[bool] = []
    place = 0
    for begin, end in [*spans, (len(text), len(text))]:
        outside = _ids(text[place:begin], tokenizer) if begin > place else []
        inside = _ids(text[begin:end], tokenizer) if end > begin else []
        stop = next((i + 1 for i, token in enumerate(inside) if token in special), len(inside))
        ids += outside + inside
        mask += [False] * len(outside) + [True] * stop + [False] * (len(inside) - stop)
        place = end
    return Encoded(ids, mask)
