"""Tokenises conversations, with a loss mask on exactly what the assistant generates.

If the chat template marks generated text (`{% generation %}`), its marks are used. Otherwise each assistant turn
follows the prompt that generation would give to the model, so that training and rollouts use the same tokens: templates
drop earlier reasoning, end the last turn differently, or open a thinking block. The tokens of a row are those of the
generation prompt, then those of the answer, tokenised apart: whitespace at the beginning of an answer could join the
end of the prompt. Turns share a row as long as the tokens of each prompt extend those so far; otherwise the next turn
begins a new row.

A prompt that ends with an assistant turn is continued: it ends behind that turn's text, and an answer completes it.

An assistant turn ends with its end-of-turn token: the first special token that the template writes after the turn's
text. If there is none (GLM-4), it is the token that opens the next turn.
"""

from __future__ import annotations

import contextlib
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import REASONING_KEYS, Message, Tools, continued_turn, is_learned, split_reasoning
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.data.chat.template import (
    CLOSES_THINKING,
    SYSTEM_TURN,
    THINKING_MARK,
    ChatTemplate,
    is_plain,
    leading_bos,
    render,
    render_unfinished,
    token_ids,
)
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, RowImages
from hybrid_rlhf.runtime.observability.logs import shortened

RULES_VERSION = 13
"""Part of the cache key of tokenised rows; increase it when tokenisation changes."""
_EMPTY_BLOCK = re.compile(rf"\s*(?:{THINKING_MARK.pattern})?\s*(?:{CLOSES_THINKING.pattern})\s*")
Pieces = list[tuple[str, bool]]
"""A text in pieces, and which of them carry loss."""
_OTHER_ANSWER: Message = {"role": "assistant", "content": "q7otherq7"}
_ANCHORS = ("\n", ".", "a", "1")
"""Texts before an answer that keep a tokenizer from writing a space before it."""


@dataclass(frozen=True)
class EncodedSequence:
    """Token ids, and which of them carry loss."""

    input_ids: list[int]
    loss_mask: list[bool]
    images: int = 0
    """The number of the conversation's images that are in it, the first ones."""


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    learn_from: int = 0,
    continued: int | None = None,
    images: RowImages | None = None,
) -> list[EncodedSequence]:
    """Encode a conversation as one row, or as several where the template renders earlier turns differently.

    Args:
        messages: the turns.
        tokenizer: its chat template renders them.
        tools: JSON schemas of the functions that the assistant may call.
        learn_from: turns before this index carry no loss; nor do assistant turns of weight 0.
        continued: index of an assistant turn that the next turn continues; its own text carries no loss.
        images: those of the turns; None for a model that reads none.

    Raises:
        UserError: if the template rejects the messages.
    """
    parts = conversation_texts(messages, tokenizer, tools=tools, learn_from=learn_from, continued=continued)
    rows: list[EncodedSequence] = []
    for before, pieces in parts:
        count = 0
        if images is not None:
            texts = [before, *(text for text, _ in pieces)]
            count = sum(text.count(IMAGE_MARK) for text in texts)
            before, *said = images.expanded(texts)
            pieces = [(text, has_loss) for text, (_, has_loss) in zip(said, pieces, strict=True)]
        ids = token_ids(before, tokenizer)
        mask = [False] * len(ids)
        if rows:
            earlier = rows[-1].loss_mask
            end = len(earlier) - earlier[::-1].index(True) if True in earlier else 0
            if ids[:end] == rows[-1].input_ids[:end]:
                mask[:end] = earlier[:end]
                rows.pop()
        for piece, has_loss in pieces:
            tokens = continuation(before, piece, tokenizer)[0]
            ids = ids + tokens
            mask += [has_loss] * len(tokens)
            before += piece
        if images is not None:
            images.require_no_others(ids, count, tokenizer)
        rows.append(EncodedSequence(ids, mask, count))
    return rows


def conversation_texts(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None,
    learn_from: int,
    continued: int | None,
) -> Iterator[tuple[str, Pieces]]:
    """The text before each learned turn, and the text from there to the end of its row, in pieces with and without
    loss; see `encode_conversation`."""
    template = ChatTemplate.of(tokenizer, tools)
    learned = [turn >= learn_from and is_learned(message) for turn, message in enumerate(messages)]
    begun = {}
    if continued is not None:
        begun[continued] = messages[continued]
        joined = _joined(*messages[continued : continued + 2])
        messages = [*messages[:continued], joined, *messages[continued + 2 :]]
        del learned[continued]
    if template is not None and template.marks_generation:
        return _marked(messages, template, tokenizer, tools, learned, begun)
    return _turns(messages, tokenizer, tools, learned, begun)


