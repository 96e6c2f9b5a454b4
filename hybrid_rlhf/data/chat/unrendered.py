"""The parts of a conversation that do not reach the model, because the chat template has no place for them.

Templates drop a second system turn, text beside a call, reasoning without a call, or all calls but one, without an
error. What a template drops depends on the form of a conversation, not on its texts: a conversation of the same form
whose texts are all different is encoded in place of the row, once per form, and each of its texts is looked for in what
the model receives, and in what carries loss.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.conversation import Pieces, conversation_texts, prompt_text
from hybrid_rlhf.data.chat.messages import (
    METADATA_KEYS,
    REASONING_KEYS,
    Message,
    Tools,
    is_learned,
    split_reasoning,
)
from hybrid_rlhf.data.chat.template import ChatTemplate, content_keys, has_value

_INLINE = "<think> in content"
_THINKING_OFF = " (thinking is off)"
"""Suffix of reasoning that is not rendered because the generation prompt closes the thinking block."""
_BEFORE = " (before the answer)"
"""Suffix of reasoning in a turn without loss: generation does not see it either."""
_AFTER = " (after the last answer)"
"""Suffix of a turn that no turn with loss follows."""
_UNPROMPTED = "answer before any prompt (no loss)"
EARLIER_TURNS = "turns before the last of a completion"
"""Name of those that are in the row without loss, in the column `ignored`."""
_ACCEPTED = (_THINKING_OFF, _BEFORE, _AFTER, _UNPROMPTED, EARLIER_TURNS)
_TOOL = {
    "type": "function",
    "function": {
        "name": "q7toolq7",
        "description": "c",
        "parameters": {"type": "object", "properties": {"q7keyq7": {"type": "string", "description": "c"}}},
    },
}


def unrendered(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    *,
    learn_from: int = 0,
    continued: int | None = None,
) -> list[str]:
    """The parts of a row that the model does not see as they are, one entry per occurrence: keys, roles, the row's
    tools, turns without their loss.

    Args:
        messages: the turns.
        tokenizer: its chat template renders them.
        tools: JSON schemas of the functions that the assistant may call.
        learn_from: turns before this index carry no loss; with the number of turns, they are a prompt.
        continued: index of an assistant turn that the next turn continues.
    """
    if not messages:
        return []
    template = ChatTemplate.of(tokenizer, tools)
    missing = []
    for message in messages:
        missing += content_keys(message) if template is None else template.unread(message)
    form = _Form()
    outline = [form.outline(turn, message) for turn, message in enumerate(messages)]
    probe = {"messages": outline, "tools": bool(tools), "learn_from": learn_from, "continued": continued}
    known: dict[bytes, list[str]] = {} if template is None else template.known_losses
    key = hashlib.blake2b(json.dumps(probe).encode(), digest_size=16).digest()
    if key not in known:
        known[key] = _lost(form, outline, tokenizer, [_TOOL] if tools else None, learn_from, continued)
    return missing + known[key]


def refused(name: str) -> bool:
    """Return True if a row with an unrendered part is refused, because text would be lost.

    Roles, tools and their calls are accepted: they become the nearest equivalent, or the row's system prompt describes
    them. So is reasoning that generation would not see either, and an answer at the beginning, which has no prompt.
    """
    is_named = name in METADATA_KEYS or name in ("tools", "tool_calls") or name.startswith("role ")
    return not (is_named or name.endswith(_ACCEPTED))


@dataclass(frozen=True)
class _Part:
    """A text of the outline, and where it stands in the row."""

    turn: int
    key: str
    text: str
    is_name: bool = False
    """True if another part may have the same text."""


@dataclass
class _Form:
    """Makes the outline of a conversation: its form, with texts that occur once."""

    parts: list[_Part] = field(default_factory=list)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)

    def outline(self, turn: int, message: Message) -> Message:
        """A message of the same form."""
        outlined = {key: value for key, value in message.items() if key not in METADATA_KEYS}
        for name, kind in (("name", "name"), ("tool_call_id", "id")):
            if has_value(message, name):
                outlined[name] = self._name(kind, message[name])
        for key in REASONING_KEYS:
            if has_value(message, key):
                outlined[key] = self._text(turn, key)
        if str(message.get("content", "")).strip():
            reasoning, rest = split_reasoning({k: v for k, v in message.items() if k not in REASONING_KEYS})
            inline = f"<think>\n{self._text(turn, _INLINE)}\n</think>\n\n" if reasoning else ""
            shown = self._text(turn, "content") if str(rest["content"]).strip() else ""
            outlined["content"] = inline + shown
        if "tool_calls" in message:
            outlined["tool_calls"] = [self._call(turn, place, call) for place, call in enumerate(message["tool_calls"])]
        return outlined

    def _call(self, turn: int, place: int, call: Mapping[str, Any]) -> dict[str, Any]:
        key = f"tool_calls ({'after the first' if place else 'in part'})"
        name = self._name("name", call["function"]["name"])
        self.parts.append(_Part(turn, key, name, is_name=True))
        arguments = {"q7keyq7": self._text(turn, key)} if call["function"].get("arguments") else {}
        ids = {"id": self._name("id", call["id"])} if has_value(dict(call), "id") else {}
        return {"type": "function", **ids, "function": {"name": name, "arguments": arguments}}

    def _name(self, kind: str, value: Any) -> str:
        """The same text for the same name; some templates want identifiers of nine characters."""
        names = self._names
        return names.setdefault((kind, str(value)), f"q7{kind[0]}{len(names):06}")

    def _text(self, turn: int, key: str) -> str:
        text = f"q7said{len(self.parts)}q7"
        self.parts.append(_Part(turn, key, text))
        return text


def _lost(
    form: _Form,
    outline: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    learn_from: int,
    continued: int | None,
) -> list[str]:
    """What of an outline is neither in a text that the model receives, nor learned where it should be."""
    rows: list[tuple[str, Pieces]]
    if learn_from >= len(outline):
        rows = [(prompt_text(outline, tokenizer, tools=tools), [])]
    else:
        rows = list(conversation_texts(outline, tokenizer, tools=tools, learn_from=learn_from, continued=continued))
    if not rows:  # without loss, the row is not used
        return []
    last = max((turn for turn, message in enumerate(outline) if is_learned(message)), default=len(outline))
    shown = "\n".join(before + "".join(text for text, _ in pieces) for before, pieces in rows)
    learned = Counter(
        part
        for part in form.parts
        for _, pieces in rows
        if any(has_loss and part.text in text for text, has_loss in pieces)
    )
    template = ChatTemplate.of(tokenizer, tools)
    lost = [] if tools is None or "q7toolq7" in shown else ["tools"]
    for part in form.parts:
        message = outline[part.turn]
        has_loss = part.turn >= learn_from and part.turn != continued and is_learned(message)
        if part.text in shown and learned[part] == has_loss or (learned[part] and has_loss and part.is_name):
            continue
        if part.key in (*REASONING_KEYS, _INLINE):
            is_closed = template is not None and template.closes_thinking
            suffix = _THINKING_OFF if is_closed else "" if has_loss else _BEFORE
        elif part.turn > last:
            suffix = _AFTER
        elif part.text in shown:
            lost.append(_UNPROMPTED if part.turn == 0 else f"{part.key} (loss {learned[part]} times)")
            continue
        elif part.key == "content":
            suffix = " (beside tool_calls)" if "tool_calls" in message else f" ({message['role']} turn)"
        else:
            suffix = ""
        lost.append(part.key + suffix)
    return list(dict.fromkeys(lost)) if template is None else lost
