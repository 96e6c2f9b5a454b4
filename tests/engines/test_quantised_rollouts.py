"""Rollouts of weights in 4 and in 8 bits: any sharding samples from them, they follow the training, it is unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.runtime.world import World
from tests.support.engines import PROMPTS, actor_spec, differences, state_of, train_step
from tests.support.generation import token_ids_of
from tests.support.marks import faults
from tests.support.placement import small_job
from tests.support.ranks import run_ranks
from tests.support.rl import ALGORITHM, SAMPLING, build_parts, sample_and_score

SAMPLED = SamplingParams(max_new_tokens=6, seed=3, n=2)


def trained_and_sampled(
    world: World, path: Path, rollout: RolloutConfig, settings: dict[str, Any], cases: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Two updates, with a rollout after each, by ZeRO stage and tensor-parallel ranks."""
    results = []
    for stage, tensor_parallel in cases:
        spec = actor_spec(path, stage=stage, lr=0.05, **settings)
        engine = build_actor(spec, world, rollout=replace(rollout, tensor_parallel=tensor_parallel))
        result: dict[str, Any] = {"losses": [], "apart": [], "tokens": [], "same": True}
        for _ in range(2):
            result["losses"].append(train_step(engine, world))
            before = state_of(engine)
            with engine.inference(stop_token_ids=()) as generation:
                completions = generation.generate(PROMPTS, SAMPLED)
            result["same"] &= all(map(torch.equal, before, state_of(engine)))
            result["apart"] += differences(engine, completions)
            result["tokens"] += token_ids_of(completions)
        results.append(result)
    return results


def test_any_sharding_of_four_bit_weights_trains_and_samples_the_same(model_folder: Path, tmp_path: Path) -> None:
    given = model_folder, RolloutConfig(), {"lora": 4, "quantization": "nf4"}
    ((alone,),) = run_ranks(trained_and_sampled, 1, tmp_path / "1", *given, [(0, 1)])
    assert alone["losses"][1] < alone["losses"][0]
    cases = [(0, 2), (1, 1), (2, 2), (3, 1), (3, 2)]
    for results in run_ranks(trained_and_sampled, 2, tmp_path / "2", *given, cases):
        for case, result in zip(cases, results, strict=True):
            assert result["losses"] == pytest.approx(alone["losses"], abs=1e-4), case
            assert result["tokens"] == alone["tokens"], case
            assert max(*alone["apart"], *result["apart"]) <= 1e-4, case
            assert result["same"], f"{case}: weights, gradients and optimizer states are bit for bit what they were"


@pytest.mark.parametrize(
    ("ranks", "lora", "cases"),
    [(1, 0, [(0, 1)]), (1, 4, [(0, 1)]), faults(2, 0, [(2, 2)]), faults(2, 4, [(3, 1), (3, 2)])],
)
def test_samples_of_int8_weights_follow_the_training(
    ranks: int, lora: int, cases: list[tuple[int, int]], model_folder: Path, tmp_path: Path
) -> None:
    given = model_folder, RolloutConfig(quantization="int8"), {"lora": lora}
    for results in run_ranks(trained_and_sampled, ranks, tmp_path, *given, cases):
        for result in results:
            assert 0.0 < sum(result["apart"]) / len(result["apart"]) < 0.1, "rounded, and no more"
            assert result["same"]


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
    reads = replace(job, config=config, dtype=torch.float32).actor_reads
    assert reads == int(differs), "the planner counts the forward"
