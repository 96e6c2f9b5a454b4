"""Each on-policy algorithm against its paper's formula in plain loops, torch autograd, and the others."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import AlgorithmConfig
from hybrid_rlhf.functional.advantages import differs_in_group, group_mean, group_std, leave_one_out, shaped_rewards
from hybrid_rlhf.functional.losses import MAX_LOG_RATIO, LossSum
from hybrid_rlhf.functional.masking import masked_whiten, row_sums
from hybrid_rlhf.rl.algorithms import ALGORITHMS, Algorithm
from hybrid_rlhf.rl.algorithms.algorithm import per_token
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling, _advantages, estimate_advantages
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_ranks
from tests.support.rl import rollout_of

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
SCORES = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 2.0, -1.0, 3.0])
CRITIC_FREE = [name for name, kind in RL_ALGORITHMS.items() if not kind.needs_critic]
BY_OUTCOME = ["rloo", "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "vespo", "pass_at_k"]
BY_OUTCOME += ["reinforce_pp_baseline"]


def algorithm(name: str, **changes: Any) -> Algorithm:
    config = parse_config(RLConfig, ["--algorithm", name]).algorithm
    if name == "pass_at_k":
        changes = {"k": 2, **changes}  # groups have two or three completions
    return ALGORITHMS[name](replace(config, **changes))


def scored(scores: Tensor = SCORES, *, seed: int = 0, kl: float = 0.1) -> tuple[Tensor, Rollout]:
    """Rewards of completions of 1 to 6 tokens, some with a gap: a penalty on each token, and a score at the end."""
    chance = torch.Generator().manual_seed(seed)
    rows = len(scores)
    time = torch.arange(9)
    mask = (time >= 1) & (time < 1 + torch.randint(1, 7, (rows, 1), generator=chance))
    mask &= (torch.rand(mask.shape, generator=chance) > 0.2) | (time == 1)
    rewards = torch.where(mask, -kl * torch.rand(mask.shape, generator=chance), 0.0)
    for row in range(rows):
        rewards[row, int(mask[row].nonzero().max())] += scores[row]
    values = torch.randn(mask.shape, generator=chance)
    return rewards, rollout_of(mask, mask, groups=GROUPS, old_values=values, greedy_scores=SCORES[GROUPS * 3 % 8])


def best_of_two(group: list[float], i: int) -> float:
    """The advantage of a completion of pass@2."""
    pairs = [*itertools.combinations(range(len(group)), 2)]
    best = [max(group[a], group[b]) for a, b in pairs]
    mean = sum(best) / len(best)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in best) / len(best))
    mine = [x for x, pair in zip(best, pairs, strict=True) if i in pair]
    return (sum(mine) / len(mine) - mean) / (deviation + 1e-4)


def slowly(name: str, rewards: Tensor, rollout: Rollout, config: AlgorithmConfig) -> Tensor:
    """The papers' advantages, a completion and a token at a time."""
    rows, mask, groups = rewards.tolist(), rollout.response_mask.tolist(), rollout.groups.tolist()  # type: ignore[union-attr]
    outcomes = [sum(r for r, m in zip(row, marks, strict=True) if m) for row, marks in zip(rows, mask, strict=True)]
    found = torch.zeros_like(rewards)
    for i, (row, marks) in enumerate(zip(rows, mask, strict=True)):
        group = [outcomes[j] for j in range(len(outcomes)) if groups[j] == groups[i]]
        others = [outcomes[j] for j in range(len(outcomes)) if groups[j] == groups[i] and j != i]
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
        for t in range(len(row)):
            if not marks[t]:
                continue
            later = [(s, row[s]) for s in range(t, len(row)) if marks[s]]
            gamma = getattr(config, "gamma", 1.0)
            to_come = sum(r * gamma**place for place, (_, r) in enumerate(later))
            named = {
                "reinforce": outcomes[i] - sum(outcomes) / len(outcomes),
                "rloo": outcomes[i] - sum(others) / len(others),
                "remax": to_come - float(rollout.greedy_scores[i]),  # type: ignore[index]
                "reinforce_pp": to_come,
                "reinforce_pp_baseline": to_come - mean * gamma ** (len(later) - 1),
                "dr_grpo": outcomes[i] - mean,
                "online_dpo": math.copysign(1.0, outcomes[i] - mean),
                "raft": 1.0,
                "pass_at_k": best_of_two(group, groups[:i].count(groups[i])),
            }
            found[i, t] = named.get(name, (outcomes[i] - mean) / (deviation + 1e-4))
    return found


