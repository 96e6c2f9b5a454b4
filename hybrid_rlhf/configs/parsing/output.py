"""What a command prints: text for people, or with `--json` its result as JSON on standard output.

With `--json` everything else that a command prints (logs, progress, warnings of libraries) goes to standard error, so
that standard output has JSON and nothing else: one document per line, the result last. An error is `{"error": "..."}`;
the exit code is the same as without `--json`.

Why here: a user's mistake may be found before anything but the line itself is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from hybrid_rlhf.configs.files.credentials import redacted

JSON_OPTION = "--json"
_documents: list[TextIO] = []
"""Where documents go, innermost last; empty: the command prints text."""


@contextlib.contextmanager
def json_output() -> Iterator[None]:
    """Inside the block results and errors are JSON on standard output, and what is printed goes to standard error.

    An exception that is not a user's mistake is reported as an error too, and raised.
    """
    _documents.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                yield
            except Exception as error:
                print_document({"error": redacted(f"{type(error).__name__}: {error}")})
                raise
    finally:
        _documents.pop()


def wants_json() -> bool:
    """Whether the command was asked for JSON."""
    return bool(_documents)


def print_result(document: Mapping[str, Any], text: str) -> None:
    """Print the result of a command: the text, or with --json the document."""
    if wants_json():
        print_document(document)
    else:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def print_document(document: Mapping[str, Any]) -> None:
    """Print a line of JSON, on the main rank; only with --json.

    Numbers that are not finite become null, dataclasses objects, and any other type its text.
    """
    if os.environ.get("RANK", "0") == "0":
        _documents[-1].write(f"{json.dumps(_plain(document), allow_nan=False, default=str)}\n")
        _documents[-1].flush()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
