"""What the peers' scripts measure with. They run by their path, in environments that know nothing of this project."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):  # type: ignore[misc]
    """When training began and each update ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End of an update."""
        self.times.append(time.perf_counter())


def peak_gib() -> float:
    """The most memory that was resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20
