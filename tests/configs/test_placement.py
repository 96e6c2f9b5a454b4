"""How the ranks of a role share its weights: what is given, what follows, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.placement import PlacedRoles, Placement, resolve_placement

ZERO = {"actor": 3, "critic": 3, "reference": 3, "judge": 3}


def resolved(given: dict[str, Any] | str, ranks: int = 8, **placed: Any) -> Placement:
    return resolve_placement(given, PlacedRoles(**{"zero": ZERO, **placed}), ranks=ranks)


def test_tensor_parallelism_takes_the_place_of_the_stage_of_the_config() -> None:
    found = resolved({"reward": {"ranks": "4-7", "tensor_parallel": 4}, "reference": {"tensor_parallel": 2}})
    assert (found["judge"].ranks, found["judge"].zero, found["judge"].tensor_parallel) == ((4, 5, 6, 7), 0, 4)
    assert found["reference"].groups == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert found["actor"].zero == found["critic"].zero == 3
    assert {(4, 5, 6, 7), (0, 1), (6, 7)} < set(found.groups()) and (0,) not in found.groups()
    assert "  judge      4-7    tensor parallel 4" in found.table()


def test_a_sampler_on_the_actors_ranks_leaves_the_actor_its_stage() -> None:
    found = resolved("flattening", tensor_parallel=2)
    assert (found["actor"].zero, found["actor"].tensor_parallel, found["judge"].tensor_parallel) == (3, 2, 1)


@pytest.mark.parametrize(
    ("given", "placed", "rule"),
    [
        ({"critic": {"tensor_parallel": 2}}, {}, "placement.critic trains without tensor parallelism"),
        ({"judge": {"ranks": "0-2", "tensor_parallel": 2}}, {}, "must divide the 3 ranks of the judge, got 2: use"),
        ({"judge": {"tensor_parallel": 2, "zero": 3}}, {}, "by tensor parallelism or by ZeRO, got tensor_parallel 2"),
        (
            {"reference": {"tensor_parallel": 2}},
            {"refreshes_reference": True},
            "refresh_every writes to whole or ZeRO-sharded weights",
        ),
        (
            {"reference": {"tensor_parallel": 2}},
            {"zero": {"actor": 0}, "reads_actor": True},
            "the reference is the actor without its adapters",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(given: dict[str, Any], placed: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        resolved(given, **placed)
