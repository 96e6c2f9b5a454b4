"""A placement whose training ranks sample beside the sampler's."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.placement import read_placement
from hybrid_rlhf.runtime.placement import PlacedRoles, resolve_placement

PLACED = PlacedRoles({"actor": 3, "reference": 3})


def test_the_table_shows_who_samples() -> None:
    given = {"sampler": {"ranks": "2-3", "tensor_parallel": 2, "with_actor": True}}
    placement = resolve_placement(read_placement(given), PLACED, ranks=4)
    assert placement.sampling_groups == [(2, 3), (0, 1)] and {(0, 1), (2, 3)} <= {*placement.groups()}
    lines = [line.split() for line in placement.table()]
    assert ["0-1", "actor", "-", "actor", "actor"] in lines
    assert ["2-3", "sampler", "reference", "-", "-"] in lines
    assert ["actor", "0-1", "ZeRO-3,", "tensor", "parallel", "2"] in lines


@pytest.mark.parametrize(
    ("given", "ranks", "lag", "said"),
    [
        ({"actor": {"ranks": 0, "with_actor": True}}, 2, 0, "got placement.actor.with_actor True: give one to sampler"),
        ({"sampler": {"ranks": 1, "with_actor": 2}}, 2, 0, "must be true or false"),
        ({"style": "flattening", "sampler": {"with_actor": True}}, 2, 0, "got no ranks of its own"),
        ({"sampler": {"ranks": 1, "with_actor": True}}, 2, 1, "async_sampling.policy_lag 1: leave one out"),
        ({"sampler": {"ranks": "1-2", "tensor_parallel": 2, "with_actor": True}}, 3, 0, "got 1 of them"),
    ],
)
def test_what_cannot_share_is_refused(given: dict[str, Any], ranks: int, lag: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve_placement(read_placement(given), PlacedRoles(PLACED.zero, policy_lag=lag), ranks=ranks)
