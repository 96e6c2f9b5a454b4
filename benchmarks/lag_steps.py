"""Decoding steps and recomputed tokens of a training step, by the lag.

    python -m benchmarks.lag_steps [--lags 0 1 2 4]

Why: they do not depend on the machine or on other work. An actor samples without training: eight prompts a step, four
completions of each of up to 256 tokens, which end at each token with a chance of one in 26. The first four steps and
the last four do not count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.generation.batching.continuous import ContinuousBatch
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World
from tests.support.ahead import build_sampling_actor
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_model

STEPS, EDGE, PROMPTS = 24, 4, 8
STOP_TOKEN_IDS = tuple(range(3, 8))


def counted(world: World, model: str, lag: int) -> dict[str, float]:
    """Means over the steps that count."""
    counts = Counter[str]()
    launch, chunks = ContinuousBatch._launch, ContinuousBatch._chunks

    def counted_launch(batch: ContinuousBatch) -> None:
        counts["decoding_steps"] += 1
        launch(batch)

    def counted_chunks(batch: ContinuousBatch) -> list[Any]:
        found = chunks(batch)
        counts["prefilled_tokens"] += sum(length for *_, length in found)
        return found

    actor, _ = build_sampling_actor(world, model, max_lag=lag)
    sampling = SamplingParams(n=4, max_new_tokens=256)
    config = RolloutConfig(prompts_per_step=PROMPTS, sampling=sampling, kv_cache_gib=0.5, max_lag=lag)
    timers = Timers(actor.device)
    sampler = RolloutSampler(actor, config, world=world, stop_token_ids=STOP_TOKEN_IDS, seed=0, timers=timers)
    rows = PROMPTS * (STEPS + 8)
    prompts = Dataset.from_list([{"input_ids": [5 + row % 100, 7, 9]} for row in range(rows)])
    row_stream = RowStream(rows, epochs=1, seed=0)
    stream = StepStream(sampler, prompts=prompts, stream=row_stream, per_step=PROMPTS, total_steps=STEPS, max_lag=lag)
    with mock.patch.multiple(ContinuousBatch, _launch=counted_launch, _chunks=counted_chunks):
        for step in range(1, STEPS + 1):
            if step == EDGE + 1:
                counts.clear()
            _, rollout = stream.take(step)
            mask = rollout.response_mask
            counts["sampled_tokens"] += int(mask.sum())
            counts["age"] += int((step - 1 - rollout.weight_versions)[mask].sum())
            actor._engine.global_steps += 1
            if step == STEPS - EDGE:
                break
    steps = STEPS - 2 * EDGE
    return {
        "lag": lag,
        "age_steps": round(counts.pop("age") / counts["sampled_tokens"], 2),
        **{name: round(count / steps, 1) for name, count in counts.items()},
    }


def main() -> None:
    """Print a line for each lag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(Path(folder) / "model")
        for lag in options.lags:
            ranks = Path(folder) / str(lag)
            ranks.mkdir()
            print(json.dumps(run_ranks(counted, 1, ranks, f"{folder}/model", lag)[0]), flush=True)


if __name__ == "__main__":
    main()
