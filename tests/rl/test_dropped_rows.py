"""Rows that the reward drops count nowhere: what is learned is what a rollout without them teaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import DynamicSamplingConfig
from hybrid_rlhf.configs.sections.rollout import CurriculumConfig
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.metrics import evaluation_metrics, rollout_metrics
from hybrid_rlhf.rl.rewards import Reward
from hybrid_rlhf.rl.rollouts.collector import Collector
from hybrid_rlhf.rl.rollouts.curriculum import Curriculum
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.rewards import Judge
from tests.support.rl import ALGORITHM, PROMPTS, sample_and_score

ROWS = 8
ROWS_DROPPED = [0, 3, 4, 5, 7]


def test_dropped_rows_are_in_no_tensor_and_no_figure(world: World, build: Any) -> None:
    algorithm = replace(ALGORITHM, score_scaling="running", score_clip=None)
    of_whole, parts = (build(algorithm=algorithm, reward=Reward([Judge(rows)], world)) for rows in ([], ROWS_DROPPED))
    (whole, _), (rollout, plan) = sample_and_score(of_whole), sample_and_score(parts)
    kept = [row for row in range(ROWS) if row not in ROWS_DROPPED]
    assert rollout.scores.tolist() == [float(row) for row in kept]
    assert rollout.metrics["reward/judge/dropped"] == len(ROWS_DROPPED)
    found, expected = rollout.tensors(), whole.rows(kept).tensors()
    assert found.keys() == expected.keys()
    for each, parts_of in ((found, parts), (expected, of_whole)):
        each["penalties"] = (
            each["penalties"] / parts_of.scaling.unit
        )  # in units of scores, scaled by those that are left
    for name, tensor in found.items():
        read = rollout.response_mask if tensor.dim() == 2 else slice(None)
        torch.testing.assert_close(tensor[read], expected[name][read], atol=1e-5, rtol=1e-5)
    batch = parts.estimate(rollout, kl_coef=0.1)
    metrics = rollout_metrics(batch, world)
    assert metrics["objective/scores"] == pytest.approx(float(rollout.penalized_scores.mean()))
    assert metrics["completions/mean_length"] == float(whole.response_mask[kept].sum(dim=1).float().mean())
    assert parts.scaling.metrics()["objective/scaling_mean"] == pytest.approx(sum(kept) / len(kept))
    told = evaluation_metrics(rollout, world, prefix="eval", prompts=[{"source": "a"}] * ROWS)
    assert told["eval/scores"] == metrics["objective/scores"]
    assert told["eval/avg@1"] == pytest.approx(sum(kept) / len(kept)), "of groups of two, one is left at most"
    report = parts.updater.update(batch, [plan])
    assert report.metrics["val/ratio"] == 1 and all(value == value for value in report.metrics.values())


@pytest.mark.parametrize(
    ("name", "learned"), [("grpo", [*range(8)]), ("raft", [3, 7]), ("online_dpo", [2, 3, 6, 7]), ("dapo", [2, 3, 6, 7])]
)
def test_rows_without_a_score_are_neither_selected_nor_in_a_statistic(
    name: str, learned: list[int], world: World, build: Any
) -> None:
    """A component that does not apply is no score of 0: not to what selects, scales, filters prompts or is reported."""
    judge = Judge()
    judge.silent = [0, 4, 5]
    config = replace(parse_config(RLConfig, ["--algorithm", name]).algorithm, score_scaling="running")
    algorithm = replace(ALGORITHM, score_scaling="running", penalties=None)
    parts = build(algorithm=algorithm, reward=Reward([judge], world))
    data, stream = Dataset.from_list(PROMPTS), Curriculum(4, epochs=1, seed=0, config=CurriculumConfig())
    steps = StepStream(parts.sampler, prompts=data, stream=stream, per_step=4, total_steps=1)
    collected = Collector(steps, parts.scorer, ALGORITHMS[name](config)).collect(1)
    assert collected.scores is not None and collected.numbered(world).mine == [*range(len(learned))]
    assert collected.scores.tolist() == [0.0 if row in judge.silent else float(row) for row in learned]
    assert collected.metrics["curriculum/pass_rate"] == 1.0, "of the three prompts with a score"
    evaluated = parts.scorer.compute_logprobs(collected, parts.planner.plan(collected))
    metrics = rollout_metrics(parts.estimate(evaluated, kl_coef=0.0), world) | dict(collected.metrics)
    known = float(torch.tensor([1.0, 2.0, 3.0, 6.0, 7.0]).mean())
    for mean in ("reward/judge/mean", "objective/scores"):
        assert metrics[mean] == pytest.approx(known)
    assert parts.scaling.metrics()["objective/scaling_mean"] == pytest.approx(known)


@pytest.mark.parametrize(("name", "learned"), [("dapo", 2), ("raft", 1)])
def test_a_refill_may_be_dropped_whole_and_a_rollout_may_not(name: str, learned: int, world: World, build: Any) -> None:
    """The first two prompts differ in their scores, of the third there are none, and then the data ends."""
    judge = Judge()
    parts = build(reward=Reward([judge], world))
    config = replace(parse_config(RLConfig, ["--algorithm", name]).algorithm, dynamic_sampling=DynamicSamplingConfig())
    data, stream = Dataset.from_list(PROMPTS[:3]), RowStream(3, epochs=1, seed=0)
    steps = StepStream(parts.sampler, prompts=data, stream=stream, per_step=2, total_steps=1)
    inner, calls = parts.scorer.score, []

    def score(*given: Any, **named: Any) -> Any:
        judge._failing = range(ROWS) if calls else [2, 3]
        calls.append(named["refill"])
        return inner(*given, **named)

    parts.scorer.score = score
    collected = Collector(steps, parts.scorer, ALGORITHMS[name](config)).collect(1)
    assert calls == [False, True] and len(collected) == learned
    with user_error("must leave completions to learn from, all 8 of a rollout are dropped"):
        inner(PROMPTS, parts.sampler.sample(PROMPTS, step=1))
