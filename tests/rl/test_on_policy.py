"""Each on-policy algorithm against its paper's formula in plain loops, torch autograd, and the others."""

from __future__ import annotations

import itertools
import math
import statistics
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
from hybrid_rlhf.functional.losses import MAX_LOG_RATIO, LossSum, length_weights
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
CRITIC_FREE = [name for name, kind in RL_ALGORITHMS.items() if not kind.needs_critic and name != "pass_at_k"]
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


def slowly(name: str, rewards: Tensor, rollout: Rollout, config: AlgorithmConfig) -> Tensor:
    """The papers' advantages, a completion and a token at a time."""
    gamma, groups = getattr(config, "gamma", 1.0), GROUPS.tolist()
    outcomes = [float(row[marks].sum()) for row, marks in zip(rewards, rollout.response_mask, strict=True)]
    found = torch.zeros_like(rewards)
    for i, outcome in enumerate(outcomes):
        group = [other for other, number in zip(outcomes, groups, strict=True) if number == groups[i]]
        mean, standard = statistics.mean(group), statistics.stdev(group)
        places = rollout.response_mask[i].nonzero().flatten().tolist()
        for number, t in enumerate(places):
            later = places[number:]
            to_come = sum(float(rewards[i, s]) * gamma**place for place, s in enumerate(later))
            named = {
                "reinforce": outcome - statistics.mean(outcomes),
                "rloo": outcome - (sum(group) - outcome) / (len(group) - 1),
                "remax": to_come - float(rollout.greedy_scores[i]),  # type: ignore[index]
                "reinforce_pp": to_come,
                "reinforce_pp_baseline": to_come - mean * gamma ** (len(later) - 1),
                "dr_grpo": outcome - mean,
                "online_dpo": math.copysign(1.0, outcome - mean),
                "raft": 1.0,
            }
            found[i, t] = named.get(name, (outcome - mean) / (standard + 1e-4))
    return found


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_advantages_are_the_papers(name: str) -> None:
    rewards, rollout = scored()
    learner = algorithm(name, **({"gamma": 0.9} if name.startswith("reinforce_pp") else {}))
    advantages = learner.advantages(rewards, rollout)
    assert learner.returns(rewards, rollout) is None
    torch.testing.assert_close(advantages, slowly(name, rewards, rollout, learner.config), atol=1e-5, rtol=1e-4)
    assert (advantages[~rollout.response_mask] == 0).all()


def test_maxrl_divides_by_the_mean_of_the_group() -> None:
    """A success of one in four counts three times as much as a failure; without any, nothing is learned."""
    outcomes = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, -1, 0.5, 0, 0])
    groups = torch.arange(4).repeat_interleave(4)
    mask = torch.ones(16, 2, dtype=torch.bool)
    rewards = torch.stack([outcomes, torch.zeros(16)], dim=1)
    found = algorithm("grpo", divide_by_mean=True).advantages(rewards, rollout_of(mask, mask, groups=groups))
    expected = [3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, *[0.0] * 8]
    for row, of_row in zip(found, expected, strict=True):
        assert row.tolist() == pytest.approx([of_row] * 2, abs=2e-3)  # 1e-4 is added to the mean


