"""Output of a command: text for people, or with `--json` its result as JSON on standard output.

With `--json` everything else that a command prints (logs, progress, warnings of libraries) goes to standard error, so
that standard output has only JSON: one document per line, the result last. An error is `{"error": "..."}`; the exit
code is the same as without `--json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from hybrid_rlhf.configs.credentials import redacted

JSON_OPTION = "--json"
_documents: TextIO | None = None
"""Stream of the documents; None if the command prints text."""
_has_result = False
"""True if a document other than progress has been printed."""


@contextlib.contextmanager
def json_output() -> Iterator[None]:
    """Context with results and errors as JSON on standard output, and all other output on standard error.

    A command that fails without printing a result prints an error, also after an exception that is not a user's
    mistake, which is raised.
    """
    global _documents, _has_result
    outer = (_documents, _has_result)
    _documents = sys.stdout
    _has_result = False
    try:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                yield
            except Exception as error:
                print_document({"error": redacted(f"{type(error).__name__}: {error}")})
                raise
            except SystemExit as stop:
                if stop.code and not _has_result:
                    print_document({"error": f"ended with exit code {stop.code}: see standard error"})
                raise
    finally:
        _documents, _has_result = outer


def wants_json() -> bool:
    """Return True if the command prints JSON."""
    return _documents is not None


def print_result(document: Mapping[str, Any], text: str) -> None:
    """Print the result of a command: the text, or with --json the document."""
    if wants_json():
        print_document(document)
    else:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def print_document(document: Mapping[str, Any]) -> None:
    """Print a line of JSON; only with --json.

    A document with a key `event` is progress, any other the result.
    """
    global _has_result
    assert _documents is not None
    _has_result = _has_result or "event" not in document
    _documents.write(f"{json_text(document)}\n")
    _documents.flush()


def json_text(value: Any) -> str:
    """A value as ASCII JSON: numbers that are not finite become null, dataclasses objects, any other type its text."""
    return json.dumps(_plain(value), allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
