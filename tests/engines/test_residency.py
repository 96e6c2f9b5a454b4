"""Where each part of a role's memory is in each phase, for the settings and placements that decide it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.rl import ActorConfig, RLConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.residency.rules import PHASES, Part, ResidencyRules, RoleResidency, residency_table
from hybrid_rlhf.engines.sampling_engine import backend_maker
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.runtime.placement import Placement, RolePlacement
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.tiny import tiny_model

D, H, F = "device", "host", "freed"
STAY, AWAY, ONCE, IN_USE = (D, D, D, D), (H, D, D, D), (D, F, F, F), (H, D, H, H)


def rules(**settings: Any) -> ResidencyRules:
    return ResidencyRules(**settings)


ACTOR: list[tuple[ResidencyRules, int, dict[Part, tuple[str, ...]]]] = [
    (rules(), 0, {"weights": STAY, "optimizer": STAY, "gradients": (F, F, F, D), "inference weights": ONCE}),
    (rules(cuda_graphs=True), 3, {"gradients": STAY, "KV cache": ONCE, "CUDA graphs": ONCE}),
    (rules(keep_weights=True, cuda_graphs=True), 2, {"inference weights": STAY, "KV cache": STAY, "CUDA graphs": STAY}),
    (rules(offload_states=True), 3, {"optimizer": AWAY, "gradients": AWAY, "weights": STAY}),
    (rules(offload_states=True), 2, {"optimizer": AWAY, "gradients": (F, F, F, D)}),
    (rules(optimizers_on_host=["actor"]), 2, {"optimizer": (H,) * 4, "gradients": (H,) * 4}),
    (rules(optimizers_on_host=["actor"]), 1, {"optimizer": (H,) * 4, "gradients": (F, F, F, D)}),
    (rules(optimizers_on_host=["actor"], offload_states=True), 3, {"optimizer": (H,) * 4, "gradients": (H,) * 4}),
    (rules(parameters_on_host=["actor"]), 3, {"weights": (H,) * 4}),
]


@pytest.mark.parametrize(("own", "zero", "expected"), ACTOR)
def test_the_actor_on_the_ranks_where_it_samples(
    own: ResidencyRules, zero: int, expected: dict[Part, tuple[str, ...]]
) -> None:
    found = own.actor(zero).places
    assert {part: found[part] for part in expected} == expected
    assert ("CUDA graphs" in found) == own.cuda_graphs


def test_an_actor_that_does_not_sample_keeps_its_states_and_has_no_cache() -> None:
    found = rules(offload_states=True, keep_weights=True).actor(2, samples=False)
    assert found == rules().learner("actor", 2)
    assert found.at("KV cache", "sampling") == F


@pytest.mark.parametrize(
    ("keep", "lag", "shares", "weights", "cache"),
    [
        ("auto", 0, False, STAY, STAY),
        ("auto", 0, True, STAY, ONCE),
        (True, 0, True, STAY, STAY),
        (False, 0, False, ONCE, ONCE),
        (False, 1, True, STAY, STAY),
    ],
)
def test_a_sampler_with_ranks_of_its_own(keep: Any, lag: int, shares: bool, weights: Any, cache: Any) -> None:
    found = rules(keep_weights=keep, lags=lag > 0).sampler(shares_ranks=shares).places
    assert found == {"inference weights": weights, "KV cache": cache}


def test_frozen_roles_come_for_their_phase_unless_they_are_shared() -> None:
    whole, sharded = RolePlacement((0, 1)), RolePlacement((0, 1), 3)
    offloads = rules(offload_frozen=True)
    assert offloads.frozen(whole).places == {"weights": IN_USE}
    assert offloads.frozen(sharded).zero(3) == ZeroConfig(stage=3, offload_parameters=True)
    assert rules().frozen(sharded, sharded_on_host=True).zero(3).offload_parameters
    assert not rules().frozen(sharded).zero(3).offload_parameters
    assert rules().frozen(whole).places == {"weights": STAY}


def test_the_settings_of_a_config_are_the_rules_of_its_placement() -> None:
    zero = ZeroConfig(stage=3, offload_optimizer=True)
    config = RLConfig(actor=ActorConfig(zero=zero), rollout=RolloutConfig(offload_frozen=True, keep_weights=False))
    roles = {"actor": RolePlacement((0,), 3), "critic": RolePlacement((0,), 3), "reference": RolePlacement((1,))}
    roles["teacher"] = RolePlacement((1,))
    own = ResidencyRules.of(config, cuda=True)
    found = own.roles(Placement({**roles, "sampler": RolePlacement((1,))}, "separation"))
    assert found["actor"].at("optimizer", "updates") == found["critic"].at("optimizer", "updates") == H
    assert found["sampler"].at("CUDA graphs", "scoring") == F and "KV cache" not in found["actor"].places
    together = own.roles(Placement({**roles, "judge": RolePlacement((1,))}, "hybrid"))
    assert together["actor"].at("KV cache", "sampling") == D
    assert together["reference"].places == {"weights": (H, H, D, H)}, "it reads after a reward model on its rank"
    apart = own.roles(Placement({**roles, "judge": RolePlacement((0,))}, "hybrid"))
    assert apart["reference"].places == apart["judge"].places == {"weights": IN_USE}
    assert apart["teacher"].places == together["teacher"].places == {"weights": (H, H, D, H)}


def test_one_line_shows_parts_that_are_alike() -> None:
    found = residency_table({"actor": rules(offload_states=True).actor(3), "judge": RoleResidency({"weights": IN_USE})})
    assert [line.split()[0] for line in found] == ["role", "actor", "actor", "actor", "reward:"]
    assert found[0].split(None, 2)[2].split("  ")[0] == PHASES[0]
    assert "gradients, optimizer" in found[2] and found[2].split()[-4:] == [H, D, D, D]
    assert found[-1].split()[-4:] == ["host", "device", "host", "host"]


@pytest.mark.parametrize("graphs", [True, False])
def test_settings_of_rollouts_reach_the_engine(graphs: bool) -> None:
    """CUDA graphs could not be turned off, and every prefill on a GPU was of 16,384 tokens."""
    decoder = decoder_of(tiny_model(), world=solo_world(torch.device("cpu")), dtype=torch.float32)
    assert decoder is not None
    make = backend_maker(RolloutConfig(cuda_graphs=graphs, prefill_tokens=300))
    assert ResidencyRules.of_rollout(RolloutConfig(cuda_graphs=graphs), cuda=True).cuda_graphs == graphs
    assert not ResidencyRules.of_rollout(RolloutConfig(cuda_graphs=graphs), cuda=False).cuda_graphs
    backend = make(decoder)
    assert backend._cuda_graphs == graphs and backend._prefill_tokens == backend._open_prefill_tokens == 300
    assert not make(decoder, cuda_graphs=False)._cuda_graphs
    with user_error("prefill_tokens must be 1 or more, got 0"):
        RolloutConfig(prefill_tokens=0)
