"""Forms of a message on which chat templates disagree; data/template.py finds out which ones a template takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hybrid_rlhf.data.messages import Message

MISSING = object()
"""In place of a content: the key is left out."""


@dataclass(frozen=True)
class Forms:
    """How a template takes what families disagree on."""

    parts: bool = False
    """Content is a list of parts."""
    calls_as_text: bool = True
    """Tool calls have no place but in the content."""
    arguments_as_text: bool = False
    empty_content: Any = ""

    def content(self, text: str) -> Any:
        """Text as the template takes it."""
        return [{"type": "text", "text": text}] if self.parts else text

    def apply(self, message: Message) -> Message:
        """A message whose content is text, or missing beside tool calls."""
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
    """The content of a message, and its tool calls as lines of JSON."""
    calls = [_json(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([*filter(None, [message.get("content")]), *calls])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