def test_dppo_learns_from_tokens_whose_probability_may_still_change() -> None:
    """However large the ratio of a rare token; a probable token is left out sooner than by its ratio."""
    case = random_case(40)
    case.logprobs.data.mul_(0.5)
    case.batch.rollout.old_logprobs.mul_(0.5)  # type: ignore[union-attr]
    learner = algorithm("grpo", clip_of="probability", clip=(0.1, 0.15))
    loss = case.loss(learner)
    expected, clipped = torch.zeros(()), 0
    for i, t in case.mask.nonzero().tolist():
        logp, old = case.logprobs[i, t], float(case.batch.rollout.old_logprobs[i, t])  # type: ignore[index]
        advantage, change = float(case.batch.advantages[i, t]), math.exp(float(logp)) - math.exp(old)
        if (advantage > 0 and change > 0.15) or (advantage < 0 and change < -0.1):
            clipped += 1
        else:
            expected = expected - advantage * (logp - old).exp()
    assert float(loss.stats["clipfrac"]) == clipped > 3
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, case.logprobs)[0] for x in (loss.total, expected)))
    ones = torch.ones(1, 2)
    rare = loss_case(torch.tensor([[0.01, 0.95]]).log(), torch.tensor([[0.0001, 0.75]]).log(), ones, ones.bool())
    assert [float(rare.loss(algorithm("grpo", clip_of=of)).stats["clipfrac"]) for of in ("ratio", "probability")] == [
        2,
        0,
    ]
    probable = loss_case(torch.tensor([[0.5, 0.7]]).log(), torch.tensor([[0.6, 0.9]]).log(), -ones, ones.bool())
    tight = algorithm("grpo", clip_of="probability", clip=(0.15, 0.15))
    assert float(probable.loss(tight).stats["clipfrac"]) == 1, "0.9 to 0.7"


def test_luspo_is_gspo_whose_sequences_count_by_their_length() -> None:
    """arXiv 2602.05261: the loss of a sequence, with its ratio, times its length; TRL's loss_type luspo."""
    case = random_case()
    rows, tokens = len(case.mask), float(case.mask.sum())
    rule = {"normalization": "sequence_sum", "tokens": tokens, "sequences": rows, "max_tokens": 5}
    case = replace(case, weights=length_weights(case.mask, **rule))  # type: ignore[arg-type]
    learner = algorithm("gspo", clip=(0.1, 0.2), dual_clip=1.1)
    loss = case.loss(learner).total / tokens
    expected = torch.zeros(())
    for i, marks in enumerate(case.mask):
        length = int(marks.sum())
        expected = expected + length * (loss_of_row("gspo", case, i, learner.config) / length) / rows
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, case.logprobs)[0] for x in (loss, expected)))


def test_gdpo_standardizes_each_component_of_the_reward() -> None:
    """With another scale, a component counts the same; groups of equal sums learn where the components differ; and a
    completion to which one does not apply neither gains nor loses by it, whatever the sign of the others' scores."""
    _, rollout = scored()
    mask = rollout.response_mask
    first = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.0, -1.0, 3.0])
    second = torch.tensor([10.0, 20.0, 40.0, 0.0, -2.0, -4.0, -5.0, torch.nan])
    learner = algorithm("gdpo")
    learner.component_weights = {"a": 1.0, "b": 0.5, "c": 2.0}
    penalty = torch.tensor([0.1, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0])

    def advantages(scale: float) -> Tensor:
        rewards = torch.zeros_like(mask, dtype=torch.float32)
        rewards[:, 1] = first + 0.5 * scale * second.nan_to_num(0.0) - penalty  # a response token of each
        components = {"a": first, "b": scale * second, "c": torch.full((8,), torch.nan)}
        return learner.advantages(rewards, replace(rollout, components=components))[:, 1]

    found = advantages(1.0)
    for row, group in enumerate(GROUPS.tolist()):
        expected = -float(penalty[row] - penalty[group == GROUPS].mean())
        for weight, scores in ((1.0, first), (0.5, second)):
            members = scores[(group == GROUPS) & ~scores.isnan()]
            if not scores[row].isnan() and len(members) > 1:
                expected += weight * float((scores[row] - members.mean()) / (members.std() + 1e-4))
        assert float(found[row]) == pytest.approx(expected, abs=1e-4)
    torch.testing.assert_close(advantages(100.0), found, atol=1e-3, rtol=1e-3)
    assert found[3] > 0, "of three equal sums"