@pytest.mark.parametrize("name", CRITIC_FREE)
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_are_the_papers(name: str, seed: int) -> None:
    rewards, rollout = scored(seed=seed)
    learner = algorithm(name, **({"gamma": 0.9} if name.startswith("reinforce_pp") else {}))
    advantages = learner.advantages(rewards, rollout)
    assert learner.returns(rewards, rollout) is None
    torch.testing.assert_close(advantages, slowly(name, rewards, rollout, learner.config), atol=1e-5, rtol=1e-4)
    assert (advantages[~rollout.response_mask] == 0).all()


def test_gdpo_standardizes_each_component_of_the_reward() -> None:
    """With another scale, a component counts the same; groups of equal sums learn where the components differ; and a
    completion to which one does not apply neither gains nor loses by it, whatever the sign of the others' scores."""
    _, rollout = scored()
    first = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.0, -1.0, 3.0])
    second = torch.tensor([10.0, 20.0, 40.0, 0.0, -2.0, -4.0, -5.0, torch.nan])
    nothing = torch.full((8,), torch.nan)
    learner = algorithm("gdpo")
    learner.component_weights = {"a": 1.0, "b": 0.5, "c": 2.0}
    penalty = torch.tensor([0.1, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0])

    def advantages(scale: float) -> Tensor:
        sums = first + 0.5 * scale * second.nan_to_num(0.0) - penalty
        rewards = torch.where(rollout.response_mask, (sums / rollout.response_mask.sum(dim=1))[:, None], 0.0)
        return learner.advantages(rewards, replace(rollout, components={"a": first, "b": scale * second, "c": nothing}))

    found = advantages(1.0)
    for row, group in enumerate(GROUPS.tolist()):
        expected = -float(penalty[row] - penalty[group == GROUPS].mean())
        for weight, scores in ((1.0, first), (0.5, second)):
            members = scores[(group == GROUPS) & ~scores.isnan()]
            if not scores[row].isnan() and len(members) > 1:
                expected += weight * float((scores[row] - members.mean()) / (members.std() + 1e-4))
        assert (found[row][rollout.response_mask[row]] - expected).abs().max() < 1e-4
    torch.testing.assert_close(advantages(100.0), found, atol=1e-3, rtol=1e-3)
    assert float(found[3][rollout.response_mask[3]][0]) > 0, "of three equal sums"


@pytest.mark.parametrize("name", ["grpo", "rloo", "pass_at_k", "gdpo", "reinforce_pp_baseline"])
def test_a_completion_without_a_score_is_not_compared(name: str) -> None:
    """To which no component applies: others have the advantages of a group without it, and it has none."""
    rewards, rollout = scored()
    known = torch.tensor([True, False, True, True, True, True, False, False])
    components = {"a": torch.where(known, SCORES, torch.nan), "b": torch.full((8,), torch.nan)}
    rewards = torch.where(known[:, None], rewards, 0.0)
    rollout = replace(rollout, components=components, scores=SCORES, penalties=torch.zeros(8))
    learner = algorithm(name, kl=None)
    learner.component_weights = {"a": 1.0, "b": 1.0}
    found = _advantages(rewards, rollout, learner)
    rows = known.nonzero().flatten().tolist()
    alone = rollout.rows(rows)
    width = alone.input_ids.shape[1]
    assert torch.equal(found[rows, :width], learner.advantages(rewards[rows, :width], alone))
    assert not found[~known].any() and found[known].any()
    failed = replace(rollout, components={"a": torch.where(known, SCORES, 0.0)})  # on_failure zero: a score
    if name != "gdpo":
        assert torch.equal(_advantages(rewards, failed, learner), learner.advantages(rewards, failed))


