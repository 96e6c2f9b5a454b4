"""The details that are keys: each does what its key says, and nothing where it is off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rlhf.algorithms.on_policy.ppo import PPO
from hybrid_rlhf.algorithms.policy_loss import MiniBatch, PolicyLoss
from hybrid_rlhf.algorithms.rollout_metrics import rollout_metrics
from hybrid_rlhf.algorithms.score_scaling import ScoreScaling
from hybrid_rlhf.algorithms.updater import Updater
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.on_policy import AlgorithmConfig
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.partition import copy_weights
from hybrid_rlhf.functional.divergences import kl_k2, kl_k3
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.runtime.world import World
from tests.algorithms.test_ppo import ALGORITHM, ONCE, PROMPTS, SAMPLING, build, collect


def weights(engine: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def test_a_single_update_reads_the_actor_once(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths, algorithm=ONCE)
    forwards: list[int] = []
    roles.actor.module.register_forward_hook(lambda *_: forwards.append(1))
    collect(rollout)
    forwards.clear()  # the first switch checks the layout once
    experience, layout = collect(rollout)
    assert not forwards, "scoring does not read the actor"
    torch.testing.assert_close(experience.old_logprobs, experience.sequences.sampled_logprobs, atol=0, rtol=0)
    _, slow = build(world, paths, algorithm=ALGORITHM)
    expected = slow.score(slow.rate(PROMPTS, experience.sequences), layout)
    report = Updater(roles, PPO(ONCE), rollout=SAMPLING).update(experience, [layout])
    assert len(forwards) == len(layout.mini_batches[0])
    torch.testing.assert_close(report.experience.old_logprobs, expected.old_logprobs, atol=0, rtol=0)
    assert report.metrics["val/ratio"] == 1 and report.metrics["policy/approxkl"] == 0
    assert 0 < rollout_metrics(report.experience)["rollout/logprob_abs_diff_mean"] < 1e-5


def test_a_learning_rate_of_zero_never_moves_the_ratio(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths, algorithm=replace(ALGORITHM, epochs=3, mini_batches=2))
    for group in roles.actor._engine.optimizer.param_groups:
        group["lr"] = 0.0
    sequences = collect(rollout)[0].sequences
    layouts = [rollout.layout(sequences, step=1, epoch=0, mini_batches=2)] * 3
    experience = rollout.experience(rollout.score(rollout.rate(PROMPTS, sequences), layouts[0]), kl_coef=0.1)
    roles.actor._engine.lr_scheduler = None
    report = Updater(roles, PPO(replace(ALGORITHM, epochs=3, mini_batches=2)), rollout=SAMPLING).update(
        experience, layouts
    )
    assert report.metrics["policy/approxkl"] == 0 and report.metrics["val/ratio"] == 1


def test_passes_end_when_the_policy_has_gone_too_far(world: World, paths: dict[str, str]) -> None:
    updates = {}
    for target in (None, 1e-9, 1e9):
        roles, rollout = build(world, paths)
        experience, layout = collect(rollout)
        config = replace(ALGORITHM, target_approxkl=target)
        report = Updater(roles, PPO(config), rollout=SAMPLING).update(experience, [layout] * 4)
        updates[target] = report.metrics["rollout/updates"]
    assert updates == {None: 4, 1e-9: 2, 1e9: 4}, "the first mini-batch has an approxkl of exactly 0"


def test_a_warm_up_moves_the_critic_alone(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths)
    experience, layout = collect(rollout)
    before = weights(roles.actor), weights(roles.critic)
    report = Updater(roles, PPO(ALGORITHM), rollout=SAMPLING).update(experience, [layout], train_actor=False)
    assert all(map(torch.equal, before[0], weights(roles.actor)))
    assert not all(map(torch.equal, before[1], weights(roles.critic)))
    assert "loss/policy" not in report.metrics and "loss/value" in report.metrics


@pytest.mark.parametrize(("estimator", "function"), [("k2", kl_k2), ("k3", kl_k3)])
def test_the_kl_may_be_a_term_of_the_loss(
    estimator: Any,
    function: Any,
    world: World,
    paths: dict[str, str],
) -> None:
    config = replace(ALGORITHM, kl_in="loss", kl_estimator=estimator)
    roles, rollout = build(world, paths, algorithm=config)
    experience, layout = collect(rollout)
    mask = experience.sequences.response_mask
    last = torch.zeros_like(mask).scatter(1, (mask * torch.arange(mask.shape[1])).argmax(1)[:, None], True)
    assert (experience.rewards[mask & ~last] == 0).all(), "no penalty in the reward"
    indices = layout.mini_batches[0][0]
    mini_batch = MiniBatch(layout.counts[0], layout.sizes[0], kl_coef=0.3)
    loss, current = PolicyLoss(roles.actor, PPO(config), temperature=0.8, max_tokens=10)(
        experience, indices, mini_batch
    )
    plain = PolicyLoss(roles.actor, PPO(replace(config, kl_in="reward")), temperature=0.8, max_tokens=10)
    without, _ = plain(experience, indices, mini_batch)
    rows = torch.tensor(indices)
    reference = experience.ref_logprobs[rows, : current.shape[1]]
    kl = masked_sum(function(current, ref_logprobs=reference), mask=mask[rows, : current.shape[1]])
    torch.testing.assert_close(loss.total - without.total, 0.3 * kl, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss.stats["kl"], kl, atol=1e-5, rtol=1e-4)
    assert float(kl) > 0.01


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_loss_may_be_a_mean_over_the_tokens_that_a_correction_keeps(
    epochs: int, world: World, paths: dict[str, str]
) -> None:
    config = replace(ALGORITHM, epochs=epochs, sampler_correction="mask", kl_in="loss", kl_estimator="k2")
    found = []
    for counts in (True, False):
        learned = replace(config, masked_tokens_count=counts)
        roles, rollout = build(world, paths, algorithm=learned)
        experience, layout = collect(rollout, mini_batches=1)
        mask = experience.sequences.response_mask
        dropped = mask & (torch.arange(mask.shape[1]) % 3 == 0)
        drawn = experience.sequences.drawn_logprobs - 5.0 * dropped  # ratios of exp(5), and of 1
        sequences = replace(experience.sequences, drawn_logprobs=drawn)
        experience = replace(experience, sequences=sequences, advantages=1.0 * mask)
        report = Updater(roles, PPO(learned), rollout=SAMPLING).update(experience, [layout])
        found.append(report.metrics["loss/policy"])
        assert report.metrics["rollout/correction_mean"] == pytest.approx(
            1 - float(dropped.sum() / mask.sum()), abs=1e-4
        )
    kept = 1 - float(dropped.sum()) / float(mask.sum())
    assert 0.3 < kept < 0.9 and found == pytest.approx([-kept, -1.0], abs=1e-4)


def test_the_log_ratio_is_no_loss() -> None:
    with pytest.raises(UserError, match="take k2 or k3"):
        AlgorithmConfig(kl_in="loss")


def test_rewards_and_advantages_are_whitened_as_asked(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths)
    sequences = collect(rollout)[0].sequences
    layout = rollout.layout(sequences, step=1, epoch=0, mini_batches=1)
    scored = rollout.score(rollout.rate(PROMPTS, sequences), layout)
    mask = sequences.response_mask

    def experience(**changes: Any) -> Any:
        rollout._algorithm = PPO(replace(ALGORITHM, **changes))
        return rollout.experience(scored, kl_coef=0.1)

    plain = experience(whiten_advantages=False)
    for unbiased in (True, False):
        found = experience(whiten_advantages=False, whiten_rewards=True, whiten_unbiased=unbiased)
        expected = plain.rewards[mask] / plain.rewards[mask].std(correction=int(unbiased))
        shift = plain.rewards[mask].mean() - expected.mean()
        torch.testing.assert_close(found.rewards[mask], expected + shift, atol=1e-4, rtol=1e-4)
        for shifted in (True, False):
            found = experience(whiten_shift_mean=shifted, whiten_unbiased=unbiased)
            values = plain.advantages[mask]
            expected = (values - values.mean()) / values.std(correction=int(unbiased))
            expected = expected if shifted else expected + values.mean()
            torch.testing.assert_close(found.advantages[mask], expected, atol=1e-4, rtol=1e-4)


def test_penalties_and_scaling_reach_the_last_reward(world: World, paths: dict[str, str]) -> None:
    config = replace(ALGORITHM, length_penalty=0.25, score_clip=None, score_scaling="running", whiten_advantages=False)
    _, rollout = build(world, paths, algorithm=config)
    sequences = collect(rollout)[0].sequences
    layout = rollout.layout(sequences, step=1, epoch=0, mini_batches=1)
    scored = rollout.score(rollout.rate(PROMPTS, sequences), layout)
    lengths = sequences.response_mask.sum(dim=1)
    torch.testing.assert_close(scored.rated.penalties, 0.25 * lengths + 0.5 * (~sequences.stopped))
    rollout.scaling = ScoreScaling("running")
    experience = rollout.experience(scored, kl_coef=0.0)
    scaled = (scored.rated.scores - scored.rated.scores.mean()) / scored.rated.scores.std()
    torch.testing.assert_close(experience.rewards.sum(dim=1), scaled - scored.rated.penalties, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(experience.scores, scored.rated.scores - scored.rated.penalties)


def test_scaling_knows_all_scores_so_far_and_comes_back_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(size) * 3 + 5 for size in (1, 7, 30)]
    running = ScoreScaling("running")
    for number, part in enumerate(parts):
        seen = torch.cat(parts[: number + 1])
        expected = (part - seen.mean()) / (seen.std() if len(seen) > 1 else 1.0)
        torch.testing.assert_close(running(part), expected, atol=1e-5, rtol=1e-4)
    initial = ScoreScaling("initial")
    assert initial.needs_first_answers
    initial.observe(parts[2])
    again = ScoreScaling("initial")
    again.load_state_dict(initial.state_dict())
    assert not again.needs_first_answers
    torch.testing.assert_close(again(parts[1]), (parts[1] - parts[2].mean()) / parts[2].std())
    assert ScoreScaling("none")(parts[0]) is parts[0] and ScoreScaling("none").metrics() == {}


def test_the_reference_may_follow_the_actor(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths)
    experience, layout = collect(rollout)
    assert roles.reference is not None and float(experience.kl.abs().max()) > 0
    Updater(roles, PPO(ALGORITHM), rollout=SAMPLING).update(experience, [layout])
    copy_weights(roles.actor.lm, roles.reference.lm)
    followed, _ = collect(rollout)
    assert float(followed.kl.abs().max()) == 0


@pytest.mark.parametrize("keep", [False, True])
def test_an_averaged_actor_generates_with_its_own_weights(
    keep: bool,
    world: World,
    paths: dict[str, str],
) -> None:
    roles, rollout = build(world, paths)
    roles.actor._rollout = replace(roles.actor._rollout, keep_weights=keep)
    average = WeightAverage(roles.actor.module, decay=0.999999)
    experience, layout = collect(rollout)
    Updater(roles, PPO(ALGORITHM), rollout=SAMPLING).update(experience, [layout])
    moved, _ = collect(rollout)
    with average.applied(), roles.actor.other_weights():
        averaged, _ = collect(rollout)
    again, _ = collect(rollout)
    assert torch.equal(averaged.sequences.input_ids, experience.sequences.input_ids)
    assert torch.equal(again.sequences.input_ids, moved.sequences.input_ids)
    assert not torch.equal(moved.sequences.sampled_logprobs, averaged.sequences.sampled_logprobs)
