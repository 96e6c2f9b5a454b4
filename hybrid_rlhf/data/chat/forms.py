"""Message formats in which chat templates differ; data/chat/template.py detects those that a template accepts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.images.expansion import IMAGE_MARK

MISSING = object()
"""Value of `empty_content` to omit the key `content`."""


@dataclass(frozen=True)
class MessageForms:
    """The formats that one template accepts."""

    parts: bool = False
    """True if content is a list of parts."""
    calls_as_text: bool = True
    """True if tool calls become part of the content, as the template does not render them."""
    arguments_as_text: bool = False
    """True if arguments of tool calls are JSON text instead of a mapping."""
    empty_content: Any = ""
    """Content of a turn that has tool calls only."""

    def content(self, text: str) -> Any:
        """Text in the template's format; with images, always a list of parts."""
        if IMAGE_MARK in text:
            texts = [[{"type": "text", "text": part}] if part else [] for part in text.split(IMAGE_MARK)]
            return [*texts[0], *(part for after in texts[1:] for part in ({"type": "image"}, *after))]
        return [{"type": "text", "text": text}] if self.parts else text

    def apply(self, message: Message) -> Message:
        """Convert a normalised message to the template's formats."""
        calls = message.get("tool_calls")
        if calls is None:
            return {**message, "content": self.content(message["content"])}
        if self.calls_as_text:
            shown = {key: value for key, value in message.items() if key != "tool_calls"}
            return {**shown, "content": self.content(text_with_calls(message))}
        if self.arguments_as_text:
            calls = [
                {**c, "function": {**c["function"], "arguments": _json(c["function"].get("arguments", {}))}}
                for c in calls
            ]
        shown = {**message, "tool_calls": calls}
        if "content" in message:
            return {**shown, "content": self.content(message["content"])}
        return shown if self.empty_content is MISSING else {**shown, "content": self.empty_content}


def text_with_calls(message: Message) -> str:
    """The content of a message, followed by its tool calls as lines of JSON."""
    calls = [_json(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([*filter(None, [message.get("content")]), *calls])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
