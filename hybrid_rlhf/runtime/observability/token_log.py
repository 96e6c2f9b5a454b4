"""Writes token records (token_records.py): a file per recorded step, written under a temporary name and renamed.

A failing disk does not end the run: the log names the first error, and the step has no record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.durable import flush
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.token_records import DETAILS, ENVIRONMENT, TOKENS, record_file, record_files


class TokenLog:
    """Writes the tokens of some steps, those of samples.jsonl."""

    def __init__(self, folder: Path, *, ranks: int, enabled: bool) -> None:
        """Take the run folder, the number of ranks, and whether this rank writes."""
        self._folder = folder / TOKENS
        self._enabled = enabled
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._details = {"ranks": ranks, "environment": environment}
        self._is_failing = False

    def resume(self, step: int) -> None:
        """Remove the records after a step, written by an interrupted run.

        Raises:
            OSError: if they cannot be removed.
        """
        for number, file in record_files(self._folder).items():
            if self._enabled and number > step:
                file.unlink()

    def write(self, step: int, arrays: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the arrays of a step; `arrays` is called on the rank that writes."""
        if not self._enabled:
            return
        content = save(dict(arrays()), metadata={DETAILS: json.dumps(self._details)})
        try:
            self._folder.mkdir(exist_ok=True)
            write_whole(record_file(self._folder, step), content)
            flush(self._folder)
        except OSError as error:
            if not self._is_failing:
                reason = error.strerror or type(error).__name__
                logger.warning("%s cannot be written (%s): the tokens of the step are lost", self._folder, reason)
            self._is_failing = True
            return
        self._is_failing = False
