"""Conversations of a request in the form that chat templates read, with errors in terms of the request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message, read_message, with_ordered_results
from hybrid_rlhf.data.rows.placing import place_images
from hybrid_rlhf.serving.bodies import KeyRejected

_IMAGE_PARTS = ("image", "image_url", "input_image")
_MOST_IMAGE_BYTES = 16 * 2**20
"""Longest file of an image."""
NOT_READ = "no images are read here"
"""Why a model of text gets none."""


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
        UserError: for an invalid message, or an image.
    """
    return read_messages(name, take_images(name, conversation, refusal=NOT_READ)[0])[0]


def take_images(
    name: str, conversation: Sequence[dict[str, Any]], *, refusal: str = ""
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Messages with the key of each image in its place, and the data URIs by the keys, for `read_messages`.

    Raises:
        KeyRejected: for an image that is sent in another way than a data URI, or is too long; for any if none are read,
            with the reason.
    """
    images: dict[str, str] = {}

    def taken(place: int, number: int, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        key = f"{name}.{place}.content.{number}"
        if kind not in _IMAGE_PARTS:
            return part
        if refusal:
            raise KeyRejected(key, f"must be text, as {refusal}, got {kind}: remove it")
        if kind != "image_url":
            raise KeyRejected(key, f"must have type text or image_url, got {kind}: send image_url with a data URI")
        key += ".image_url.url"
        linked = part.get("image_url")
        url = linked.get("url") if isinstance(linked, dict) else linked
        if not isinstance(url, str) or not url.startswith("data:"):
            raise KeyRejected(key, f"must be a data URI, got {str(url)[:80]!r}: send the image itself")
        if len(url) * 3 // 4 > _MOST_IMAGE_BYTES:
            raise KeyRejected(key, f"must have at most {_MOST_IMAGE_BYTES} bytes, got {len(url) * 3 // 4}: scale it")
        images[key] = url
        return {"type": "image", "image": key}

    messages = []
    for place, message in enumerate(conversation):
        content = message.get("content")
        if isinstance(content, list):
            message = message | {"content": [taken(place, number, part) for number, part in enumerate(content)]}
        messages.append(message)
    return messages, images


def read_messages(name: str, conversation: Sequence[dict[str, Any]]) -> tuple[list[Message], list[str]]:
    """As `read_conversation`, for the messages of `take_images`: with marks of images, and the keys of these in the
    order of the marks."""
    check_text(json.dumps(conversation, ensure_ascii=False), name)
    read = [_message(f"{name}.{place}", message) for place, message in enumerate(conversation)]
    with request_errors(name):
        messages = with_ordered_results(name, read)
        (keys,) = place_images(name, {}, messages)
    return messages, keys


def _message(location: str, message: dict[str, Any]) -> Message:
    content = message.get("content")
    if isinstance(content, list) and all(part == {"type": "text", "text": ""} for part in content):
        message, content = {**message, "content": ""}, ""
    if message.get("role") in ("user", "assistant") and isinstance(content, str) and not content.strip():
        if not message.get("tool_calls"):
            return {key: value for key, value in message.items() if value is not None}  # empty turns are valid here
    with request_errors(location):
        return read_message(location, message, with_images=True)


def check_text(text: str, name: str) -> None:
    """Refuse lone surrogates, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise KeyRejected(name, f"must be Unicode text, got {text[error.start]!r}: remove it") from None
