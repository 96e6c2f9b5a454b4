"""POST /v1/responses for text: OpenAI's Responses API over chat completions.

A request has no state: `previous_response_id`, tools and files are refused, and `store` has no effect. Reasoning is an
item of its own, before the message. `system_fingerprint` has the version of the weights, as in the other answers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid_rlhf.serving.answers import Answer, event
from hybrid_rlhf.serving.bodies import MOST_INTEGER, ChatBody, KeyRejected, checked
from hybrid_rlhf.serving.service import TokenStream
from hybrid_rlhf.serving.web import StrictBody

_TEXT_PARTS = ("input_text", "output_text", "text")
_STATUSES = {"length": "incomplete", "content_filter": "incomplete", "abort": "incomplete"}
_PLAIN = {"type": "text"}
_MOST_ITEMS = 8192


class ResponseBody(StrictBody):
    """POST /v1/responses."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=_MOST_ITEMS)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_INTEGER)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    include: list[Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    """No effect: `chat_template_kwargs` controls reasoning."""

    def chat(self) -> ChatBody:
        """The chat request with the same answer.

        Raises:
            UserError: for tools, an item that is no text, or another format than text.
        """
        for key in ("tools", "include"):
            if getattr(self, key):
                rest = "must be empty in a response: use /v1/chat/completions for tools"
                raise KeyRejected(key, rest, "unsupported_parameter")
        if ((self.text or {}).get("format") or _PLAIN) != _PLAIN:
            raise KeyRejected("text.format", "must be text in a response: use /v1/chat/completions for others")
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_message(f"input.{place}", item) for place, item in enumerate(self.input)]
        shared = self.model_dump(include={*ChatBody.model_fields})
        return checked(ChatBody, {"messages": messages, "max_completion_tokens": self.max_output_tokens, **shared})


def _message(location: str, item: dict[str, Any]) -> dict[str, Any]:
    """A message of a chat request from an item of the input."""
    kind = item.get("type") or "message"
    content = item.get("content")
    if kind != "message" or not isinstance(item.get("role"), str):
        raise KeyRejected(location, f"must be a message with a role, got type {kind!r:.40}: leave it out")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") in _TEXT_PARTS for part in content):
            raise KeyRejected(location, "must have parts of text (input_text, output_text), got others: remove them")
        content = "".join(str(part.get("text", "")) for part in content)
    return {"role": item["role"], "content": content}


def response_of(body: ResponseBody, whole: dict[str, Any]) -> dict[str, Any]:
    """The response of a request, from the answer as a chat completion."""
    (choice,) = whole["choices"]
    message = choice["message"]
    items = [_reasoning(message["reasoning_content"])] if message.get("reasoning_content") else []
    status = _STATUSES.get(choice["finish_reason"], "completed")
    items.append(_said(message["content"] or "", status))
    head = _head(body, int(whole["created"]), whole["system_fingerprint"])
    return {**head, **_end(status), "output": items, "usage": _usage(whole["usage"])}


async def response_events(body: ResponseBody, answer: Answer, stream: TokenStream) -> AsyncIterator[str]:
    """Server-sent events of a streamed response; the last one has the whole response."""
    head = _head(body, int(time.time()), answer.version)
    number = 0

    def sent(kind: str, **content: Any) -> str:
        nonlocal number
        number += 1
        return f"event: {kind}\n" + event({"type": kind, "sequence_number": number - 1, **content})

    begun = {**head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield sent("response.created", response=begun)
    yield sent("response.in_progress", response=begun)
    done = list[dict[str, Any]]()
    reasoning = _reasoning("")
    message = _said("", "in_progress")
    thought = ""
    text = ""
    is_open = False
    """True if the message was announced."""
    status = "completed"
    async for _, part in answer.parts(stream):
        status = _STATUSES.get(part.finish_reason or "", status)
        if part.reasoning:
            if not thought:
                yield sent("response.output_item.added", output_index=0, item={**reasoning, "content": []})
            thought += part.reasoning
            place = {"item_id": reasoning["id"], "output_index": 0, "content_index": 0}
            yield sent("response.reasoning_text.delta", **place, delta=part.reasoning)
        if part.text or part.finish_reason:
            if not is_open:
                if thought:
                    done.append({**reasoning, "content": [{"type": "reasoning_text", "text": thought}]})
                    yield sent("response.output_item.done", output_index=0, item=done[0])
                is_open = True
                yield sent("response.output_item.added", output_index=len(done), item={**message, "content": []})
                place = {"item_id": message["id"], "output_index": len(done), "content_index": 0}
                yield sent("response.content_part.added", **place, part=_output_text(""))
            if part.text:
                text += part.text
                yield sent("response.output_text.delta", **place, delta=part.text, logprobs=[])
    whole = {**message, "status": status, "content": [_output_text(text)]}
    yield sent("response.output_text.done", **place, text=text, logprobs=[])
    yield sent("response.content_part.done", **place, part=_output_text(text))
    yield sent("response.output_item.done", output_index=len(done), item=whole)
    response = {**head, **_end(status), "output": [*done, whole], "usage": _usage(answer.usage())}
    yield sent(f"response.{status}", response=response)


def _head(body: ResponseBody, created: int, version: str | None) -> dict[str, Any]:
    """The keys of a response that are known when it begins, those of its request among them."""
    repeated = ("model", "instructions", "max_output_tokens", "temperature", "top_p")
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": created,
        "system_fingerprint": version,
        **{key: getattr(body, key) for key in repeated},
        "error": None,
        "metadata": {},
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
    }


def _end(status: str) -> dict[str, Any]:
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {"status": status, "incomplete_details": details}


def _reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": content}


def _said(text: str, status: str) -> dict[str, Any]:
    message = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": status}
    return {**message, "content": [_output_text(text)]}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(chat: dict[str, int]) -> dict[str, Any]:
    """The usage of a chat completion with the names of the Responses API."""
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }
