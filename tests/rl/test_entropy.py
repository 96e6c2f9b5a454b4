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
    values = np.array([np.random.default_rng(prompt).normal(size=(3, SAMPLES, WIDTH)) for prompt in prompts])
    values = values.reshape(-1, 3, SAMPLES, WIDTH).swapaxes(0, 1).reshape(3, -1, WIDTH)
    chance, old, advantages = torch.from_numpy(values).float()[..., : int(max(lengths, default=1))]
    attention = torch.arange(chance.shape[1]) < lengths
    mask = attention & (chance > -0.5)
    old, advantages = (torch.where(mask, x, torch.nan) for x in (old, advantages))
    groups = torch.tensor(prompts, dtype=torch.long).repeat_interleave(SAMPLES)
    return Batch(rollout_of(attention, mask, groups=groups, old_logprobs=old), torch.zeros_like(old), advantages)


def selected(config: EntropyConfig, batch: Batch, world: World = CPU, *, step: int = 3) -> Batch:
    return select_tokens(batch, config, seed=5, step=step, world=world)


def covariances(batch: Batch) -> dict[tuple[int, int], float]:
    """The covariance term of each response token, by row and place."""
    tokens = [tuple(token) for token in batch.rollout.response_mask.nonzero().tolist()]
    old, advantages = batch.rollout.old_logprobs, batch.advantages
    assert old is not None
    mean_logprob = sum(float(old[token]) for token in tokens) / len(tokens)
    mean_advantage = sum(float(advantages[token]) for token in tokens) / len(tokens)
    return {token: (float(old[token]) - mean_logprob) * (float(advantages[token]) - mean_advantage) for token in tokens}


@pytest.mark.parametrize("config", METHODS, ids=str)
def test_the_selected_tokens_are_those_of_the_formulas(config: EntropyConfig) -> None:
    """Catches means over padding, a share of another count than all tokens, and an order that is not the paper's."""
    batch = batch_of(list(range(PROMPTS)))
    terms = covariances(batch)
    mask, old = batch.rollout.response_mask, batch.rollout.old_logprobs
    assert old is not None and config.share is not None
    found = covariance_terms(old, advantages=batch.advantages, mask=mask)
    assert found[~mask].eq(0).all()
    assert {token: float(found[token]) for token in terms} == pytest.approx(terms, abs=1e-6)
    count = max(1, int(config.share * len(terms)))
    low, high = config.bounds
    within = [token for token in terms if low <= terms[token] <= high]
    draws = {row: np.random.default_rng([5, 3, row, 1]).random(WIDTH) for row in range(len(mask))}
    if config.method == "kl_cov":
        expected = sorted(terms, key=lambda token: -terms[token])[:count]
    else:
        expected = sorted(within, key=lambda token: -draws[token[0]][token[1]])[:count]
        assert len(within) > 10 and (config.share < 1 or len(expected) == len(within))
    result = selected(config, batch)
    assert result.selected is not None
    assert sorted(map(tuple, result.selected.nonzero().tolist())) == sorted(expected)
    assert result.metrics["policy/selected_tokens"] == pytest.approx(len(expected) / len(terms))


def test_the_random_tokens_change_with_the_step_and_the_highest_do_not() -> None:
    """Catches a choice that is the same in every step."""
    batch = batch_of(list(range(PROMPTS)))
    for config, same in ((METHODS[0], False), (METHODS[3], True)):
        first, second = (selected(config, batch, step=step).selected for step in (1, 2))
        assert first is not None and second is not None and torch.equal(first, second) == same


def test_equal_terms_are_within_their_bounds_and_the_first_tokens_are_the_highest() -> None:
    """Catches bounds that exclude their values, and an order of equal terms by place alone."""
    batch = batch_of(list(range(PROMPTS)))
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    tokens = batch.rollout.response_mask.nonzero().tolist()
    for method, share in (("clip_cov", 1.0), ("kl_cov", 0.3)):
        bounds = {"bounds": (0.0, 0.0)} if method == "clip_cov" else {}
        marks = selected(EntropyConfig(method=method, share=share, **bounds), batch).selected  # type: ignore[arg-type]
        assert marks is not None and marks.nonzero().tolist() == tokens[: int(share * len(tokens))]
    first = torch.zeros_like(batch.rollout.response_mask)
    first[tuple(tokens[0])] = True
    alone = replace(batch, rollout=replace(batch.rollout, response_mask=first))
    for some, share in ((batch.rows([]), 0.0), (alone, 1.0)):
        assert selected(METHODS[3], some).metrics["policy/selected_tokens"] == share


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
    rows, mini_batch = plan.mini_batches(world)[0][0], MiniBatch(plan.tokens[0], plan.sequences[0])
    mask = batch.rollout.response_mask
    marks = mask & (torch.arange(mask.shape[1]) % 3 == 0)
    batch = replace(batch, advantages=torch.where(mask, 1.0, 0.0), selected=marks).rows(rows)
    marks, mask = marks[rows][:, : batch.selected.shape[1]], batch.rollout.response_mask  # type: ignore[union-attr]
    found = []
    for each in (batch, replace(batch, selected=None)):
        config = RL_ALGORITHMS[name](kl=None, mini_batches=2, entropy=EntropyConfig())  # type: ignore[call-arg]
        learner: Any = watched(ALGORITHMS[name])(config)
        loss, _ = PolicyLoss(parts.roles.actor, learner, temperature=0.8, max_tokens=10)(each, mini_batch)
        found.append(torch.autograd.grad(loss.total, learner.seen)[0])
    clipped, plain = found
    assert marks.any() and (clipped[marks] == 0).all()
    assert (plain[mask] != 0).all() and torch.equal(clipped[mask & ~marks], plain[mask & ~marks])


