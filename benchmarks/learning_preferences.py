"""Do DPO, IPO and KTO learn to prefer? Held-out pairs of the demo, before and after, over seeds.

    python -m benchmarks.learning_preferences                       # three algorithms, two seeds
    python -m benchmarks.learning_preferences --algorithms orpo     # any of training/preference/main.py

SmolLM2-135M-Instruct with adapters of rank 16 learns from the demo's pairs: the answer that belongs to a question
against one that belongs to another. Of pairs that no run has seen this counts by Hugging Face's own forward how often
the better answer is the likelier one (by the sum of its tokens' log-probs), before and after, and how often its
log-prob has risen by more than that of the worse (the sign of DPO's implicit reward: 0.5 is chance).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import results
from benchmarks.learning_tasks import run_step, write_rows
from hybrid_rlhf.configs.preference import PREFERENCE_LOSSES
from hybrid_rlhf.data.chat.conversation import encode_completion
from hybrid_rlhf.data.rows.embedded import write_demo_data
from hybrid_rlhf.models.pretrained.sources import quiet_transformers, resolve_model
from hybrid_rlhf.runtime.world import solo_world

AT_ONCE = 16
"""Pairs that are read together."""


def main() -> None:
    """Train, compare, write, print."""
    options = parse()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = [json.loads(line) for line in write_demo_data(folder, seed=0).read_text().splitlines()]
        path = resolve_model("embedded", world=solo_world(torch.device("cpu")))
        for seed in options.seeds:
            order = np.random.default_rng(seed).permutation(len(pairs))
            fresh = [pairs[i] for i in order[: options.held_out]]
            shown = [pairs[i] for i in order[options.held_out :][: 8 * options.steps]]  # once each
            write_rows(folder / "shown.jsonl", shown)
            before = logprobs(path, fresh)
            for algorithm in options.algorithms:
                run = folder / f"{algorithm}_{seed}"
                run_step(
                    ["training/preference/main.py"],
                    config(algorithm, path, folder, run, seed, options),
                    run.with_suffix(".yaml"),
                )
                after = logprobs(str(run), fresh)
                told = {
                    "algorithm": algorithm,
                    "seed": seed,
                    "likelier_before": share(before[:, 0] > before[:, 1]),
                    "likelier_after": share(after[:, 0] > after[:, 1]),
                    "risen_by_more": share((after - before)[:, 0] > (after - before)[:, 1]),
                }
                rows.append(told)
                print(
                    "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in told.items()),
                    flush=True,
                )
    report(rows, options)


def config(
    algorithm: str, path: str, folder: Path, run: Path, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """As the demo's preference step, for some steps."""
    return {
        "algorithm": algorithm,
        "output_dir": str(run),
        "seed": seed,
        "model": {"path": path},
        "data": {
            "sources": [str(folder / "shown.jsonl")],
            "max_length": 96,
            "eval_fraction": 0.0,
            "cache_dir": str(folder / f"cache_{seed}"),
        },
        "lora": {"rank": 16, "alpha": 32},
        "optimizer": {"lr": 5e-4},
        "train": {"global_batch_size": 8, "max_steps": options.steps},
        "logging": {"sinks": []},
    }


@torch.inference_mode()
def logprobs(path: str, pairs: Sequence[dict[str, Any]]) -> Tensor:
    """[N, 2], the sum over the better answer's tokens and over the worse's, by the model as transformers runs it."""
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    parts = [_read(model, tokenizer, pairs[i : i + AT_ONCE]) for i in range(0, len(pairs), AT_ONCE)]
    return torch.cat(parts)


def _read(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[dict[str, Any]]) -> Tensor:
    encoded = [
        encode_completion(pair["prompt"], [{"role": "assistant", "content": pair[side]}], tokenizer)
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    width = max(len(row.input_ids) for row in encoded)
    ids = torch.tensor([row.input_ids + [0] * (width - len(row.input_ids)) for row in encoded])
    own = torch.tensor([row.loss_mask + [False] * (width - len(row.loss_mask)) for row in encoded])
    there = torch.arange(width) < torch.tensor([len(row.input_ids) for row in encoded])[:, None]
    logits = model(input_ids=ids, attention_mask=there.long()).logits[:, :-1]
    found = logits.log_softmax(dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.where(own[:, 1:], found, 0.0).sum(dim=1).view(-1, 2)


def share(right: Tensor) -> float:
    """Of pairs."""
    return float(right.float().mean())


def report(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """A line an algorithm, and preferences.csv in benchmarks/results/learning.zip."""
    error = math.sqrt(0.25 / (options.held_out * len(options.seeds)))
    print(
        f"{options.held_out} held-out pairs a seed, {options.steps} updates of 8; a standard error is at most "
        f"{error:.3f}"
    )
    for algorithm in options.algorithms:
        mine = [row for row in rows if row["algorithm"] == algorithm]
        told = [
            f"{name.replace('_', ' ')} {statistics.fmean(row[name] for row in mine):.3f} "
            f"({min(row[name] for row in mine):.3f} to {max(row[name] for row in mine):.3f})"
            for name in ("likelier_before", "likelier_after", "risen_by_more")
        ]
        print(f"{algorithm:6} " + ", ".join(told))
    results.write_csv("learning", "preferences.csv", rows, options.out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["dpo", "ipo", "kto"], choices=list(PREFERENCE_LOSSES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--held_out", type=int, default=144)
    parser.add_argument("--out", type=Path, default=results.RESULTS, help="folder of learning.zip")
    return parser.parse_args()


if __name__ == "__main__":
    main()
