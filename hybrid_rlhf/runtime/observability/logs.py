"""The logger "hybrid_rlhf": the main rank logs to the console and a file, other ranks log only warnings.

Third-party loggers are not changed. A closed console or a log file on a full disk is dropped: the run continues
without it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # it imports torch, which readers of run folders do not need
    from hybrid_rlhf.runtime.world import World

LOGGER_NAME = "hybrid_rlhf"
logger = logging.getLogger(LOGGER_NAME)
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
    form = "%(message)s" if world.is_main else f"{world.name}: %(message)s"
    handlers: list[logging.Handler] = [_Console()]
    if file is not None and world.is_main:
        handlers.append(_LogFile(file))
    for handler in handlers:
        is_terminal = isinstance(handler, _Console) and sys.stdout.isatty()
        handler.setFormatter(logging.Formatter(form if is_terminal else f"%(asctime)s {form}", TIME_FORMAT))
        logger.addHandler(handler)


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


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard output, until it fails. Each line looks up sys.stdout: a progress bar replaces it to stay below them."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        if _is_dropped(self, "the console"):
            # Later prints, and Python's flush at exit, must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


def shortened(text: str, limit: int = 60) -> str:
    """Text on one line, truncated; a lone surrogate, which consoles cannot encode, becomes a question mark."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
