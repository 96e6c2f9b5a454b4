"""Entropy control: which tokens it selects, what it does to their losses, and a coefficient that follows a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.sections.algorithm import EntropyConfig
from hybrid_rlhf.functional.advantages import covariance_terms
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm
from hybrid_rlhf.rl.rollouts.entropy import EntropyController, select_tokens
from hybrid_rlhf.rl.types import Batch
from hybrid_rlhf.rl.updates.policy_loss import MiniBatch, PolicyLoss
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_ranks
from tests.support.rl import ALGORITHM, collect, rollout_of

CPU = solo_world(torch.device("cpu"))
PROMPTS, SAMPLES, WIDTH = 6, 2, 12
METHODS = [
    EntropyConfig(share=0.1, bounds=(0.2, 1.5)),
    EntropyConfig(share=1.0, bounds=(0.2, 1.5)),
    EntropyConfig(share=1e-9, bounds=(0.2, 1.5)),
    EntropyConfig(method="kl_cov", share=0.1),
    EntropyConfig(method="kl_cov", share=1e-9),
]


def batch_of(prompts: list[int]) -> Batch:
    """Random completions of some prompts, with gaps, as wide as the longest; NaN outside the mask."""
    lengths = torch.tensor([6 + prompt for prompt in prompts], dtype=torch.long).repeat_interleave(SAMPLES)[:, None]
    values = [np.random.default_rng(prompt).normal(size=(3, SAMPLES, WIDTH)) for prompt in prompts]
    whole = torch.from_numpy(np.concatenate([np.empty((3, 0, WIDTH)), *values], axis=1)).float()
    chance, old, advantages = whole[..., : int(max(lengths, default=1))]
    attention = torch.arange(chance.shape[1]) < lengths
    mask = attention & (chance > -0.5)
    old, advantages = (torch.where(mask, x, torch.nan) for x in (old, advantages))
    groups = torch.tensor(prompts, dtype=torch.long).repeat_interleave(SAMPLES)
    return Batch(rollout_of(attention, mask, groups=groups, old_logprobs=old), torch.zeros_like(old), advantages)


def selected(config: EntropyConfig, batch: Batch, world: World = CPU, *, step: int = 3) -> Batch:
    return select_tokens(batch, config, seed=5, step=step, world=world)


@pytest.mark.parametrize("config", METHODS, ids=str)
def test_the_selected_tokens_are_those_of_the_formulas(config: EntropyConfig) -> None:
    """Catches means over padding, a share of another count than all tokens, and an order that is not the paper's."""
    batch = batch_of(list(range(PROMPTS)))
    mask, old = batch.rollout.response_mask, batch.rollout.old_logprobs
    assert old is not None and config.share is not None
    tokens = mask.nonzero().tolist()
    terms = (old - old[mask].mean()) * (batch.advantages - batch.advantages[mask].mean())
    found = covariance_terms(old, advantages=batch.advantages, mask=mask)
    assert found[~mask].eq(0).all()
    torch.testing.assert_close(found[mask], terms[mask].to(found), atol=1e-6, rtol=1e-5)
    count = max(1, int(config.share * len(tokens)))
    if config.method == "kl_cov":
        expected = sorted(tokens, key=lambda token: -float(terms[tuple(token)]))[:count]
    else:
        low, high = config.bounds
        within = [[row, place] for row, place in tokens if low <= terms[row, place] <= high]
        draws = [np.random.default_rng([5, 3, row, 1]).random(WIDTH) for row in range(len(mask))]
        expected = sorted(within, key=lambda token: -draws[token[0]][token[1]])[:count]
        assert len(within) > 10 and (config.share < 1 or len(expected) == len(within))
    result = selected(config, batch)
    assert result.selected is not None and result.selected.nonzero().tolist() == sorted(expected)
    assert result.metrics["policy/selected_tokens"] == pytest.approx(len(expected) / len(tokens))


def test_equal_terms_are_within_their_bounds_and_the_first_tokens_are_the_highest() -> None:
    """Catches bounds that exclude their values, and an order of equal terms by place alone."""
    batch = batch_of(list(range(PROMPTS)))
    equal = replace(batch, advantages=torch.zeros_like(batch.advantages))
    tokens = batch.rollout.response_mask.nonzero().tolist()
    for config in (EntropyConfig(share=1.0, bounds=(0.0, 0.0)), EntropyConfig(method="kl_cov", share=0.3)):
        marks = selected(config, equal).selected
        assert marks is not None and marks.nonzero().tolist() == tokens[: int((config.share or 0) * len(tokens))]
    assert selected(METHODS[3], batch.rows([])).metrics["policy/selected_tokens"] == 0


def places(world: World) -> list[list[list[int]]]:
    """By method, the selected places of each row over all ranks; of three ranks the second holds nothing."""
    holders = [0, 2, 2, 0, 2, 0] if world.size == 3 else [number % world.size for number in range(PROMPTS)]
    batch = batch_of([prompt for prompt in range(PROMPTS) if holders[prompt] == world.rank])
    index = batch.rollout.numbered(world)
    found = []
    for config in METHODS:
        marks = selected(config, batch, world).selected
        assert marks is not None
        found.append(index.bring([row.nonzero().flatten().tolist() for row in marks], everywhere=True))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_select_the_tokens_of_one_rank(ranks: int, tmp_path: Path) -> None:
    """Catches means, shares or random numbers of a rank's own rows."""
    for found in run_ranks(places, ranks, tmp_path):
        assert found == places(CPU)


