"""One logger, "hybrid_rlhf": the main rank speaks on the console and into a file, other ranks only warn.

Third-party loggers are left alone but for their chatter at INFO.
"""

from __future__ import annotations

import logging
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
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO if world.is_main else logging.WARNING)
    form = "%(message)s" if world.is_main else f"rank {world.rank}: %(message)s"
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if file is not None and world.is_main:
        handlers.append(logging.FileHandler(file))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(form))
        logger.addHandler(handler)
    return logger
