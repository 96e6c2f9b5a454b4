"""Steps against arithmetic by hand, and a step that a GPU measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from benchmarks.generation import SHAPES
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import ModelDimensions, RLJob, RoleJob, StepLengths, modelled_lengths, read_job
from hybrid_rlhf.planning.machine import DATA_SHEETS
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan
from hybrid_rlhf.planning.step_time import (
    LAYER_LAUNCHES,
    LINK_ACHIEVED,
    MEMORY_ACHIEVED,
    PASSES_ACHIEVED,
    PHASES,
    Seconds,
    Span,
    StepTimer,
    tree_depth,
)
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.placement import flattening, machine, placed_at, small_job

B7 = ModelDimensions(32, 4096, 4096, 8192, 32, 202_383_360.0, 32000, 6.74e9, 6.74e9)
B70 = ModelDimensions(80, 8192, 8192, 2048, 64, 855_638_016.0, 128256, 70.55e9, 70.55e9)
"""Llama 2 7B and Llama 3 70B."""
H100 = DATA_SHEETS["h100"]
ALL_ROWS = 10**6
STYLES = {
    "flattening": dict.fromkeys(("actor", "critic", "reference", "reward"), (0, 1, 2, 3)),
    "interleaving": {"actor": (0, 1, 2, 3), "critic": (0, 1, 2, 3), "reference": (0, 1), "reward": (2, 3)},
    "separation": {"actor": (0, 1), "critic": (0, 1), "reference": (2,), "reward": (3,), SAMPLER: (2, 3)},
}


def grpo(sizes: ModelDimensions, *, prompts: int, n: int, prompt: int, mean: int, most: int) -> RLJob:
    """GRPO with a reference of the actor's size and a reward without a model."""
    line = "--algorithm grpo --model.path none --reward.components [reward] --model.gradient_checkpointing true "
    line += f"--rollout.prompts_per_step {prompts} --rollout.max_prompt_tokens {prompt} --rollout.sampling.n {n} "
    line += f"--rollout.sampling.max_new_tokens {most} --train.micro_batch_tokens 16384"
    config = parse_config(RLConfig, line.split())
    roles = {
        "actor": RoleJob("actor", sizes, None, ZeroConfig(), OptimizerConfig()),
        "reference": RoleJob("reference", replace(sizes, trained=0.0), None, ZeroConfig()),
    }
    lengths = modelled_lengths(
        prompts=prompts, per_prompt=n, prompt_tokens=prompt / 2, mean_tokens=mean, max_tokens=most
    )
    return RLJob(config, roles, lengths, torch.bfloat16, torch.bfloat16, torch.device("cuda"))


def phases_of(timer: StepTimer, plan: StepPlan) -> dict[str, float]:
    return dict(timer(plan, rows_at_once=ALL_ROWS).phases)


