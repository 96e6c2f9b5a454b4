"""Streaming against the synchronous loop, with an environment whose tools sleep.

    python -m benchmarks.streaming [--ranks 4] [--samplers 2] [--prompts 8] [--max_lag 4] [--json FILE]

GRPO of a random model (--layers of --hidden) on `ranks` ranks, of which `samplers` sample. An episode has three turns
of --turn_tokens; the tool of each sleeps for a log-normal time (median 0.3 s, sigma 1) that depends on prompt and turn
alone. The first three steps of a run do not count, nor the last `max_lag`, beyond which there is nothing to sample.
Runs by turns, each kind several times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_rlhf.runtime.files.json_lines import read_lines
from tests.support.tiny import tiny_model, tiny_tokenizer

TURNS = 3
MEDIAN_SECONDS = 0.3
SIGMA = 1.0
_WARM_UP = 3
_TOOL_TOKENS = 18
"""Room for the tokens of a tool's answer, of which a turn has one."""


class SleepingTool:
    """An environment whose tool answers after a log-normal time that depends on prompt and turn alone."""

    def reset(self, row: dict[str, Any]) -> None:
        """Begin an episode."""
        self._random = np.random.default_rng([int(row["seed"]), 1])
        self._turn = 0

    def step(self, action: str) -> tuple[str, float, bool]:
        """Sleep, and end after the last turn."""
        time.sleep(float(self._random.lognormal(np.log(MEDIAN_SECONDS), SIGMA)))
        self._turn += 1
        return "go on", float(len(set(action))) / 8, self._turn == TURNS


def run(folder: Path, model: Path, rows: Path, options: argparse.Namespace, more: list[str]) -> list[dict[str, float]]:
    """Run GRPO, and return the metrics of its steps."""
    line = [
        *f"--algorithm grpo --model.path {model} --data.sources {rows} --data.cache_dir {folder}/cache".split(),
        *f"--output_dir {folder}/run --train.max_steps {options.steps} --logging.sinks []".split(),
        *"--train.eval_every 1000 --data.max_eval_rows 4 --rollout.sampling.n 4".split(),
        *f"--rollout.prompts_per_step {options.prompts}".split(),
        *f"--rollout.sampling.max_new_tokens {TURNS * (options.turn_tokens + _TOOL_TOKENS)}".split(),
        *f"--rollout.max_prompt_tokens 48 --environment.max_turn_tokens {options.turn_tokens}".split(),
        *"--environment.threads 640 --rollout.kv_cache_gib 0.5 --algorithm.mini_batches 1".split(),
        *f"--environment.path {Path(__file__)}:SleepingTool".split(),
        *more,
    ]
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    subprocess.run([*launched, "-m", "hybrid_rlhf.cli.rl", *line], check=True, stdout=subprocess.DEVNULL)
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if line["step"] > 0]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of each kind, and the idle time of samplers."""
    max_lag = options.max_lag
    samplers = f"{options.ranks - options.samplers}-{options.ranks - 1}"
    separate = ["--placement", json.dumps({"sampler": {"ranks": samplers}})]
    kinds = {
        "synchronous, all ranks sample and train": [],
        "synchronous, samplers on ranks of their own": separate,
        f"async_sampling, policy_lag {max_lag}": [*separate, "--rollout.async_sampling.policy_lag", str(max_lag)],
        f"streaming, max_lag {max_lag}": [*separate, "--rollout.streaming.max_lag", str(max_lag)],
        f"streaming, max_lag {max_lag}, all ranks sample and train": ["--rollout.streaming.max_lag", str(max_lag)],
    }
    kinds = {kind: more for number, (kind, more) in enumerate(kinds.items()) if number in options.kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    idle: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        shape = {
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
        }
        tiny_model(**shape, initializer_range=0.02).save_pretrained(base / "model")
        tiny_tokenizer().save_pretrained(base / "model")
        rows = base / "rows.jsonl"
        lines = [{"prompt": f"say {number}", "seed": number} for number in range(options.prompts * (options.steps + 1))]
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for repeat in range(options.repeats):
            for number, (kind, more) in enumerate(kinds.items()):
                folder = base / f"{repeat}.{number}"
                folder.mkdir()
                told = run(folder, base / "model", rows, options, more)[_WARM_UP : options.steps - max_lag]
                seconds[kind].append(statistics.mean(line["time/step_seconds"] for line in told))
                waits = [line["rollout/sampler_idle_ratio"] for line in told if "rollout/sampler_idle_ratio" in line]
                idle[kind] += [statistics.mean(waits)] if waits else []
                shown = "".join(f", samplers idle {value:.1%}" for value in idle[kind][-1:])
                print(f"{kind}: {seconds[kind][-1]:.2f} s per step{shown}", flush=True)
    return {
        kind: {"seconds_per_step": of, "median_seconds": statistics.median(of), "idle": idle[kind]}
        for kind, of in seconds.items()
    }


def main() -> None:
    """Print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step, with 4 completions each")
    parser.add_argument("--turn_tokens", type=int, default=32)
    parser.add_argument("--kinds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="numbers of the kinds to run")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--max_lag", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure(options)
    first = next(iter(results.values()))["median_seconds"]
    for kind, result in results.items():
        print(f"{kind}: {3600 / result['median_seconds']:.0f} steps an hour, {first / result['median_seconds']:.2f} x")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