def encode_completion(
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    images: RowImages | None = None,
) -> EncodedSequence:
    """The last of `completion_rows`, which has the whole conversation."""
    return completion_rows(prompt, completion, tokenizer, tools=tools, images=images)[-1]


def completion_rows(
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    images: RowImages | None = None,
) -> list[EncodedSequence]:
    """Encode a prompt and its completion, whose turns may need several rows; see `encode_conversation`.

    Raises:
        UserError: if the template rejects the messages.
    """
    continued = continued_turn(prompt, completion)
    return encode_conversation(
        [*prompt, *completion], tokenizer, tools=tools, learn_from=len(prompt), continued=continued, images=images
    )


def completion_parts(
    prompt: Sequence[Message], completion: Message, tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None = None
) -> tuple[str, str]:
    """The text of the prompt as generation receives it, and that of the completion to the end of the row.

    Raises:
        UserError: if the template rejects the messages.
    """
    if (continued := continued_turn(prompt, [completion])) is not None:
        turns = [*prompt[:-1], _joined(prompt[-1], completion)]
        return _turn(turns, continued, tokenizer, tools, prompt[-1])[:2]
    return _turn([*prompt, completion], len(prompt), tokenizer, tools)[:2]


def continuation(before: str, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text that follows another, tokenised apart, with their character ranges in the text.

    Tokenizers that write a space before a text do so only where the whole text has it. Without a fast tokenizer there
    are no ranges.
    """
    if not text:
        return [], []
    ids, ranges = _tokens(text, tokenizer)
    if "".join(map(str, tokenizer.convert_ids_to_tokens(_tokens("a", tokenizer)[0]))) in ("a", "b'a'"):
        return ids, ranges
    for head in (before, *_ANCHORS):
        alone = _tokens(head, tokenizer)[0]
        whole, places = _tokens(head + text, tokenizer)
        if whole[: len(alone)] == alone:
            places = [(max(a - len(head), 0), b - len(head)) for a, b in places[len(alone) :]]
            return whole[len(alone) :], places
    return ids, ranges


def turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, list[int]] | None:
    """The end-of-turn token of the last assistant turn, and the tokens that follow it in the template, often a newline.

    None if the template has no such token, or cannot render one user turn and one assistant turn, with or without a
    system prompt.
    """
    turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for conversation in (turns, [SYSTEM_TURN, *turns]):
        with contextlib.suppress(UserError):
            (encoded,) = encode_conversation(conversation, tokenizer)
            break
    else:
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
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    images: RowImages | None = None,
) -> list[int]:
    """Encode a conversation up to the beginning of the next assistant turn, or to the end of the text of the last turn
    if that is the assistant's."""
    text = prompt_text(messages, tokenizer, tools=tools)
    if images is None:
        return token_ids(text, tokenizer)
    ids = token_ids(images.expanded([text])[0], tokenizer)
    images.require_no_others(ids, len(images.references), tokenizer)
    return ids


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
    """The text of a completion's tokens; see `text_decoder`.

    Without a chat template, the space after the role name is not part of the text.
    """
    text = text_decoder(tokenizer)([int(token) for token in ids])
    return text.removeprefix(" ") if is_plain(tokenizer) else text


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, *, context: str = "") -> EncodedSequence:
    """Encode plain text and EOS with loss on all tokens, after a context and BOS (if the tokenizer adds it) without."""
    before = leading_bos(context or text, tokenizer, plain=True)
    before += _tokens(context, tokenizer)[0] if context else []
    said = continuation(context, text, tokenizer) if context else _tokens(text, tokenizer)
    ids = [*said[0], int(tokenizer.eos_token_id)]
    return EncodedSequence(before + ids, [False] * len(before) + [True] * len(ids))


