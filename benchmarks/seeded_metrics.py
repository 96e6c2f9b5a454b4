"""Metrics of small seeded runs, to be compared between two checkouts bit by bit.

    python -m benchmarks.seeded_metrics before.json                      # in one checkout
    python -m benchmarks.seeded_metrics after.json --against before.json # in the other

Why: a change that moves or renames code must not change what is computed. Each step and several algorithms run for
three updates on a tiny random model; all metrics count but durations, speeds and memory. Exit code 1 where a figure
differs or is missing on either side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
NOT_COMPUTED = ("time", "perf/", "memory/")
"""Beginnings of metrics that differ between runs of the same code."""
COMMON = ["--data.sources", "{rows}", "--data.cache_dir", "{folder}/cache", "--logging.tensorboard", "false",
          "--train.max_steps", "3", "--seed", "3"]  # fmt: skip
SUPERVISED = [*COMMON, "--data.max_length", "64", "--train.global_batch_size", "8", "--train.eval_every", "2"]
RL = [*COMMON, "--actor.path", "{model}", "--rollout.prompts_per_step", "8", "--rollout.max_prompt_tokens", "48",
      "--rollout.max_new_tokens", "8", "--actor.optimizer.lr", "1e-3", "--train.eval_every", "2"]  # fmt: skip
LEARNED = ["--reward.path", "{folder}/reward"]
CHECKED = ["--reward.parts", '[{"function": "benchmarks.seeded_metrics:even"}]']
RUNS: dict[str, tuple[str, list[str]]] = {
    "sft": ("training.step1_sft.main", [*SUPERVISED, "--model.path", "{model}"]),
    "sft_lora": ("training.step1_sft.main", [*SUPERVISED, "--model.path", "{model}", "--lora.rank", "4"]),
    "reward": ("training.step2_reward.main", [*SUPERVISED, "--model.path", "{model}"]),
    "dpo": ("training.preference.main", [*SUPERVISED, "--model.path", "{model}"]),
    "kto": ("training.preference.main", [*SUPERVISED, "--model.path", "{model}", "--algorithm", "kto"]),
    "ppo": ("training.step3_ppo.main", [*RL, *LEARNED]),
    "ppo_lora": ("training.step3_ppo.main", [*RL, *LEARNED, "--actor.lora.rank", "4", "--critic.lora.rank", "4",
                                             "--critic.share_base", "true", "--ppo.epochs", "2"]),
    "grpo": ("training.step3_ppo.main", [*RL, *LEARNED, "--algorithm", "grpo"]),
    "rloo": ("training.step3_ppo.main", [*RL, *CHECKED, "--algorithm", "rloo", "--ppo.kl_coef", "0.1"]),
    "dapo": ("training.step3_ppo.main", [*RL, *CHECKED, "--algorithm", "dapo", "--ppo.max_refills", "2"]),
}  # fmt: skip
"""Module and words of each run; `reward` comes before those that read its model."""


def even(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(len(text) % 2 == 0) for text in completions]


def main() -> None:
    """Run all, write the metrics, and compare them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: metrics(name, Path(folder)) for name in prepared(Path(folder))}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    if options.against is None:
        return
    differing = [
        f"{run}, line {place}: {key}: {before.get(key)} and {after.get(key)}"
        for run, lines in json.loads(options.against.read_text()).items()
        for place, (before, after) in enumerate(zip(lines, found[run], strict=True))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    print("\n".join(differing) or f"{len(found)} runs, all metrics are the same")
    sys.exit(1 if differing else 0)


def prepared(folder: Path) -> list[str]:
    """Write the model and the rows; the names of the runs."""
    for part in (tiny_model(seed=0), tiny_tokenizer()):
        part.save_pretrained(folder / "model")
    rows = [
        {"prompt": f"say {i % 9} and {i}", "chosen": str(i % 9) * (i % 4 + 1), "rejected": "x" * (i % 5 + 1)}
        for i in range(80)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(RUNS)


def metrics(name: str, folder: Path) -> list[dict[str, float]]:
    """What a run computes, a dict a line."""
    module, words = RUNS[name]
    places = {"rows": folder / "rows.jsonl", "model": folder / "model", "folder": folder}
    line = [word.format(**places) if word.startswith("{") and word[1] != '"' else word for word in words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HYBRID_RLHF_PRODUCTS": "torch"}
    done = subprocess.run(
        [sys.executable, "-m", module, *line, "--output_dir", str(folder / name)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(name, flush=True)
    lines = [json.loads(text) for text in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in told.items() if not key.startswith(NOT_COMPUTED)} for told in lines]


if __name__ == "__main__":
    main()
