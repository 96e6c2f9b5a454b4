"""How many decoding steps speculative decoding saves in RL, counted, not timed.

    python -m benchmarks.draft_steps                 # the reasoning task of benchmarks/learning.py, in several epochs
    python -m benchmarks.draft_steps --task chat     # GRPO on longer completions of conversations

Each rollout is sampled three times with the same weights and seeds: without drafts, with those of n-grams, and with
those of the earlier epochs. Drafts are on in every step. Training goes on with the first, and the tokens of all three
are compared. A row-step is one row in one decoding step: a row without drafts takes one per token after the first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.learning_tasks import reasoning_task, write_rows
from hybrid_rlhf.cli.rl import main as run_rl
from hybrid_rlhf.data.rows.embedded import write_demo_data
from hybrid_rlhf.generation import Completion, Drafter, GenerationEngine


class CountedRollouts:
    """Takes the place of `GenerationEngine.generate`."""

    def __init__(self, draft_tokens: int) -> None:
        self.drafters = {
            "none": None,
            "ngram": Drafter("ngram", draft_tokens=draft_tokens, always=True),
            "previous": Drafter("previous", draft_tokens=draft_tokens, always=True),
        }
        self.generate = GenerationEngine.generate
        self.rollouts: list[dict[str, Any]] = []

    def __call__(self, engine: GenerationEngine, prompts: Any, sampling: Any, **_: Any) -> list[list[Completion]]:
        """Complete the prompts three times, without cached prefixes."""
        results, counts = {}, {}
        for name, drafter in self.drafters.items():
            if engine.backend.held is not None:  # type: ignore[attr-defined]
                engine.backend.held.pool.forget_prefixes()  # type: ignore[attr-defined]
            before = engine.work
            results[name] = self.generate(engine, prompts, sampling, drafter=drafter)
            counts[name] = vars(engine.work - before)
        first = [sample.token_ids for samples in results["none"] for sample in samples]
        for name, found in results.items():
            tokens = [sample.token_ids for samples in found for sample in samples]
            counts[name]["equal_completions"] = sum(a == b for a, b in zip(first, tokens, strict=True))
        counts["completions"] = len(first)
        self.rollouts.append(counts)
        print(json.dumps(counts), flush=True)
        return results["none"]


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward of `chat`: the fraction of words that begin with a vowel."""
    words = [text.lower().split() or [""] for text in completions]
    return [sum(word[:1] in set("aeiou") for word in own) / len(own) for own in words]


def chat_config(folder: Path) -> dict[str, Any]:
    """GRPO on prompts of the demo's corpus, from the embedded model, with adapters."""
    file = write_demo_data(folder / "corpus", seed=0)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": row["prompt"]} for row in rows if len(row["prompt"][-1]["content"]) <= 120]
    write_rows(folder / "prompts.jsonl", rows)
    return {
        "model": {"path": "embedded"},
        "actor": {"lora": {"rank": 16, "alpha": 32}, "optimizer": {"lr": 1e-4}},
        "reward": {"components": [{"function": "benchmarks.draft_steps:vowels"}]},
        "data": {"sources": [str(folder / "prompts.jsonl")], "cache_dir": str(folder / "cache")},
        "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 96, "sampling": {"n": 4, "max_new_tokens": 64}},
        "algorithm": {"name": "grpo", "penalties": None},
    }


def shortened(config: dict[str, Any], *, prompts: int, epochs: int) -> dict[str, Any]:
    """The task on few prompts, so that they come again."""
    file = Path(config["data"]["sources"][0])
    write_rows(file, [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:prompts]])
    steps = epochs * prompts // config["rollout"]["prompts_per_step"]
    config["data"] = {"sources": [str(file)], "eval_fraction": 0.0, "cache_dir": config["data"]["cache_dir"]}
    config["train"] = {"max_steps": steps, "epochs": epochs}
    return config


def summary(rollouts: Sequence[dict[str, Any]], epochs: int) -> list[dict[str, Any]]:
    """Counts of each kind of draft in each epoch."""
    each, lines = len(rollouts) // epochs, []
    for epoch in range(epochs):
        own = rollouts[epoch * each : (epoch + 1) * each]
        for name in ("none", "ngram", "previous"):
            sums = {key: sum(one[name][key] for one in own) for key in own[0][name]}
            lines.append(
                {
                    "epoch": epoch + 1,
                    "draft": name,
                    **sums,
                    "completions": sum(one["completions"] for one in own),
                    "acceptance": round(sums["accepted"] / max(sums["drafted"], 1), 3),
                    "tokens_per_row_step": round(sums["tokens"] / max(sums["row_steps"], 1), 3),
                }
            )
    return lines


def main() -> None:
    """Run, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("reasoning", "chat"), default="reasoning")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=2, help="per epoch")
    parser.add_argument("--prompts_per_step", type=int, help="none: the task's")
    parser.add_argument("--draft_tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counted = CountedRollouts(options.draft_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = reasoning_task(folder, steps=1).config if options.task == "reasoning" else chat_config(folder)
        if options.prompts_per_step is not None:
            config["rollout"]["prompts_per_step"] = options.prompts_per_step
        config["rollout"]["sampling"]["temperature"] = options.temperature
        prompts = options.rollouts * config["rollout"]["prompts_per_step"]
        config = shortened(config, prompts=prompts, epochs=options.epochs)
        config |= {"output_dir": str(folder / "run"), "logging": {"sinks": [], "samples_every": 0}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        GenerationEngine.generate = lambda self, *given, **named: counted(self, *given, **named)  # type: ignore[method-assign,assignment]
        run_rl(["--config", str(folder / "config.yaml")])
    lines = summary(counted.rollouts, options.epochs)
    for line in lines:
        print(line)
    if options.json is not None:
        told = {"options": {key: value for key, value in vars(options).items() if key != "json"}, "lines": lines}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
