"""A whole GRPO step side by side: training/step3_ppo/main.py, TRL's GRPOTrainer, and the matrix products of the step.

    python -m benchmarks.grpo_step                                # this project and the limit
    python -m benchmarks.grpo_step --trl_python ENV/bin/python    # TRL 1.16 too, see peers/trl_trainers.py
    python -m benchmarks.grpo_step --prompts 2 --completions 4 --prompt_tokens 32 --new_tokens 16    # a try

SmolLM2-135M in float32, all of it trained, on a GPU if there is one; this project with all its defaults: old log-probs,
a KL to the reference, four updates of a rollout. TRL has the same updates and the same KL. Completions have
--new_tokens tokens, but for a few here that sample the end of a turn: nothing is gained by packing. The sides take
turns, a step each, while the others' processes rest; the first steps warm up. Medians over the others are printed, and
the seconds over those of the limit.

The limit counts matrix products of linear layers, and nothing else:

- generation: each prompt once, then the rows of each step; the head for each sampled token
- scoring: one forward of the actor and one of the reference, the head on completions
- training: forward and backward, the head on completions; a backward is two products for each forward

In scoring and training a prompt counts once for all of its completions; `separate` counts it with each of them. A
quarter of the tokens of a pass, and some decoding steps, are computed and counted for all. Each part takes the faster
of torch's products and oneDNN's (benchmarks/matrix_products.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.in_turn import ROOT, InTurn, Side, add_shared_options, environment, versions_line, words, write_result
from benchmarks.matrix_products import Products
from benchmarks.words import embedded, make_prompts
from hybrid_rlhf.models.pretrained.sources import quiet_transformers
from hybrid_rlhf.runtime.host_memory import MALLOC_ENVIRONMENT
from hybrid_rlhf.runtime.world import default_device

OURS, TRL, LIMIT, SEPARATE = "this project", "TRL GRPOTrainer", "matrix products", "matrix products, separate"
PHASES = ("generation", "scoring", "training")
"""Others may have the time in them that a process rests."""
UPDATES = 4
_PARTS, _DECODED = 4, 4


def main() -> None:
    """Measure all sides in turn, print a table, write JSON."""
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        sides, versions = measure(Path(name), options)
    report(sides, versions, options)
    write_result(options, versions, sides={name: asdict(side) for name, side in sides.items()})


def measure(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Side], dict[str, str]]:
    """All sides, a step each in turn; the versions of TRL and what it ran on."""
    steps = options.warmup + options.steps
    products = prepare(folder, options, rows=options.prompts * steps)
    metrics, progress = folder / "run" / "metrics.jsonl", folder / "trl.jsonl"
    plain = environment(options.threads, gpu=True)
    tokens = options.prompts * options.completions * (options.prompt_tokens + options.new_tokens)
    sides = {name: Side() for name in (LIMIT, SEPARATE)}
    runs: dict[str, InTurn] = {}
    try:
        line = [sys.executable, str(ROOT / "training/step3_ppo/main.py"), "--config", str(folder / "config.yaml")]
        runs[OURS] = InTurn(
            line,
            log=folder / "run.log",
            progress=metrics,
            mark='"time/step_seconds"',
            environment={**plain, **MALLOC_ENVIRONMENT},  # as train.py starts its steps
        )
        if options.trl_python:
            line = trl_line(folder, progress, options)
            runs[TRL] = InTurn(line, log=folder / "trl.log", progress=progress, mark="\n", environment=plain)
        for _ in range(steps):
            for run in runs.values():
                run.update()
            for name in (LIMIT, SEPARATE):
                phases = limit(products, options, shares=name == LIMIT)
                sides[name].add(phases, tokens=tokens, length=options.new_tokens)
        last = {name: run.finish() for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()
    lines = {name: file.read_text().splitlines() for name, file in ((OURS, metrics), (TRL, progress)) if name in runs}
    for name, run in runs.items():
        figures = [told for told in map(json.loads, lines[name]) if "completions/mean_length" in told]
        side = sides[name] = Side(peak_gib=[run.peak_gib])
        assert float(figures[-1].get("num_tokens", tokens * steps)) == tokens * steps, "both sides have the same rows"
        for seconds, told in zip(run.seconds, figures, strict=True):
            parts = {part: told[f"time/{part}_seconds"] for part in PHASES if name == OURS}
            side.add(
                {**parts, "rest": seconds - sum(parts.values())},
                tokens=tokens,
                length=float(told["completions/mean_length"]),
            )
    return sides, json.loads(last[TRL]) if TRL in last else {}


def prepare(folder: Path, options: argparse.Namespace, *, rows: int) -> Products:
    """The model's folder, prompts.jsonl and config.yaml; the products of the model."""
    path, tokenizer = embedded()
    generator = torch.Generator().manual_seed(options.seed)
    prompts = make_prompts(tokenizer, rows, tokens=options.prompt_tokens, generator=generator)
    lines = [json.dumps({"prompt": row["prompt"]}) + "\n" for row in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))
    with quiet_transformers():
        lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for config in (lm.config, lm.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    lm.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    reward = f"{ROOT / 'benchmarks/peers/letters.py'}:letters"
    config = {
        "output_dir": str(folder / "run"),
        "seed": options.seed,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"sources": [str(folder / "prompts.jsonl")], "eval_fraction": 0.0, "cache_dir": str(folder / "cache")},
        "reward": {"components": [{"function": reward}]},
        "rollout": {
            "prompts_per_step": options.prompts,
            "max_prompt_tokens": options.prompt_tokens,
            "sampling": {"n": options.completions, "max_new_tokens": options.new_tokens},
        },
        "algorithm": {"name": "grpo"},
        "train": {"max_steps": options.warmup + options.steps},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    most = options.prompts * options.completions * (options.prompt_tokens + options.new_tokens)
    return Products(lm.to(default_device()), most, outputs=options.prompts * options.completions * options.new_tokens)


@torch.inference_mode()
def limit(products: Products, options: argparse.Namespace, *, shares: bool) -> dict[str, float]:
    """Seconds of the products of a step by phase; sizes are (tokens, of these with the head)."""
    rows = options.prompts * options.completions
    sampled = rows * options.new_tokens
    tokens = sampled + options.prompt_tokens * (options.prompts if shares else rows)
    part = (tokens // _PARTS, sampled // _PARTS)
    steps = products.times(forward=[(rows, rows)] * _DECODED).fastest / _DECODED
    return {
        "generation": products.times(forward=[(options.prompts * options.prompt_tokens, options.prompts)]).fastest
        + (options.new_tokens - 1) * steps,
        "scoring": 2 * _PARTS * products.times(forward=[part]).fastest,
        "training": _PARTS * products.times(forward=[part], backward=[part]).fastest,
    }


def trl_line(folder: Path, progress: Path, options: argparse.Namespace) -> list[str]:
    """TRL on the same folder."""
    settings = {
        "task": "grpo",
        "model": folder / "model",
        "rows": folder / "prompts.jsonl",
        "progress": progress,
        "steps": options.warmup + options.steps,
        "updates": UPDATES,
        "batch": options.prompts * options.completions // UPDATES,
        "completions": options.completions,
        "max_length": options.new_tokens,
        "threads": options.threads,
    }
    return [options.trl_python, str(ROOT / "benchmarks/peers/trl_trainers.py"), *words(settings)]


def report(sides: dict[str, Side], versions: dict[str, str], options: argparse.Namespace) -> None:
    """A table on the screen."""
    print(
        f"SmolLM2-135M, {options.prompts} prompts of {options.prompt_tokens} tokens x {options.completions} "
        f"completions of {options.new_tokens}; float32, {default_device().type}, {options.threads} threads, torch "
        f"{torch.__version__}, transformers {transformers.__version__}; medians of {options.steps} steps"
    )
    if versions:
        print(versions_line(versions))
    measured = {name: side.seconds[options.warmup :] for name, side in sides.items()}
    for name, side in sides.items():
        seconds = measured[name]
        ratio, over = (
            statistics.median(a / b for a, b in zip(seconds, measured[other], strict=True)) for other in (LIMIT, OURS)
        )
        median = statistics.median(seconds)
        print(
            f"{name:26s} {median:7.2f} s a step ({min(seconds):.2f} to {max(seconds):.2f})  "
            f"{side.tokens[0] / median:7.1f} tokens/s  {ratio:5.2f} x the products  {over:5.2f} x this project"
            + "".join(
                f"  peak {peak:.2f} GiB, {statistics.mean(side.mean_length[options.warmup :]):.1f} new"
                for peak in side.peak_gib
            )
        )
    for name, of_steps in sides[OURS].phases.items():
        alone = sides[LIMIT].phases.get(name)
        products = f"   products alone {statistics.median(alone[options.warmup :]):.2f} s" if alone else ""
        print(f"  {name:12s} {statistics.median(of_steps[options.warmup :]):7.2f} s{products}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--completions", type=int, default=8, help="of a prompt")
    parser.add_argument("--prompt_tokens", type=int, default=144, help="of each prompt, chat template included")
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=3, help="steps that are")
    add_shared_options(parser, trl="1.16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
