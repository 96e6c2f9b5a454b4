"""Steps against timelines made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rlhf.planning.costs.decoding import decode_segments
from hybrid_rlhf.planning.curves import Curve
from hybrid_rlhf.planning.step_time import step_time
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
    assert time.idle("generation") == pytest.approx(2 / 24)
    assert time.idle_part == pytest.approx(2 / (2 * 46.5))


def test_interleaved_roles_read_at_the_same_time() -> None:
    time = timed({"actor": (0, 1), "critic": (0, 1), "reference": (0,), "reward": (1,)}, world=2)
    assert time.step_seconds == pytest.approx(1 + 12 + max(3, 4) + 5 + 6 + 7 + 8 + 0.5)
    assert time.idle("scoring") == pytest.approx(1 / (2 * 15))


def test_a_separate_sampler_without_lag_waits_for_the_trainers_and_they_for_it() -> None:
    ranks = {"actor": (0,), "critic": (1,), "reference": (2,), "reward": (2,), "sampler": (2,)}
    time = timed(ranks, world=3)
    # actor and critic are on ranks of their own, so they read and train at the same time
    assert time.step_seconds == pytest.approx(1 + 10 + 3 + 4 + max(5, 6) + max(7, 8) + 0.5)
    assert time.idle("generation") == pytest.approx(2 / 3)
    assert time.idle("training") == pytest.approx(1 - (7 + 8) / (3 * 8))


@pytest.mark.parametrize(("sample", "step"), [(10.0, max(1 + 3, 7) + 6 + 8), (40.0, 1 + 40)])
def test_a_lag_hides_sampling_behind_the_rest_or_the_rest_behind_sampling(sample: float, step: float) -> None:
    ranks = {"actor": (0,), "critic": (1,), "reference": (0,), "reward": (1,), "sampler": (2,)}
    # the actor sends its weights and the reference reads while the reward model reads on another rank
    reads = {"read reference": 3.0, "read reward": 7.0}
    time = timed(ranks, world=3, lag=1, sample=sample, loop=0.0, **reads)
    assert time.step_seconds == pytest.approx(step)


def test_the_sampling_thread_shares_its_device_with_scoring() -> None:
    """Sampling of 40 s and scoring of 3 + 4 s on one rank."""
    ranks = {"actor": (0,), "critic": (0,), "reference": (1,), "reward": (1,), "sampler": (1,)}
    assert timed(ranks, world=2, lag=1, sample=40.0).step_seconds == pytest.approx(1 + 40 + 3 + 4)


def test_ranks_of_a_cpu_share_its_cores_while_they_compute() -> None:
    """Two ranks slow each other down by half; with 3 s and 4 s of scoring, 1.75 ranks compute in the mean."""
    curves = machine(device="cpu", slowdown=Curve.of([(1, 1.0), (2, 1.5)]))
    costs: Any = FixedCosts(small_job(), {**SECONDS, "sync": 0.0}, ranks=2, curves=curves)
    placed = {"actor": (0, 1), "critic": (0, 1), "reference": (0,), "reward": (1,)}
    time = step_time(costs, placed_at(placed, world=2), rows_at_once=100)
    assert time.phases["training"] == pytest.approx(1.5 * (7 + 8))
    assert time.phases["scoring"] == pytest.approx(1.5 * (5 + 6) + 4 * curves.slowed(1.75))
    assert time.phases["generation"] == pytest.approx(12 * curves.slowed((10 + 12) / 12))


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
