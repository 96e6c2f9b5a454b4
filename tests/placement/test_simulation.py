"""Simulated steps against timelines made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rlhf.placement.costs import Work, decode_segments
from hybrid_rlhf.placement.curves import Curve
from hybrid_rlhf.placement.plans import Cluster
from hybrid_rlhf.placement.schedule import step_time
from hybrid_rlhf.placement.simulation import Task, simulate
from tests.support.placement import FixedCosts, machine, placed_at, small_job

SECONDS = {
    "sync": 1.0,
    "sample": 10.0,
    "sample more": 2.0,
    "read reference": 3.0,
    "read reward": 4.0,
    "read actor": 5.0,
    "read critic": 6.0,
    "train actor": 7.0,
    "train critic": 8.0,
    "loop": 0.5,
}


def timed(ranks: dict[str, tuple[int, ...]], *, world: int, lag: int = 0, **seconds: float) -> Any:
    """A step with the seconds above."""
    costs: Any = FixedCosts(small_job(), SECONDS | seconds, ranks=world, curves=machine())
    return step_time(costs, placed_at(ranks, world=world, lag=lag), rows_at_once=100)


def test_flattening_runs_everything_in_turn() -> None:
    both = (0, 1)
    time = timed({"actor": both, "critic": both, "reference": both, "reward": both}, world=2)
    # the second group samples for 12 s; the first waits for 2 of them
    assert time.step_seconds == pytest.approx(1 + 12 + 3 + 4 + 5 + 6 + 7 + 8 + 0.5)
    assert time.phases == pytest.approx(
        {"weight_sync": 1, "generation": 12, "gather": 0, "scoring": 18, "training": 15, "loop": 0.5}
    )
    assert time.idle["generation"] == pytest.approx(2 / 24)
    assert time.idle_part == pytest.approx(2 / (2 * 46.5))


def test_interleaved_roles_read_at_the_same_time() -> None:
    time = timed({"actor": (0, 1), "critic": (0, 1), "reference": (0,), "reward": (1,)}, world=2)
    assert time.step_seconds == pytest.approx(1 + 12 + max(3, 4) + 5 + 6 + 7 + 8 + 0.5)
    assert time.idle["scoring"] == pytest.approx(1 / (2 * 15))


def test_a_separate_sampler_without_lag_waits_for_the_trainers_and_they_for_it() -> None:
    ranks = {"actor": (0,), "critic": (1,), "reference": (2,), "reward": (2,), "sampler": (2,)}
    time = timed(ranks, world=3)
    # actor and critic are on ranks of their own, so they read and train at the same time
    assert time.step_seconds == pytest.approx(1 + 10 + 3 + 4 + max(5, 6) + max(7, 8) + 0.5)
    assert time.idle["generation"] == pytest.approx(2 / 3)
    assert time.idle["training"] == pytest.approx(1 - (7 + 8) / (3 * 8))


@pytest.mark.parametrize(("transfer", "exposed"), [(3.0, 0.0), (5.0, 1.0)])
def test_weights_travel_while_the_critic_learns_from_the_last_mini_batch(transfer: float, exposed: float) -> None:
    """Two mini-batches of a critic that trains for 8 s: the last takes 4 s."""
    ranks = {"actor": (0,), "critic": (0,), "reference": (1,), "reward": (1,), "sampler": (1,)}
    time = timed(ranks, world=2, transfer=transfer)
    assert time.step_seconds == pytest.approx(1 + 10 + 3 + 4 + 5 + 6 + 7 + 8 + exposed + 0.5)
    assert time.phases["training"] == pytest.approx(7 + 8 + exposed) and time.phases["weight_sync"] == 1


@pytest.mark.parametrize(("sample", "step"), [(10.0, max(1 + 3, 7) + 6 + 8), (40.0, 1 + 40)])
def test_a_lag_hides_sampling_behind_the_rest_or_the_rest_behind_sampling(sample: float, step: float) -> None:
    ranks = {"actor": (0,), "critic": (1,), "reference": (0,), "reward": (1,), "sampler": (2,)}
    # the actor sends its weights and the reference reads while the reward model reads on another rank
    reads = {"read reference": 3.0, "read reward": 7.0}
    time = timed(ranks, world=3, lag=1, sample=sample, loop=0.0, **reads)
    assert time.step_seconds == pytest.approx(step)


def test_the_sampling_thread_shares_its_device_with_scoring() -> None:
    """Sampling of 10 s and scoring of 4 s start together: each has half of the device, so the latter ends after 8 s."""
    tasks = [Task("generation", (0,), Work(10.0), lane="sampling"), Task("scoring", (0,), Work(4.0))]
    timeline = simulate(tasks, machine(), Cluster(1, 1))
    assert [span.end for span in timeline.spans] == pytest.approx([14.0, 8.0])


def test_ranks_of_a_cpu_share_its_cores() -> None:
    """Three ranks on a host that runs two at full speed: 2 s, then one of 4 s more alone."""
    curves = machine(device="cpu", slowdown=Curve.of([(1, 1.0), (2, 1.0), (3, 1.5)]))
    tasks = [Task("a", (rank,), Work(seconds)) for rank, seconds in enumerate((2.0, 2.0, 6.0))]
    timeline = simulate(tasks, curves, Cluster(3, 3))
    assert [span.end for span in timeline.spans] == pytest.approx([3.0, 3.0, 7.0])


def test_waiting_for_a_link_leaves_the_core_to_others() -> None:
    curves = machine(device="cpu", slowdown=Curve.of([(1, 1.0), (2, 2.0)]))
    tasks = [Task("a", (0,), Work(1.0, wire=5.0)), Task("a", (1,), Work(3.0))]
    timeline = simulate(tasks, curves, Cluster(2, 2))
    assert [span.end for span in timeline.spans] == pytest.approx([2.0 + 5.0, 2.0 + 2.0])


def test_tasks_of_a_rank_keep_their_order_and_wait_for_others() -> None:
    tasks = [
        Task("a", (0,), Work(1.0)),
        Task("b", (1,), Work(2.0), after=(0,)),
        Task("c", (0, 1), Work(1.0)),
        Task("d", (0,), Work(1.0)),
    ]
    timeline = simulate(tasks, machine(), Cluster(2, 2))
    assert [(span.start, span.end) for span in timeline.spans] == [(0, 1), (1, 3), (3, 4), (4, 5)]


def test_rows_leave_as_they_finish_and_the_next_join() -> None:
    # two at once: 3 and 5 begin; at 3 the row of 4 joins, and outlives the row of 5 by 2
    assert decode_segments([3, 5, 4], 10.0, 2) == [(2, 11.5, 3), (2, 10 + (3 + 5 + 0 + 2) / 4, 2), (1, 13.0, 2)]
    assert decode_segments([3, 5, 4], 10.0, 3) == [(3, 11.5, 3), (2, 13.5, 1), (1, 14.5, 1)]


@pytest.mark.parametrize("rows_at_once", [1, 3, 64])
def test_decoding_makes_every_token_once(rows_at_once: int) -> None:
    lengths = [1 + 37 * place % 90 for place in range(50)]
    segments = decode_segments(lengths, 5.0, rows_at_once)
    assert sum(rows * steps for rows, _, steps in segments) == sum(lengths)
    assert max(rows for rows, _, _ in segments) == min(rows_at_once, 50)