def watched(kind: type[Algorithm]) -> type[Algorithm]:
    """An algorithm whose loss has no other input with a gradient than the log-probs that it keeps."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def loss(self, logprobs: Tensor, batch: Batch, **more: Any) -> Any:
            self.seen = logprobs.detach().requires_grad_()
            return super().loss(self.seen, batch, **more)

    return Watched


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "cispo", "sapo", "vespo"])
def test_clip_cov_leaves_selected_tokens_no_policy_gradient(name: str, world: World, build: Any) -> None:
    """Catches a gradient at a selected token, one that is lost elsewhere, and a changed denominator."""
    parts = build()
    batch, plan = collect(parts)
    mini_batch = MiniBatch(plan.tokens[0], plan.sequences[0])
    marks = batch.rollout.response_mask & (torch.arange(batch.advantages.shape[1]) % 3 == 0)
    batch = replace(batch, advantages=1.0 * batch.rollout.response_mask, selected=marks)
    batch = batch.rows(plan.mini_batches(world)[0][0])
    mask, chosen = batch.rollout.response_mask, batch.selected
    config = RL_ALGORITHMS[name](kl=None, mini_batches=2, entropy=EntropyConfig())  # type: ignore[call-arg]
    learner: Any = watched(ALGORITHMS[name])(config)
    policy_loss = PolicyLoss(parts.roles.actor, learner, temperature=0.8, max_tokens=10)
    clipped, plain = (
        torch.autograd.grad(policy_loss(each, mini_batch)[0].total, learner.seen)[0]
        for each in (batch, replace(batch, selected=None))
    )
    assert chosen is not None and chosen.any() and (clipped[chosen] == 0).all()
    assert (plain[mask] != 0).all() and torch.equal(clipped[mask & ~chosen], plain[mask & ~chosen])


def test_kl_cov_penalizes_the_change_of_selected_tokens(world: World, build: Any) -> None:
    """Catches a penalty at other tokens, of the signed change, or with other weights than the loss."""
    parts = build(algorithm=replace(ALGORITHM, kl=None, entropy=EntropyConfig(method="kl_cov", coef=0.5)))
    batch, plan = collect(parts)
    assert batch.selected is not None and int(batch.selected.sum()) == 1, "one token at least"
    rows, mini_batch = plan.mini_batches(world)[0][0], MiniBatch(plan.tokens[0], plan.sequences[0])
    places = torch.arange(batch.advantages.shape[1])
    moved = batch.rollout.old_logprobs + 0.3 * (places % 4 - 1)
    marks = batch.rollout.response_mask & (places % 2 == 0)
    batch = replace(batch, rollout=replace(batch.rollout, old_logprobs=moved), selected=marks).rows(rows)
    loss, current = parts.updater.policy_loss(batch, mini_batch)
    without, _ = parts.updater.policy_loss(replace(batch, selected=None), mini_batch)
    expected = 0.5 * float((current - batch.rollout.old_logprobs)[batch.selected].abs().sum())
    assert expected > 0.5
    assert float((loss.total - without.total).detach()) == pytest.approx(expected, rel=1e-4)


def test_the_coefficient_follows_skywork() -> None:
    """Catches a bonus above the target, a coefficient below 0, and a state that a checkpoint loses."""
    config = EntropyConfig(method="adaptive", target=0.5, step=0.25)
    controller = EntropyController(config, coef=0.25)
    applied = []
    for entropy in (0.4, 0.3, 0.5, 0.6, 0.7, 0.2, 0.1):
        controller._entropy = entropy
        applied.append(controller.coef)
        controller.update()
        state = controller.state_dict()
        controller = EntropyController(config, coef=0.25)
        controller.load_state_dict(state)
    assert applied == [0.25, 0.5, 0.75, 0.0, 0.0, 0.0, 0.25]


def test_the_measured_entropy_is_a_mean_over_response_tokens() -> None:
    """Catches a mean of means of completions, and one over padding."""
    rollout = batch_of(list(range(PROMPTS))).rollout
    rollout = replace(rollout, entropy=rollout.old_logprobs)
    assert rollout.entropy is not None
    first = rollout.response_mask.cumsum(dim=1).eq(1) & rollout.response_mask
    first[1:] = False
    controller = EntropyController(EntropyConfig(method="adaptive"), coef=0.0)
    for some, mask in ((rollout, rollout.response_mask), (replace(rollout, response_mask=first), first)):
        controller.measure(some, CPU)
        assert controller._entropy == pytest.approx(float(rollout.entropy[mask].double().mean()), abs=1e-9)
    controller.measure(rollout.rows([]), CPU)
    assert controller._entropy == 0, "no completion is kept"


def test_one_update_reads_the_rollout_first(build: Any) -> None:
    """Catches a selection by the sampler's log-probs, and a target without an entropy to compare."""
    for entropy in (EntropyConfig(), EntropyConfig(method="adaptive")):
        config = replace(ALGORITHM, epochs=1, entropy=entropy)
        batch, _ = collect(build(algorithm=config))
        assert config.updates_once and batch.rollout.entropy is not None
        assert (batch.selected is None) == (entropy.method == "adaptive")
