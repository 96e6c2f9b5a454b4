"""Rows that the reward drops count nowhere: what is learned is what a rollout without them teaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.algorithms.collection import Collector
from hybrid_rlhf.algorithms.experience import Experience
from hybrid_rlhf.algorithms.kl_controller import KLController
from hybrid_rlhf.algorithms.on_policy import ON_POLICY_ALGORITHMS
from hybrid_rlhf.algorithms.on_policy.ppo import PPO
from hybrid_rlhf.algorithms.policy_loss import MiniBatch
from hybrid_rlhf.algorithms.rewards import Ratings, Reward, RewardPart, Share
from hybrid_rlhf.algorithms.roles import Roles
from hybrid_rlhf.algorithms.rollout import Rollout
from hybrid_rlhf.algorithms.rollout_metrics import evaluation_metrics, rollout_metrics
from hybrid_rlhf.algorithms.scoring import Scored
from hybrid_rlhf.algorithms.updater import Updater
from hybrid_rlhf.configs.cli import parse_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.rewards import RewardPartConfig
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.runtime.world import World
from tests.algorithms.test_ppo import ALGORITHM, PROMPTS, SAMPLING, build

ROWS = 8
ROWS_DROPPED = [0, 3, 4, 5, 7]


class Judge(RewardPart):
    """Scores a row by its number, and fails on some."""

    reads_text = False

    def __init__(self, failing: list[int]) -> None:
        super().__init__(RewardPartConfig(function="a:judge", on_failure="drop"))
        self._failing = failing

    def begin(self, share: Share) -> Callable[[], Ratings]:
        failures = {place: "no" for place, row in enumerate(share.rows) if row in self._failing}
        values = [None if place in failures else float(row) for place, row in enumerate(share.rows)]
        return lambda: Ratings(values, failures)


def collect(
    world: World, paths: dict[str, str], failing: list[int], mini_batches: int
) -> tuple[Roles, Rollout, Scored, Experience]:
    roles, rollout = build(world, paths, algorithm=replace(ALGORITHM, score_scaling="running", score_clip=None))
    roles = replace(roles, reward=Reward([Judge(failing)], world))
    rollout._roles = roles
    rated = rollout.rate(PROMPTS, rollout.sample(PROMPTS, step=1))
    layout = rollout.layout(rated.sequences, step=1, epoch=0, mini_batches=mini_batches)
    scored = rollout.score(rated, layout)
    return roles, rollout, scored, rollout.experience(scored, kl_coef=0.1)


def test_dropped_rows_are_in_no_tensor_and_no_figure(world: World, paths: dict[str, str]) -> None:
    _, _, whole, _ = collect(world, paths, [], 1)
    kept = [row for row in range(ROWS) if row not in ROWS_DROPPED]
    _, rollout, scored, experience = collect(world, paths, ROWS_DROPPED, 1)
    assert scored.rated.prompts.tolist() == [row // 2 for row in kept]
    assert whole.rated.prompts.tolist() == [row // 2 for row in range(ROWS)]
    assert scored.rated.scores.tolist() == [float(row) for row in kept]
    assert scored.rated.metrics["reward/judge/dropped"] == len(ROWS_DROPPED)
    width = scored.sequences.input_ids.shape[1]
    for name, tensor in whole.sequences.tensors().items():
        expected, found = tensor[kept], scored.sequences.tensors()[name]
        assert torch.equal(found, expected[:, :width] if expected.dim() == 2 else expected), name
    mask = scored.sequences.response_mask
    for name in ("old_logprobs", "ref_logprobs", "old_values"):
        expected = getattr(whole, name)[kept][:, :width][mask]
        torch.testing.assert_close(getattr(scored, name)[mask], expected, atol=1e-5, rtol=1e-5)
    metrics = rollout_metrics(experience)
    assert metrics["objective/scores"] == pytest.approx(float(whole.rated.penalised[kept].mean()))
    assert metrics["completions/mean_length"] == float(whole.sequences.response_mask[kept].sum(dim=1).float().mean())
    assert rollout.scaling.metrics()["objective/scaling_mean"] == pytest.approx(sum(kept) / len(kept))
    assert evaluation_metrics(scored, prefix="eval")["eval/scores"] == metrics["objective/scores"]
    controller = KLController(replace(ALGORITHM, kl_target=1.0))
    controller.update(10.0, completions=len(scored.rated.scores))
    assert controller.kl_coef == pytest.approx(ALGORITHM.kl_coef * (1 + 0.2 * len(kept) / ALGORITHM.kl_horizon))


@pytest.mark.parametrize("name", ["dapo", "raft"])
def test_a_refill_may_be_dropped_whole_and_a_rollout_may_not(name: str, world: World, paths: dict[str, str]) -> None:
    """The first two prompts differ in their scores, of the third there are none, and then the data ends."""
    roles, rollout = build(world, paths)
    judge = Judge([])
    rollout._roles = replace(roles, reward=Reward([judge], world))
    config = replace(parse_config(PPOConfig, ["--algorithm", name]).ppo, dynamic_sampling=True)
    algorithm = ON_POLICY_ALGORITHMS[name](config)
    data, stream = Dataset.from_list(PROMPTS[:3]), RowStream(3, epochs=1, seed=0)
    collector = Collector(rollout, algorithm, prompts=data, stream=stream, per_step=2, total_steps=1)
    inner, calls = rollout.rate, []

    def rate(*given: Any, **named: Any) -> Any:
        judge._failing = list(range(ROWS)) if calls else [2, 3]
        calls.append(named["refill"])
        return inner(*given, **named)

    rollout.rate = rate  # type: ignore[method-assign]
    collected = collector.collect(1)
    assert calls == [False, True] and len(collected.prompts) == (2 if name == "dapo" else 1)
    judge._failing = list(range(ROWS))
    with pytest.raises(UserError, match="must leave completions to learn from, all 8 of a rollout are dropped"):
        inner(PROMPTS, rollout.sample(PROMPTS, step=1))


@pytest.mark.parametrize("mini_batches", [1, 2, 8])
def test_ratios_are_1_and_updates_are_of_what_is_left(mini_batches: int, world: World, paths: dict[str, str]) -> None:
    """More mini-batches than rows too: none of them is empty."""
    roles, rollout, scored, experience = collect(world, paths, ROWS_DROPPED, mini_batches)
    layout = rollout.layout(scored.sequences, step=1, epoch=0, mini_batches=mini_batches)
    updater = Updater(roles, PPO(ALGORITHM), rollout=SAMPLING)
    for indices in layout.mini_batches[0]:
        loss, _ = updater.policy_loss(experience, indices, MiniBatch(tokens=1.0, sequences=1.0))
        assert float(loss.stats["ratio"]) == float(loss.count), "every ratio is 1"
    assert sum(layout.counts) == float(scored.sequences.response_mask.sum()) and all(layout.counts)
    assert sum(layout.sizes) == ROWS - len(ROWS_DROPPED)
    report = updater.update(experience, [layout])
    assert report.metrics["rollout/updates"] == min(mini_batches, ROWS - len(ROWS_DROPPED))
    assert all(value == value for value in report.metrics.values()), "none is NaN"
    assert all(bool(p.isfinite().all()) for p in roles.actor.module.parameters())
