"""One logger, "hybrid_rlhf": the main rank speaks on the console and into a file, other ranks only warn.

Third-party loggers are left alone but for their chatter at INFO. A console that is gone, or a log file on a full disk,
is left: nobody reads there any more, and the run is worth more.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from hybrid_rlhf.runtime.world import World

LOGGER_NAME = "hybrid_rlhf"


def setup_logging(world: World, *, file: Path | None = None) -> logging.Logger:
    """Configure the project's logger for this rank.

    Args:
        world: rank 0 logs at INFO, the others at WARNING with their rank named.
        file: a copy of what rank 0 says.
    """
    logger = logging.getLogger(LOGGER_NAME)
    close_log_file()
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO if world.is_main else logging.WARNING)
    form = "%(message)s" if world.is_main else f"rank {world.rank}: %(message)s"
    handlers: list[logging.Handler] = [_Console(sys.stdout)]
    if file is not None and world.is_main:
        handlers.append(_LogFile(file))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(form))
        logger.addHandler(handler)
    return logger


def close_log_file() -> None:
    """What is said after a run is not of that run."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _LogFile)]:
        logger.removeHandler(handler)
        handler.close()


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard output, as long as somebody is there."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        _leave(self, f"the console is gone ({error.strerror}): the run goes on without it")
        # Later prints, and python's flush at its end, must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None


class _LogFile(logging.FileHandler):
    """log.txt, as long as the disk takes it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        _leave(self, f"{self.baseFilename} is written no more ({error.strerror})")
        return None


def _leave(handler: logging.Handler, why: str) -> None:
    logger = logging.getLogger(LOGGER_NAME)
    logger.removeHandler(handler)
    logger.warning(why)


def shortened(text: str, limit: int = 60) -> str:
    """Text on one line, cut; half a surrogate pair, which no console takes, is a question mark."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
