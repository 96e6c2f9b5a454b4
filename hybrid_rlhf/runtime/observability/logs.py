"""The logger "hybrid_rlhf": the main rank logs to the console and a file, other ranks log only warnings.

Lines that need attention begin with their level: `note:` for what a user may want to change, `warning:` for what may be
wrong.

Third-party loggers are not changed. A closed console or a log file on a full disk is dropped: the run continues
without it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # it imports torch, which readers of run folders do not need
    from hybrid_rlhf.runtime.world import World

LOGGER_NAME = "hybrid_rlhf"
logger = logging.getLogger(LOGGER_NAME)
NOTE = 25
"""Level of notes: above information, below warnings."""
_LEVELS = {NOTE: "note: ", logging.WARNING: "warning: "}
LOADING_LIBRARIES = "loading torch and transformers"
"""What a command says at once, as these take seconds."""
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
"""Format of the local time at the beginning of lines, except on a terminal."""


def setup_logging(world: World, *, file: Path | None = None) -> None:
    """Configure the project's logger for this rank.

    Args:
        world: rank 0 logs at INFO, the others at WARNING with their rank as a prefix, on several hosts also their host.
        file: file for a copy of rank 0's log.
    """
    close_log_file()
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO if world.is_main else logging.WARNING)
    form = "%(kind)s%(message)s" if world.is_main else f"{world.name}: %(kind)s%(message)s"
    handlers: list[logging.Handler] = [_Console()]
    if file is not None and world.is_main:
        handlers.append(_LogFile(file))
    for handler in handlers:
        is_terminal = isinstance(handler, _Console) and sys.stdout.isatty()
        handler.setFormatter(_Lines(form if is_terminal else f"%(asctime)s {form}", TIME_FORMAT))
        logger.addHandler(handler)


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Context of a command that prints a result: what it is doing goes to standard error."""
    before = logger.handlers, logger.level
    handler = _Console("stderr")
    handler.setFormatter(_Lines("%(kind)s%(message)s"))
    logger.handlers = [other for other in logger.handlers if not isinstance(other, _Console)] + [handler]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, level = before
        logger.setLevel(level)


def note(text: str, *values: object) -> None:
    """Log what a user may want to change."""
    logger.log(NOTE, text, *values)


def log_to_file(file: Path, text: str) -> None:
    """Write a line to an open log file alone, for an error that the command prints itself."""
    record = logger.makeRecord(LOGGER_NAME, logging.ERROR, "", 0, text, (), None)
    for handler in list(logger.handlers):
        if isinstance(handler, _LogFile) and handler.baseFilename == os.path.abspath(file):
            handler.handle(record)


def close_log_file() -> None:
    """Close log.txt at the end of a run: later messages do not belong to it."""
    for handler in [handler for handler in logger.handlers if isinstance(handler, _LogFile)]:
        logger.removeHandler(handler)
        handler.close()


class _Lines(logging.Formatter):
    """Lines with their level, unless it is information."""

    def format(self, record: logging.LogRecord) -> str:
        record.kind = _LEVELS.get(record.levelno, "")
        return super().format(record)


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """A standard stream, until it fails. Each line looks it up: a progress bar replaces it to stay below them."""

    def __init__(self, name: str = "stdout") -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return getattr(sys, self._stream_name)  # type: ignore[no-any-return]

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        if _is_dropped(self, "the console"):
            # Later prints, and Python's flush at exit, must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        else:
            super().handleError(record)


class _LogFile(logging.FileHandler):
    """log.txt, until writing to it fails."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        if not _is_dropped(self, self.baseFilename):
            super().handleError(record)


def _is_dropped(handler: logging.Handler, name: str) -> bool:
    """Drop a handler whose write has just failed; return False after any other error."""
    error = sys.exc_info()[1]
    if not isinstance(error, OSError):
        return False
    # A new list, because logging is iterating over the old one and would skip the next handler after a removal.
    logger.handlers = [kept_handler for kept_handler in logger.handlers if kept_handler is not handler]
    logger.warning(f"{name} cannot be written ({error.strerror}): the run continues without it")
    return True


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once in this process."""
    logger.warning(text)


def shortened(text: str, limit: int = 60) -> str:
    """Text on one line, truncated; a lone surrogate, which consoles cannot encode, becomes a question mark."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
