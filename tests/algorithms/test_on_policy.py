"""Each on-policy algorithm against its paper's formula in plain loops, torch autograd, and the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.algorithms.on_policy import ON_POLICY_ALGORITHMS, Judged, OnPolicyAlgorithm, Tokens
from hybrid_rlhf.configs.algorithms import ON_POLICY
from hybrid_rlhf.configs.cli import parse_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.on_policy import AlgorithmConfig
from hybrid_rlhf.configs.ppo import PPOConfig

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
SCORES = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 2.0, -1.0, 3.0])
CRITIC_FREE = [name for name, traits in ON_POLICY.items() if not traits.critic]
BY_OUTCOME = ["rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp_baseline"]


def algorithm(name: str, **changes: Any) -> OnPolicyAlgorithm:
    config = parse_config(PPOConfig, ["--algorithm", name]).ppo
    return ON_POLICY_ALGORITHMS[name](replace(config, **changes))


def judged(scores: Tensor = SCORES, groups: Tensor = GROUPS, seed: int = 0, kl: float = 0.1) -> Judged:
    """Completions of 1 to 6 tokens, some with a gap, with a penalty on each token and a score at the end."""
    chance = torch.Generator().manual_seed(seed)
    rows = len(scores)
    time = torch.arange(8)
    mask = (time >= 1) & (time < 1 + torch.randint(1, 7, (rows, 1), generator=chance))
    mask &= (torch.rand(mask.shape, generator=chance) > 0.2) | (time == 1)
    rewards = torch.where(mask, -kl * torch.rand(mask.shape, generator=chance), 0.0)
    for row in range(rows):
        rewards[row, int(mask[row].nonzero().max())] += scores[row]
    return Judged(rewards, mask, groups, torch.randn(mask.shape, generator=chance), SCORES[GROUPS * 3 % 8])


def slowly(name: str, view: Judged, config: AlgorithmConfig) -> Tensor:
    """The papers' advantages, a completion and a token at a time."""
    rewards, mask, groups = view.rewards.tolist(), view.mask.tolist(), view.groups.tolist()
    outcomes = [sum(r for r, m in zip(row, marks, strict=True) if m) for row, marks in zip(rewards, mask, strict=True)]
    found = torch.zeros_like(view.rewards)
    for i, (row, marks) in enumerate(zip(rewards, mask, strict=True)):
        group = [outcomes[j] for j in range(len(outcomes)) if groups[j] == groups[i]]
        others = [outcomes[j] for j in range(len(outcomes)) if groups[j] == groups[i] and j != i]
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
        for t in range(len(row)):
            if not marks[t]:
                continue
            later = [(s, row[s]) for s in range(t, len(row)) if marks[s]]
            to_come = sum(r * config.gamma**place for place, (_, r) in enumerate(later))
            named = {
                "reinforce": outcomes[i] - sum(outcomes) / len(outcomes),
                "rloo": outcomes[i] - sum(others) / len(others),
                "remax": to_come - float(view.greedy_scores[i]),  # type: ignore[index]
                "reinforce_pp": to_come,
                "reinforce_pp_baseline": to_come - mean * config.gamma ** (len(later) - 1),
                "dr_grpo": outcomes[i] - mean,
                "online_dpo": math.copysign(1.0, outcomes[i] - mean),
                "raft": 1.0,
            }
            found[i, t] = named.get(name, (outcomes[i] - mean) / (deviation + 1e-4))
    return found


@pytest.mark.parametrize("name", CRITIC_FREE)
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_are_the_papers(name: str, seed: int) -> None:
    view = judged(seed=seed)
    gamma = 0.9 if name.startswith("reinforce_pp") else 1.0
    learner = algorithm(name, gamma=gamma)
    found = learner.estimate(view)
    assert found.returns is None
    torch.testing.assert_close(found.advantages, slowly(name, view, learner.config), atol=1e-5, rtol=1e-4)
    assert (found.advantages[~view.mask] == 0).all()