def test_the_step_of_a_gpu_is_predicted_within_a_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/benchmarks/gpu.md: 9.2 s on an H200 whose processor launches slowly, with a prompt for each completion. The
    numbers of the machine are from other runs: a product, a copy, and the forward of a layer."""
    monkeypatch.setattr(RLJob, "sharing", lambda *_: 1)
    LlamaConfig(**SHAPES["qwen2.5-0.5b"]).save_pretrained(tmp_path)
    line = f"--algorithm grpo --model.path {tmp_path} --rollout.prompts_per_step 64 --rollout.sampling.n 8 "
    line += "--rollout.max_prompt_tokens 512 --rollout.sampling.max_new_tokens 256 --reward.components"
    config = parse_config(RLConfig, [*line.split(), "[{function: 'm.py:f'}]"])
    job = read_job(config, torch.device("cuda"), lengths=StepLengths(150.0, (256,) * 512))
    forward_seconds, layers = 0.035, 24
    measured = replace(
        DATA_SHEETS["h200"],
        tflops=846,
        memory_gb_per_second=4160,
        launch_microseconds=1e6 * forward_seconds / layers / LAYER_LAUNCHES,
        measured=True,
    )
    plan = StepPlan(flattening([*job.roles], 1, zero={}))
    found = StepTimer(job, measured, Cluster(1, 1))(plan, rows_at_once=ALL_ROWS)
    assert found.step_seconds == pytest.approx(9.2, rel=0.25)
    assert found.phases["scoring"] == pytest.approx(2.9, rel=0.3)
    assert found.phases["training"] == pytest.approx(4.5, rel=0.3)
    assert found.phases["generation"] == pytest.approx(1.2, rel=0.4)
    without = StepTimer(job, replace(measured, launch_microseconds=1.0), Cluster(1, 1))(plan, rows_at_once=ALL_ROWS)
    assert without.step_seconds < 0.5 * found.step_seconds


def test_a_phase_is_the_largest_of_its_parts_on_a_gpu_and_their_sum_on_a_cpu() -> None:
    gpu = StepTimer(small_job(), machine(), Cluster(1, 1))
    cpu = StepTimer(small_job(), machine(cores=4), Cluster(1, 1))
    work = (5e12 * PASSES_ACHIEVED, 30e9 * MEMORY_ACHIEVED, 200_000.0)
    assert gpu._local(*work) == pytest.approx(0.5) and cpu._local(*work) == pytest.approx(0.5 + 0.3 + 0.2)
    assert gpu._local(0.0, 0.0, 2e6) == pytest.approx(2.0)
    arrays = [np.asarray([each, 0.0]) for each in work[:2]]
    assert gpu._local(*arrays, work[2]) == pytest.approx([0.5, 0.2])


TAKEN = {"reference": 3.0, "reward": 4.0, "actor": 5.0, "critic": 6.0}


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (dict.fromkeys(TAKEN, (0, 1)), None, 3 + 4 + 5 + 6),
        ({"actor": (0, 1), "critic": (0, 1), "reference": (0,), "reward": (1,)}, None, 5 + 6 + 4),
        ({"actor": (0,), "critic": (1,), "reference": (2,), "reward": (2,)}, None, 3 + 4),
        # two ranks on one core: the one with less is done after twice its time
        ({"actor": (0,), "critic": (1,)}, 1, 2 * 5 + (6 - 5)),
        ({"actor": (0,), "critic": (1,)}, 2, 6),
    ],
)
def test_roles_take_turns_on_common_ranks_and_share_cores(
    ranks: dict[str, tuple[int, ...]], cores: int | None, expected: float
) -> None:
    timer = StepTimer(small_job(), machine(cores=cores), Cluster(3, 8))
    taken = {name: Seconds(TAKEN[name]) for name in ranks}
    assert timer._stage(placed_at(ranks, world=3), taken) == pytest.approx(expected)
    wired = {name: Seconds(0.0, TAKEN[name]) for name in ranks}
    assert timer._stage(placed_at(ranks, world=3), wired) <= sum(TAKEN[name] for name in ranks), "messages take no core"


def test_a_sampler_with_a_lag_works_beside_all_other_phases() -> None:
    plan = placed_at(STYLES["separation"], world=4)
    newest, behind = (
        StepTimer(small_job(lag=lag), machine(), Cluster(4, 8))(plan, rows_at_once=ALL_ROWS) for lag in (0, 1)
    )
    sampled = behind.phases["weight_sync"] + behind.phases["generation"]
    rest = sum(behind.phases.values()) - sampled
    assert behind.step_seconds == pytest.approx(max(sampled, rest)) and min(sampled, rest) > 0
    assert newest.step_seconds == pytest.approx(sum(newest.phases.values())) and {*newest.phases} == {*PHASES}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_better_machines_and_shorter_completions_are_never_slower(style: str, zero: int) -> None:
    def seconds(per_host: int = 8, lengths: StepLengths | None = None, **changes: Any) -> float:
        timer = StepTimer(small_job(lengths=lengths), machine(**changes), Cluster(4, per_host))
        return timer(placed_at(STYLES[style], world=4, zero=zero), rows_at_once=ALL_ROWS).step_seconds

    own = seconds()
    faster = {
        "tflops": 20.0,
        "memory_gb_per_second": 200.0,
        "launch_microseconds": 0.5,
        "link_gb_per_second": 2.0,
        "link_latency_microseconds": 5.0,
    }
    assert all(seconds(**{name: value}) <= own for name, value in faster.items())
    assert seconds(**faster) < own, "all of them"
    assert own < seconds(per_host=1), "a group on one host is faster than one on several"
    shorter = StepLengths(32.0, tuple(max(1, n // 2) for n in small_job().lengths.completions))
    assert seconds(lengths=shorter) < own


def test_zero_stages_communicate_as_they_should() -> None:
    """ZeRO-3 gathers weights in every pass, 2 and 3 reduce after every backward, 0 and 1 once per update."""
    job = small_job(prompts=64)
    # a processor, where nothing hides behind the layers, and links without latency
    timer = StepTimer(job, machine(cores=4, measured=True, link_latency_microseconds=1e-9), Cluster(4, 8))
    size = 3 / 4 * job.dtype.itemsize * job.actor.sizes.parameters / 1e9
    batches = -(-8 // int(1024 // job.lengths.mean_row))
    exchanges = {0: 2, 1: 2 + 1, 2: batches + 1, 3: batches * (1 + 1 + 1)}
    for zero, times in exchanges.items():
        wire = timer._updates("actor", Span(4, 1, 4), zero, False).wire / job.updates
        assert wire == pytest.approx(times * size, rel=0.02), zero


def test_offloading_costs_time() -> None:
    timer = StepTimer(small_job(), machine(), Cluster(4, 8))
    plan = placed_at(STYLES["flattening"], world=4, zero=2)
    own = timer(plan, rows_at_once=ALL_ROWS).step_seconds
    for key in ("offload_frozen", "offload_states", "offload_optimizer"):
        assert timer(replace(plan, **{key: True}), rows_at_once=ALL_ROWS).step_seconds > own, key


def test_completions_that_wait_for_room_take_longer() -> None:
    job = small_job(lengths=StepLengths(32.0, (10, 20, 30, 40) * 4))
    timer = StepTimer(job, machine(), Cluster(1, 8))
    plan = placed_at(dict.fromkeys(job.roles, (0,)), world=1)
    taken = [timer(plan, rows_at_once=rows).phases["generation"] for rows in (16, 8, 4, 1)]
    assert taken == sorted(taken) and taken[3] > 3 * taken[0]
    # the sum of all lengths instead of the longest one
    assert taken[3] / taken[0] == pytest.approx(400 / 40, rel=0.2)


def test_a_mixture_whose_experts_are_split_exchanges_tokens_and_fewer_weights() -> None:
    sizes = replace(B7, experts=6e9, choices=8.0 * 32, active=0.2)
    job = grpo(sizes, prompts=64, n=8, prompt=512, mean=500, most=1024)
    split = replace(job, config=replace(job.config, model=replace(job.config.model, expert_parallel=8)))
    plan = StepPlan(flattening([*job.roles], 16, zero={"actor": 3}))
    slow = H100.with_network(0.01)
    whole, parts = (StepTimer(each, slow, Cluster(16, 8)) for each in (job, split))
    weights = [timer._weights(Span(16, 2, 8), sizes, sizes.parameters) for timer in (whole, parts)]
    assert weights[1] / weights[0] == pytest.approx((0.74 + 6 / 8) / 6.74, rel=0.01)
    assert phases_of(parts, plan) != phases_of(whole, plan)


@pytest.mark.parametrize("link", [11.6, 1.16])
def test_a_7b_model_on_two_hosts_pays_for_the_link_between_them(link: float) -> None:
    """NVLink's measured times stood for the network: three passes of 13.5 GB in an update under ZeRO-1."""
    job = grpo(B7, prompts=64, n=8, prompt=512, mean=1000, most=4096)
    measured = replace(H100, measured=True).with_network(link)
    wire = StepTimer(job, measured, Cluster(16, 8))._updates("actor", Span(16, 2, 8), 1, False).wire
    by_hand = 3 * 15 / 16 * 2 * 6.74e9 / (link * 2**30 * LINK_ACHIEVED)
    assert wire / job.updates == pytest.approx(by_hand, rel=0.02)
    assert StepTimer(job, measured, Cluster(16, 16))._updates("actor", Span(16, 1, 16), 1, False).wire < 0.5


