"""Steps per hour with a lag against the synchronous loop, and against another checkout.

    python -m benchmarks.lag [--task tools|lengths] [--ranks 4] [--samplers 2] [--max_lag 4] [--json FILE]
    python -m benchmarks.lag --before FOLDER --before_settings "--rollout.async_sampling.policy_lag 4" ...

GRPO of a random model (--layers of --hidden). Task `tools`: an episode has three turns of --turn_tokens; the tool of
each sleeps for a log-normal time (median 0.3 s, sigma 1) that depends on prompt and turn alone. Task `lengths`:
completions of one turn whose lengths are a long tail, as each token ends it with the same chance. The first three steps
of a run do not count, nor the last `max_lag`, beyond which there is nothing to sample. Kinds run by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_rlhf.runtime.files.json_lines import read_lines
from tests.support.ahead import STOP_TOKEN_IDS
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


def letters(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A reward."""
    return [len(set(text)) / 8 for text in completions]


def run(folder: Path, base: Path, options: argparse.Namespace, more: list[str], checkout: Path | None) -> list[Any]:
    """Run GRPO, and return the metrics of its steps."""
    line = [
        *f"--algorithm grpo --model.path {base}/model --data.sources {base}/rows.jsonl".split(),
        *f"--data.cache_dir {folder}/cache --output_dir {folder}/run --train.max_steps {options.steps}".split(),
        *"--logging.sinks [] --train.eval_every 1000 --data.max_eval_rows 4 --rollout.sampling.n 4".split(),
        *f"--rollout.prompts_per_step {options.prompts} --rollout.max_prompt_tokens 48".split(),
        *"--rollout.kv_cache_gib 0.5 --algorithm.mini_batches 1".split(),
        *more,
    ]
    if options.task == "tools":
        line += f"--rollout.sampling.max_new_tokens {TURNS * (options.turn_tokens + _TOOL_TOKENS)}".split()
        line += f"--environment.max_turn_tokens {options.turn_tokens} --environment.threads 640".split()
        line += ["--environment.path", f"{Path(__file__)}:SleepingTool"]
    else:
        line += f"--rollout.sampling.max_new_tokens {options.longest}".split()
        line += ["--reward.components", json.dumps([{"function": f"{Path(__file__)}:letters"}])]
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    environment = os.environ if checkout is None else os.environ | {"PYTHONPATH": str(checkout)}
    command = [*launched, "-m", "hybrid_rlhf.cli.rl", *line]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=checkout)
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if line["step"] > 0]


def kinds_of(options: argparse.Namespace) -> dict[str, tuple[list[str], Path | None]]:
    """Settings and checkout of each kind of run."""
    lag = ["--rollout.max_lag", str(options.max_lag)]
    kinds: dict[str, tuple[list[str], Path | None]] = {
        "synchronous, all ranks sample and train": ([], None),
        f"max_lag {options.max_lag}, all ranks sample and train": (lag, None),
    }
    if options.samplers:
        ranks = f"{options.ranks - options.samplers}-{options.ranks - 1}"
        separate = ["--placement", json.dumps({"sampler": {"ranks": ranks}})]
        kinds["synchronous, samplers on ranks of their own"] = separate, None
        kinds[f"max_lag {options.max_lag}, samplers on ranks of their own"] = [*separate, *lag], None
    for settings in options.before_settings:
        kinds[f"before: {settings or 'synchronous'}"] = shlex.split(settings), options.before
    return kinds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of each kind, and the idle time of samplers."""
    kinds = kinds_of(options)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    idle: dict[str, list[float]] = {kind: [] for kind in kinds}
    ages: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        shape = {
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
        }
        model = tiny_model(**shape, initializer_range=0.02)
        if options.task == "lengths":
            assert model.generation_config is not None
            model.generation_config.eos_token_id = list(STOP_TOKEN_IDS[: options.stops])
        model.save_pretrained(base / "model")
        tiny_tokenizer().save_pretrained(base / "model")
        lines = [{"prompt": f"say {number}", "seed": number} for number in range(options.prompts * (options.steps + 1))]
        (base / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for repeat in range(options.repeats):
            for number, (kind, (more, checkout)) in enumerate(kinds.items()):
                folder = base / f"{repeat}.{number}"
                folder.mkdir()
                told = run(folder, base, options, more, checkout)[_WARM_UP : options.steps - options.max_lag]
                seconds[kind].append(statistics.mean(line["time/step_seconds"] for line in told))
                waits = [line["rollout/sampler_idle_ratio"] for line in told if "rollout/sampler_idle_ratio" in line]
                idle[kind] += [statistics.mean(waits)] if waits else []
                ages[kind].append(statistics.mean(line.get("rollout/stale_updates", 0.0) for line in told))
                shown = "".join(f", samplers idle {value:.1%}" for value in idle[kind][-1:])
                print(f"{kind}: {seconds[kind][-1]:.3f} s per step, age {ages[kind][-1]:.2f}{shown}", flush=True)
    return {
        kind: {"seconds": of, "median_seconds": statistics.median(of), "idle": idle[kind], "age_updates": ages[kind]}
        for kind, of in seconds.items()
    }


def main() -> None:
    """Print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("tools", "lengths"), default="tools")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samplers", type=int, default=2, help="ranks that sample alone; 0: no such kinds")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step, with 4 completions each")
    parser.add_argument("--turn_tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, default=512, help="longest completion of the task lengths")
    parser.add_argument("--stops", type=int, default=5, help="tokens that end a completion of the task lengths")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--max_lag", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--before_settings", nargs="*", default=[], help="settings of its kinds, each a text")
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