@pytest.mark.parametrize(("lam", "value_lam"), [(0.8, 0.8), (1.0, 0.5), (0.0, 1.0)])
def test_ppo_is_gae_by_a_lambda_of_the_actor_and_one_of_the_critic(lam: float, value_lam: float) -> None:
    view = judged()
    learner = ON_POLICY_ALGORITHMS["ppo"](replace(algorithm("ppo").config, gamma=0.9, lam=lam), value_lam=value_lam)
    found = learner.estimate(view)
    assert view.values is not None and found.returns is not None
    for row in range(len(view.mask)):
        places = view.mask[row].nonzero().flatten().tolist()
        advantage, to_learn, next_value = 0.0, 0.0, 0.0
        for t in reversed(places):
            value = float(view.values[row, t])
            error = float(view.rewards[row, t]) + 0.9 * next_value - value
            advantage, to_learn = error + 0.9 * lam * advantage, error + 0.9 * value_lam * to_learn
            next_value = value
            assert float(found.advantages[row, t]) == pytest.approx(advantage, abs=1e-5)
            assert float(found.returns[row, t]) == pytest.approx(to_learn + value, abs=1e-5)


def test_by_default_both_lambdas_are_1() -> None:
    """Advantages are what was earned less the value, returns what was earned: the closed form at lambda 1."""
    config = parse_config(PPOConfig, [])
    view = judged()
    found = ON_POLICY_ALGORITHMS["ppo"](config.ppo, value_lam=config.critic.lam).estimate(view)
    assert view.values is not None and found.returns is not None
    to_go = torch.where(view.mask, view.rewards, 0.0).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(found.returns[view.mask], to_go[view.mask])
    torch.testing.assert_close(found.advantages[view.mask], (to_go - view.values)[view.mask])


def test_reinforce_takes_the_mean_of_all_before() -> None:
    learner = algorithm("reinforce")
    outcomes = []
    for seed, shift in enumerate((0.0, 3.0, -1.0)):
        view = judged(SCORES + shift, seed=seed)
        baseline = torch.cat(outcomes).mean() if outcomes else view.outcomes.mean()
        expected = view.spread(view.outcomes - baseline)
        again = type(learner)(learner.config)
        again.load_state_dict(learner.state_dict())
        torch.testing.assert_close(again.estimate(view).advantages, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(learner.estimate(view).advantages, expected, atol=1e-5, rtol=1e-5)
        outcomes.append(view.outcomes)


def tokens(seed: int = 0, *, rows: int = 6, length: int = 5, advantages: Tensor | None = None) -> Tokens:
    chance = torch.Generator().manual_seed(seed)
    old = -1 - torch.rand(rows, length, generator=chance)
    logprobs = (old + 0.5 * torch.randn(rows, length, generator=chance)).requires_grad_()
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=chance)
    reference = old + 0.3 * torch.randn(rows, length, generator=chance)
    if advantages is None:
        advantages = torch.randn(rows, 1, generator=chance).expand(rows, length)
    return Tokens(logprobs, old, advantages, mask, torch.ones(rows, 1), reference, float(mask.sum()) / rows)


def loss_of_row(name: str, batch: Tokens, i: int, config: AlgorithmConfig) -> Tensor:
    """The papers' loss of a completion, summed over its tokens."""
    places = batch.mask[i].nonzero().flatten().tolist()
    logp, old = ([x[i, t] for t in places] for x in (batch.logprobs, batch.old_logprobs))
    total = torch.zeros(())
    ratios = [(a - b).exp() for a, b in zip(logp, old, strict=True)]
    if name == "gspo":
        mean: Tensor = torch.stack([a - b for a, b in zip(logp, old, strict=True)]).mean()
        ratios = [mean.exp()] * len(places)
    for t, place in enumerate(places):
        advantage, ratio = batch.advantages[i, place], ratios[t]
        low, high = 1 - config.clip_low, 1 + config.clip_high
        if name == "cispo":
            total = total - ratio.detach().clamp(low, high) * advantage * logp[t]
        elif name == "raft":
            total = total - logp[t]
        else:
            total = total - torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
    return total


