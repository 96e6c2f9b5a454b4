"""Networks: what ranks exchange within a host and between hosts, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.curves import MachineCurves, Surface
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import ModelDimensions, RLJob, RoleJob, modelled_lengths
from hybrid_rlhf.planning.machines import collectives
from hybrid_rlhf.planning.machines.datasheets import DATA_SHEETS, modelled_curves, with_usual_link
from hybrid_rlhf.planning.machines.links import LINK_ACHIEVED, with_measured_link
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan, flattening
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.placement import placed_at
from tests.support.ranks import run_ranks

H100 = DATA_SHEETS["h100"]
GIB = 2.0**30
B7 = ModelDimensions(32, 4096, 4096, 8192, 32, 202_383_360.0, 32000, 6.74e9, 6.74e9)
B70 = ModelDimensions(80, 8192, 8192, 2048, 64, 855_638_016.0, 128256, 70.55e9, 70.55e9)
"""Llama 2 7B and Llama 3 70B."""


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


def measured() -> MachineCurves:
    """Curves as a calibration of one host of eight H100 would leave them."""
    return replace(modelled_curves(H100), source="measured", machine="NVIDIA H100 80GB HBM3", between_hosts={})


@pytest.mark.parametrize("link", [11.6, 1.16])
def test_a_7b_model_on_two_hosts_pays_for_the_link_between_them(link: float) -> None:
    """NVLink's measured times stood for the network: three passes of 13.5 GB in an update under ZeRO-1."""
    job = grpo(B7, prompts=64, n=8, prompt=512, mean=1000, most=4096)
    plan = StepPlan(flattening([*job.roles], 16, zero={"actor": 1}))
    curves = with_usual_link(measured(), link)
    costs = Costs(job, curves, Cluster(16, 8))
    by_hand = 3 * 15 / 16 * 2 * 6.74e9 / (link * GIB * LINK_ACHIEVED)
    assert costs.updates(job.actor, plan).wire / job.updates == pytest.approx(by_hand, rel=0.02)
    as_within = replace(curves, between_hosts=curves.collectives)
    assert Costs(job, as_within, Cluster(16, 8)).updates(job.actor, plan).wire / job.updates < 0.2


def test_without_a_link_measured_curves_take_that_of_the_data_sheet() -> None:
    curves = with_usual_link(measured())
    assert curves.link_source == "data sheet" and curves.link_gib_per_second == pytest.approx(400e9 / GIB)
    other = with_usual_link(replace(measured(), machine="this CPU"))
    assert other.link_gib_per_second == pytest.approx(1.25e9 / GIB)
    within = curves.collective("all_gather", ranks=8, size_bytes=2**30, hosts=1)
    assert other.collective("all_gather", ranks=16, size_bytes=2**30, hosts=2) > 100 * within


@pytest.mark.parametrize(("receivers", "at_peak"), [(1, 3.05), (8, 24.4)])
def test_receivers_of_a_host_share_its_link(receivers: int, at_peak: float) -> None:
    """3.8 GB each over 1.16 GiB/s, of which transfers reach 0.75: 4.15 s were predicted for any number."""
    sizes = replace(B7, parameters=1.9e9, layer_weights=1.9e9 / 32)
    job = grpo(sizes, prompts=8, n=2, prompt=64, mean=32, most=64)
    hosts = {"actor": tuple(range(8)), "reference": (8,), SAMPLER: tuple(range(8, 8 + receivers))}
    plan = placed_at(hosts, world=16)
    costs = Costs(job, modelled_curves(H100, link_gib_per_second=1.16), Cluster(16, 8))
    sync = costs.weight_sync(plan)
    assert sync.seconds == pytest.approx(at_peak / LINK_ACHIEVED, rel=0.05)


def test_small_all_reduces_have_the_latency_of_nvlink() -> None:
    """20 to 30 us for eight ranks, where a ring would take 84."""
    curves = modelled_curves(H100)
    assert 20e-6 < curves.collective("all_reduce", ranks=8, size_bytes=2**15, hosts=1) < 30e-6
    assert 20e-6 < curves.collective("all_reduce", ranks=8, size_bytes=2**19, hosts=1) < 30e-6


def test_a_70b_model_samples_in_the_time_by_hand() -> None:
    """4,096 completions of 2,000 tokens in the mean, at most 8,192, on 16 groups of 8 H100: 160 s. A step reads weights
    of 17.6 GB in 8 ms and makes 160 all-reduces of 24 us, so 8,192 steps take 98 s at least; caches and rows the
    rest."""
    job = grpo(B70, prompts=512, n=8, prompt=1024, mean=2000, most=8192)
    plan = StepPlan(flattening([*job.roles], 128, zero={"actor": 3}, tensor_parallel=8))
    costs = Costs(job, modelled_curves(H100), Cluster(128, 8))
    slowest = max(work.seconds for work in costs.sampling(plan, rows_at_once=10**6))
    assert slowest == pytest.approx(160, rel=0.3)


