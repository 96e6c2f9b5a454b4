"""The details that are keys: each does what its key says, and nothing where it is off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.configs.algorithms import RAFTConfig, VAPOConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig, KLConfig, PenaltiesConfig, RejectionConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.partition import copy_weights
from hybrid_rlhf.functional.losses import kl_k2, kl_k3
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.rl.algorithms.ppo import PPO
from hybrid_rlhf.rl.algorithms.raft import RAFT
from hybrid_rlhf.rl.algorithms.vapo import VAPO
from hybrid_rlhf.rl.metrics import rollout_metrics
from hybrid_rlhf.rl.rewards import Reward
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling, estimate_advantages
from hybrid_rlhf.rl.rollouts.collector import Collector
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.rl.types import Batch
from hybrid_rlhf.rl.updates.policy_loss import MiniBatch, PolicyLoss
from hybrid_rlhf.rl.updates.updater import Progress, Updater, UpdateReport
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.world import World
from tests.support.ahead import rollout_line
from tests.support.ranks import run_main
from tests.support.rewards import Judge
from tests.support.rl import ALGORITHM, PROMPTS, SAMPLING, collect, sample_and_score, scaled, score
from tests.support.steps import write_rows


def weights(engine: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def test_a_single_update_reads_the_actor_once(world: World, build: Any) -> None:
    once = replace(ALGORITHM, epochs=1)
    parts = build(algorithm=once)
    forwards: list[int] = []
    parts.roles.actor.module.register_forward_hook(lambda *_: forwards.append(1))
    batch, plan = collect(parts)
    assert len(forwards) == 1, "the check after the weight sync; scoring does not read the actor"
    forwards.clear()
    torch.testing.assert_close(batch.rollout.old_logprobs, batch.rollout.sampled_logprobs, atol=0, rtol=0)
    slow = build(algorithm=ALGORITHM)
    expected, _ = score(slow, batch.rollout)
    report = parts.updater.update(batch, [plan])
    assert len(forwards) == len(plan.mini_batches(world)[0])
    torch.testing.assert_close(report.batch.rollout.old_logprobs, expected.old_logprobs, atol=0, rtol=0)
    assert report.metrics["val/ratio"] == 1 and report.metrics["policy/approxkl"] == 0
    assert 0 < rollout_metrics(report.batch, world)["rollout/logprob_abs_diff_mean"] < 1e-5


def test_a_learning_rate_of_zero_never_moves_the_ratio(build: Any) -> None:
    parts = build(algorithm=replace(ALGORITHM, epochs=3, mini_batches=2))
    for group in parts.roles.actor._engine.optimizer.param_groups:
        group["lr"] = 0.0
    batch, plan = collect(parts, mini_batches=2)
    parts.roles.actor._engine.lr_scheduler = None
    report = parts.updater.update(batch, [plan] * 3)
    assert report.metrics["policy/approxkl"] == 0 and report.metrics["val/ratio"] == 1


def test_the_ratio_of_a_token_is_that_of_its_last_update(world: World, build: Any) -> None:
    parts = build(algorithm=replace(ALGORITHM, epochs=2, mini_batches=2))
    batch, plan = collect(parts, mini_batches=2)
    rollout, mask = batch.rollout, batch.rollout.response_mask
    expected = torch.full_like(rollout.old_logprobs, torch.nan)

    def score_again(progress: Progress) -> None:
        rows, now = plan.rows_of(progress.updates % 2), parts.scorer.compute_logprobs(rollout, plan).old_logprobs
        expected[rows] = (now - rollout.old_logprobs)[rows].exp()

    report = parts.updater.update(batch, [plan] * 2, keeps_ratios=True, between=score_again)
    torch.testing.assert_close(report.ratios[mask], expected[mask], atol=1e-5, rtol=1e-5)
    assert (report.ratios[mask] - 1).abs().max() > 1e-3

    resumed = Progress(world.device)
    resumed.updates = 1
    report = parts.updater.update(batch, [plan], keeps_ratios=True, progress=resumed)
    assert report.ratios[plan.rows_of(0)].isnan().all(), "this process made no update of these rows"
    assert report.ratios[plan.rows_of(1)].isfinite().all()
    assert parts.updater.update(batch, [plan]).ratios is None


def test_passes_end_when_the_policy_has_gone_too_far(build: Any) -> None:
    updates = {}
    for target in (None, 1e-9, 1e9):
        parts = build(algorithm=replace(ALGORITHM, target_kl=target))
        batch, plan = collect(parts)
        report = parts.updater.update(batch, [plan] * 4)
        updates[target] = report.metrics["rollout/updates"]
    assert updates == {None: 4, 1e-9: 2, 1e9: 4}, "the first mini-batch has an approxkl of exactly 0"


def test_a_warm_up_moves_the_critic_alone(build: Any) -> None:
    parts = build()
    batch, plan = collect(parts)
    before = weights(parts.roles.actor), weights(parts.roles.critic)
    report = parts.updater.update(batch, [plan], train_actor=False)
    assert all(map(torch.equal, before[0], weights(parts.roles.actor)))
    assert not all(map(torch.equal, before[1], weights(parts.roles.critic)))
    assert "loss/policy" not in report.metrics and "loss/value" in report.metrics
    index = plan.index
    actor, critic = (
        role.operations.of_rows(index.lengths, head_tokens=float(index.responses.sum()))
        for role in (parts.roles.actor, parts.roles.critic)
    )
    assert 0 < report.operations == critic < actor, "what the utilisation of the GPUs counts"
    assert parts.updater.update(batch, [plan] * 2).operations == 2 * (actor + critic)


@pytest.mark.parametrize(("estimator", "function"), [("k2", kl_k2), ("k3", kl_k3)])
def test_the_kl_may_be_a_term_of_the_loss(
    estimator: Any,
    function: Any,
    world: World,
    build: Any,
) -> None:
    config = replace(ALGORITHM, kl=KLConfig(where="loss", estimator=estimator))
    parts = build(algorithm=config)
    batch, plan = collect(parts)
    mask = batch.rollout.response_mask
    last = torch.zeros_like(mask).scatter(1, (mask * torch.arange(mask.shape[1])).argmax(1)[:, None], True)
    assert (batch.rewards[mask & ~last] == 0).all(), "no penalty in the reward"
    indices = plan.mini_batches(world)[0][0]
    mini_batch = MiniBatch(plan.tokens[0], plan.sequences[0], kl_coef=0.3)
    loss, current = parts.updater.policy_loss(batch.rows(indices), mini_batch)
    plain = PolicyLoss(parts.roles.actor, PPO(replace(config, kl=KLConfig())), temperature=0.8, max_tokens=10)
    without, _ = plain(batch.rows(indices), mini_batch)
    rows = torch.tensor(indices)
    reference = batch.rollout.ref_logprobs[rows, : current.shape[1]]
    kl = masked_sum(function(current, ref_logprobs=reference), mask=mask[rows, : current.shape[1]])
    torch.testing.assert_close(loss.total - without.total, 0.3 * kl, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss.stats["kl"], kl, atol=1e-5, rtol=1e-4)
    assert float(kl) > 0.01


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_loss_may_be_a_mean_over_the_tokens_that_a_correction_keeps(epochs: int, build: Any) -> None:
    kl = KLConfig(where="loss", estimator="k2")
    found = []
    for counts in (True, False):
        correction = CorrectionConfig(method="mask", count_masked=counts)
        learned = replace(ALGORITHM, epochs=epochs, correction=correction, kl=kl)
        parts = build(algorithm=learned)
        batch, plan = collect(parts, mini_batches=1)
        mask = batch.rollout.response_mask
        dropped = mask & (torch.arange(mask.shape[1]) % 3 == 0)
        drawn = batch.rollout.drawn_logprobs - 5.0 * dropped  # ratios of exp(5), and of 1
        rollout = replace(batch.rollout, drawn_logprobs=drawn)
        batch = replace(batch, rollout=rollout, advantages=1.0 * mask)
        report = parts.updater.update(batch, [plan])
        found.append(report.metrics["loss/policy"])
        assert report.metrics["rollout/correction_mean"] == pytest.approx(
            1 - float(dropped.sum() / mask.sum()), abs=1e-4
        )
    kept = 1 - float(dropped.sum()) / float(mask.sum())
    assert 0.3 < kept < 0.9 and found == pytest.approx([-kept, -1.0], abs=1e-4)


def test_a_rejected_completion_has_no_gradient(world: World, build: Any) -> None:
    correction = CorrectionConfig(clip=10.0, reject=RejectionConfig(high=1.05))
    learned = replace(ALGORITHM, correction=correction, kl=None)
    parts = build(algorithm=learned)
    batch, plan = collect(parts)
    rows, mini_batch = plan.mini_batches(world)[0][0], MiniBatch(plan.tokens[0], plan.sequences[0])
    mask = batch.rollout.response_mask
    apart = torch.zeros(len(mask), 1)
    apart[rows[0]] = 0.1  # a geometric mean of exp(0.1)
    rollout = replace(batch.rollout, drawn_logprobs=batch.rollout.old_logprobs - apart * mask)
    batch = replace(batch, rollout=rollout, advantages=1.0 * mask)
    policy_loss = parts.updater.policy_loss
    loss, _ = policy_loss(batch.rows(rows), mini_batch)
    kept = float(mask[rows[1:]].sum())
    assert float(loss.total.detach()) == pytest.approx(-kept, abs=1e-3)
    assert float(loss.stats["correction_cut"]) == float(mask[rows[0]].sum())
    for name in ("correction", "correction_squares"):
        assert float(loss.stats[name]) == pytest.approx(kept, abs=1e-3)
    assert torch.equal(policy_loss.kept(batch.rollout).any(dim=1), apart[:, 0] == 0)


def test_the_entropy_bonus_is_the_entropy_of_the_whole_distribution(world: World, build: Any) -> None:
    parts = build()
    batch, plan = collect(parts)
    indices, mini_batch = plan.mini_batches(world)[0][0], MiniBatch(plan.tokens[0], plan.sequences[0])
    totals = [
        PolicyLoss(parts.roles.actor, PPO(replace(ALGORITHM, entropy_coef=coef)), temperature=0.8, max_tokens=10)(
            batch.rows(indices), mini_batch
        )[0].total
        for coef in (0.0, 0.25)
    ]
    rows = batch.rollout.rows(indices)
    logits = parts.roles.actor.lm(input_ids=rows.input_ids, attention_mask=rows.attention_mask.long()).logits / 0.8
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    expected = 0.25 * masked_sum(entropy.detach(), mask=rows.response_mask[:, 1:])
    assert float(expected) > 1
    torch.testing.assert_close((totals[0] - totals[1]).detach(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("counts_masked", [None, True, False])
def test_tokens_of_positive_scores_are_made_likelier_by_their_mean(
    counts_masked: bool | None, world: World, build: Any
) -> None:
    """VAPO's term: a mean over the positive tokens of the mini-batch, not of the micro-batch or of all tokens; a token
    that a correction masks has no gradient from it either."""
    correction = None if counts_masked is None else CorrectionConfig(method="mask", count_masked=counts_masked)
    learned = VAPOConfig(positive_coef=0.3, correction=correction)
    parts = build(algorithm=ALGORITHM)
    batch, plan = collect(parts)
    rollout, mask = batch.rollout, batch.rollout.response_mask
    scores = torch.linspace(-1, 1, len(mask))
    # every third token was drawn with half its probability or less: a weight above clip
    drawn = rollout.old_logprobs - 0.75 * (torch.arange(mask.shape[1]) % 3 == 0)
    rollout = replace(rollout, scores=scores, drawn_logprobs=drawn if correction else rollout.drawn_logprobs)
    batch = replace(batch, rollout=rollout, advantages=torch.zeros_like(batch.advantages))
    kept = mask if correction is None else mask & (torch.arange(mask.shape[1]) % 3 != 0)
    updater = Updater(parts.roles, VAPO(learned), rollout=SAMPLING)
    total, expected = 0.0, 0.0
    for mini_batch in updater._mini_batches(batch, [plan], 0.0, None):
        rows = [row for row in mini_batch.rows if scores[row] > 0]
        positive = int((mask if counts_masked else kept)[rows].sum())
        assert mini_batch.inputs.extra_tokens == positive > 0
        for indices in mini_batch.micro_batches[parts.roles.actor.world]:
            local = mini_batch.local(indices)
            loss, current = updater.policy_loss(local, mini_batch.inputs)
            total += float(loss.total.detach()) / mini_batch.inputs.tokens
            assert local.rollout.scores is not None
            wanted = local.rollout.response_mask & (local.rollout.scores > 0)[:, None]
            if correction is not None:
                wanted &= torch.arange(wanted.shape[1]) % 3 != 0
            expected -= 0.3 * float(current[wanted].sum()) / positive
    assert total == pytest.approx(expected, rel=1e-4) and expected > 0.5


@pytest.mark.parametrize("limit", [0.0, 0.01])
def test_a_gradient_is_scaled_down_to_its_limit(limit: float, world: World, paths: dict[str, str]) -> None:
    """AdamW with lr and eps of 10^6 each subtracts the gradient."""
    optimizer = OptimizerConfig(lr=1e6, eps=1e6, schedule="constant", warmup_fraction=0.0, max_grad_norm=limit)
    critic = build_engine(EngineSpec("critic", paths["reward"], ModelConfig(), ZeroConfig(), 0, optimizer), world)
    before = torch.cat([p.detach().double().flatten() for p in critic.lm.parameters()])
    ids = torch.tensor([[5, 6, 7, 8]])
    critic.backward(critic(ids, torch.ones_like(ids, dtype=torch.bool)).square().sum(), count=1.0)
    norm = critic.step().grad_norm
    moved = before - torch.cat([p.detach().double().flatten() for p in critic.lm.parameters()])
    assert norm is not None and norm > 0.1
    assert float(moved.norm()) == pytest.approx(limit or norm, rel=1e-2)


def test_rewards_and_advantages_are_whitened_as_asked(world: World, build: Any) -> None:
    parts = build()
    rollout, _ = sample_and_score(parts)
    mask = rollout.response_mask

    def estimated(**changes: Any) -> Batch:
        learner = PPO(replace(ALGORITHM, **changes))
        return estimate_advantages(rollout, learner, scaling=parts.scaling, kl_coef=0.1, world=world)

    plain = estimated(whiten_advantages=False)
    for unbiased in (True, False):
        found = estimated(whiten_advantages=False, whiten_rewards=True, whiten_unbiased=unbiased)
        expected = plain.rewards[mask] / plain.rewards[mask].std(correction=int(unbiased))
        shift = plain.rewards[mask].mean() - expected.mean()
        torch.testing.assert_close(found.rewards[mask], expected + shift, atol=1e-4, rtol=1e-4)
        for shifted in (True, False):
            found = estimated(whiten_shift_mean=shifted, whiten_unbiased=unbiased)
            values = plain.advantages[mask]
            expected = (values - values.mean()) / values.std(correction=int(unbiased))
            expected = expected if shifted else expected + values.mean()
            torch.testing.assert_close(found.advantages[mask], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("updates", [1, 2])
def test_truncated_completions_are_left_out_of_updates_and_of_nothing_else(
    updates: int, world: World, build: Any
) -> None:
    """algorithm.mask_truncated: the weights of updates without these rows, bit for bit, and the metrics and samples of
    all; they were those of the others, and no completion was ever truncated."""

    def updated(*, masks: bool, cut: bool) -> tuple[Any, Batch, UpdateReport]:
        parts = build(algorithm=replace(ALGORITHM, mini_batches=updates, mask_truncated=masks, epochs=1))
        rollout, scoring = sample_and_score(parts)
        rollout = replace(rollout, stopped=torch.arange(len(rollout)) % 3 != 0)
        batch = parts.estimate(rollout, kl_coef=0.1)
        if cut:
            batch = batch.rows(rollout.stopped.nonzero().flatten().tolist())
        if masks:
            with pytest.raises(ValueError, match="plan the batch's rollout"):
                parts.updater.update(batch, [scoring])
        plan = parts.planner.plan(batch.rollout, mini_batches=updates)
        return parts, batch, parts.updater.update(batch, [plan], keeps_ratios=True)

    parts, batch, report = updated(masks=True, cut=False)
    of_cut, cut, cut_report = updated(masks=False, cut=True)
    for role in ("actor", "critic"):
        learned = [weights(getattr(of.roles, role)) for of in (parts, of_cut)]
        assert all(torch.equal(now, expected) for now, expected in zip(*learned, strict=True))
    assert report.metrics == cut_report.metrics and report.trained_tokens == cut_report.trained_tokens
    _, every, every_report = updated(masks=False, cut=False)
    assert torch.equal(batch.advantages, every.advantages) and len(batch) == len(every) > len(cut)
    expected, found = (rollout_metrics(of.batch, world) for of in (every_report, report))
    assert found == pytest.approx(expected, abs=1e-5)
    assert found["completions/clipped_ratio"] == 3 / 8
    if report.ratios is not None:
        assert report.ratios[~batch.rollout.stopped].isnan().all()


@pytest.mark.slow
def test_a_step_of_truncated_completions_alone_is_reported(model_folder: Path, tmp_path: Path) -> None:
    """It makes no update, and its metrics and samples say why."""
    rows, run = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    line = rollout_line(run, model_folder, rows, "--algorithm rloo --algorithm.mask_truncated true")
    line += "--rollout.sampling.max_new_tokens 3 --logging.samples_every 1 --train.max_steps 1".split()
    run_main("hybrid_rlhf.cli.rl", 1, line)
    (step,) = (line for line in read_lines(run / "metrics.jsonl") if line["step"])
    assert step["completions/clipped_ratio"] == 1 and step["completions/mean_length"] == 3
    assert "objective/scores" in step and "loss/policy" not in step
    assert len(read_lines(run / "samples.jsonl")) == 2 * 4


def test_penalties_and_scaling_reach_the_last_reward(world: World, build: Any) -> None:
    config = replace(
        ALGORITHM,
        penalties=PenaltiesConfig(missing_eos=0.5, length=0.25),
        score_clip=None,
        score_scaling="running",
        whiten_advantages=False,
    )
    parts = build(algorithm=config)
    rollout, _ = sample_and_score(parts)
    lengths = rollout.response_mask.sum(dim=1)
    assert rollout.scores is not None and rollout.penalties is not None
    penalties = 0.25 * lengths + 0.5 * (~rollout.stopped)
    torch.testing.assert_close(rollout.penalties, penalties * rollout.scores.std(), atol=1e-5, rtol=1e-4)
    batch = estimate_advantages(rollout, parts.algorithm, scaling=parts.scaling, kl_coef=0.0, world=world)
    scaled = (rollout.scores - rollout.scores.mean()) / rollout.scores.std()
    torch.testing.assert_close(batch.rewards.sum(dim=1), scaled - penalties, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(batch.rollout.penalized_scores, rollout.scores - rollout.penalties)
    before = parts.scaling.state_dict()
    parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=2), evaluates=True)
    assert parts.scaling.state_dict() == before, "scores of an evaluation do not count"


def test_what_an_algorithm_selects_from_is_scaled_and_counted(world: World, build: Any) -> None:
    """A penalty of one scaled score is one standard deviation of the scores where completions are ranked, and running
    statistics are of all completions, also of those that are not selected."""
    penalties = PenaltiesConfig(missing_eos="auto")
    parts = build(
        algorithm=replace(ALGORITHM, penalties=penalties, score_scaling="running"), reward=Reward([Judge()], world)
    )
    sampled = parts.sampler.sample(PROMPTS, step=1)
    sampled = replace(sampled, stopped=torch.arange(len(sampled)) % 2 == 0)
    data, stream = Dataset.from_list(PROMPTS), RowStream(len(PROMPTS), epochs=1, seed=0)
    steps = StepStream(parts.sampler, prompts=data, stream=stream, per_step=4, total_steps=1)
    steps.take = lambda step: ([0, 1, 2, 3], sampled)  # type: ignore[method-assign]
    for learner, expected in (
        (RAFT(RAFTConfig(penalties=penalties, score_scaling="running")), [0.0, 2.0, 4.0, 6.0]),
        (RAFT(RAFTConfig(penalties=penalties, score_scaling="running", select_above=3.0)), [4.0, 6.0]),
    ):
        parts.scaling.load_state_dict(ScoreScaling("running").state_dict())
        rollout = Collector(steps, parts.scorer, learner).collect(1)
        assert rollout.scores is not None and rollout.scores.tolist() == expected
        every = torch.arange(8.0)
        assert parts.scaling.metrics()["objective/scaling_mean"] == every.mean()
        assert parts.scaling.metrics()["objective/scaling_std"] == pytest.approx(float(every.std()))
        assert rollout.metrics["objective/scores"] == pytest.approx(float(every.mean() - every.std() / 2))


def test_scaling_knows_all_scores_so_far_and_comes_back_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(size) * 3 + 5 for size in (1, 7, 30)]
    running = ScoreScaling("running")
    for number, part in enumerate(parts):
        seen = torch.cat(parts[: number + 1])
        expected = (part - seen.mean()) / (seen.std() if len(seen) > 1 else 1.0)
        torch.testing.assert_close(scaled(running, part), expected, atol=1e-5, rtol=1e-4)
    initial = ScoreScaling("initial")
    assert initial.needs_initial_scores
    initial.observe(parts[2])
    again = ScoreScaling("initial")
    again.load_state_dict(initial.state_dict())
    assert not again.needs_initial_scores
    torch.testing.assert_close(again.scaled(parts[1]), (parts[1] - parts[2].mean()) / parts[2].std())
    assert ScoreScaling("none").scaled(parts[0]) is parts[0] and ScoreScaling("none").metrics() == {}


def test_the_reference_may_follow_the_actor(build: Any) -> None:
    parts = build()
    batch, plan = collect(parts)
    assert parts.roles.reference is not None and float(batch.rollout.kl.abs().max()) > 0
    parts.updater.update(batch, [plan])
    copy_weights(parts.roles.actor.lm, parts.roles.reference.lm)
    followed, _ = collect(parts)
    assert float(followed.rollout.kl.abs().max()) == 0


@pytest.mark.parametrize("keep", [False, True])
def test_an_averaged_actor_generates_with_its_own_weights(
    keep: bool,
    build: Any,
) -> None:
    parts = build()
    parts.roles.actor._rollout = replace(parts.roles.actor._rollout, keep_weights=keep)
    average = WeightAverage(parts.roles.actor.module, decay=0.999999)
    batch, plan = collect(parts)
    parts.updater.update(batch, [plan])
    moved, _ = collect(parts)
    with average.applied(), parts.roles.actor.other_weights():
        averaged, _ = collect(parts)
    again, _ = collect(parts)
    assert torch.equal(averaged.rollout.input_ids, batch.rollout.input_ids)
    assert torch.equal(again.rollout.input_ids, moved.rollout.input_ids)
    assert not torch.equal(moved.rollout.sampled_logprobs, averaged.rollout.sampled_logprobs)
