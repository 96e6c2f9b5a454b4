"""Recorded experts of a rollout: kept with its rows, compared with the actor's, and replayed in scoring and updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rlhf.configs.sections import rollout as rollout_section
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.models.routers.modules import router_modules
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.types import ROUTER_AGREEMENT, Rollout, RolloutRoutes
from hybrid_rlhf.rl.updates.policy_loss import MiniBatch
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.model_types import tiny_of_type
from tests.support.rl import PROMPTS, SAMPLING, build_parts, rollout_of_rows, score
from tests.support.routes import module_routes

CPU = torch.device("cpu")


def parts_of(
    name: str, world: World, paths: dict[str, str], folder: Path, *, lora_rank: int = 0, **settings: Any
) -> RLParts:
    variant(name).save_pretrained(folder)
    sampling = replace(SAMPLING, **settings)
    return build_parts(world, {**paths, "actor": str(folder)}, lora_rank=lora_rank, sampling=sampling)


def perturb_routers(parts: RLParts) -> None:
    """Routers that choose others for a part of the tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in router_modules(parts.roles.actor.lm):
            router.weight += 0.3 * torch.randn(router.weight.shape, generator=generator)


def own_share(parts: RLParts, rollout: Rollout) -> float:
    """Recorded choices that the actor's routers make in a forward over each row alone."""
    same, known = 0, 0
    routes = rollout.padded_routes
    assert routes is not None
    for row, length in enumerate(rollout.lengths.tolist()):
        own = module_routes(parts.roles.actor.lm, rollout.input_ids[row, :length].tolist())
        for recorded, used in zip(
            routes[row, : length - 1].flatten(0, 1).tolist(), own[:-1].reshape(-1, own.shape[-1]).tolist(), strict=True
        ):
            same, known = same + len(set(recorded) & set(used)), known + len(recorded)
    return same / known


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phimoe"])
def test_the_agreement_is_the_share_of_choices_that_training_makes_too(
    name: str, world: World, paths: dict[str, str], tmp_path: Path
) -> None:
    parts = parts_of(name, world, paths, tmp_path)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    assert rollout.routes is not None and own_share(parts, rollout) == 1
    assert score(parts, rollout)[0].metrics[ROUTER_AGREEMENT] == 1
    perturb_routers(parts)
    scored, _ = score(parts, rollout)
    assert scored.metrics[ROUTER_AGREEMENT] == pytest.approx(own_share(parts, rollout))
    assert 0.3 < scored.metrics[ROUTER_AGREEMENT] < 0.99
    assert scored.routes is None, "later forwards have other weights"


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_scoring_and_updates_replay_the_recorded_experts(
    name: str, world: World, paths: dict[str, str], tmp_path: Path
) -> None:
    parts = parts_of(name, world, paths, tmp_path, routing_replay=True)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    perturb_routers(parts)
    plain, _ = score(parts, replace(rollout, routes=None), mini_batches=2)
    scored, plan = score(parts, rollout, mini_batches=2)
    assert ROUTER_AGREEMENT not in plain.metrics and scored.metrics[ROUTER_AGREEMENT] == 1
    assert scored.old_logprobs is not None and plain.old_logprobs is not None
    assert (scored.old_logprobs - plain.old_logprobs).abs().max() > 0.01, "the choice matters"
    batch = parts.estimate(scored, kl_coef=0.1)
    part = batch.rows(plan.micro_batches(world)[0])
    _, current = parts.updater.policy_loss(part, MiniBatch(1.0, 1.0))
    mask = part.rollout.response_mask
    torch.testing.assert_close(current[mask], part.rollout.old_logprobs[mask], rtol=1e-5, atol=1e-5)
    routers = [router.weight for router in router_modules(parts.roles.actor.lm)]
    before = [weight.detach().clone() for weight in routers]
    report = parts.updater.update(batch, [plan, plan], kl_coef=0.1)
    assert report.metrics[ROUTER_AGREEMENT] == 1 and report.metrics["rollout/updates"] == 4
    assert not any(map(torch.equal, routers, before)), "routers learn"


def test_an_actor_that_is_its_own_reference_routes_for_itself_as_such(
    world: World, paths: dict[str, str], tmp_path: Path
) -> None:
    parts = parts_of("qwen3_moe", world, paths, tmp_path, lora_rank=4, routing_replay=True)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    perturb_routers(parts)
    plain, scored = (score(parts, each)[0] for each in (replace(rollout, routes=None), rollout))
    assert scored.metrics[ROUTER_AGREEMENT] == 1
    assert scored.ref_logprobs.equal(plain.ref_logprobs)
    assert not scored.old_logprobs.equal(plain.old_logprobs)


def test_without_replay_a_few_completions_are_recorded(
    world: World, paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_section, "_COMPARED_COMPLETIONS", 3)
    parts = parts_of("qwen3_moe", world, paths, tmp_path)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    assert rollout.routes is not None
    assert (rollout.routes.lengths > 0).tolist() == [True] * 4 + [False] * 4, "of two prompts, two each"
    assert rollout.routes.lengths[:4].equal(rollout.lengths[:4])
    assert score(parts, rollout)[0].metrics[ROUTER_AGREEMENT] == 1


def test_routes_stay_with_their_rows() -> None:
    """Through selection, empty rows and joining; against a padded tensor. Some tokens, and a row, are not recorded."""
    whole = np.random.default_rng(0).integers(0, 9, (3, 4, 2, 3)).astype(np.int8)
    whole[0, 3:] = whole[1] = whole[2, 2:] = -1
    routes = RolloutRoutes.of([whole[0, :3], None, whole[2, :2]])
    rollout = replace(rollout_of_rows([[5] * size for size in (3, 1, 4)]), routes=routes)
    plain = rollout_of_rows([[6]])
    for chosen, width in (([0, 1, 2], 4), ([2, None, 0, 1, 2], 4), ([1, None, 0], 3), ([1], 1)):
        expected = np.stack([np.full_like(whole[0], -1) if row is None else whole[row] for row in chosen])[:, :width]
        part = rollout.rows(chosen)
        np.testing.assert_array_equal(part.padded_routes.numpy(), expected)
        empty = [row for row, index in enumerate(chosen) if index is None]
        assert not part.response_mask[empty].any() and (part.lengths[empty] == 1).all()
        joined = Rollout.joined([plain, part]).padded_routes.numpy()
        np.testing.assert_array_equal(joined[1:], expected)
        assert (joined[0] == -1).all()
    assert Rollout.from_tensors(plain.tensors()).routes is None


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llama", "needs a mixture of experts with inference weights, LlamaForCausalLM has none: leave it out"),
        (
            "hunyuan_v1_moe",
            "needs a mixture of experts with inference weights, HunYuanMoEV1ForCausalLM has none: leave",
        ),
        (
            "phimoe",
            "needs routers with a weight for every choice of experts, those of PhimoeForCausalLM are 0 for some",
        ),
    ],
)
def test_models_that_cannot_replay_are_refused(model_type: str, message: str, world: World, tmp_path: Path) -> None:
    tiny_of_type(model_type).save_pretrained(tmp_path)
    with user_error(f"rollout.routing_replay {message}"):
        build_actor(actor_spec(tmp_path), world, rollout=RolloutConfig(routing_replay=True))