def test_few_ranks_of_a_host_use_some_of_its_network_cards() -> None:
    timer = StepTimer(small_job(), H100.with_network(10.0), Cluster(16, 8))
    alone, all_of_them = (timer.exchange(Span(2 * each, 2, each), 1e9) for each in (1, 8))
    assert alone * 2 == pytest.approx(8 * all_of_them * 16 / 15, rel=0.01)


def test_small_all_reduces_have_the_latency_of_nvlink() -> None:
    """20 to 30 us for eight ranks, where a ring would take 84."""
    timer = StepTimer(small_job(), H100, Cluster(8, 8))
    assert 20e-6 < 2 * timer.exchange(Span(8, 1, 8), 2**15) < 30e-6
    assert [tree_depth(ranks) for ranks in (1, 2, 3, 8, 9)] == [0, 1, 2, 3, 4]


def test_a_70b_model_samples_in_the_time_by_hand() -> None:
    """4,096 completions of 2,000 tokens in the mean, at most 8,192, on 16 groups of 8 H100: 160 s. A step reads weights
    of 17.6 GB in 8 ms and makes 160 all-reduces of 24 us, so 8,192 steps take 98 s at least; caches and rows the
    rest."""
    job = grpo(B70, prompts=512, n=8, prompt=1024, mean=2000, most=8192)
    plan = StepPlan(flattening([*job.roles], 128, zero={"actor": 3}, tensor_parallel=8))
    assert phases_of(StepTimer(job, H100, Cluster(128, 8)), plan)["generation"] == pytest.approx(160, rel=0.4)
