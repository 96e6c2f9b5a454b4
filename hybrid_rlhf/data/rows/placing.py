"""Finds the images of a row, and puts a mark where each stands in its turns.

A part of a content has its image, or stands for the next one of the column `images` (or `image`), as does `<image>` in
text. Without either, the images of the column precede the text of the first user turn, as in TRL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import RESULT_ROLES, Message
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, IMAGES_KEY, WRITTEN, rows_folder
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.runtime.observability.logs import shortened

IMAGE_COLUMNS = ("images", "image")


def place_images(
    location: str, row: Row, *conversations: Sequence[Message], refusal: str = ""
) -> tuple[list[Any], ...]:
    """Mark the images of a row's conversations, a prompt and what follows it, and return those of each, as given.

    Raises:
        UserError: with a reason why there may be none, or for images that do not match the turns.
    """
    column = [listed_images(row[name]) for name in IMAGE_COLUMNS if row.get(name)]
    has_images = bool(column)
    for turns in conversations:
        for message in turns:
            own = message.get(IMAGES_KEY, ())
            has_images = has_images or bool(own)
            if str(message.get("content")).count(IMAGE_MARK) != len(own):
                raise UserError(f"{location}: a text must not have the characters U+FDD0 and U+FDD1: remove them")
    if not has_images:
        return tuple([] for _ in conversations)
    if refusal:
        raise UserError(f"{location}: {refusal}, or remove its images")
    if len(column) > 1:
        raise UserError(f"{location}: a row has its images in one column, got 'images' and 'image': remove one")
    given = column[0] if column else []
    placed = [[image for message in turns for image in _marked(message, bool(column))] for turns in conversations]
    awaited = sum(image is None for images in placed for image in images)
    if given and not awaited:
        first = next((message for turns in conversations for message in turns if message["role"] == "user"), None)
        if first is None:
            raise UserError(f"{location}: a row with images must have a user turn, got none: add one")
        first["content"] = IMAGE_MARK * len(given) + first["content"]
        at = next(number for number, turns in enumerate(conversations) if any(turn is first for turn in turns))
        placed[at] = given + placed[at]
    elif len(given) != awaited:
        raise UserError(
            f"{location}: a row needs an image for each placeholder, got {len(given)} in its column and {awaited} "
            "placeholders: add images or remove placeholders"
        )
    for turns in conversations:
        _require_shown(location, turns)
    following = iter(given)
    return tuple([next(following) if image is None else image for image in images] for images in placed)


def awaiting_images(row: Row, messages: Sequence[Message]) -> list[Any]:
    """The contents of messages in which images of a row's column stand, before they have marks."""
    is_written = any(row.get(name) for name in IMAGE_COLUMNS)
    return [
        message.get("content")
        for message in messages
        if None in message.get(IMAGES_KEY, ()) or (is_written and WRITTEN in str(message.get("content")))
    ]


def with_written_images(messages: Sequence[Message]) -> list[Message]:
    """Messages that people and other programs read: `<image>` in the places of marks."""
    return [
        message | {"content": message["content"].replace(IMAGE_MARK, WRITTEN)} if "content" in message else message
        for message in messages
    ]


def listed_images(images: Any) -> list[Any]:
    """The images of a column: a list, one, or none."""
    return images if isinstance(images, list) else [images] if images else []


def require_image_paths(location: str, row: Row, folder: Path) -> None:
    """Raise a UserError for a path of an image that a file in another folder would not have."""
    given = [image for name in IMAGE_COLUMNS for image in listed_images(row.get(name))] + [*_parts([*row.values()])]
    paths = [image.get("path") if isinstance(image, dict) and not image.get("bytes") else image for image in given]
    for path in paths:
        if not isinstance(path, str) or path.startswith("data:"):
            continue
        file, own = folder / path, (rows_folder(location) or folder) / path
        if not file.is_file() or (own.is_file() and not own.samefile(file)):
            raise UserError(
                f"{location}: paths of images must be relative to the folder of the output, {shortened(path)!r} is not "
                f"in {folder.absolute()}: write the output there"
            )


def _parts(value: Any) -> Iterator[Any]:
    """The images of the parts of messages, at any depth of a row."""
    if isinstance(value, dict) and value.get("type") == "image":
        yield value.get("image")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(item)


def _marked(message: Message, has_column: bool) -> list[Any]:
    """The images of a message, None for one of the column; `<image>` in its text becomes a mark."""
    own = iter(message.pop(IMAGES_KEY, ()))
    content = str(message.get("content", ""))
    if not has_column or WRITTEN not in content:
        return list(own)
    message["content"] = content.replace(WRITTEN, IMAGE_MARK)
    return [next(own) if place == IMAGE_MARK else None for place in re.findall(f"{IMAGE_MARK}|{WRITTEN}", content)]


def _require_shown(location: str, turns: Sequence[Message]) -> None:
    """Refuse images where a model writes text, or templates write none."""
    for message in turns:
        if IMAGE_MARK in str(message.get("content")) and message["role"] not in ("user", *RESULT_ROLES):
            raise UserError(
                f"{location}: images belong to turns of the user and of tools, got one in a turn of the "
                f"{message['role']}, {shortened(str(message['content']).replace(IMAGE_MARK, WRITTEN))!r}: move it"
            )
