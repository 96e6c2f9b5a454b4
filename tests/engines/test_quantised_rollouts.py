"""Rollouts of quantised weights: any sharding samples from them, they follow the training, and it is unchanged."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.world import World
from tests.support.engines import PROMPTS, actor_spec, differences, state_of, train_step
from tests.support.marks import faults
from tests.support.placement import small_job
from tests.support.ranks import run_main, run_ranks
from tests.support.rl import ALGORITHM, SAMPLING, build_parts, sample_and_score
from tests.support.steps import MODULES, step_line, write_rows

SAMPLED = SamplingParams(max_new_tokens=6, seed=3, n=2)


def sampled(world: World, path: Path, cases: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """By ZeRO stage, tensor-parallel ranks and LoRA rank."""
    told = []
    for stage, tensor_parallel, lora in cases:
        rollout = RolloutConfig(tensor_parallel=tensor_parallel, quantization="int8")
        engine = build_actor(actor_spec(path, stage=stage, lora=lora, lr=0.05), world, rollout=rollout)
        apart: list[float] = []
        codes: list[torch.Tensor] = []
        same = True
        for _ in range(2):
            train_step(engine, world)
            before = state_of(engine)
            with engine.inference(stop_token_ids=()) as generation:
                completions = generation.generate(PROMPTS, SAMPLED)
                codes.append(generation.backend.decoder._weights.layers[0].qkv.weight.clone())  # type: ignore[attr-defined]
            same &= all(map(torch.equal, before, state_of(engine)))
            apart += differences(engine, completions)
        told.append(
            {
                "apart": sum(apart) / len(apart),
                "same": same,
                "followed": bool((codes[0] != codes[1]).any()),
                "dtype": str(codes[0].dtype),
            }
        )
    return told


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(1, [(0, 1, 0), (0, 1, 4)]), faults(2, [(3, 1, 4), (2, 2, 0), (3, 2, 4)])],
    ids=["1 rank", "2 ranks"],
)
def test_samples_are_of_the_weights_that_train(
    ranks: int, cases: list[tuple[int, int, int]], model_folder: Path, tmp_path: Path
) -> None:
    for told, case in product(run_ranks(sampled, ranks, tmp_path, model_folder, cases), range(len(cases))):
        result = told[case]
        assert 0.0 < result["apart"] < 0.1, "rounded, and no more"
        assert result["dtype"] == "torch.int8" and result["followed"] and result["same"], cases[case]


@pytest.mark.faults
def test_a_run_corrects_for_the_rounding(model_folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    settings = (
        "--rollout.quantization int8 --algorithm.correction.method truncate --actor.zero.stage 3 "
        "--rollout.tensor_parallel 2"
    ).split()
    line = step_line("ppo", tmp_path / "out", model_folder, rows, "--train.max_steps 2", *settings)
    run_main(MODULES["ppo"], 2, line)
    steps = [metrics for metrics in read_metrics(tmp_path / "out") if "rollout/correction_mean" in metrics]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["rollout/correction_mean"] != 1.0
        assert 1e-5 < metrics["rollout/logprob_abs_diff_mean"] < 0.1


@pytest.mark.parametrize(
    ("sampled_in", "differs"), [({"quantization": "int8"}, True), ({"dtype": "bfloat16"}, True), ({}, False)]
)
def test_the_kl_of_a_single_update_is_that_of_the_training_arithmetic(
    sampled_in: dict[str, Any], differs: bool, world: World, paths: dict[str, str]
) -> None:
    """The sampler's log-probs stood in for the actor's, so that an untrained actor had a KL to its own weights."""
    sampling = replace(SAMPLING, **sampled_in)
    algorithm = replace(ALGORITHM, epochs=1, correction=CorrectionConfig())
    parts = build_parts(world, paths | {"reference": paths["actor"]}, algorithm=algorithm, sampling=sampling)
    rollout, _ = sample_and_score(parts)
    assert rollout.kl is not None and rollout.ref_logprobs is not None
    assert rollout.kl.abs().max() < 1e-4
    of_sampler = masked_sum(rollout.sampled_logprobs - rollout.ref_logprobs, mask=rollout.response_mask, dim=1)
    assert (float(of_sampler.abs().max()) > 1e-3) == differs
    job = small_job()
    config = replace(job.config, algorithm=algorithm, rollout=replace(job.config.rollout, **sampled_in))
    reads = replace(job, config=config, dtype=torch.float32).actor_reads(lag=0)
    assert reads == int(differs), "the planner counts the forward"