def test_gdpo_is_whitened_over_completions() -> None:
    """As in the paper and TRL; over tokens, a long completion would shift and scale the advantages of all."""
    lengths = torch.tensor([1, 3, 3, 3, 3, 40])
    mask = torch.arange(40) < lengths[:, None]
    scores = {"a": torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0, 2.0]), "b": torch.tensor([5.0, 1.0, 0.0, 2.0, 1.0, 1.0])}
    summed = scores["a"] + scores["b"]
    rollout = rollout_of(
        mask,
        mask,
        groups=torch.tensor([0, 0, 0, 1, 1, 1]),
        scores=summed,
        penalties=torch.zeros(6),
        old_logprobs=torch.zeros(6, 40),
        components=scores,
    )
    learner = algorithm("gdpo", kl=None)
    learner.component_weights = {"a": 1.0, "b": 1.0}
    rewards = torch.zeros(6, 40).scatter(1, lengths[:, None] - 1, summed[:, None])
    plain = learner.advantages(rewards, rollout)[:, 0]
    cpu = solo_world(torch.device("cpu"))
    found = estimate_advantages(rollout, learner, scaling=ScoreScaling("none"), kl_coef=0.0, world=cpu).advantages
    expected = (plain - plain.mean()) / plain.std()
    torch.testing.assert_close(found, expected[:, None] * mask, atol=1e-5, rtol=1e-5)
    episodes = replace(rollout, samples=torch.tensor([0, 1, 1, 0, 1, 2]))
    found = estimate_advantages(episodes, learner, scaling=ScoreScaling("none"), kl_coef=0.0, world=cpu).advantages[
        :, 0
    ]
    assert found[1] == found[2], "sequences of an episode"
    torch.testing.assert_close(found[[0, 1, 3, 4, 5]].std(), torch.tensor(1.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_pass_at_k_of_right_and_wrong_answers_is_the_papers_formula(k: int) -> None:
    """arXiv 2508.10751: with all answers right or wrong, or groups of k or fewer, nothing is learned."""
    groups = torch.tensor([0] * 7 + [1] * 6 + [2] * k + [3] * (k - 1))
    rights = torch.tensor([1, 0, 0, 1, 0, 0, 0] + [1] * 6 + [0, *[1] * (k - 1)] * 2, dtype=torch.float64)[: len(groups)]
    mask = torch.ones(len(groups), 1, dtype=torch.bool)
    exact, found = (
        algorithm("pass_at_k", k=k).advantages(rewards[:, None], rollout_of(mask, mask, groups=groups))[:, 0]
        for rewards in (rights, rights.float())
    )
    assert torch.equal(exact.float(), found), "computed in float64"
    n, wrong = 7, 5
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    deviation = math.sqrt(mean * (1 - mean)) + 1e-4
    of_right = (1 - mean) / deviation
    of_wrong = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation
    expected = torch.tensor([of_right if right else of_wrong for right in rights[:7]], dtype=torch.float64)
    torch.testing.assert_close(exact[:7], expected, atol=1e-12, rtol=1e-12)
    assert (exact[7:] == 0).all()


def test_vapo_is_ppo_with_the_lambda_of_each_length() -> None:
    rewards, rollout = scored()
    vapo = ALGORITHMS["vapo"](replace(algorithm("vapo").config, gamma=0.9, length_alpha=0.4), value_lam=0.7)
    found = vapo.advantages(rewards, rollout)
    for row, tokens in enumerate(rollout.response_mask.sum(dim=1).tolist()):
        lam = max(0.0, 1 - 1 / (0.4 * tokens))
        ppo = ALGORITHMS["ppo"](replace(algorithm("ppo").config, gamma=0.9, gae_lambda=lam), value_lam=0.7)
        torch.testing.assert_close(found[row], ppo.advantages(rewards, rollout)[row])
        torch.testing.assert_close(vapo.returns(rewards, rollout), ppo.returns(rewards, rollout))
    assert {*rollout.response_mask.sum(dim=1).tolist()} > {2, 3}, "lambdas of 0 and above"


@pytest.mark.parametrize(("lam", "value_lam"), [(0.8, 0.8), (1.0, 0.5), (0.0, 1.0)])
def test_ppo_is_gae_by_a_lambda_of_the_actor_and_one_of_the_critic(lam: float, value_lam: float) -> None:
    rewards, rollout = scored()
    learner = ALGORITHMS["ppo"](replace(algorithm("ppo").config, gamma=0.9, gae_lambda=lam), value_lam=value_lam)
    advantages, returns = learner.advantages(rewards, rollout), learner.returns(rewards, rollout)
    assert rollout.old_values is not None and returns is not None
    for row in range(len(rollout)):
        places = rollout.response_mask[row].nonzero().flatten().tolist()
        advantage, to_learn, next_value = 0.0, 0.0, 0.0
        for t in reversed(places):
            value = float(rollout.old_values[row, t])
            error = float(rewards[row, t]) + 0.9 * next_value - value
            advantage, to_learn = error + 0.9 * lam * advantage, error + 0.9 * value_lam * to_learn
            next_value = value
            assert float(advantages[row, t]) == pytest.approx(advantage, abs=1e-5)
            assert float(returns[row, t]) == pytest.approx(to_learn + value, abs=1e-5)


def test_reinforce_takes_the_mean_of_all_before() -> None:
    learner = algorithm("reinforce")
    outcomes = []
    for seed, shift in enumerate((0.0, 3.0, -1.0)):
        rewards, rollout = scored(SCORES + shift, seed=seed)
        outcome = rewards.sum(dim=1)
        baseline = torch.cat(outcomes).mean() if outcomes else outcome.mean()
        expected = per_token(outcome - baseline, rollout)
        again = type(learner)(learner.config)
        again.load_state_dict(learner.state_dict())
        torch.testing.assert_close(again.advantages(rewards, rollout), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(learner.advantages(rewards, rollout), expected, atol=1e-5, rtol=1e-5)
        outcomes.append(outcome)


def reinforced(world: World) -> list[list[float]]:
    """Advantages of two rollouts over all ranks; of two ranks the second holds nothing of the first one."""
    learner = algorithm("reinforce")
    found = []
    for seed, holders in enumerate(([0, 0, 0], [0, 1, 0])):
        rewards, rollout = scored(SCORES + seed, seed=seed)
        mine = [row for row, group in enumerate(GROUPS.tolist()) if holders[group] % world.size == world.rank]
        mask = rollout.response_mask[mine]
        part = rollout_of(mask, mask, groups=GROUPS[mine])
        index = part.numbered(world)
        advantages = learner.advantages(rewards[mine], replace(part, index=index))
        found.append(index.gather(advantages.sum(dim=1)).tolist())
    return found


def test_the_baseline_of_reinforce_is_that_of_all_ranks(tmp_path: Path) -> None:
    """Each rank had the mean of its own completions, and one without any ended with a division by zero."""
    expected = reinforced(solo_world(torch.device("cpu")))
    for found in run_ranks(reinforced, 2, tmp_path):
        assert found == [pytest.approx(of_rollout, abs=1e-5) for of_rollout in expected]


@dataclass(frozen=True)
class LossCase:
    """What a loss is computed from."""

    logprobs: Tensor
    batch: Batch
    weights: Tensor = field(default_factory=lambda: torch.ones(1, 1))
    tokens_per_completion: float = 1.0

    def loss(self, learner: Algorithm) -> LossSum:
        """That of an algorithm."""
        return learner.loss(
            self.logprobs, self.batch, weights=self.weights, tokens_per_completion=self.tokens_per_completion
        )

    @property
    def mask(self) -> Tensor:
        return self.batch.rollout.response_mask


def loss_case(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, ref: Tensor | None = None, **more: Any
) -> LossCase:
    rollout = rollout_of(mask, mask, old_logprobs=old, ref_logprobs=ref)
    return LossCase(logprobs, Batch(rollout, torch.zeros_like(old), advantages), **more)


def random_case(
    seed: int = 0, *, rows: int = 6, length: int = 5, advantages: Tensor | None = None, outside: float = torch.nan
) -> LossCase:
    """Random completions, with `outside` wherever the mask is off."""
    chance = torch.Generator().manual_seed(seed)
    old = -1 - torch.rand(rows, length, generator=chance)
    logprobs = old + 0.5 * torch.randn(rows, length, generator=chance)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=chance)
    ref = old + 0.3 * torch.randn(rows, length, generator=chance)
    if advantages is None:
        advantages = torch.randn(rows, 1, generator=chance).mul(0.5).expand(rows, length)
    logprobs, old, ref, advantages = (torch.where(mask, x, outside) for x in (logprobs, old, ref, advantages))
    logprobs.requires_grad_()
    weights, mean_tokens = torch.ones(rows, 1), float(mask.sum()) / rows
    return loss_case(logprobs, old, advantages, mask, ref=ref, weights=weights, tokens_per_completion=mean_tokens)


def loss_of_row(name: str, case: LossCase, i: int, config: AlgorithmConfig) -> Tensor:
    """The papers' loss of a completion, summed over its tokens."""
    places = case.mask[i].nonzero().flatten().tolist()
    logp, old = ([x[i, t] for t in places] for x in (case.logprobs, case.batch.rollout.old_logprobs))  # type: ignore[index]
    total = torch.zeros(())
    ratios = [(a - b).exp() for a, b in zip(logp, old, strict=True)]
    if name == "gspo":
        mean: Tensor = torch.stack([a - b for a, b in zip(logp, old, strict=True)]).mean()
        ratios = [mean.exp()] * len(places)
    if name == "vespo":
        whole = torch.stack(ratios).prod().detach()
    for t, place in enumerate(places):
        advantage, ratio = case.batch.advantages[i, place], ratios[t]
        low, high = (1 - config.clip[0], 1 + config.clip[1]) if hasattr(config, "clip") else (0, 0)
        sign = int(advantage <= 0)
        if name == "cispo":
            total = total - ratio.detach().clamp(low, high) * advantage * logp[t]
        elif name == "raft":
            total = total - logp[t]
        elif name == "sapo":
            tau = config.gate_temperatures[sign]
            total = total - advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        elif name == "vespo":
            gate = whole ** config.gate_power[sign] * (config.gate_decay[sign] * (1 - whole)).exp()
            total = total - gate * advantage * logp[t]
        elif name == "gmpo":
            clipped = [torch.clamp(r, max=high) if advantage > 0 else torch.clamp(r, min=low) for r in ratios]
            total = total - advantage * torch.stack(clipped).prod() ** (1 / len(places))
        else:
            surrogate = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
            total = total - (surrogate if advantage > 0 else surrogate.clamp(min=1.1 * advantage))
    return total


@pytest.mark.parametrize("name", [name for name in RL_ALGORITHMS if name != "online_dpo"])
def test_losses_are_the_papers_and_so_are_their_gradients(name: str) -> None:
    learner = algorithm(name)
    if hasattr(learner.config, "dual_clip"):
        learner.config = replace(learner.config, dual_clip=1.1)
    if name in ("gspo", "gmpo", "cispo"):
        learner.config = replace(learner.config, clip=(0.1, 0.2))
    case = random_case()
    loss = case.loss(learner)
    assert float(loss.count) == int(case.mask.sum())
    expected = sum((loss_of_row(name, case, i, learner.config) for i in range(len(case.mask))), torch.zeros(()))
    torch.testing.assert_close(loss.total, expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(loss.total, case.logprobs)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected, case.logprobs)[0], atol=1e-5, rtol=1e-5)
    assert float(found.abs().max()) > 0.01 and (found[~case.mask] == 0).all()
    if name != "gspo":  # whose ratios are those of sequences
        assert case.batch.rollout.old_logprobs is not None
        change = (case.logprobs.detach() - case.batch.rollout.old_logprobs)[case.mask]
        torch.testing.assert_close(loss.stats["approxkl"], 0.5 * change.square().sum())
    assert name not in ("raft", "sapo", "vespo") or float(loss.stats["clipfrac"]) == 0
    if name == "gmpo":
        beyond = torch.where(case.batch.advantages[case.mask] > 0, change > math.log(1.2), change < math.log(0.9))
        assert float(loss.stats["clipfrac"]) == int(beyond.sum()) > 0
    weighed = replace(case, weights=torch.full_like(case.weights, 3.0)).loss(learner)
    torch.testing.assert_close(weighed.total, 3 * loss.total)


def test_clips_bind_where_they_say() -> None:
    low = algorithm("dapo")
    ratio = torch.tensor([[0.5, 0.9, 1.25, 1.5]])
    ones = torch.ones_like(ratio)
    case = loss_case(ratio.log(), 0 * ones, ones, ones.bool(), tokens_per_completion=4.0)
    assert float(case.loss(low).stats["clipfrac"]) == 1, "1.25 is below 1 + 0.28"
    assert float(case.loss(algorithm("grpo")).stats["clipfrac"]) == 2
    cispo = algorithm("cispo")
    assert float(case.loss(cispo).stats["clipfrac"]) == 0
    far = replace(case, logprobs=torch.tensor([[7.0, 5.0, 4.9, 0.0]]).log())
    assert float(far.loss(cispo).stats["clipfrac"]) == 1, "above 5 only"
    against = replace(case, batch=replace(case.batch, advantages=-ones))
    unbound = against.loss(algorithm("gmpo", clip=(1.0, 0.2)))
    assert float(unbound.total) == pytest.approx(4 * float(ratio.prod()) ** 0.25), "no lower bound"
    idle = replace(case, batch=replace(case.batch, advantages=0 * ones)).loss(algorithm("gmpo", clip=(0.2, 0.2)))
    assert float(idle.stats["clipfrac"]) == 1, "without an advantage the lower bound counts"
    gone = replace(case, logprobs=-1000 * ones).loss(algorithm("vespo", gate_power=(0.01, 0.01)))
    assert float(gone.total) == pytest.approx(4000 * math.exp(3 - 0.01 * MAX_LOG_RATIO)), "a bounded log-ratio"


def test_gspo_gives_a_masked_token_no_gradient_and_the_others_their_own() -> None:
    learner = algorithm("gspo", clip=(0.2, 0.2))
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -0.7]], requires_grad=True)
    ones = torch.ones(2, 2)
    case = loss_case(logprobs, logprobs.detach().clone(), ones, ones.bool(), weights=ones, tokens_per_completion=2.0)
    whole = torch.autograd.grad(case.loss(learner).total, logprobs)[0]
    assert whole.tolist() == [[-1, -1], [-1, -1]]
    masked = replace(case, weights=torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    found = torch.autograd.grad(masked.loss(learner).total, logprobs)[0]
    assert found.tolist() == [[-1, 0], [-1, -1]], "weights 1 and 0 gave -0.5 to both tokens before"


@pytest.mark.parametrize("name", BY_OUTCOME)
def test_a_group_of_equal_rewards_teaches_nothing(name: str) -> None:
    rewards, rollout = scored(kl=0.0)
    learner = algorithm(name, **({"clip": (1.0, 9.0)} if hasattr(RL_ALGORITHMS[name], "clip") else {}))
    advantages = learner.advantages(rewards, rollout)
    equal = GROUPS == 1
    assert (advantages[equal] == 0).all() and (advantages[~equal] != 0).any()
    case = random_case(rows=8, length=9, outside=0.0)
    batch = replace(case.batch, advantages=advantages)
    batch = replace(batch, rollout=replace(batch.rollout, response_mask=rollout.response_mask))
    loss = replace(case, batch=batch).loss(learner)
    gradient = torch.autograd.grad(loss.total, case.logprobs)[0]
    assert (gradient[equal] == 0).all() and (gradient[~equal] != 0).any()


@pytest.mark.parametrize("name", [*BY_OUTCOME, "online_dpo", "reinforce"])
@pytest.mark.parametrize("score", [-0.1, 100.1, 1000.1, 1e6 / 3])
def test_equal_scores_have_advantages_of_exactly_0(name: str, score: float) -> None:
    """The mean of equal scores was rounded: 8 scores of 1000.1 had GRPO advantages of 0.54."""
    for rows in (2, 3, 7, 8, 12, 16):
        mask = torch.ones(rows, 4, dtype=torch.bool)
        rewards = torch.zeros(rows, 4)
        rewards[:, -1] = score
        rollout = rollout_of(mask, mask, groups=torch.zeros(rows, dtype=torch.long))
        assert (algorithm(name).advantages(rewards, rollout) == 0).all()
        assert (masked_whiten(rewards[:, -1:], mask=mask[:, -1:]) == 0).all(), "of a whole rollout too"


def test_a_group_of_one_has_no_deviation_and_low_precision_is_summed_in_float32() -> None:
    groups, values = torch.zeros(2, dtype=torch.long), torch.tensor([256.0, 0.07]).bfloat16()
    for function in (group_std, leave_one_out):
        assert function(values[:1], groups=groups[:1]).tolist() == [0.0]
    means = [group_mean(values.to(dtype), groups=groups) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    assert torch.equal(means[0], means[1]) and means[2].tolist() == [float(values.double().mean())] * 2


def test_turn_rewards_of_equal_sum_are_equal_wherever_they_are_earned() -> None:
    """Float32 sums depend on the order: parts of a score in other places gave other outcomes, so advantages of 0.4."""
    parts = torch.tensor([1000.1, 0.3, 33.3, 0.7])
    turn_rewards = torch.stack([parts[torch.tensor(order)] for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 3, 2, 0])])
    mask = torch.ones(3, 4, dtype=torch.bool)
    scores = row_sums(turn_rewards)
    rewards = shaped_rewards(scores=scores, kl=torch.zeros(3, 4), mask=mask, kl_coef=0.0, earned=turn_rewards)
    rollout = rollout_of(mask, mask, groups=torch.zeros(3, dtype=torch.long))
    assert not differs_in_group(scores, groups=torch.zeros(3, dtype=torch.long)).any()
    for name in ("grpo", "dr_grpo", "rloo"):
        assert (algorithm(name).advantages(rewards, rollout) == 0).all()