def test_kl_cov_penalizes_the_change_of_selected_tokens(world: World, build: Any) -> None:
    """Catches a penalty at other tokens, of the signed change, or with other weights than the loss."""
    config = replace(ALGORITHM, kl=None, entropy=EntropyConfig(method="kl_cov", coef=0.5))
    parts = build(algorithm=config)
    batch, plan = collect(parts)
    assert batch.selected is not None and int(batch.selected.sum()) == 1, "one token at least"
    rows, mini_batch = plan.mini_batches(world)[0][0], MiniBatch(plan.tokens[0], plan.sequences[0])
    mask = batch.rollout.response_mask
    marks = mask & (torch.arange(mask.shape[1]) % 2 == 0)
    moved = batch.rollout.old_logprobs + 0.3 * (torch.arange(mask.shape[1]) % 4 - 1)
    batch = replace(batch, rollout=replace(batch.rollout, old_logprobs=moved), selected=marks).rows(rows)
    loss, current = parts.updater.policy_loss(batch, mini_batch)
    without, _ = parts.updater.policy_loss(replace(batch, selected=None), mini_batch)
    expected = 0.0
    for row, place in batch.selected.nonzero().tolist():  # type: ignore[union-attr]
        expected += 0.5 * abs(float(current[row, place]) - float(batch.rollout.old_logprobs[row, place]))  # type: ignore[index]
    assert expected > 0.5
    assert float((loss.total - without.total).detach()) == pytest.approx(expected, rel=1e-4)


def test_the_coefficient_follows_skywork() -> None:
    """Catches a bonus above the target, a coefficient below 0, and a state that a checkpoint loses."""
    config = EntropyConfig(method="adaptive", target=0.5, step=0.25)
    controller = EntropyController(config, coef=0.25)
    applied, expected, coef = [], [], 0.25
    entropies = [0.4, 0.3, 0.5, 0.6, 0.7, 0.2, 0.1]
    for entropy in entropies:
        expected.append(coef if entropy <= 0.5 else 0.0)
        coef = coef + 0.25 if entropy < 0.5 else max(coef - 0.25, 0.0)
        applied.append(controller.coef(entropy))
        controller.update(entropy)
        resumed = EntropyController(config, coef=0.25)
        resumed.load_state_dict(controller.state_dict())
        controller = resumed
    assert applied == expected == [0.25, 0.5, 0.75, 0.0, 0.0, 0.0, 0.25]


def test_the_measured_entropy_is_a_mean_over_response_tokens() -> None:
    """Catches a mean of means of completions, and one over padding."""
    rollout = batch_of(list(range(PROMPTS))).rollout
    rollout = replace(rollout, entropy=rollout.old_logprobs)
    controller = EntropyController(EntropyConfig(method="adaptive"), coef=0.0)
    assert rollout.entropy is not None
    expected = float(rollout.entropy[rollout.response_mask].double().mean())
    assert controller.measured(rollout, CPU) == pytest.approx(expected, abs=1e-9)
    assert controller.measured(rollout.rows([]), CPU) == 0, "no completion is kept"
    first = rollout.response_mask.cumsum(dim=1).eq(1) & rollout.response_mask
    first[1:] = False
    one = replace(rollout, response_mask=first)
    assert controller.measured(one, CPU) == pytest.approx(float(rollout.entropy[first]), abs=1e-9)


def test_one_update_reads_the_rollout_first(build: Any) -> None:
    """Catches a selection by the sampler's log-probs, and a target without an entropy to compare."""
    for entropy in (EntropyConfig(), EntropyConfig(method="adaptive")):
        config = replace(ALGORITHM, epochs=1, entropy=entropy)
        batch, _ = collect(build(algorithm=config))
        assert config.updates_once and batch.rollout.entropy is not None
        assert (batch.selected is None) == (entropy.method == "adaptive")
