"""Splits a source into files by a hash, so that rows with the same prompt are in the same file.

The part of a row depends on its prompt and the seed alone: it stays the same when rows are added, removed or reordered,
and a prompt that occurs twice is never in training and test data at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, ImageRules
from hybrid_rlhf.data.rows.files import Row, json_line
from hybrid_rlhf.data.rows.formats import read_preference_row, read_prompt_row, read_sft_row
from hybrid_rlhf.data.rows.placing import require_image_paths
from hybrid_rlhf.data.rows.sources import missing_columns_error, open_source
from hybrid_rlhf.runtime.files.atomic import whole_file
from hybrid_rlhf.runtime.observability.progress import ProgressLog


def split_rows(
    path: str, outputs: Mapping[str, Path], shares: Sequence[tuple[str, float]], *, by: str, seed: int
) -> dict[str, int]:
    """Write each row of a source to the file of its part.

    Args:
        path: a file, a folder or a hub name.
        outputs: JSONL file of each part; they appear only once all are complete.
        shares: name and share of each part.
        by: "prompt", or the name of the column whose value determines the part.
        seed: seed of the hash.

    Returns:
        the number of rows of each part.

    Raises:
        UserError: if the source cannot be read, a row has no prompt or no such column, a part gets no row, or rows name
            images by paths that the folder of a part does not have.
    """
    counts = dict.fromkeys(outputs, 0)
    edges = list(accumulate(share for _, share in shares))
    source = open_source(path)
    progress = ProgressLog(f"splitting {path}", total=source.count())
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {name: stack.enter_context(whole_file(file)) for name, file in outputs.items()}
        for location, row in progress.track(source):
            key = prompt_key(location, row) if by == "prompt" else _column_key(location, row, by)
            part = shares[bisect_right(edges[:-1], position(key, seed) * edges[-1])][0]
            require_image_paths(location, row, outputs[part].parent)
            files[part].write(json_line(row))
            counts[part] += 1
        empty = next((name for name, count in counts.items() if not count), None)
        if empty is not None:
            raise UserError(
                f"each part must get a row, {empty} gets none of the {sum(counts.values()):,} rows: raise its share, "
                "or give another --seed"
            )
    return counts


def position(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on a key and the seed."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def prompt_key(location: str, row: Row, images: ImageRules | None = None) -> str:
    """A key that is equal for rows with the same prompt: the turns before the first answer and their images, or plain
    text.

    Args:
        location: beginning of errors.
        row: row as read from its source.
        images: reads the images, so that the key has their digests; None: it has what the row says of them, as paths.

    Raises:
        UserError: for a row without a prompt.
    """
    refusal = "" if images is None else images.refusal
    given: list[Any] = []
    if "prompt" in row or "messages" in row:
        asked = read_prompt_row(location, row, refusal=refusal)
        prompt = asked.messages if "prompt" in row else _before_the_answer(asked.messages)
        given = asked.images
    elif "chosen" in row and "rejected" in row:
        pair = read_preference_row(location, row, refusal=refusal)
        prompt = _before_the_answer(pair.prompt)
        given = pair.images[0]
    elif isinstance(row.get("text"), str):
        return str(row["text"]).strip()
    elif "segments" in row:
        return str(read_sft_row(location, row).text).strip()
    else:
        raise missing_columns_error(location, row, ["prompt", "messages", "chosen + rejected", "text"])
    texts = [turn.get("content", "").strip() for turn in prompt]
    given = given[: sum(text.count(IMAGE_MARK) for text in texts)]
    names = [read.digest for read in images.references(location, given)] if images else map(str, given)
    return json.dumps([[turn["role"], text] for turn, text in zip(prompt, texts, strict=True)] + [*names])


def _before_the_answer(messages: Sequence[Message]) -> list[Message]:
    """The turns before the first assistant turn that follows a user turn."""
    asked = False
    for number, message in enumerate(messages):
        if asked and message["role"] == "assistant":
            return list(messages[:number])
        asked = asked or message["role"] == "user"
    return list(messages)


def _column_key(location: str, row: Row, column: str) -> str:
    if column not in row:
        raise missing_columns_error(location, row, [f"{column} (--by)"])
    return json.dumps(row[column], sort_keys=True, default=str)
