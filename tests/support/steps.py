"""Tiny runs of the three steps, and their outputs that an interruption must not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MODULES = {
    "sft": "hybrid_rlhf.cli.sft",
    "reward": "hybrid_rlhf.cli.reward",
    "ppo": "hybrid_rlhf.cli.rl",
}
CLOCK = ("time_seconds", "time/", "perf/", "memory/")
"""Prefixes of the metrics that depend on the machine."""


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSON lines and return the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_rows(file: Path) -> list[Any]:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_rows(file: Path) -> Path:
    """Write 60 preference pairs."""
    rows = [{"prompt": f"say {i % 9}", "chosen": str(i % 9), "rejected": "x" * (i % 5 + 1)} for i in range(60)]
    return write_lines(file, rows)


def words(*texts: str) -> list[str]:
    """The words of a command line: texts that begin with an option are split, others are values with spaces."""
    return [word for text in texts for word in ([text] if text and not text.startswith("--") else text.split())]


def step_line(name: str, output: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """The command line of a step of six updates or rollouts, with a checkpoint after every second."""
    line = (
        f"--model.path {model} --data.sources {rows} --data.cache_dir {rows.parent}/cache --output_dir {output}".split()
    )
    line += "--train.max_steps 6 --train.save_every 2 --train.eval_every 3 --data.max_eval_rows 4".split()
    line += "--logging.sinks []".split()
    if name != "ppo":
        return [*line, *words("--data.max_length 64 --train.global_batch_size 4", *more)]
    return [
        *line,
        *"--rollout.prompts_per_step 4 --rollout.sampling.max_new_tokens 5 --rollout.max_prompt_tokens 48".split(),
        *"--algorithm.mini_batches 2 --algorithm.epochs 2 --algorithm.kl.target 3".split(),
        *"--algorithm.score_scaling running --actor.ema_decay 0.5 --actor.optimizer.lr 1e-3".split(),
        *"--reference.refresh_every 3 --logging.samples_every 1".split(),
        *f"--ptx.coef 0.1 --ptx.sources {rows} --ptx.max_length 64".split(),
        "--reward.components",
        f"[{{function: '{__file__}:brevity'}}]",
        *words(*more),
    ]


def brevity(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text))) - 0.1 * len(text) for text in completions]


def run_outputs(output: Path) -> dict[str, Any]:
    """Outputs of a run that do not depend on the clock: metrics, samples, hashes of the weights."""
    left: dict[str, Any] = {
        "metrics": [
            {key: value for key, value in line.items() if not key.startswith(CLOCK)}
            for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        ]
    }
    if (output / "samples.jsonl").exists():
        left["samples"] = (output / "samples.jsonl").read_text().splitlines()
    for file in sorted(output.rglob("*.safetensors")):
        if "checkpoints" not in file.parts:
            left[str(file.relative_to(output))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return left


def checkpoint_names(output: Path) -> list[str]:
    """Names of the checkpoints of a run, sorted."""
    return sorted(path.name for path in (output / "checkpoints").iterdir())
