"""The search against brute force, and what must hold of any prediction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.planning.candidates import layouts, offloads, plan_of, samplings, shardings
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.costs.passes import ModelPasses
from hybrid_rlhf.planning.curves import MachineCurves
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import RLJob, StepLengths
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan
from hybrid_rlhf.planning.search import Search
from tests.support.marks import slow
from tests.support.placement import FlatMemory, machine, placed_at, small_job

LONG_TAIL = StepLengths(32.0, (*(8,) * 15, 512))
THREE = {"actor": 4.0, "critic": 4.0, "reward": 4.0}
TWO = {"actor": 8.0, "critic": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "1 rank": {"ranks": 1},
    "2 ranks, slow link": {"ranks": 2, "curves": {"bandwidth": 1e7}, "job": {"roles": THREE}},
    "2 ranks, lag 1, long tail": {"ranks": 2, "job": {"lag": 1, "lengths": LONG_TAIL}},
    "2 ranks of a cpu": {"ranks": 2, "curves": {"device": "cpu"}, "job": {"roles": THREE}},
    "3 ranks, little memory": {"ranks": 3, "device_bytes": 1.2e8, "job": {"roles": THREE}},
    "4 ranks on 2 hosts": {"ranks": 4, "per_host": 2, "curves": {"bandwidth": 1e8}, "job": {"roles": TWO}},
    "5 ranks without a critic": {"ranks": 5, "job": {"roles": {"actor": 4.0, "reward": 8.0}}},
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "3 ranks, heavy reward": {"ranks": 3, "job": {"roles": {**THREE, "reward": 40.0}}},
    "4 ranks on 2 hosts, three roles": {
        "ranks": 4,
        "per_host": 2,
        "curves": {"bandwidth": 1e8},
        "job": {"roles": THREE},
    },
    "6 ranks, two roles": {"ranks": 6, "job": {"roles": TWO}},
}


def search_of(
    *,
    ranks: int,
    per_host: int = 8,
    curves: dict[str, Any] | None = None,
    job: dict[str, Any] | None = None,
    device_bytes: float = 1e18,
    keep: int = 1,
) -> Search:
    found = small_job(**(job or {}))
    memory: Any = FlatMemory(found, device_bytes)
    return Search(Costs(found, machine(**(curves or {})), Cluster(ranks, per_host)), memory, keep=keep)


def every_plan(job: RLJob, cluster: Cluster) -> Iterator[StepPlan]:
    """Every choice for every layout."""
    for layout in layouts(job, cluster):
        ways = [[(name, way) for way in shardings(job, name, ranks)] for name, ranks in layout.places.items()]
        for shared, together, offload in itertools.product(
            itertools.product(*ways), samplings(job, layout, cluster), offloads(job, layout)
        ):
            yield plan_of(job, layout, dict(shared), together=together, offload=offload)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.faults) for name, case in MORE_CASES.items()),
    ],
)
def test_the_best_plans_are_those_of_brute_force(case: dict[str, Any]) -> None:
    """The best of each style; and as many as are wanted, each of which brute force finds too."""
    brute = search_of(**case)
    best = {style: math.inf for style in ("flattening", "interleaving", "separation", "hybrid")}
    every = set()
    for plan in every_plan(brute.costs.job, brute.costs.cluster):
        style = plan.placement.style
        taken = brute.evaluate(plan).seconds
        every.add(taken)
        best[style] = min(best[style], taken)
    found = {each.plan.placement.style: each.seconds for each in search_of(**case).run().ranked}
    assert found == pytest.approx({style: seconds for style, seconds in best.items() if style in found})
    assert min(best.values()) == pytest.approx(min(found.values())) and min(found.values()) < math.inf
    listed = [each.seconds for each in search_of(**case, keep=12).run().fastest[:12]]
    assert listed == sorted(listed) and listed[0] == pytest.approx(min(every))
    assert all(min(abs(seconds / other - 1) for other in every) < 1e-9 for seconds in listed)
    assert len(listed) == 12 or len(every) < 40


def test_brute_force_tries_each_plan_once_and_every_kind() -> None:
    job, cluster = small_job(), Cluster(3, 8)
    found = list(layouts(job, cluster))
    ranks = [layout.places for layout in found]
    assert all(ranks.count(each) == 1 for each in ranks)
    assert {"actor": (0, 1, 2), "critic": (0, 1, 2), "reference": (0, 1), "reward": (2,)} in ranks
    assert {"actor": (0, 1), "critic": (0, 1), "reference": (2,), "reward": (2,), SAMPLER: (2,)} in ranks
    assert all(not set(each.get(SAMPLER, ())) & set(each["actor"]) for each in ranks)


def test_a_base_in_four_bits_is_sampled_where_it_trains_in_whole_products() -> None:
    """Plans had a separate sampler, which a run refuses, and products divided by tensor parallelism."""
    whole = small_job()
    model = replace(whole.config.model, quantization="nf4")
    config: Any = SimpleNamespace(**{**vars(whole.config), "model": model})
    job = replace(whole, config=config)
    assert not any(SAMPLER in layout.places for layout in layouts(job, Cluster(3, 8)))
    sizes = whole.actor.sizes
    rows = np.asarray([0.0, 1.0, 8.0])
    passes = ModelPasses(machine(), replace(sizes, active=0.25), torch.bfloat16, whole_products=True)
    alone, together = (replace(passes, ranks=ranks).decode_products(rows) for ranks in (1, 2))
    assert np.isfinite(alone).all() and (together > 0.5 * alone).all()


@pytest.mark.parametrize("ranks", [4, slow(24)])
def test_no_plan_that_does_not_fit_is_chosen(ranks: int) -> None:
    """With memory for all of it, for some plans, and for none."""
    job = {"roles": THREE}
    roomy, tight = search_of(ranks=ranks, job=job).run(), search_of(ranks=ranks, job=job, device_bytes=3e7).run()
    assert roomy.best is not None and tight.best is not None
    assert tight.best.memory.misfit is None and tight.best.memory.peak_bytes <= 3e7
    assert roomy.best.memory.peak_bytes > 3e7 and roomy.best.seconds < tight.best.seconds
    none = search_of(ranks=ranks, job=job, device_bytes=1e6).run()
    assert none.best is None and all(each.memory.misfit is not None for each in none.ranked)


@pytest.mark.slow
def test_few_plans_of_many_ranks_are_evaluated() -> None:
    """Of more than ten thousand layouts with some hundred options each."""
    result = search_of(ranks=32, curves={"bandwidth": 1e8}).run()
    assert result.best is not None and result.evaluated <= 100


STYLES = {
    "flattening": dict.fromkeys(("actor", "critic", "reference", "reward"), (0, 1, 2, 3)),
    "interleaving": {"actor": (0, 1, 2, 3), "critic": (0, 1, 2, 3), "reference": (0, 1), "reward": (2, 3)},
    "separation": {"actor": (0, 1), "critic": (0, 1), "reference": (2,), "reward": (3,), SAMPLER: (2, 3)},
}


def seconds(style: str, curves: MachineCurves, *, zero: int = 3, job: RLJob | None = None, per_host: int = 8) -> float:
    found = job or small_job()
    memory: Any = FlatMemory(found)
    search = Search(Costs(found, curves, Cluster(4, per_host)), memory)
    return search.evaluate(placed_at(STYLES[style], world=4, zero=zero)).seconds


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_better_machines_and_shorter_completions_are_never_slower(style: str, zero: int) -> None:
    at = {bandwidth: seconds(style, machine(bandwidth=bandwidth), zero=zero) for bandwidth in (1e7, 1e8, 1e9, 1e10)}
    assert list(at.values()) == sorted(at.values(), reverse=True) and at[1e7] > at[1e10]
    assert seconds(style, machine(latency=1e-6), zero=zero) < seconds(style, machine(latency=1e-4), zero=zero)
    across = seconds(style, machine(), zero=zero, per_host=1)
    assert seconds(style, machine(), zero=zero) < across, "a group on one host is faster than one on several"
    shorter = small_job(lengths=StepLengths(32.0, tuple(max(1, n // 2) for n in small_job().lengths.completions)))
    assert seconds(style, machine(), zero=zero, job=shorter) < seconds(style, machine(), zero=zero)


def test_hiding_gathers_behind_compute_is_never_slower() -> None:
    taken = [seconds("flattening", machine(overlap=overlap, bandwidth=1e8)) for overlap in (0.0, 0.5, 1.0)]
    assert taken == sorted(taken, reverse=True) and taken[0] > taken[2]


def test_the_planner_plans_what_programs_can_ask() -> None:
    job, cluster = small_job(), Cluster(4, 8)
    config = replace(job.config, environment=EnvironmentConfig(program="m:f"))
    sizes = {
        name: {size for layout in layouts(each, cluster) for size in samplings(each, layout, cluster)}
        for name, each in (("none", job), ("program", replace(job, config=config)))
    }
    assert sizes == {"none": {1, 2, 4}, "program": {1}}


def test_corrections_scale_their_kind_of_work_alone() -> None:
    curves, job = machine(), small_job()
    plan = placed_at(STYLES["flattening"], world=4, zero=3)
    plain = Costs(job, curves, Cluster(4, 8))
    doubled = Costs(job, curves.corrected({"decode": 2.0}), Cluster(4, 8))
    assert doubled.read(job.actor, plan) == plain.read(job.actor, plan)
    more = doubled.sampling(plan, rows_at_once=99)[0].compute / plain.sampling(plan, rows_at_once=99)[0].compute
    assert 1.5 < more < 2.0  # the prefill is not corrected


def test_zero_stages_communicate_as_they_should() -> None:
    """ZeRO-3 gathers weights in every pass, 2 reduces after every backward, 0 and 1 once per update."""
    job = small_job(prompts=64)
    costs = Costs(job, machine(latency=0.0, calls={}), Cluster(4, 8))
    size = job.dtype.itemsize * job.actor.sizes.parameters / 1e9
    assert size > 0.001
    batches = math.ceil(8 / (1024 // job.lengths.mean_row))
    passes = {0: 1, 1: 2, 2: batches + 1, 3: batches * (1 + 1 + 1)}
    for zero, times in passes.items():
        work = costs.updates(job.actor, placed_at(STYLES["flattening"], world=4, zero=zero))
        assert work.wire == pytest.approx(2 * times * size, rel=0.02), zero


def test_offloading_costs_time() -> None:
    search = search_of(ranks=4)
    plan = placed_at(STYLES["flattening"], world=4, zero=2)
    for key in ("offload_frozen", "offload_optimizer"):
        assert search.evaluate(replace(plan, **{key: True})).seconds > search.evaluate(plan).seconds
