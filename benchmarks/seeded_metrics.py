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
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learning_tasks import run_step, write_rows
from tests.support.tiny import tiny_model, tiny_tokenizer

NOT_COMPUTED = ("time", "perf/", "memory/")
"""Beginnings of metrics that differ between runs of the same code."""


ENVIRONMENT = {"path": "benchmarks.seeded_metrics:Turns", "max_turn_tokens": 3}
OTHER_ALGORITHMS: dict[str, dict[str, Any]] = {
    name: {"algorithm": name}
    for name in (
        *("reinforce", "remax", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "gdpo", "gspo", "gmpo", "cispo"),
        *("sapo", "vespo", "vapo"),
    )
} | {
    "online_dpo": {"algorithm": "online_dpo", "rollout": {"sampling": {"n": 2}}},
    "pass_at_k": {"algorithm": {"name": "pass_at_k", "k": 2}},
    "raft": {"algorithm": {"name": "raft", "selected_per_prompt": 1}, "rollout": {"sampling": {"n": 4}}},
}
"""Settings of the RL algorithms that have no run of their own in `runs`, by the name of the run."""
OTHER_PREFERENCE_ALGORITHMS = ("cdpo", "ipo", "hinge", "simpo", "orpo")


class Turns:
    """An environment of three turns."""

    def reset(self, row: dict[str, Any]) -> None:
        """Begin an episode."""
        self._turn = 0

    def step(self, action: str) -> tuple[str, float, bool]:
        """Reward turns of even length, and end after the third."""
        self._turn += 1
        return "go on", float(len(action) % 2 == 0), self._turn == 3


def even(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(len(text) % 2 == 0) for text in completions]


def main() -> None:
    """Run all, write the metrics, and compare them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    os.environ["HYBRID_RLHF_PRODUCTS"] = "torch"
    with tempfile.TemporaryDirectory() as folder:
        found = {name: metrics(*run, Path(folder), name) for name, run in runs(Path(folder)).items()}
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


def runs(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Module and config of each run, after its model and rows are written; `reward` comes before its readers."""
    for part in (tiny_model(seed=0), tiny_tokenizer()):
        part.save_pretrained(folder / "model")
    write_rows(
        folder / "rows.jsonl",
        [
            {"prompt": f"say {i % 9} and {i}", "chosen": str(i % 9) * (i % 4 + 1), "rejected": "x" * (i % 5 + 1)}
            for i in range(80)
        ],
    )
    common = {
        "seed": 3,
        "logging": {"sinks": []},
        "train": {"max_steps": 3, "eval_every": 2, "micro_batch_tokens": 8192},
        "data": {"sources": [str(folder / "rows.jsonl")], "cache_dir": str(folder / "cache")},
    }
    supervised = merged(
        common,
        {
            "model": {"path": str(folder / "model")},
            "data": {"max_length": 64},
            "train": {"global_batch_size": 8},
        },
    )
    rl = merged(
        common,
        {
            "model": {"path": str(folder / "model")},
            "actor": {"optimizer": {"lr": 1e-3}},
            "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 48, "sampling": {"max_new_tokens": 8}},
        },
    )
    learned = merged(rl, {"reward": {"components": [str(folder / "reward")]}})
    checked = merged(rl, {"reward": {"components": [{"function": "benchmarks.seeded_metrics:even"}]}})
    lora = {
        "actor": {"lora": {"rank": 4}},
        "critic": {"share_base": True},
        "algorithm": {"epochs": 2},
    }
    return {
        "sft": ("training.step1_sft.main", supervised),
        "sft_lora": ("training.step1_sft.main", merged(supervised, {"lora": {"rank": 4}})),
        "reward": ("training.step2_reward.main", supervised),
        "dpo": ("training.preference.main", supervised),
        "kto": ("training.preference.main", merged(supervised, {"algorithm": "kto"})),
        "ppo": ("training.step3_ppo.main", learned),
        "ppo_lora": ("training.step3_ppo.main", merged(learned, lora)),
        "grpo": ("training.step3_ppo.main", merged(learned, {"algorithm": "grpo"})),
        "rloo": ("training.step3_ppo.main", merged(checked, {"algorithm": {"name": "rloo", "kl": {"coef": 0.1}}})),
        "dapo": (
            "training.step3_ppo.main",
            merged(checked, {"algorithm": {"name": "dapo", "dynamic_sampling": {"max_refills": 2}}}),
        ),
        "environment": ("training.step3_ppo.main", merged(rl, {"algorithm": "grpo", "environment": ENVIRONMENT})),
        **{name: ("training.step3_ppo.main", merged(checked, more)) for name, more in OTHER_ALGORITHMS.items()},
        **{
            f"preference_{name}": ("training.preference.main", merged(supervised, {"algorithm": name}))
            for name in OTHER_PREFERENCE_ALGORITHMS
        },
    }


def merged(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The config with the sections of another one laid over its own."""
    return config | {
        key: merged(config.get(key, {}), value) if isinstance(value, dict) else value for key, value in more.items()
    }


def metrics(module: str, config: dict[str, Any], folder: Path, name: str) -> list[dict[str, float]]:
    """What a run computes, a dict a line."""
    run_step(["-m", module], config | {"output_dir": str(folder / name)}, folder / f"{name}.yaml", threads=1)
    print(name, flush=True)
    lines = [json.loads(text) for text in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in told.items() if not key.startswith(NOT_COMPUTED)} for told in lines]


if __name__ == "__main__":
    main()
