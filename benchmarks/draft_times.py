"""Time that speculative decoding saves in GRPO: rollouts without drafts and with `previous`, by turns.

    python -m benchmarks.draft_times --temperature 0.3

The task is `chat` of benchmarks/draft_steps.py. Each rollout is sampled from the same weights and seeds without drafts,
with `previous` as a run has it (drafts only while measured to be faster) and with drafts in every step, each several
times by turns. Each repetition has a drafter of its own, so that none sees a completion of the rollout that it samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.draft_steps import chat_config, shortened
from hybrid_rlhf.cli.rl import main as run_rl
from hybrid_rlhf.generation import Completion, Drafter, GenerationEngine

KINDS = ("none", "previous", "always")


class TimedRollouts:
    """Takes the place of `GenerationEngine.generate`."""

    def __init__(self, repeats: int, draft_tokens: int) -> None:
        self.drafters: dict[str, list[Drafter | None]] = {
            "none": [None] * repeats,
            "previous": [Drafter("previous", draft_tokens=draft_tokens) for _ in range(repeats)],
            "always": [Drafter("previous", draft_tokens=draft_tokens, always=True) for _ in range(repeats)],
        }
        self.generate = GenerationEngine.generate
        self.rollouts: list[dict[str, Any]] = []

    def __call__(self, engine: GenerationEngine, prompts: Any, sampling: Any, **_: Any) -> list[list[Completion]]:
        """Complete the prompts by turns, without cached prefixes."""
        repeats = len(self.drafters["none"])
        times: dict[str, Any] = {name: {"seconds": [], "cpu_seconds": []} for name in KINDS}
        for turn in range(repeats):
            for name in KINDS if turn % 2 == 0 else KINDS[::-1]:
                if engine.backend.held is not None:  # type: ignore[attr-defined]
                    engine.backend.held.pool.forget_prefixes()  # type: ignore[attr-defined]
                before = engine.work
                start, cpu = time.perf_counter(), time.process_time()
                result = self.generate(engine, prompts, sampling, drafter=self.drafters[name][turn])
                times[name]["seconds"].append(time.perf_counter() - start)
                times[name]["cpu_seconds"].append(time.process_time() - cpu)
                times[name]["work"] = vars(engine.work - before)
                if name == "none":
                    kept = result
        self.rollouts.append(times)
        medians = {
            name: [round(statistics.median(times[name][key]), 2) for key in ("seconds", "cpu_seconds")]
            for name in KINDS
        }
        tokens = sum(len(sample.token_ids) for samples in kept for sample in samples)
        entropy = -sum(sum(sample.logprobs) for samples in kept for sample in samples) / tokens
        print(json.dumps({"tokens": tokens, "nats": round(entropy, 2), **medians}), times["always"]["work"], flush=True)
        return kept


def main() -> None:
    """Run, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=2, help="per epoch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts_per_step", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--draft_tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timed = TimedRollouts(options.repeats, options.draft_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = chat_config(folder)
        config["rollout"]["prompts_per_step"] = options.prompts_per_step
        config["rollout"]["sampling"] |= {"temperature": options.temperature, "max_new_tokens": options.new_tokens}
        config = shortened(config, prompts=options.rollouts * options.prompts_per_step, epochs=options.epochs)
        config |= {"output_dir": str(folder / "run"), "logging": {"sinks": [], "samples_every": 0}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        GenerationEngine.generate = lambda self, *given, **named: timed(self, *given, **named)  # type: ignore[method-assign,assignment]
        run_rl(["--config", str(folder / "config.yaml")])
    for epoch in range(options.epochs):
        part = timed.rollouts[epoch * options.rollouts : (epoch + 1) * options.rollouts]
        for key in ("seconds", "cpu_seconds"):
            sums = {name: sum(statistics.median(one[name][key]) for one in part) for name in KINDS}
            ratios = {name: round(sums["none"] / sums[name], 3) for name in KINDS[1:]}
            print(epoch + 1, key, {name: round(value, 2) for name, value in sums.items()}, "none / it:", ratios)
    for key in ("seconds", "cpu_seconds"):
        sums = {name: sum(statistics.median(one[name][key]) for one in timed.rollouts) for name in KINDS}
        print("all", key, {name: round(sums["none"] / sums[name], 3) for name in KINDS[1:]})


if __name__ == "__main__":
    main()