@pytest.mark.parametrize("name", ["grpo", "rloo", "pass_at_k", "gdpo", "reinforce_pp_baseline"])
def test_a_completion_without_a_score_is_not_compared(name: str) -> None:
    """To which no component applies: others have the advantages of a group without it, and it has none."""
    rewards, rollout = scored()
    known = torch.tensor([True, False, True, True, True, True, False, False])
    rewards = rewards * known[:, None]
    rollout = replace(rollout, components={"a": torch.where(known, SCORES, torch.nan)})
    learner = algorithm(name, kl=None)
    learner.component_weights = {"a": 1.0}
    found = _advantages(rewards, rollout, learner)
    rows = known.nonzero().flatten().tolist()
    alone = rollout.rows(rows)
    width = alone.input_ids.shape[1]
    assert torch.equal(found[rows, :width], learner.advantages(rewards[rows, :width], alone))
    assert not found[~known].any() and found[known].any()
    if name != "gdpo":
        failed = replace(rollout, components={"a": torch.where(known, SCORES, 0.0)})  # on_failure zero: a score
        assert torch.equal(_advantages(rewards, failed, learner), learner.advantages(rewards, failed))


def test_gdpo_is_whitened_over_completions() -> None:
    """As in the paper and TRL; over tokens, a long completion would shift and scale the advantages of all."""
    lengths = torch.tensor([1, 3, 3, 3, 3, 40])
    mask = torch.arange(40) < lengths[:, None]
    scores = torch.tensor([6.0, 1.0, 1.0, 2.0, 3.0, 5.0])
    known = {"scores": scores, "penalties": torch.zeros(6), "components": {"a": scores}}
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    rollout = rollout_of(mask, mask, groups=groups, old_logprobs=torch.zeros(6, 40), **known)
    learner = algorithm("gdpo", kl=None)
    learner.component_weights = {"a": 1.0}
    plain = learner.advantages(torch.zeros(6, 40).scatter(1, lengths[:, None] - 1, scores[:, None]), rollout)[:, 0]

    def estimated(rollout: Rollout) -> Tensor:
        scaling, cpu = ScoreScaling("none"), solo_world(torch.device("cpu"))
        return estimate_advantages(rollout, learner, scaling=scaling, kl_coef=0.0, world=cpu).advantages

    expected = (plain - plain.mean()) / plain.std()
    torch.testing.assert_close(estimated(rollout), expected[:, None] * mask, atol=1e-5, rtol=1e-5)
    found = estimated(replace(rollout, samples=torch.tensor([0, 1, 1, 0, 1, 2])))[:, 0]
    assert found[1] == found[2], "sequences of an episode"
    torch.testing.assert_close(found[[0, 1, 3, 4, 5]].std(), torch.tensor(1.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_pass_at_k_is_the_papers_formula_over_all_subsets(k: int) -> None:
    """arXiv 2508.10751, by enumeration; with equal outcomes, or groups of k or fewer, nothing is learned."""
    sizes = [7, 6, k, k - 1]
    groups = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    outcomes = torch.tensor([1.0, 0, 0.5, 1, 0, -2, 0] + [1.0] * 6 + [0.0, *[1.0] * (k - 1)] * 2)[: len(groups)]
    mask = torch.ones(len(groups), 1, dtype=torch.bool)
    found = algorithm("pass_at_k", k=k).advantages(outcomes[:, None], rollout_of(mask, mask, groups=groups))[:, 0]
    subsets = [*itertools.combinations(range(7), k)]
    best = [max(float(outcomes[i]) for i in subset) for subset in subsets]
    mean = sum(best) / len(best)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in best) / len(best)) + 1e-4
    for i in range(7):
        mine = [x for x, subset in zip(best, subsets, strict=True) if i in subset]
        assert float(found[i]) == pytest.approx((sum(mine) / len(mine) - mean) / deviation, abs=1e-6)
    assert (found[7:] == 0).all()


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
    for row, marks in enumerate(rollout.response_mask):
        advantage = to_learn = next_value = 0.0
        for t in reversed(marks.nonzero().flatten().tolist()):
            value = float(rollout.old_values[row, t])
            error = float(rewards[row, t]) + 0.9 * next_value - value
            advantage, to_learn = error + 0.9 * lam * advantage, error + 0.9 * value_lam * to_learn
            next_value = value
            assert float(advantages[row, t]) == pytest.approx(advantage, abs=1e-5)
            assert float(returns[row, t]) == pytest.approx(to_learn + value, abs=1e-5)


