"""The search against brute force, and on stored measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.placement.regret import groups, regrets
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import RLJob, StepLengths
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan, style_of
from hybrid_rlhf.planning.search import Search, layouts, offloads, plans_of
from hybrid_rlhf.planning.step_time import StepTimer
from tests.support.placement import FlatMemory, machine, small_job

LONG_TAIL = StepLengths(32.0, (*(8,) * 15, 512))
THREE = {"actor": 4.0, "critic": 4.0, "reward": 4.0}
TWO = {"actor": 8.0, "critic": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "1 rank": {"ranks": 1},
    "2 ranks, slow link": {"ranks": 2, "changes": {"link_gb_per_second": 0.01}, "job": {"roles": THREE}},
    "2 ranks, lag 1, long tail": {"ranks": 2, "job": {"lag": 1, "lengths": LONG_TAIL}},
    "2 ranks of a cpu": {"ranks": 2, "changes": {"cores": 2}, "job": {"roles": THREE}},
    "3 ranks, little memory": {"ranks": 3, "device_bytes": 1.2e8, "job": {"roles": THREE}},
    "4 ranks on 2 hosts": {"ranks": 4, "per_host": 2, "job": {"roles": TWO}},
    "5 ranks without a critic": {"ranks": 5, "job": {"roles": {"actor": 4.0, "reward": 8.0}}},
}


def search_of(
    *,
    ranks: int,
    per_host: int = 8,
    changes: dict[str, Any] | None = None,
    job: dict[str, Any] | None = None,
    device_bytes: float = 1e18,
    keep: int = 1,
) -> Search:
    found = small_job(**(job or {}))
    memory: Any = FlatMemory(found, device_bytes)
    return Search(StepTimer(found, machine(**(changes or {})), Cluster(ranks, per_host)), memory, keep=keep)


def every_plan(job: RLJob, cluster: Cluster) -> Iterator[StepPlan]:
    for layout in layouts(job, cluster):
        for plan in plans_of(job, cluster, layout):
            yield plan
            yield from (replace(plan, **each) for each in offloads(job, plan))


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_the_best_plans_are_those_of_brute_force(case: dict[str, Any]) -> None:
    """The best of each style; and as many as are wanted."""
    brute = search_of(**case)
    best: dict[str, float] = {}
    for plan in every_plan(brute.timer.job, brute.timer.cluster):
        style = plan.placement.style
        best[style] = min(best.get(style, math.inf), brute.evaluate(plan).seconds)
    found = search_of(**case).run()
    assert {each.plan.placement.style: each.seconds for each in found.ranked if each.fits} == pytest.approx(best)
    listed = [each.seconds for each in search_of(**case, keep=12).run().fastest]
    assert listed == sorted(listed) and listed[0] == pytest.approx(min(best.values()))


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_the_search_counts_every_plan_once(
    case: dict[str, Any], log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an estimate of the remaining time over plans that are never counted, or counted twice."""
    monkeypatch.setattr("hybrid_rlhf.runtime.observability.progress.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("hybrid_rlhf.runtime.observability.progress._GROWTH", 0.0)
    search = search_of(**case)
    search.run()
    ways = len([*every_plan(search.timer.job, search.timer.cluster)])
    assert log_lines[0].startswith("searching placements: 0 of ") and " s left" in "".join(log_lines)
    assert [line for line in log_lines if " plans in " in line] == [log_lines[-1]]
    assert log_lines[-1].startswith(f"searching placements: {ways:,} plans in ")


def test_layouts_have_all_styles_once() -> None:
    job, cluster = small_job(), Cluster(3, 8)
    found = list(layouts(job, cluster))
    assert all(found.count(each) == 1 for each in found)
    assert {"actor": (0, 1, 2), "critic": (0, 1, 2), "reference": (0, 1), "reward": (2,)} in found
    assert {"actor": (0, 1), "critic": (0, 1), "reference": (2,), "reward": (2,), SAMPLER: (2,)} in found
    assert {"actor": (0, 1), "critic": (2,), "reference": (0, 1, 2), "reward": (2,)} in found
    assert all(not set(each.get(SAMPLER, ())) & set(each["actor"]) for each in found)
    assert {style_of(each, 3) for each in found} == {"flattening", "interleaving", "separation", "hybrid"}
    beside = [each for each in layouts(small_job(lag=1), cluster) if SAMPLER in each]
    assert beside and all(not set(each[SAMPLER]) & set(each["critic"]) for each in beside), "nothing trains there"
    many = {len(ranks) for each in layouts(job, Cluster(64, 8)) for ranks in each.values()}
    assert many == {*range(8, 65, 8)}, "whole hosts"


def test_a_base_in_four_bits_is_sampled_where_it_trains() -> None:
    """Plans had a separate sampler, which a run refuses."""
    whole = small_job()
    model = replace(whole.config.model, quantization="nf4")
    config: Any = SimpleNamespace(**{**vars(whole.config), "model": model})
    assert not any(SAMPLER in each for each in layouts(replace(whole, config=config), Cluster(3, 8)))


def test_moments_in_8_bits_stay_on_the_device_and_out_of_zero_3() -> None:
    """The search ended in the error of a plan that a run refuses."""
    whole = small_job()
    eight = OptimizerConfig(name="adamw_8bit")
    roles = {name: replace(role, optimizer=role.is_trained and eight or None) for name, role in whole.roles.items()}
    for job, expected in ((whole, (3, True)), (replace(whole, roles=roles), (2, False))):
        plans = [*every_plan(job, Cluster(2, 8))]
        assert max(plan.roles["actor"].zero for plan in plans) == expected[0]
        assert any(plan.offload_optimizer for plan in plans) == expected[1]


def test_no_plan_that_does_not_fit_is_chosen() -> None:
    none = search_of(ranks=4, job={"roles": THREE}, device_bytes=1e6).run()
    assert none.best is None and all(each.memory.misfit is not None for each in none.ranked)


def test_the_planner_plans_what_programs_can_ask() -> None:
    job, cluster = small_job(), Cluster(4, 8)
    config = replace(job.config, environment=EnvironmentConfig(program="m:f"))
    sizes = {
        name: {plan.sampling.tensor_parallel for plan in every_plan(each, cluster)}
        for name, each in (("none", job), ("program", replace(job, config=config)))
    }
    assert sizes == {"none": {1, 2, 4}, "program": {1}}


def test_a_lag_overlaps_on_ranks_of_the_samplers_own() -> None:
    job = small_job(lag=2)
    plans = [*every_plan(job, Cluster(4, 8))]
    assert {(plan.separate, plan.overlaps(job)) for plan in plans} == {(False, False), (True, True)}
    assert any(plan.offload_states for plan in plans)
    assert not any(plan.offload_states for plan in plans if plan.separate)


def test_the_choice_on_stored_trials_is_at_most_a_tenth_slower_than_the_best() -> None:
    """In hours in which the machine did other work, the order of the same placements changed."""
    found = regrets()
    assert len(found["steady hours"]) >= 30 and max(found["steady hours"]) <= 0.1
    assert sorted(found["busy hours"])[len(found["busy hours"]) // 2] <= 0.1


def test_the_regret_of_a_wrong_prediction_is_seen() -> None:
    group = next(iter(groups()))
    slowest = max(group.trials, key=lambda trial: trial.seconds)
    wrong = [-trial.seconds for trial in group.trials]
    best = min(trial.seconds for trial in group.trials)
    assert group.regret(wrong) == pytest.approx(slowest.seconds / best - 1) and group.regret(wrong) > 0.5
