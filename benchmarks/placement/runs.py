"""Short RL runs of small random models under a plan, on ranks of this machine, and the time of their steps."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.rl.build import run_rl
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.tiny import tiny_config, tiny_tokenizer

WARM_STEPS = 1
"""First steps of a run that are not counted."""


@dataclass(frozen=True)
class RunTimes:
    """When the steps of a run ended on a rank, in seconds."""

    ends: tuple[float, ...]
    processor: tuple[float, ...]
    """Processor time of the rank until then, of all its threads."""
    mean_tokens: float
    """Of the completions of the last step."""

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the first."""
        return _median_step(self.ends)

    @property
    def processor_seconds(self) -> float:
        """Median processor time of these steps."""
        return _median_step(self.processor)


class Clock:
    """Records the end of each step; a callback of a run."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []
        self._mean_tokens = 0.0

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended; step 0 is what comes before the first."""
        self._ends.append((time.perf_counter(), time.process_time()))
        self._mean_tokens = metrics.get("completions/mean_length", 0.0)

    @property
    def times(self) -> RunTimes:
        """Of the steps so far."""
        ends, processor = zip(*self._ends, strict=True)
        return RunTimes(ends, processor, self._mean_tokens)


def _median_step(ends: Sequence[float]) -> float:
    kept = ends[WARM_STEPS:]
    return statistics.median(after - before for before, after in zip(kept, kept[1:], strict=False))


def timed_run(config: RLConfig) -> RunTimes:
    """The library's RL on this rank, with nothing on the console."""
    clock = Clock()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        run_rl(config, callbacks=[clock])
    return clock.times


def timed_line(world: World, line: Sequence[str]) -> RunTimes:
    """The same for a command line, on one of the ranks of a world."""
    return timed_run(parse_config(RLConfig, list(line)))


def write_inputs(folder: Path, *, prompts: int, **sizes: int) -> None:
    """Actor and reward model with these changes of tests.support.tiny's sizes, and prompts."""
    torch.manual_seed(0)
    for name, kind in (("actor", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        heads = {"num_labels": 1} if name == "reward" else {}
        config = tiny_config(num_key_value_heads=4, max_position_embeddings=4096, **heads, **sizes)
        kind.from_config(config).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    rows = [json.dumps({"prompt": f"{number:04}"}) for number in range(prompts)]
    (folder / "rows.jsonl").write_text("\n".join(rows))


def run_line(folder: Path, output: Path, plan: StepPlan, *, prompts: int, new_tokens: int, steps: int) -> list[str]:
    """The command line of PPO with one update per rollout under a plan; of what it offloads nothing is set."""
    settings: dict[str, object] = {
        "model.path": folder / "actor",
        "data.sources": f"[{folder / 'rows.jsonl'}]",
        "data.cache_dir": folder / "cache",
        "data.eval_fraction": 0.0,
        "reward.components": f"[{folder / 'reward'}]",
        "output_dir": output,
        "placement": json.dumps(plan.placement_setting().as_given()),
        "algorithm.epochs": 1,
        "algorithm.mini_batches": 1,
        "rollout.prompts_per_step": prompts,
        "rollout.max_prompt_tokens": 64,
        "rollout.sampling.max_new_tokens": new_tokens,
        "rollout.kv_cache_gib": 0.25,
        "rollout.tensor_parallel": 1 if plan.separate else plan.sampling.tensor_parallel,
        "train.max_steps": steps,
        "logging.sinks": "[]",
    }
    if plan.policy_lag:
        settings["rollout.max_lag"] = plan.policy_lag
        settings["algorithm.correction.method"] = "truncate"
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]
