"""Tiny runs of the three steps, and what of them must be the same whether they were cut off or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = {
    "sft": "training.step1_sft.main",
    "reward": "training.step2_reward.main",
    "ppo": "training.step3_ppo.main",
}
CLOCK = ("time_seconds", "time/", "perf/", "memory/")
"""Beginnings of the metrics that tell of the machine."""


def write_rows(file: Path) -> Path:
    rows = [{"prompt": f"say {i % 9}", "chosen": str(i % 9), "rejected": "x" * (i % 5 + 1)} for i in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def step_line(name: str, output: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """The command line of a step of six updates or rollouts, with a checkpoint after every second."""
    line = [
        "--data.sources", str(rows), "--output_dir", str(output), "--data.max_length", "64",
        "--data.cache_dir", str(rows.parent / "cache"), "--logging.tensorboard", "false",
        "--train.max_steps", "6", "--train.save_every", "2", "--train.eval_every", "3", "--data.max_eval_rows", "4",
    ]  # fmt: skip
    if name != "ppo":
        return [*line, "--model.path", str(model), "--train.global_batch_size", "4", *more]
    return [
        *line, "--actor.path", str(model), "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "5",
        "--rollout.max_prompt_tokens", "48", "--reward.parts", f"[{{function: '{__file__}:brevity'}}]",
        "--ppo.mini_batches", "2", "--ppo.epochs", "2", "--ppo.ema_decay", "0.5", "--ppo.kl_target", "3",
        "--ppo.score_scaling", "running", "--ppo.reference_refresh_every", "3", "--logging.samples_every", "1",
        "--ppo.ptx_coef", "0.1", "--data.ptx_sources", str(rows), "--actor.optimizer.lr", "1e-3", *more,
    ]  # fmt: skip


def brevity(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text))) - 0.1 * len(text) for text in completions]


def story(output: Path) -> dict[str, Any]:
    """What a run left that does not depend on the clock: metrics, samples, weights."""
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