@pytest.mark.parametrize("name", [name for name in ON_POLICY if name != "online_dpo"])
def test_losses_are_the_papers_and_so_are_their_gradients(name: str) -> None:
    learner = algorithm(name)
    if name == "gspo":
        learner.config = replace(learner.config, clip_low=0.1, clip_high=0.2)
    if name == "cispo":
        learner.config = replace(learner.config, clip_low=0.3, clip_high=0.3)
    batch = tokens()
    loss = learner.loss(batch)
    assert float(loss.count) == int(batch.mask.sum())
    expected = sum((loss_of_row(name, batch, i, learner.config) for i in range(len(batch.mask))), torch.zeros(()))
    torch.testing.assert_close(loss.total, expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(loss.total, batch.logprobs)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected, batch.logprobs)[0], atol=1e-5, rtol=1e-5)
    assert float(found.abs().max()) > 0.01 and (found[~batch.mask] == 0).all()
    weighed = learner.loss(replace(batch, weights=torch.full_like(batch.weights, 3.0)))
    torch.testing.assert_close(weighed.total, 3 * loss.total)


def test_clips_bind_where_they_say() -> None:
    low = algorithm("dapo")
    ratio = torch.tensor([[0.5, 0.9, 1.25, 1.5]])
    ones = torch.ones_like(ratio)
    batch = Tokens(ratio.log(), 0 * ones, ones, ones.bool(), ones[:, :1], None, 4.0)
    assert float(low.loss(batch).stats["clipfrac"]) == 1, "1.25 is below 1 + clip_high 0.28"
    assert float(algorithm("grpo").loss(batch).stats["clipfrac"]) == 2
    cispo = algorithm("cispo")
    assert float(cispo.loss(batch).stats["clipfrac"]) == 0
    far = replace(batch, logprobs=torch.tensor([[7.0, 5.0, 4.9, 0.0]]).log())
    assert float(cispo.loss(far).stats["clipfrac"]) == 1, "above 5 only"


def test_gspo_of_one_token_is_ppo() -> None:
    learner, ppo = algorithm("gspo", clip_low=0.2, clip_high=0.2), algorithm("ppo")
    batch = tokens(length=1)
    losses = [method.loss(batch) for method in (learner, ppo)]
    assert torch.equal(losses[0].total, losses[1].total)
    gradients = [torch.autograd.grad(loss.total, batch.logprobs)[0] for loss in losses]
    assert torch.equal(*gradients) and float(losses[0].stats["clipfrac"]) > 0


