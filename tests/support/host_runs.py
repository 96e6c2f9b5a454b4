"""The training run that tests/hosts repeats on several hosts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.runs import ROOT

STEPS = 40
SAVE_EVERY = 4


@dataclass(frozen=True)
class Training:
    """The command lines of one training run, which others repeat elsewhere."""

    model: Path
    rows: Path
    outputs: dict[str, Any]
    """Of the run on one host with two ranks."""
    config: Path
    """Settings of its step."""

    def line(self, output: Path, *more: str) -> list[str]:
        """`train` of the step SFT."""
        return train_line(output, self.model, self.rows, *more)


def train_line(output: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """`train` of 40 updates of SFT with a checkpoint after every fourth."""
    line = f"{sys.executable} train.py --steps sft --base_model {model} --data.sources {rows} --output_dir {output}"
    line += f" --sft.train.max_steps {STEPS} --sft.train.epochs 99 --sft.train.save_every {SAVE_EVERY}"
    line += f" --sft.train.global_batch_size 4 --sft.data.max_length 64 --sft.data.cache_dir {rows.parent}/cache"
    return [*line.split(), "--sft.logging.sinks", "[]", *more]


def slurm_line(training: Training, output: Path, log: Path) -> list[str]:
    """The recipe's script with the sizes of this cluster."""
    sizes = ["--cpus-per-task=1", "--gpus-per-node=1", "--time=10", f"--output={log}"]
    script = [str(ROOT / "recipes" / "cluster" / "slurm.sh"), "sft", str(training.config)]
    return [*sizes, *script, "--output_dir", str(output)]
