"""Memory and time of a rollout's rows: held by the ranks that sampled them, brought to those that compute them.

    python -m benchmarks.rollout_rows [--ranks 2] [--prompts 64] [--samples 8] [--tokens 8192]

Each rank holds the completions of its prompts, of lengths up to --tokens, as a batch of PPO. Printed are the bytes of a
token on the host and on the device, and the seconds of one epoch's exchange, of what returns, and of the statistics of
the step. No model computes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.functional.masking import masked_whiten
from hybrid_rlhf.rl.metrics import rollout_metrics
from hybrid_rlhf.rl.mini_batches import MiniBatchPlanner
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_ranks

_MICRO_BATCH_TOKENS = 65_536


def held_batch(world: World, prompts: int, samples: int, tokens: int) -> Batch:
    """Random rows of this rank's prompts, as a step of PPO has them before its updates."""
    groups = torch.arange(world.rank, prompts, world.size).repeat_interleave(samples)
    generator = torch.Generator().manual_seed(world.rank)
    lengths = torch.randint(tokens // 4, tokens + 1, (len(groups),), generator=generator)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    response = mask & (torch.arange(mask.shape[1]) >= 16)
    values = torch.rand(mask.shape, generator=generator) * response
    numbers = torch.rand(len(groups), generator=generator)
    rollout = Rollout(
        torch.randint(0, 32_000, mask.shape, generator=generator) * mask,
        mask,
        response,
        -values,
        -values,
        torch.ones(len(groups), dtype=torch.bool),
        torch.zeros(mask.shape, dtype=torch.long),
        groups=groups,
        prompt_rows=groups,
        scores=numbers,
        penalties=torch.zeros(len(groups)),
        old_logprobs=-values,
        ref_logprobs=-values * 1.1,
        entropy=values,
        old_values=values,
    )
    rollout = replace(rollout, index=rollout.numbered(world))
    return Batch(rollout, values, values * 2, values * 3)


def measured(world: World, options: argparse.Namespace) -> dict[str, float]:
    """Bytes and seconds on this rank."""
    batch = held_batch(world, options.prompts, options.samples, options.tokens)
    index = batch.rollout.numbered(world)
    held_bytes = sum(tensor.nbytes for tensor in batch.tensors().values())
    planner = MiniBatchPlanner(MicroBatches(rows=None, tokens=_MICRO_BATCH_TOKENS), seed=0, world=world)
    micro_batches = planner.plan(batch.rollout).micro_batches(world)
    wanted = sorted(row for rows in micro_batches for row in rows if row is not None)
    seconds: dict[str, list[float]] = {"fetch": [], "collect": [], "statistics": []}
    device_bytes = fetched_bytes = 0
    for _ in range(4):
        world.barrier()
        start = time.perf_counter()
        rows = index.fetch(batch, micro_batches)
        seconds["fetch"].append(time.perf_counter() - start)
        fetched_bytes = sum(tensor.nbytes for tensor in rows.on_host(wanted).tensors().values())
        device_bytes = max(sum(t.nbytes for t in rows(numbers).tensors().values()) for numbers in micro_batches)
        start = time.perf_counter()
        index.collect({"x": {row: torch.zeros(int(index.lengths[row])) for row in wanted}}, width=options.tokens)
        seconds["collect"].append(time.perf_counter() - start)
        start = time.perf_counter()
        masked_whiten(batch.advantages, mask=batch.rollout.response_mask, total=world.total)
        rollout_metrics(batch, world)
        seconds["statistics"].append(time.perf_counter() - start)
    all_tokens = int(index.lengths.sum())
    return {
        "tokens of the rollout": all_tokens,
        "host bytes held per token of the rollout": held_bytes / all_tokens,
        "host bytes computed per token of the rollout": fetched_bytes / all_tokens,
        "device MB of a micro-batch": device_bytes / 1e6,
        **{f"seconds, {name}": sorted(times[1:])[1] for name, times in seconds.items()},
    }


def main() -> None:
    """Measure on gloo ranks of this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("prompts", 64), ("samples", 8), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first, *_ = run_ranks(measured, options.ranks, Path(folder), options)
    for name, value in first.items():
        print(f"{name:48} {value:,.3f}")


if __name__ == "__main__":
    main()
