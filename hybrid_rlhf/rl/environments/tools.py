"""Calls of an environment's tools in a turn of the actor, in the format of its chat template.

A template that does not show tools leaves them out of the prompt; an instruction then describes them, in the words of
Hermes' system prompt (arXiv 2408.11857).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hybrid_rlhf.data.chat.calls import ToolCall, function_names, read_reply
from hybrid_rlhf.data.chat.messages import Message, Tools
from hybrid_rlhf.data.chat.reasoning import answer_of
from hybrid_rlhf.rl.environments.environment import with_instruction

_FORM = '<tool_call>{"name": "TOOL", "arguments": {...}}</tool_call>'
UNREADABLE = f"The call cannot be read. Write {_FORM}."


def requested_calls(completion: str, tools: Tools) -> Sequence[ToolCall] | None:
    """The calls of a turn; none in the list if they cannot be read, and None if the turn has no call."""
    text = answer_of(completion)
    calls = read_reply(text, function_names(tools)).calls
    return calls if calls or "<tool_call>" in text else None


def with_tools(prompt: Sequence[Message], tools: Tools) -> list[Message]:
    """A conversation with tools described in its last message."""
    described = "\n".join(json.dumps(tool) for tool in tools)
    return with_instruction(prompt, f"You have these tools:\n{described}\nTo call one, write {_FORM}.")