def pairs(seed: int = 0) -> tuple[LossCase, list[tuple[int, int]]]:
    """Three pairs of neighbours, and an empty one that fills a micro-batch up."""
    winners = torch.tensor([1.0, -1, -1, 1, 1, -1, 0, 0])
    case = random_case(seed, rows=8, advantages=winners[:, None].expand(8, 5))
    case.mask[6:] = False
    return replace(case, tokens_per_completion=1.5), [(0, 1), (3, 2), (4, 5)]


def test_online_dpo_with_a_perfect_judge_is_dpo() -> None:
    case, couples = pairs()
    learner = algorithm("online_dpo", beta=0.3)
    ref = case.batch.rollout.ref_logprobs
    assert ref is not None
    change = torch.where(case.mask, case.logprobs - ref, 0.0).sum(dim=1)
    leads = torch.stack([change[better] - change[worse] for better, worse in couples])
    expected = -torch.nn.functional.logsigmoid(0.3 * leads).sum()
    loss = case.loss(learner)
    torch.testing.assert_close(loss.total / 3, expected)  # over completions of 1.5 tokens, of which a pair has two
    found, wanted = (torch.autograd.grad(x, case.logprobs)[0] for x in (loss.total / 3, expected))
    torch.testing.assert_close(found, wanted)
    same = replace(case, logprobs=ref.clone()).loss(learner)
    assert float(same.total) == pytest.approx(3 * 3 * math.log(2), rel=1e-6)
    old = case.batch.rollout.old_logprobs
    assert old is not None and int(same.count) == int(case.mask.sum())
    torch.testing.assert_close(same.stats["approxkl"], 0.5 * (ref - old)[case.mask].square().sum())