def encode_segments(segments: Sequence[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase) -> EncodedSequence:
    """Encode texts, each tokenised apart and with loss or without; they have the special tokens of the row
    themselves."""
    encoded = [(_tokens(text, tokenizer)[0], has_loss) for text, has_loss in segments]
    return EncodedSequence(
        [token for ids, _ in encoded for token in ids], [has_loss for ids, has_loss in encoded for _ in ids]
    )


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text and their character ranges, if the tokenizer knows them."""
    encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    return list(encoding["input_ids"]), list(encoding["offset_mapping"] if tokenizer.is_fast else [])


def _joined(unfinished: Message, following: Message) -> Message:
    """An assistant turn and the turn that continues it, as one.

    Raises:
        UserError: if its text cannot be continued so.
    """
    reasoning = [key for key in REASONING_KEYS if following.get(key)]
    if "tool_calls" in unfinished or reasoning:
        raise UserError(
            "a completion can only continue the text of the prompt's last assistant turn, got "
            f"{'tool calls in the prompt' if 'tool_calls' in unfinished else f'{reasoning[0]!r} in the completion'}: "
            "end the prompt with a user or tool turn, or change the key"
        )
    content = str(unfinished.get("content", "")) + str(following.get("content", ""))
    return {**unfinished, **following, "content": content}


def prompt_text(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Tools | None) -> str:
    """The text of `encode_prompt`."""
    if messages and messages[-1]["role"] == "assistant":
        return render_unfinished(messages, tokenizer, tools=tools)
    return render(messages, tokenizer, tools=tools, add_generation_prompt=True)


def _marked(
    messages: Sequence[Message],
    template: ChatTemplate,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    learned: Sequence[bool],
    begun: Mapping[int, Message],
) -> Iterator[tuple[str, Pieces]]:
    """The texts of each learned turn as those of `_turns`, with the loss on what the template marks in the turn.

    A turn is rendered without those that follow, on which its text may depend (templates drop earlier reasoning).
    """
    if True not in learned:
        yield template.generated(messages, tools)[0], []
    for turn in (index for index, has_loss in enumerate(learned) if has_loss):
        text, spans = template.generated(messages[: turn + 1], tools)
        spans = spans[_marks_before(messages[:turn], text, template, tools) :]
        if turn in begun:
            start = len(render_unfinished([*messages[:turn], begun[turn]], tokenizer, tools=tools))
            spans = [(max(begin, start), stop) for begin, stop in spans if stop > start]
        pieces: Pieces = []
        place = first = spans[0][0] if spans else len(text)
        for begin, stop in spans:
            pieces += [(text[place:begin], False), (text[begin:stop], True)]
            place = stop
        yield text[:first], [*pieces, (text[place:], False)]


def _marks_before(history: Sequence[Message], text: str, template: ChatTemplate, tools: Tools | None) -> int:
    """The number of a template's marks in the turns before one, whose text with them is `text`."""
    if not history:
        return 0
    earlier, spans = template.generated(history, tools)
    if history[-1]["role"] != "assistant":
        return len(spans)
    # The end of a conversation, which another turn moves, may have marks of its own.
    shared = len(os.path.commonprefix([earlier, text]))
    return sum(stop <= shared for _, stop in spans)


def _turns(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    learned: Sequence[bool],
    begun: Mapping[int, Message],
) -> Iterator[tuple[str, Pieces]]:
    """The prompt of each learned turn, and the text from there to the end of its row, in pieces with and without loss.

    An assistant turn at the beginning of a conversation is learned if the template can render a prompt for it.
    """
    for turn, has_loss in enumerate(learned):
        if not has_loss:
            continue
        try:
            before, generated, stop = _turn(messages, turn, tokenizer, tools, begun.get(turn))
        except UserError:
            if turn == 0 and len(messages) > 1:
                continue
            raise
        yield before, [(generated[:stop], True), (generated[stop:], False)]


def _turn(
    messages: Sequence[Message],
    turn: int,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    unfinished: Message | None = None,
) -> tuple[str, str, int]:
    """The prompt of an assistant turn, the text from there to the end of the row, and how much of it is generated."""
    message = messages[turn]
    history = messages[:turn]
    if unfinished is None:
        before = render(history, tokenizer, tools=tools, add_generation_prompt=True)
    else:
        before = render_unfinished([*history, unfinished], tokenizer, tools=tools)
    through = render(messages[: turn + 1], tokenizer, tools=tools)
    template = ChatTemplate.of(tokenizer, tools)
    if unfinished is not None and not through.startswith(before):
        raise UserError(
            "the chat template must render a turn that a completion continues as it renders its beginning, got "
            f"{shortened(str(message['content']))!r}: end the prompt with a user or tool turn"
        )
    if template is None:
        generated = through[len(before) :]
        return before, generated, len(generated.removesuffix("\n\n"))
    if through.startswith(before):
        generated = through[len(before) :]
    else:
        shown = render(history, tokenizer, tools=tools)
        opening = before[len(os.path.commonprefix([shown, before])) :]
        other = render([*history, _OTHER_ANSWER], tokenizer, tools=tools)
        generated = _after_opening(through, other, opening, history) or ""
        if not generated:
            reasoning, thoughtless = split_reasoning(message)
            plain = render([*history, thoughtless], tokenizer, tools=tools)
            before, generated = _as_prompted(before, opening, through, plain, message, reasoning, template)
    begun = "" if unfinished is None else str(template.with_reasoning_key(unfinished)["content"])
    said = str(template.with_reasoning_key(message).get("content", ""))[len(begun) :].strip()
    # Calls follow the text of their turn.
    text_end = _text_end(generated, template.turn_suffix, "" if "tool_calls" in message else said, template.special)
    if (end_token := template.special.search(generated, text_end)) is not None:
        return before, generated, end_token.end()
    following = messages[turn + 1]["role"] if turn + 1 < len(messages) else "assistant"
    next_role = "tool" if "tool_calls" in message else "user"
    generated += template.turn_opening(next_role if following == "assistant" else following)
    return before, generated, len(generated)


def _after_opening(through: str, other: str, opening: str, history: Sequence[Message]) -> str | None:
    """The last turn of a text behind the generation prompt, if the template renders the earlier turns differently but
    this one with the same opening (gpt-oss drops earlier reasoning once a final answer follows); None otherwise.

    Args:
        through: the conversation up to the turn.
        other: the same with another answer: both begin with the opening of the last turn.
        opening: what the generation prompt adds to the conversation.
        history: the turns before.
    """
    shared = os.path.commonprefix([through, other])
    start = shared.rfind(opening) if opening else -1
    # What the template writes for an image is not its mark.
    last = str(history[-1].get("content", "")).rpartition(IMAGE_MARK)[2].strip() if history else ""
    if start < 0 or not last or last in shared[start + len(opening) :]:
        return None
    return through[start + len(opening) :]


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
    before: str,
    opening: str,
    through: str,
    thoughtless: str,
    message: Message,
    reasoning: str,
    template: ChatTemplate,
) -> tuple[str, str]:
    """Prompt and generated text if the template renders an assistant turn differently after a generation prompt.

    The generation prompt may open a thinking block that the rendered turn lacks, or close one that it has. The
    generated text is then the message's reasoning with the end of the block and the rest of the turn, or that rest
    alone.

    Args:
        before: the prompt.
        opening: what the generation prompt adds to the conversation.
        through: the conversation up to the turn.
        thoughtless: the same without the turn's reasoning.
        message: the turn.
        reasoning: its reasoning.
        template: the template.
    """
    content = str(message.get("content", ""))
    if not THINKING_MARK.search(opening):
        shared = _shared(before, through, template.special)
        start = through.rfind(content.strip(), shared) if content.strip() else -1
        # The turn is learned as rendered where its content does not appear.
        return (before, through[start:]) if start >= 0 else (through[:shared], through[shared:])
    rest = thoughtless[_shared(before, thoughtless, template.special) :]
    if (block := _EMPTY_BLOCK.match(rest)) is not None:
        rest = rest[block.end() :]
    if template.thinking_marks is not None:
        opened, closed = map(opening.rfind, template.thinking_marks)
        if opened > closed:
            rest = f"{reasoning}\n{template.thinking_marks[1]}\n\n{rest}"
    return before, rest


def _shared(before: str, text: str, special: re.Pattern[str]) -> int:
    """Length of the common beginning of two texts, without a part of a token or mark of the second."""
    shared = len(os.path.commonprefix([before, text]))
    marks = [match for pattern in (special, THINKING_MARK) for match in pattern.finditer(text)]
    return min([shared, *(match.start() for match in marks if match.start() < shared < match.end())])
