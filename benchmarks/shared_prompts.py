"""Rows that begin alike with shared prefixes (models/packing/prefixes.py) against separate rows.

    python -m benchmarks.shared_prompts                    # the model alone, SmolLM2-135M in float32 on the CPU
    python -m benchmarks.shared_prompts --step shared      # a whole GRPO step,
    python -m benchmarks.shared_prompts --step separate    # and without shared prefixes
    python -m benchmarks.shared_prompts --step shared --algorithm dpo    # an update of DPO, with a live reference

The model alone: log-probs of the completions, forward, and forward and backward, shared and separate by turns in one
process; medians after a warm-up of CPU seconds, so that other work on the cores counts little, and the most bytes of
tensors that one forward and backward has alive beside weights and gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.ppo_step import make_prompts
from benchmarks.training import DEVICE, policy
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.models.packing import batches, prefixes
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.rl.rollouts.scoring import RolloutScorer
from hybrid_rlhf.rl.trainer import RLTrainer
from hybrid_rlhf.rl.updates.updater import Updater
from hybrid_rlhf.rl_step import run_rl
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.host_memory import keep_freed_memory
from hybrid_rlhf.runtime.world import solo_world
from hybrid_rlhf.supervised.build import run_preference
from hybrid_rlhf.supervised.trainer import SupervisedTrainer

CASES = {
    "4 prompts x 8 x (144 + 64)": (4, 8, 144, 64),
    "1 x 8 x (144 + 64)": (1, 8, 144, 64),
    "1 x 8 x (512 + 64)": (1, 8, 512, 64),
    "1 x 8 x (64 + 256)": (1, 8, 64, 256),
    "8 pairs x (144 + 64)": (8, 2, 144, 64),
    "2 x 4 x (32 + 256)": (2, 4, 32, 256),
    "2 x 8 x (144 + 32 to 64)": (2, 8, 144, 64, True),
    "1 x 8 x (24 + 184)": (1, 8, 24, 184),
}
"""Prompts, completions of each, and tokens of both."""


def rows_of(
    prompts: int, completions: int, prompt: int, longest: int, ragged: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and mask of completions [B, T]; ragged completions have even lengths from half of the longest on."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.randint(10, 40_000, (prompts, 1, prompt), generator=generator).expand(-1, completions, -1)
    rests = torch.randint(10, 40_000, (prompts, completions, longest), generator=generator)
    ids = torch.cat([begins, rests], dim=2).flatten(0, 1)
    least = longest / 2 if ragged else longest
    lengths = prompt + torch.linspace(least, longest, completions).round().long().repeat(prompts)
    place = torch.arange(ids.shape[1])
    mask = place < lengths[:, None]
    return ids, mask, mask & (place >= prompt)


def sharing(share: bool) -> AbstractContextManager[Any]:
    """Context in which rows share prefixes, or nothing."""
    return mock.patch.object(batches, "shares_prefixes", lambda lm: share)


def forward(model: Policy, *rows: Tensor) -> None:
    """Log-probs, as scoring computes them."""
    with torch.no_grad():
        model(*rows)


def step(model: Policy, *rows: Tensor) -> None:
    """Forward and backward."""
    model(*rows)[0].sum().backward()


def cpu_seconds(run: Callable[..., None], model: Policy, rows: tuple[Tensor, ...], *, share: bool) -> float:
    """CPU seconds of a run."""
    start = time.process_time()
    with sharing(share):
        run(model, *rows)
    return time.process_time() - start


def measure(model: Policy, rows: tuple[Tensor, ...], repeats: int) -> dict[str, float]:
    """Medians of both, and ratios of shared to separate."""
    result: dict[str, float] = {"tokens": int(rows[1].sum()), "shared_tokens": batches.pack(model.lm, *rows[:2]).tokens}
    for name, run in (("forward", forward), ("step", step)):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(repeats + 1):
            for share in (True, False) if turn % 2 else (False, True):
                used = cpu_seconds(run, model, rows, share=share)
                if turn:
                    seconds[share].append(used)
        shared, alone = (statistics.median(seconds[share]) for share in (True, False))
        result |= {f"{name}_shared": shared, f"{name}_separate": alone, f"{name}_ratio": shared / alone}
    for name, share in (("shared", True), ("separate", False)):
        with sharing(share), LiveBytes("cpu") as live:
            step(model, *rows)
        result[f"gib_{name}"] = live.peak / 2**30
    return result


def run_step(share: bool, options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of a step and its parts, in a process of its own, and its peak memory."""
    seconds: dict[str, float] = {}

    def timed(kind: type, method: str, name: str) -> AbstractContextManager[Any]:
        plain = getattr(kind, method)

        def call(*args: Any, **named: Any) -> Any:
            start = time.process_time()
            result = plain(*args, **named)
            seconds[name] = time.process_time() - start
            return result

        return mock.patch.object(kind, method, call)

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        for kind, method, part in (
            (RLTrainer, "step", "step"),
            (SupervisedTrainer, "step", "step"),
            (RolloutScorer, "compute_logprobs", "scoring"),
            (Updater, "update", "updates"),
        ):
            stack.enter_context(timed(kind, method, part))
        if not share:
            stack.enter_context(mock.patch.object(prefixes, "LEAST_TOKENS", 10**9))
        write_files(Path(name), options)
        line = f"""--model.path embedded --model.dtype float32 --data.sources {name}/rows.jsonl --data.eval_fraction 0
            --output_dir {name}/run --train.micro_batch_tokens {options.micro_batch_tokens}"""
        if options.algorithm == "dpo":
            line += f""" --algorithm dpo --reference.logprobs live --train.global_batch_size {options.prompts}
                --train.max_steps 2"""
            run_preference(parse_config(PreferenceStepConfig, line.split()))
        else:
            line += f""" --algorithm grpo --algorithm.mini_batches 1 --rollout.prompts_per_step {options.prompts}
                --rollout.sampling.n 8 --rollout.sampling.max_new_tokens {options.new_tokens} --train.max_steps 1
                --reward.components"""
            run_rl(parse_config(RLConfig, [*line.split(), f"[{{function: {name}/reward.py:letters}}]"]))
        metrics = json.loads(Path(name, "run/metrics.jsonl").read_text().splitlines()[-1])
    wanted = ("memory/peak_gib", "perf/shared_tokens_ratio", "completions/mean_length", "actor/grad_norm", "grad_norm")
    return {**seconds, **{key: metrics[key] for key in wanted if key in metrics}}