def test_online_dpo_takes_whole_pairs_whose_scores_differ() -> None:
    learner = algorithm("online_dpo")
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 4])
    scores = torch.tensor([1.0, 2, 5, 5, 9, 1, 1, 1, 1.5])
    penalties = torch.tensor([0.0, 0, 0, 0, 0, 0, 0.5, 0, 0.5])
    chosen = learner.select(scores, penalties=penalties, groups=groups)
    assert chosen.tolist() == [True, True, False, False, False, True, True, False, False]


def test_dynamic_sampling_takes_groups_that_differ_in_their_scores() -> None:
    nothing = torch.zeros_like(SCORES)
    chosen = algorithm("dapo").select(SCORES, penalties=nothing, groups=GROUPS)
    assert torch.equal(chosen, GROUPS != 1)
    chosen = algorithm("dapo", dynamic_sampling=None).select(SCORES, penalties=nothing, groups=GROUPS)
    assert chosen.dtype is torch.bool and chosen.all()
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


def test_every_algorithm_has_settings_and_defaults_that_parse() -> None:
    assert set(RL_ALGORITHMS) == set(ALGORITHMS)
    assert [name for name, learner in ALGORITHMS.items() if learner.wants_greedy] == ["remax"]
    assert {name: learner.together for name, learner in ALGORITHMS.items() if learner.together != 1} == {
        "online_dpo": 2
    }
    for name, kind in RL_ALGORITHMS.items():
        config = parse_config(RLConfig, ["--algorithm", name, "--reward.components", "somewhere"])
        assert config.algorithm.name == name and type(config.algorithm) is kind
        assert ALGORITHMS[name](config.algorithm).correction == getattr(config.algorithm, "correction", None)
        assert getattr(config.algorithm, "score_clip", None) is None, "scores are clipped only where asked"
        assert config.uses_reference == (config.algorithm.kl is not None or name == "online_dpo")
    told = parse_config(RLConfig, "--algorithm.kl.coef 0.5 --algorithm=grpo --rollout.sampling.n 3".split())
    assert told.algorithm.kl is not None
    assert (told.algorithm.kl.coef, told.algorithm.kl.estimator, told.rollout.sampling.n) == (0.5, "k3", 3)