def test_reinforce_takes_the_mean_of_all_before() -> None:
    """Also where it is resumed."""
    outcomes: list[Tensor] = []
    learner = algorithm("reinforce")
    for seed, shift in enumerate((0.0, 3.0, -1.0)):
        rewards, rollout = scored(SCORES + shift, seed=seed)
        outcome = rewards.sum(dim=1)
        expected = per_token(outcome - torch.cat(outcomes or [outcome]).mean(), rollout)
        again = algorithm("reinforce")
        again.load_state_dict(learner.state_dict())
        for each in (again, learner):
            torch.testing.assert_close(each.advantages(rewards, rollout), expected, atol=1e-5, rtol=1e-5)
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


def random_case(rows: int = 6, *, advantages: Tensor | None = None) -> LossCase:
    """Random completions, with NaN wherever the mask is off."""
    chance = torch.Generator().manual_seed(0)
    old = -1 - torch.rand(rows, 5, generator=chance)
    logprobs, ref = (old + scale * torch.randn(rows, 5, generator=chance) for scale in (0.5, 0.3))
    mask = torch.arange(5) < torch.randint(1, 6, (rows, 1), generator=chance)
    if advantages is None:
        advantages = torch.randn(rows, 1, generator=chance).mul(0.5).expand(rows, 5)
    logprobs, old, ref, advantages = (torch.where(mask, x, torch.nan) for x in (logprobs, old, ref, advantages))
    logprobs.requires_grad_()
    return loss_case(logprobs, old, advantages, mask, ref=ref, tokens_per_completion=float(mask.sum()) / rows)


def loss_of_row(name: str, case: LossCase, i: int, config: AlgorithmConfig) -> Tensor:
    """The papers' loss of a completion, whose tokens have one advantage, summed over them."""
    mask, old = case.mask[i], case.batch.rollout.old_logprobs
    assert old is not None
    logp, advantage = case.logprobs[i][mask], case.batch.advantages[i][mask][0]
    log_ratio = logp - old[i][mask]
    ratio = log_ratio.exp()
    low, high = (1 - config.clip[0], 1 + config.clip[1]) if hasattr(config, "clip") else (0, 0)
    sign = int(advantage <= 0)
    if name == "cispo":
        return -(ratio.detach().clamp(low, high) * advantage * logp).sum()
    if name == "raft":
        return -logp.sum()
    if name == "sapo":
        tau = config.gate_temperatures[sign]
        return -(advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())).sum()
    if name == "vespo":
        whole = ratio.prod().detach()
        return -(
            whole ** config.gate_power[sign] * (config.gate_decay[sign] * (1 - whole)).exp() * advantage * logp
        ).sum()
    if name == "gmpo":
        clipped = ratio.clamp(min=low) if sign else ratio.clamp(max=high)
        return -len(logp) * advantage * clipped.prod() ** (1 / len(logp))
    if name == "gspo":
        ratio = log_ratio.mean().exp().expand(len(logp))
    surrogate = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
    return -(surrogate.clamp(min=1.1 * advantage) if sign else surrogate).sum()


@pytest.mark.parametrize("name", [name for name in RL_ALGORITHMS if name != "online_dpo"])
def test_losses_are_the_papers_and_so_are_their_gradients(name: str) -> None:
    changes: dict[str, Any] = {"dual_clip": 1.1} if hasattr(RL_ALGORITHMS[name], "dual_clip") else {}
    learner = algorithm(name, **changes, **({"clip": (0.1, 0.2)} if name in ("gspo", "gmpo", "cispo") else {}))
    case = random_case()
    loss = case.loss(learner)
    assert float(loss.count) == int(case.mask.sum())
    expected = sum((loss_of_row(name, case, i, learner.config) for i in range(len(case.mask))), torch.zeros(()))
    torch.testing.assert_close(loss.total, expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(loss.total, case.logprobs)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected, case.logprobs)[0], atol=1e-5, rtol=1e-5)
    assert float(found.abs().max()) > 0.01 and (found[~case.mask] == 0).all()
    assert case.batch.rollout.old_logprobs is not None
    change = (case.logprobs.detach() - case.batch.rollout.old_logprobs)[case.mask]
    if name != "gspo":  # whose ratios are those of sequences
        torch.testing.assert_close(loss.stats["approxkl"], 0.5 * change.square().sum())
    if name == "gmpo":
        beyond = torch.where(case.batch.advantages[case.mask] > 0, change > math.log(1.2), change < math.log(0.9))
        assert float(loss.stats["clipfrac"]) == int(beyond.sum()) > 0
    weighed = replace(case, weights=torch.full_like(case.weights, 3.0)).loss(learner)
    torch.testing.assert_close(weighed.total, 3 * loss.total)