def write_files(folder: Path, options: argparse.Namespace) -> None:
    """Prompts of a step, or pairs of two updates, and a reward."""
    tokenizer = load_tokenizer(resolve_model("embedded", world=solo_world(DEVICE)))
    generator = torch.Generator().manual_seed(0)
    is_dpo = options.algorithm == "dpo"

    def turns(tokens: int) -> list[Any]:
        number = options.prompts * (1 + is_dpo)
        return [row["prompt"] for row in make_prompts(tokenizer, number, tokens=tokens, generator=generator)]

    rows = [{"prompt": prompt} for prompt in turns(options.prompt_tokens)]
    for key in ("chosen", "rejected") if is_dpo else ():
        for row, (turn,) in zip(rows, turns(options.new_tokens), strict=True):
            row[key] = turn["content"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def letters(completions, **_):\n    return [len({*c}) for c in completions]\n")


def main() -> None:
    """Print a line for each case, or for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[*CASES], help="of the model alone")
    parser.add_argument("--step", choices=("shared", "separate"), help="measure a whole step in this process instead")
    parser.add_argument("--algorithm", choices=("grpo", "dpo"), default="grpo", help="of a step")
    parser.add_argument("--prompts", type=int, default=8, help="of a step, with 8 completions or a pair each")
    parser.add_argument("--prompt_tokens", type=int, default=144)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="file for the raw figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    results: dict[str, dict[str, float]] = {}
    if options.step:
        results["step"] = run_step(options.step == "shared", options)
        print(options.step, results["step"], flush=True)
    else:
        model = policy("embedded", packed=True)
        for name in options.cases:
            results[name] = measure(model, rows_of(*CASES[name]), options.repeats)
            print(f"{name:28s}", {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