def test_the_clock_of_a_collective_begins_when_the_first_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns before it has run: the first call ran while the others were timed."""
    events: list[str] = []

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setattr(collectives.time, "perf_counter", clock)
    monkeypatch.setattr(collectives, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(collectives, "_communicate", lambda *_: events.append("call"))
    collectives._time("all_reduce", None, 2, 2**20, World(0, 2, 0, 2, torch.device("cpu")))
    assert events == ["call", "wait", "clock", "call", "call", "wait", "clock"]


def times_between_hosts(world: World) -> collectives.Times:
    """Of four ranks that are two hosts of two."""
    return collectives.time_collectives(world, [2**10, 2**16], local=2)


def test_a_run_on_several_hosts_measures_between_them(tmp_path: Path) -> None:
    times = run_ranks(times_between_hosts, 4, tmp_path)[0]
    assert {ranks for ranks, _, _ in times["all_reduce"]} == {4.0}
    assert {ranks for ranks, _, _ in times["transfer"]} == {1.0, 2.0}
    curves = with_measured_link(measured(), times)
    assert curves.link_source == "measured" and 1 <= curves.ranks_to_fill_link <= 2
    measured_seconds = [seconds for _, _, seconds in times["all_gather"]]
    found = curves.collective("all_gather", ranks=4, size_bytes=2**10, hosts=2)
    assert min(measured_seconds) * (1 - 1e-9) <= found <= max(measured_seconds) * (1 + 1e-9)


def test_the_ranks_that_fill_a_measured_link_are_counted() -> None:
    """One rank sends 10 GB/s, the eight of a host 40 GB/s together: four fill the link."""
    times = {
        "all_gather": [(16.0, 1e9, 0.05)],
        "transfer": [(1.0, 1e9, 0.1), (8.0, 8e9, 0.2)],
    }
    curves = with_measured_link(measured(), times)
    assert curves.ranks_to_fill_link == pytest.approx(4.0)
    assert curves.link_gib_per_second == pytest.approx(40e9 / GIB)
    sent = [curves.transfer(8e9, hosts=2, at_once=count) for count in (1, 2, 4, 8)]
    assert sent == pytest.approx([0.8, 0.8, 0.8, 1.6])
    gathered = [curves.collective("all_gather", ranks=ranks, size_bytes=1e9, hosts=2) for ranks in (2, 8, 16)]
    assert gathered == pytest.approx([0.2, 0.05, 0.05])


def test_a_step_pays_for_its_small_exchanges_between_hosts() -> None:
    """20 ms one way: by hand, 40 ms for a reduction and 20 ms for an all-gather. Two hosts of eight ranks; on one host
    calibration has measured them with the rest."""
    job = grpo(B7, prompts=64, n=8, prompt=512, mean=1000, most=4096)
    surface = {"all_reduce": 0.04, "all_gather": 0.02, "reduce_scatter": 0.02, "transfer": 0.02}
    between = {kind: Surface.of([(16.0, 64.0, seconds)]) for kind, seconds in surface.items()}
    curves = replace(with_usual_link(measured()), between_hosts=between)
    costs, alone = (Costs(job, curves, cluster) for cluster in (Cluster(16, 8), Cluster(8, 8)))
    assert costs.messages("training").wire == pytest.approx((2 + job.updates) * 0.04 + 6 * 0.02)
    assert costs.messages("gather").wire == pytest.approx(4 * 0.02)
    assert alone.messages("training").seconds == 0.0


@pytest.mark.parametrize("zero", [0, 3])
def test_split_experts_travel_less_and_tokens_more(zero: int) -> None:
    """Catches a plan that gathers the experts of a mixture as if no ranks split them, or that forgets the tokens."""
    mixture = replace(B7, experts=0.9 * B7.layer_weights * B7.layers, choices=8.0 * B7.layers, active=0.3)
    job = grpo(mixture, prompts=64, n=8, prompt=512, mean=512, most=1024)
    curves = replace(measured(), overlap=0.0)
    wires = {}
    for over in (1, 8):
        config = replace(job.config, model=replace(job.config.model, expert_parallel=over))
        costs = Costs(replace(job, config=config), curves, Cluster(8, 8))
        plan = StepPlan(flattening([*job.roles], 8, zero=dict.fromkeys(job.roles, zero)))
        wires[over] = costs.read(job.roles["reference"], plan).wire
    count, batch = Costs(job, curves, Cluster(8, 8))._micro_batches(64 * 8, 8)
    elements = batch.tokens * mixture.hidden * 8
    exchange = curves.collective("all_gather", ranks=8, size_bytes=2.0 * elements, hosts=1)
    tokens = count * 2 * mixture.layers * exchange
    if zero == 0:
        assert wires[8] - wires[1] == pytest.approx(tokens)
    else:
        assert 0 < wires[8] - tokens < wires[1], "a layer's gather has a tenth of its weights"