def test_clips_bind_where_they_say() -> None:
    ratio = torch.tensor([[0.5, 0.9, 1.25, 1.5]])
    ones = torch.ones_like(ratio)
    case = loss_case(ratio.log(), 0 * ones, ones, ones.bool(), tokens_per_completion=4.0)
    beyond = {name: float(case.loss(algorithm(name)).stats["clipfrac"]) for name in ("dapo", "grpo", "cispo")}
    assert beyond == {"dapo": 1, "grpo": 2, "cispo": 0}, "1.25 is below 1 + 0.28"
    far = replace(case, logprobs=torch.tensor([[7.0, 5.0, 4.9, 0.0]]).log())
    assert float(far.loss(algorithm("cispo")).stats["clipfrac"]) == 1, "above 5 only"
    against = replace(case, batch=replace(case.batch, advantages=-ones)).loss(algorithm("gmpo", clip=(1.0, 0.2)))
    assert float(against.total) == pytest.approx(4 * float(ratio.prod()) ** 0.25), "no lower bound"
    idle = replace(case, batch=replace(case.batch, advantages=0 * ones)).loss(algorithm("gmpo", clip=(0.2, 0.2)))
    assert float(idle.stats["clipfrac"]) == 1, "without an advantage the lower bound counts"
    gone = replace(case, logprobs=-1000 * ones).loss(algorithm("vespo", gate_power=(0.01, 0.01)))
    assert float(gone.total) == pytest.approx(4000 * math.exp(3 - 0.01 * MAX_LOG_RATIO)), "a bounded log-ratio"


def test_gspo_gives_a_masked_token_no_gradient_and_the_others_their_own() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -0.7]], requires_grad=True)
    ones = torch.ones(2, 2)
    case = loss_case(logprobs, logprobs.detach(), ones, ones.bool(), tokens_per_completion=2.0)
    for weights in (ones, torch.tensor([[1.0, 0.0], [1.0, 1.0]])):
        loss = replace(case, weights=weights).loss(algorithm("gspo", clip=(0.2, 0.2)))
        found = torch.autograd.grad(loss.total, logprobs)[0]
        assert torch.equal(found, -weights), "weights 1 and 0 gave -0.5 to both tokens before"


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
    low, high, double = (
        group_mean(values.to(dtype), groups=groups) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    assert torch.equal(low, high) and double.tolist() == [float(values.double().mean())] * 2


def test_turn_rewards_of_equal_sum_are_equal_wherever_they_are_earned() -> None:
    """Float32 sums depend on the order: parts of a score in other places gave other outcomes, so advantages of 0.4."""
    parts = torch.tensor([1000.1, 0.3, 33.3, 0.7])
    turn_rewards = torch.stack([parts[torch.tensor(order)] for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 3, 2, 0])])
    mask, groups = torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    scores = row_sums(turn_rewards)
    rewards = shaped_rewards(scores=scores, kl=torch.zeros(3, 4), mask=mask, kl_coef=0.0, earned=turn_rewards)
    assert not differs_in_group(scores, groups=groups).any()
    assert (algorithm("grpo").advantages(rewards, rollout_of(mask, mask, groups=groups)) == 0).all()


