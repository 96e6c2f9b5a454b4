"""The grammar of an answer: its response format, or calls of the tools that a request requires.

Calls have the form in which the template writes earlier ones, which data/chat/calls.py reads. Where the template has
marks of reasoning, reasoning may come first: its text is free, and the grammar begins after its closing mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.template import Channels, ChatTemplate, special_tokens
from hybrid_rlhf.generation.batching.grammar import json_rule, source_of
from hybrid_rlhf.serving.bodies import ChatBody, GenerationBody, KeyRejected

_TEXT = {"type": "text"}
_NO_PARAMETERS = {"type": "object", "properties": {}}
_MARK_TOKENS = 16
"""Number of last tokens of a prompt among which a mark opens or closes reasoning."""


def grammar_key(body: GenerationBody) -> str:
    """The key of a request from which its grammar comes."""
    return "tool_choice" if isinstance(body, ChatBody) and body.required_tools else "response_format"


def response_format(
    body: GenerationBody, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
) -> dict[str, Any] | None:
    """The response format of a request as the engine reads it; None for free text.

    Args:
        body: the request.
        tokenizer: tokenizer of the model, with its template.
        prompt: token ids of the (first) prompt.

    Raises:
        UserError: for a format that is unknown or incomplete.
    """
    required = body.required_tools if isinstance(body, ChatBody) else []
    given = None if body.response_format == _TEXT else body.response_format
    if required and given is not None:
        raise KeyRejected("response_format", "must be text where tool_choice requires a call: leave one out")
    if given is not None and (given.get("type") == "lark" or not isinstance(body, ChatBody)):
        return given
    template = ChatTemplate.of(tokenizer, body.used_tools) if isinstance(body, ChatBody) else None
    if required:
        assert isinstance(body, ChatBody)
        form = "" if template is None else template.call_text
        rules = _call_rules(required, form, tokenizer, several=body.may_call_several)
    elif given is not None:
        rules = [source_of(given).replace("start:", "body:", 1)]
    else:
        return None
    tail = str(tokenizer.decode(prompt[-_MARK_TOKENS:]))
    if template is not None and template.channels is not None:
        start = ["start: body"] if required else _channel_rules(template, template.channels, tail, tokenizer)
    else:
        start = _start_rules(None if template is None else template.thinking_marks, tail, tokenizer)
    return {"type": "lark", "lark": "\n".join([*start, *rules])}


def _channel_rules(
    template: ChatTemplate, channels: Channels, tail: str, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Rules up to the rule `body` of an answer in its channel, which reasoning in another may precede."""
    opened, closed = tail.rfind(channels.reasoning), tail.rfind(channels.end)
    opening, closing, header = (
        " ".join(_literal(part, tokenizer) for part in re.split(f"({template.special.pattern})", text) if part)
        for text in (channels.reasoning, channels.end, channels.answer)
    )
    start = "think" if opened > closed else f"({opening} think)?"
    return [f"start: {start} {header} body", f"think: /(.|\\n)*/ {closing}"]


def _start_rules(marks: tuple[str, str] | None, tail: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Rules up to the rule `body`: reasoning that the prompt has opened, or that the answer may open."""
    if marks is None:
        return ["start: body"]
    opening, closing = marks
    opened, closed = map(tail.rfind, marks)
    if closed > opened:
        return ["start: body"]
    start = "start: think SPACE? body"
    if opened < 0:
        start = f"start: ({_literal(opening, tokenizer)} think SPACE?)? body"
    pattern = re.escape(closing).replace("/", "\\/")
    think = f"think[lazy]: /(.|\\n)*{pattern}/"
    if closing in special_tokens(tokenizer):
        think = f"think: /(.|\\n)*/ {_literal(closing, tokenizer)}"
    return [start, think, "SPACE: /[ \\n]{1,4}/"]


def _call_rules(
    tools: Sequence[dict[str, Any]], form: str, tokenizer: PreTrainedTokenizerBase, *, several: bool
) -> list[str]:
    """Rules of one call, or several, in the form of a rendered call."""
    functions = [tool["function"] for tool in tools]
    more = "+" if several else ""
    mark = _literal("[TOOL_CALLS]", tokenizer)
    if "[TOOL_CALLS]" in form and '"name"' not in form:  # Mistral since v11
        separator = _literal("[ARGS]", tokenizer) if "[ARGS]" in form else '""'
        calls = [
            f"call{place}: {mark} {json.dumps(function['name'])} {separator} {json_rule(_schema(function))}"
            for place, function in enumerate(functions)
        ]
        return [f"body: ({' | '.join(f'call{place}' for place in range(len(calls)))}){more}", *calls]
    if "[TOOL_CALLS]" in form:
        count = {} if several else {"maxItems": 1}
        listed = {"type": "array", "minItems": 1, **count, "items": _call_schema(functions, "arguments")}
        return [f"body: {mark} {json_rule(listed)}"]
    if '"parameters"' in form:  # Llama 3
        joined = ' (";" call)*' if several else ""
        return [f"body: call{joined}", f"call: {json_rule(_call_schema(functions, 'parameters'))}"]
    begin, end = (_literal(tag, tokenizer) for tag in ("<tool_call>", "</tool_call>"))
    joined = ' ("\\n" call)*' if several else ""
    call = f'call: {begin} "\\n" {json_rule(_call_schema(functions, "arguments"))} "\\n" {end}'
    return [f"body: call{joined}", call]


def _call_schema(functions: Sequence[dict[str, Any]], arguments: str) -> dict[str, Any]:
    """JSON schema of a call of one of the functions."""
    forms = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, arguments: _schema(function)},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return {"anyOf": forms} if len(forms) > 1 else forms[0]


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    """Schema of the arguments of a function, which may be missing."""
    return {**_NO_PARAMETERS, **(function.get("parameters") or {})}


def _literal(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text in Lark; a special token is matched by its id."""
    if text in special_tokens(tokenizer):
        return f"<[{tokenizer.convert_tokens_to_ids(text)}]>"
    return json.dumps(text, ensure_ascii=False)
