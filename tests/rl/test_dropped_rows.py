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
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.rewards import Reward
from hybrid_rlhf.rl.rollouts.collector import Collector
from hybrid_rlhf.rl.rollouts.curriculum import Curriculum
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.rl.updates.policy_loss import MiniBatch
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.rewards import Judge
from tests.support.rl import ALGORITHM, PROMPTS, sample_and_score

ROWS = 8
ROWS_DROPPED = [0, 3, 4, 5, 7]


def collect_with_failures(
    build: Any, world: World, failing: list[int], mini_batches: int = 1
) -> tuple[RLParts, Rollout, Batch]:
    algorithm = replace(ALGORITHM, score_scaling="running", score_clip=None)
    parts: RLParts = build(algorithm=algorithm, reward=Reward([Judge(failing)], world))
    rollout, _ = sample_and_score(parts, mini_batches=mini_batches)
    return parts, rollout, parts.estimate(rollout, kl_coef=0.1)


def test_dropped_rows_are_in_no_tensor_and_no_figure(world: World, build: Any) -> None:
    of_whole, whole, _ = collect_with_failures(build, world, [])
    kept = [row for row in range(ROWS) if row not in ROWS_DROPPED]
    parts, rollout, batch = collect_with_failures(build, world, ROWS_DROPPED)
    assert rollout.groups is not None and rollout.groups.tolist() == [row // 2 for row in kept]
    assert whole.groups is not None and whole.groups.tolist() == [row // 2 for row in range(ROWS)]
    assert rollout.scores is not None and rollout.scores.tolist() == [float(row) for row in kept]
    assert rollout.metrics["reward/judge/dropped"] == len(ROWS_DROPPED)
    width, mask, computed = rollout.input_ids.shape[1], rollout.response_mask, rollout.tensors()
    assert whole.tensors().keys() == computed.keys()
    for name, tensor in whole.tensors().items():
        expected, found = tensor[kept], computed[name]
        expected = expected[:, :width] if expected.dim() == 2 else expected
        if name in ("old_logprobs", "ref_logprobs", "entropy", "old_values"):
            torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-5)
        elif name == "penalties":  # in units of scores, which are scaled by those that are left
            torch.testing.assert_close(found / parts.scaling.unit, expected / of_whole.scaling.unit)
        else:
            assert torch.equal(found, expected), name
    metrics = rollout_metrics(batch, world)
    assert metrics["objective/scores"] == pytest.approx(float(rollout.penalized_scores.mean()))
    assert metrics["completions/mean_length"] == float(whole.response_mask[kept].sum(dim=1).float().mean())
    assert parts.scaling.metrics()["objective/scaling_mean"] == pytest.approx(sum(kept) / len(kept))
    assert evaluation_metrics(rollout, world, prefix="eval")["eval/scores"] == metrics["objective/scores"]


@pytest.mark.parametrize(
    ("name", "learned"),
    [("grpo", [0, 1, 2, 3, 4, 5, 6, 7]), ("raft", [3, 7]), ("online_dpo", [2, 3, 6, 7]), ("dapo", [2, 3, 6, 7])],
)
def test_rows_without_a_score_are_neither_selected_nor_in_a_statistic(
    name: str, learned: list[int], world: World, build: Any
) -> None:
    """A component that does not apply is no score of 0: not to what selects, scales, filters prompts or is reported."""
    judge = Judge()
    judge.silent = [0, 4, 5]
    config = replace(parse_config(RLConfig, ["--algorithm", name]).algorithm, score_scaling="running")
    changes: dict[str, Any] = {"score_scaling": "running", "penalties": None}
    parts = build(algorithm=replace(ALGORITHM, **changes), reward=Reward([judge], world))
    data, stream = Dataset.from_list(PROMPTS), Curriculum(4, epochs=1, seed=0, config=CurriculumConfig())
    steps = StepStream(parts.sampler, prompts=data, stream=stream, per_step=4, total_steps=1)
    collected = Collector(steps, parts.scorer, ALGORITHMS[name](config)).collect(1)
    assert collected.scores is not None and collected.numbered(world).mine == [*range(len(learned))]
    assert collected.scores.tolist() == [0.0 if row in judge.silent else float(row) for row in learned]
    known = torch.tensor([1.0, 2.0, 3.0, 6.0, 7.0])
    assert parts.scaling.metrics()["objective/scaling_mean"] == pytest.approx(float(known.mean()))
    assert collected.metrics["curriculum/pass_rate"] == 1.0, "of the three prompts with a score"
    evaluated = parts.scorer.compute_logprobs(collected, parts.planner.plan(collected))
    metrics = rollout_metrics(parts.estimate(evaluated, kl_coef=0.0), world) | dict(collected.metrics)
    assert metrics["reward/judge/mean"] == pytest.approx(float(known.mean()))
    assert metrics["objective/scores"] == pytest.approx(float(known.mean()))


@pytest.mark.parametrize("name", ["dapo", "raft"])
def test_a_refill_may_be_dropped_whole_and_a_rollout_may_not(name: str, world: World, build: Any) -> None:
    """The first two prompts differ in their scores, of the third there are none, and then the data ends."""
    judge = Judge([])
    parts = build(reward=Reward([judge], world))
    config = replace(parse_config(RLConfig, ["--algorithm", name]).algorithm, dynamic_sampling=DynamicSamplingConfig())
    algorithm = ALGORITHMS[name](config)
    data, stream = Dataset.from_list(PROMPTS[:3]), RowStream(3, epochs=1, seed=0)
    steps = StepStream(parts.sampler, prompts=data, stream=stream, per_step=2, total_steps=1)
    collector = Collector(steps, parts.scorer, algorithm)
    inner, calls = parts.scorer.score, []

    def score(*given: Any, **named: Any) -> Any:
        judge._failing = list(range(ROWS)) if calls else [2, 3]
        calls.append(named["refill"])
        return inner(*given, **named)

    parts.scorer.score = score  # type: ignore[method-assign]
    collected = collector.collect(1)
    assert calls == [False, True] and len(collected) == (2 if name == "dapo" else 1)
    judge._failing = list(range(ROWS))
    with user_error("must leave completions to learn from, all 8 of a rollout are dropped"):
        inner(PROMPTS, parts.sampler.sample(PROMPTS, step=1))


@pytest.mark.parametrize("mini_batches", [2, 8])
def test_ratios_are_1_and_updates_are_of_what_is_left(mini_batches: int, world: World, build: Any) -> None:
    """More mini-batches than rows too: none of them is empty."""
    parts, rollout, batch = collect_with_failures(build, world, ROWS_DROPPED, mini_batches)
    plan = parts.planner.plan(rollout, step=1, mini_batches=mini_batches)
    for indices in plan.mini_batches(world)[0]:
        loss, _ = parts.updater.policy_loss(batch.rows(indices), MiniBatch(tokens=1.0, sequences=1.0))
        assert float(loss.stats["ratio"]) == float(loss.count), "every ratio is 1"
    assert sum(plan.tokens) == float(rollout.response_mask.sum()) and all(plan.tokens)
    assert sum(plan.sequences) == ROWS - len(ROWS_DROPPED)
    report = parts.updater.update(batch, [plan])
    assert report.metrics["rollout/updates"] == min(mini_batches, ROWS - len(ROWS_DROPPED))
    assert all(value == value for value in report.metrics.values()), "none is NaN"
    assert all(bool(p.isfinite().all()) for p in parts.roles.actor.module.parameters())