def test_online_dpo_with_a_perfect_judge_is_dpo() -> None:
    """Over three pairs of neighbours, and an empty one that fills a micro-batch up."""
    winners = torch.tensor([1.0, -1, -1, 1, 1, -1, 0, 0])
    case = replace(random_case(8, advantages=winners[:, None].expand(8, 5)), tokens_per_completion=1.5)
    case.mask[6:] = False
    learner = algorithm("online_dpo", beta=0.3)
    ref, old = case.batch.rollout.ref_logprobs, case.batch.rollout.old_logprobs
    assert ref is not None and old is not None
    change = torch.where(case.mask, case.logprobs - ref, 0.0).sum(dim=1)
    leads = torch.stack([change[better] - change[worse] for better, worse in [(0, 1), (3, 2), (4, 5)]])
    expected = -torch.nn.functional.logsigmoid(0.3 * leads).sum()
    loss = case.loss(learner)
    torch.testing.assert_close(loss.total / 3, expected)  # over completions of 1.5 tokens, of which a pair has two
    torch.testing.assert_close(*(torch.autograd.grad(x, case.logprobs)[0] for x in (loss.total / 3, expected)))
    same = replace(case, logprobs=ref.clone()).loss(learner)
    assert float(same.total) == pytest.approx(3 * 3 * math.log(2), rel=1e-6) and int(same.count) == int(case.mask.sum())
    torch.testing.assert_close(same.stats["approxkl"], 0.5 * (ref - old)[case.mask].square().sum())


def test_online_dpo_takes_whole_pairs_whose_scores_differ() -> None:
    learner = algorithm("online_dpo")
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 4])
    scores = torch.tensor([1.0, 2, 5, 5, 9, 1, 1, 1, 1.5])
    penalties = torch.tensor([0.0, 0, 0, 0, 0, 0, 0.5, 0, 0.5])
    chosen = learner.select(scores, penalties=penalties, groups=groups)
    assert chosen.tolist() == [True, True, False, False, False, True, True, False, False]


def test_dynamic_sampling_takes_groups_that_differ_in_their_scores() -> None:
    lengths_differ = torch.arange(8).float()
    chosen = algorithm("dapo").select(SCORES, penalties=lengths_differ, groups=GROUPS)
    assert torch.equal(chosen, GROUPS != 1), "lengths alone accept no group"
    chosen = algorithm("dapo", dynamic_sampling=None).select(SCORES, penalties=lengths_differ, groups=GROUPS)
    assert chosen.dtype is torch.bool and chosen.all()


@pytest.mark.parametrize(
    ("best", "least", "expected"),
    [(1, None, [2, 7]), (2, None, [0, 2, 6, 7]), (2, 0.4, [2, 7]), (1, 0.5, [7]), (1, 3.0, [])],
)
def test_rejection_sampling_takes_the_best(best: int, least: float | None, expected: list[int]) -> None:
    """And nothing of a prompt whose scores are equal, as all may be wrong, the shortest too."""
    learner = algorithm("raft", selected_per_prompt=best, select_above=least)
    penalties = torch.tensor([0.9, 0, 0, 0, 0.1, 0, 0, 0])
    assert learner.select(SCORES, penalties=penalties, groups=GROUPS).nonzero().flatten().tolist() == expected
    assert not learner.select(0 * SCORES, penalties=-torch.arange(8.0), groups=GROUPS).any()


def test_every_algorithm_has_settings_and_defaults_that_parse() -> None:
    assert set(RL_ALGORITHMS) == set(ALGORITHMS)
    for name, kind in RL_ALGORITHMS.items():
        config = parse_config(RLConfig, ["--algorithm", name, "--reward.components", "somewhere"])
        assert config.algorithm.name == name and type(config.algorithm) is kind
        assert getattr(config.algorithm, "score_clip", None) is None, "scores are clipped only where asked"
        assert config.uses_reference == (config.algorithm.kl is not None or name == "online_dpo")
    told = parse_config(RLConfig, "--algorithm.kl.coef 0.5 --algorithm=grpo --rollout.sampling.n 3".split())
    assert told.algorithm.kl is not None
    assert (told.algorithm.kl.coef, told.algorithm.kl.estimator, told.rollout.sampling.n) == (0.5, "k3", 3)
