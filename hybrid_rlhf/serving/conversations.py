"""Conversations of a request in the form that chat templates read, with errors in terms of the request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message, read_message, with_ordered_results
from hybrid_rlhf.serving.bodies import KeyRejected


@contextmanager
def request_errors(key: str) -> Iterator[None]:
    """Context that names the key of the request in errors of readers, which give advice for rows and repeat a
    message."""
    try:
        yield
    except UserError as error:
        rule, _, _ = str(error).removeprefix(f"{key}: ").rpartition(": ")
        raise KeyRejected(key, f"is refused: {rule:.500}: change it") from error
    except RecursionError as error:
        raise KeyRejected(key, "is nested too deeply for its template: simplify it") from error


def read_conversation(name: str, conversation: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages in the form that chat templates read, results of tool calls in the order of their calls.

    Args:
        name: name of the conversation in error messages.
        conversation: messages of a request.

    Raises:
        UserError: for an invalid message.
    """
    check_text(json.dumps(conversation, ensure_ascii=False), name)
    read = [_message(f"{name}.{place}", message) for place, message in enumerate(conversation)]
    with request_errors(name):
        return with_ordered_results(name, read)


def _message(location: str, message: dict[str, Any]) -> Message:
    content = message.get("content")
    if message.get("role") in ("user", "assistant") and isinstance(content, str) and not content.strip():
        if not message.get("tool_calls"):
            return {key: value for key, value in message.items() if value is not None}  # empty turns are valid here
    with request_errors(location):
        return read_message(location, message)


def check_text(text: str, name: str) -> None:
    """Refuse lone surrogates, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise KeyRejected(name, f"must be Unicode text, got {text[error.start]!r}: remove it") from None