def test_gspo_gives_a_masked_token_no_gradient_and_the_others_their_own() -> None:
    learner = algorithm("gspo", clip_low=0.2, clip_high=0.2)
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -0.7]], requires_grad=True)
    ones = torch.ones(2, 2)
    batch = Tokens(logprobs, logprobs.detach().clone(), ones, ones.bool(), ones, None, 2.0)
    whole = torch.autograd.grad(learner.loss(batch).total, logprobs)[0]
    assert whole.tolist() == [[-1, -1], [-1, -1]]
    masked = replace(batch, weights=torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    found = torch.autograd.grad(learner.loss(masked).total, logprobs)[0]
    assert found.tolist() == [[-1, 0], [-1, -1]], "weights 1 and 0 gave -0.5 to both tokens before"


def test_grpo_without_deviation_is_rloo_but_for_a_factor() -> None:
    view = judged()
    plain = algorithm("grpo", group_deviation=False).estimate(view).advantages
    rloo = algorithm("rloo").estimate(view).advantages
    sizes = torch.tensor([3, 3, 3, 3, 3, 3, 2, 2])[:, None]
    torch.testing.assert_close(plain, rloo * (sizes - 1) / sizes, atol=1e-6, rtol=1e-5)
    assert torch.equal(algorithm("dr_grpo").estimate(view).advantages, plain)


@pytest.mark.parametrize("name", BY_OUTCOME)
def test_a_group_of_equal_rewards_teaches_nothing(name: str) -> None:
    view = judged(kl=0.0)
    learner = algorithm(name, clip_high=9.0)
    advantages = learner.estimate(view).advantages
    equal = GROUPS == 1
    assert (advantages[equal] == 0).all() and (advantages[~equal] != 0).any()
    batch = tokens(rows=8, length=8)
    loss = learner.loss(replace(batch, advantages=advantages, mask=view.mask))
    gradient = torch.autograd.grad(loss.total, batch.logprobs)[0]
    assert (gradient[equal] == 0).all() and (gradient[~equal] != 0).any()


def pairs(seed: int = 0) -> tuple[Tokens, list[tuple[int, int]]]:
    """Three pairs of neighbours, and an empty one that fills a micro-batch up."""
    winners = torch.tensor([1.0, -1, -1, 1, 1, -1, 0, 0])
    batch = tokens(seed, rows=8, advantages=winners[:, None].expand(8, 5))
    batch.mask[6:] = False
    return replace(batch, tokens_per_completion=1.0), [(0, 1), (3, 2), (4, 5)]


def test_online_dpo_with_a_perfect_judge_is_dpo() -> None:
    batch, couples = pairs()
    learner = algorithm("online_dpo", beta=0.3)
    assert batch.ref_logprobs is not None
    change = torch.where(batch.mask, batch.logprobs - batch.ref_logprobs, 0.0).sum(dim=1)
    leads = torch.stack([change[better] - change[worse] for better, worse in couples])
    expected = -torch.nn.functional.logsigmoid(0.3 * leads).sum()
    loss = learner.loss(batch)
    torch.testing.assert_close(loss.total / 2, expected)  # over completions, of which a pair has two
    found, wanted = (torch.autograd.grad(x, batch.logprobs)[0] for x in (loss.total / 2, expected))
    torch.testing.assert_close(found, wanted)
    same = replace(batch, logprobs=batch.ref_logprobs.clone())
    assert float(learner.loss(same).total) == pytest.approx(2 * 3 * math.log(2), rel=1e-6)


def test_online_dpo_takes_whole_pairs_whose_scores_differ() -> None:
    learner = algorithm("online_dpo")
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    scores = torch.tensor([1.0, 2, 5, 5, 9, 1, 1])
    penalties = torch.tensor([0.0, 0, 0, 0, 0, 0, 0.5])
    chosen = learner.select(scores, penalties=penalties, groups=groups)
    assert chosen.tolist() == [True, True, False, False, False, True, True]


def test_dynamic_sampling_takes_groups_that_differ_in_their_scores() -> None:
    nothing = torch.zeros_like(SCORES)
    chosen = algorithm("dapo").select(SCORES, penalties=nothing, groups=GROUPS)
    assert torch.equal(chosen, GROUPS != 1)
    assert algorithm("dapo", dynamic_sampling=False).select(SCORES, penalties=nothing, groups=GROUPS).all()
    lengths_differ = torch.arange(8).float()
    chosen = algorithm("dapo").select(SCORES, penalties=lengths_differ, groups=GROUPS)
    assert torch.equal(chosen, GROUPS != 1), "lengths alone accept no group"


@pytest.mark.parametrize("best", [1, 2])
def test_rejection_sampling_takes_the_best(best: int) -> None:
    learner = algorithm("raft", selected_per_prompt=best)
    penalties = torch.tensor([0.9, 0, 0, 0, 0.1, 0, 0, 0])
    chosen = learner.select(SCORES, penalties=penalties, groups=GROUPS).nonzero().flatten().tolist()
    assert chosen == ([2, 7] if best == 1 else [0, 2, 6, 7]), "nothing of the second prompt, whose scores are equal"
    for least, left in ((0.4, [2, 7]), (0.5, [7]), (3.0, [])):
        learner = algorithm("raft", selected_per_prompt=best, select_above=least)
        assert learner.select(SCORES, penalties=penalties, groups=GROUPS).nonzero().flatten().tolist() == left
    all_wrong = torch.zeros_like(SCORES)
    assert not learner.select(all_wrong, penalties=all_wrong, groups=GROUPS).any()
    lengths_differ = torch.arange(8).float()
    learner = algorithm("raft", selected_per_prompt=best)
    assert not learner.select(all_wrong, penalties=lengths_differ, groups=GROUPS).any(), "the shortest is wrong too"


def test_every_algorithm_has_traits_and_defaults_that_parse() -> None:
    assert set(ON_POLICY) == set(ON_POLICY_ALGORITHMS)
    for name, traits in ON_POLICY.items():
        config = parse_config(PPOConfig, ["--algorithm", name, "--reward.path", "somewhere"])
        assert config.algorithm == name and config.traits is traits
        assert config.ppo.score_clip is None, "scores are clipped only where asked"
        assert config.uses_reference == (config.ppo.kl_coef > 0 or name == "online_dpo")
    told = parse_config(PPOConfig, ["--ppo.kl_coef", "0.5", "--algorithm=grpo", "--rollout.samples_per_prompt", "3"])
    assert (told.ppo.kl_coef, told.ppo.kl_estimator, told.rollout.samples_per_prompt) == (0.5, "k3", 3)


MISTAKES = {
    "--algorithm grpo --rollout.samples_per_prompt 1": "algorithm grpo compares completions of one prompt, got "
    "rollout.samples_per_prompt 1: give 2 or more",
    "--algorithm online_dpo --rollout.samples_per_prompt 4": "algorithm online_dpo takes pairs, got "
    "rollout.samples_per_prompt 4: give 2",
    **{
        f"--algorithm online_dpo --ppo.{key} {value}": "algorithm online_dpo learns from pairs, by DPO's loss, got "
        f"ppo.{key} {value.title() if value == 'true' else value}: leave it out"
        for key, value in (
            ("mask_truncated", "true"),
            ("whiten_advantages", "true"),
            ("loss_normalisation", "sequence"),
            ("sampler_correction", "truncate"),
        )
    },
    "--algorithm grpo --ppo.whiten_rewards true": "algorithm grpo compares whole completions, got ppo.whiten_rewards "
    "True: leave it out",
    "--algorithm grpo --ppo.select_above 0.5": "algorithm grpo selects no completions, got ppo.select_above 0.5: leave "
    "it out",
    "--algorithm raft --ppo.kl_coef 0.1": "algorithm raft selects by scores, got ppo.kl_coef 0.1 in the reward: give "
    "ppo.kl_in loss",
    "--algorithm rloo --ppo.critic_warmup_steps 3": "algorithm rloo has no critic, got ppo.critic_warmup_steps 3: "
    "leave it out",
    "--ppo.dynamic_sampling true": "ppo.dynamic_sampling compares completions of one prompt, got "
    "rollout.samples_per_prompt 1: give 2 or more",
    "--algorithm raft --ppo.selected_per_prompt 8": "ppo.selected_per_prompt must be below "
    "rollout.samples_per_prompt 8, got 8: lower it",
    "--algorithm dapo --ppo.reference_refresh_every 4": "ppo.reference_refresh_every 4 needs a reference, got "
    "ppo.kl_coef 0: leave it out",
    "--ppo.kl_target 3 --ppo.kl_coef 0": "ppo.kl_target 3.0 steers the coefficient by factors, got kl_coef 0: give a "
    "start, for example 0.05",
    "--ppo.sampler_correction_low 0.5": "ppo.sampler_correction masks no token, got ppo.sampler_correction_low 0.5: "
    "leave it out",
    "--ppo.sampler_correction truncate --ppo.masked_tokens_count false": "ppo.sampler_correction masks no token, got "
    "ppo.masked_tokens_count False: leave it out",
    "--ppo.sampler_correction mask --ppo.sampler_correction_low 2": "ppo.sampler_correction_low must be above 0 and at "
    "most 1, got 2.0: give for example 0.5",
    "--ppo.overlong_fraction 2": "ppo.overlong_fraction must be in [0, 1], got 2.0: give for example 0.2",
    "--algorithm gpro": "algorithm must be one of ppo, reinforce, rloo, remax, reinforce_pp, reinforce_pp_baseline, "
    "grpo, dr_grpo, dapo, gspo, cispo, online_dpo, raft, got gpro: see --help",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_cannot_be_is_refused(line: str) -> None:
    with pytest.raises(UserError) as error:
        parse_config(PPOConfig, line.split())
    assert str(error.value) == MISTAKES[line]
