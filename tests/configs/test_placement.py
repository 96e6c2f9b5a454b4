"""What a placement means, and what it may not say: each error is one line with the rule, the value and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.cli.train import check_ranks
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import read_placement
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from hybrid_rlhf.runtime.placement import PlacedRoles, Placement, RolePlacement, resolve_placement
from tests.support.errors import user_error

PPO = {"actor": 0, "critic": 0, "reference": 0, "judge": 0}
# what is given, its error, and what else is known of the roles
REFUSED: list[tuple[Any, ...]] = [
    (
        "separated",
        "one of flattening, interleaving, separation, auto or a mapping of roles, got separated: the nea",
    ),
    (3, "placement must be one of flattening, interleaving, separation, auto or a mapping of roles, got 3: give one"),
    ({"sampler": {"ranks": "6-7"}}, "below the number of ranks, 4, got 7: start more ranks or the missing hosts"),
    ({"actor": {"ranks": []}}, "placement.actor.ranks must name a rank, got none"),
    ({"actor": {"ranks": "3-1"}}, "must be a list of ranks or ranges, got 3-1: write for example 0-3"),
    ({"actor": {"ranks": [1, 1]}}, r"must name each rank once, got \[1, 1\]"),
    ({"actor": {}}, "placement.actor must be a mapping with ranks, zero, tensor_parallel, got {}"),
    ({"actor": {"rank": 1}}, "unknown key placement.actor.rank: the nearest is ranks"),
    ({"actr": {"ranks": 1}}, "placement.actr must be a role of the step, .* the nearest is actor"),
    ({"sampler": {"ranks": "0-3"}}, "placement.actor needs ranks, placement.sampler takes all 4: leave it some"),
    ({"sampler": {"ranks": "1-2"}, "actor": {"ranks": "0-1"}}, "got 1 of the actor's too: name others"),
    (
        {"sampler": {"ranks": "1-3", "tensor_parallel": 2}},
        "must divide the 3 ranks of the sampler, got 2: use one of 1, 3",
    ),
    (
        {"actor": {"ranks": 1, "tensor_parallel": 2}},
        "placement.actor.tensor_parallel splits inference weights, which sampler and critic_copy have, got 2: leave",
    ),
    ({"sampler": {"ranks": 1, "zero": 3}}, "which ZeRO does not shard, got zero 3: give tensor_parallel"),
    ({"judge": {"ranks": 1, "zero": 2}}, r"ZeRO shards its weights \(3\) or nothing \(0\), got 2"),
    (
        {"actor": {"ranks": 1, "zero": 4}},
        "placement.actor.zero must be a whole number of 0 or more, at most 3, got 4",
    ),
    (
        {"sampler": {"ranks": 3}, "critic": {"ranks": "2-3"}},
        "samples while the critic trains, got both on ranks 3 in placement",
        {"max_lag": 1},
    ),
    ({"critic_copy": {"tensor_parallel": 1}}, "placement.critic_copy needs ranks, got none and no sampler's: give"),
    ({"critic_copy": {"ranks": "1-2"}}, "on ranks without the critic, got 1-2 of its too: name others, or leave"),
    (
        {"critic_copy": {"ranks": 1}},
        "placement.critic_copy must be a role of the step, which has actor, judge, sampler",
        {"zero": {"actor": 0, "judge": 0}},
    ),
    ({"critic": {"ranks": 1}}, "critic.share_base needs the critic on the actor's ranks", {"shares_base": True}),
    ("separation", "placement separation needs 3 ranks for a tensor-parallel sampler .* got 4", {"tensor_parallel": 3}),
    ("interleaving", "placement interleaving needs 2 ranks or more, got 1: start more, or give", {"ranks": 1}),
    ({"style": "auto", "actor": {"ranks": 0}}, "auto chooses the ranks of all roles, got placement.actor: leave"),
    (
        {"sampler": {"ranks": 1, "with_actor": True}},
        "unknown key placement.sampler.with_actor: a sampler samples alone, and without ranks of its own on the",
    ),
]


ZERO = {"actor": 3, "critic": 3, "reference": 3, "judge": 3}


def resolved(given: dict[str, Any] | str, ranks: int = 8, **placed: Any) -> Placement:
    return resolve_placement(read_placement(given), PlacedRoles(**{"zero": ZERO, **placed}), ranks=ranks)


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_placement_is_one_line(case: tuple[Any, ...]) -> None:
    given, message, *more = case
    with user_error(message):
        resolved(given, **{"ranks": 4, "zero": PPO} | dict(*more))


def test_a_missing_host_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("first slots=4\n# second slots=4\n")
    line = f"--launcher.hostfile {tmp_path}/hosts --rl.placement".split()
    check_ranks(parse_config(PipelineConfig, [*line, "{sampler: {ranks: 2-3}}"]))
    with user_error("rl.placement.sampler.ranks must be below the 4 ranks of .* 1 host, got 7: add"):
        check_ranks(parse_config(PipelineConfig, [*line, "{sampler: {ranks: 4-7}}"]))
    with user_error("below the 2 ranks of launcher.num_processes 2, got 2"):
        check_ranks(
            parse_config(PipelineConfig, "--launcher.num_processes 2 --rl.placement".split() + ["{critic: {ranks: 2}}"])
        )
    check_ranks(parse_config(PipelineConfig, [*line, "{sampler: {ranks: 4-7}}", "--steps", "sft"]))


@pytest.mark.parametrize(
    "given",
    [
        "auto",
        {"style": "auto"},
        "interleaving",
        {"sampler": {"ranks": "4-7", "tensor_parallel": 2}, "judge": {"zero": 0}},
        {"style": "separation", "critic_copy": {"tensor_parallel": 2}},
    ],
)
def test_a_placement_is_saved_as_it_is_given(given: Any, tmp_path: Path) -> None:
    """The form in which files give it is not that of its dataclasses."""
    config = parse_config(RLConfig, ["--placement", str(given)])
    save_config(config, tmp_path / "c.yaml")
    assert config.placement == read_placement(given)
    assert parse_config(RLConfig, ["--config", str(tmp_path / "c.yaml")]) == config


def test_a_copy_of_the_critic_computes_values_where_completions_are_sampled() -> None:
    found = resolved({"style": "separation", "critic_copy": {"tensor_parallel": 2}}, ranks=4)
    assert found["critic_copy"] == RolePlacement((2, 3), 0, 2) and found["critic"] == RolePlacement((0, 1), 3)
    assert found.style == "separation" and found.sampler_shares_ranks and found.reference_beside_rewards is False
    assert [line.split() for line in found.table()[-2:]] == [
        ["0-1", "-", "-", "actor", "actor,", "critic"],
        ["2-3", "sampler", "reference,", "reward:", "judge", "critic_copy", "-"],
    ]
    beside = resolved(
        {"reference": {"ranks": 0}, "judge": {"ranks": 1}, "critic": {"ranks": 0}, "critic_copy": {"ranks": 1}}, 2
    )
    assert beside.reference_beside_rewards


def test_a_sampler_on_the_actors_ranks_leaves_the_actor_its_stage() -> None:
    found = resolved("flattening", tensor_parallel=2)
    assert (found["actor"].zero, found["actor"].tensor_parallel, found["judge"].tensor_parallel) == (3, 2, 1)


def test_the_table_shows_who_samples() -> None:
    given = {"sampler": {"ranks": "2-3", "tensor_parallel": 2}}
    placement = resolved(given, 4, zero={"actor": 3, "reference": 3})
    assert placement.sampling_groups == [(2, 3)] and {(0, 1), (2, 3)} <= {*placement.groups()}
    lines = [line.split() for line in placement.table()]
    assert ["0-1", "-", "-", "actor", "actor"] in lines
    assert ["2-3", "sampler", "reference", "-", "-"] in lines
    assert "  sampler    2-3    tensor parallel 2" in placement.table()
