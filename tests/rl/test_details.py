"""The details that are keys: each does what its key says, and nothing where it is off."""

from __future__ import annotations

import math
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
from hybrid_rlhf.functional.losses import kl_k2, kl_k3
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.models.packing import prefixes
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
    parts = build(algorithm=replace(ALGORITHM, epochs=1))
    forwards: list[int] = []
    parts.roles.actor.module.register_forward_hook(lambda *_: forwards.append(1))
    batch, plan = collect(parts)
    assert len(forwards) == 1, "the check after the weight sync; scoring does not read the actor"
    assert torch.equal(batch.rollout.old_logprobs, batch.rollout.sampled_logprobs)
    expected, _ = score(build(), batch.rollout)
    report = parts.updater.update(batch, [plan])
    assert len(forwards) == 1 + len(plan.mini_batches(world)[0])
    assert torch.equal(report.batch.rollout.old_logprobs, expected.old_logprobs)
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

    def score_again(batch: Batch, progress: Progress) -> None:
        rows, now = plan.rows_of(progress.updates % 2), parts.scorer.compute_logprobs(rollout, plan).old_logprobs
        expected[rows] = (now - rollout.old_logprobs)[rows].exp()

    report = parts.updater.update(batch, [plan] * 2, keeps_ratios=True, between=score_again)
    torch.testing.assert_close(report.ratios[mask], expected[mask], atol=1e-5, rtol=1e-5)
    assert (report.ratios[mask] - 1).abs().max() > 1e-3
    resumed = Progress(world.device)
    resumed.updates = 1
    ratios = parts.updater.update(batch, [plan], keeps_ratios=True, progress=resumed).ratios
    assert ratios[plan.rows_of(0)].isnan().all(), "this process made no update of these rows"
    assert ratios[plan.rows_of(1)].isfinite().all()


class Interrupted(Exception):
    """The end of a step that a checkpoint holds."""


@pytest.mark.parametrize("stop", [None, 0, 1, 3])
def test_the_first_update_gives_its_own_old_log_probs(build: Any, stop: int | None) -> None:
    """A pass over its rows would compute the same; later epochs read them, also in a step that is resumed."""

    def interrupt(batch: Batch, progress: Progress) -> None:
        if progress.updates == stop:
            raise Interrupted(batch)

    results = []
    for defers in (False, True):
        parts = build(algorithm=replace(ALGORITHM, kl=KLConfig(where="loss", estimator="k3"), mini_batches=2))
        rollout = parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=1))
        plan = parts.planner.plan(rollout, step=1, mini_batches=2)
        forwards: list[int] = []
        hook = parts.roles.actor.module.register_forward_hook(lambda *_, made=forwards: made.append(1))
        batch = parts.estimate(parts.scorer.compute_logprobs(rollout, plan, defers=defers), kl_coef=0.1)
        hook.remove()
        progress = Progress(parts.roles.world.device)
        try:
            report = parts.updater.update(batch, [plan] * 2, kl_coef=0.1, progress=progress, between=interrupt)
        except Interrupted as end:
            report = parts.updater.update(end.args[0], [plan] * 2, kl_coef=0.1, progress=progress)
        old = report.batch.rollout.old_logprobs
        results.append((report.metrics, len(forwards), [old, *weights(parts.roles.actor)]))
    (metrics, passes, tensors), (deferred_metrics, deferred_passes, deferred_tensors) = results
    assert metrics == deferred_metrics and deferred_passes * 2 == passes
    assert all(torch.equal(a, b) for a, b in zip(tensors, deferred_tensors, strict=True))


def test_the_sampler_may_give_the_old_log_probs(build: Any) -> None:
    """No pass of the actor before the updates, and ratios relative to the sampler's log-probs, which are compared."""
    parts = build(algorithm=replace(ALGORITHM, mini_batches=2, old_logprobs="sampler"))
    rollout = parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=1))
    rollout = replace(rollout, sampled_logprobs=rollout.sampled_logprobs - 0.25 * rollout.response_mask)
    plan = parts.planner.plan(rollout, step=1, mini_batches=2)
    hook = parts.roles.actor.module.register_forward_hook(pytest.fail)
    read = parts.scorer.compute_logprobs(rollout, plan)
    hook.remove()
    assert torch.equal(read.old_logprobs, rollout.sampled_logprobs) and read.entropy is None
    batch = parts.estimate(read, kl_coef=0.1)
    ratios: list[float] = []
    report = parts.updater.update(
        batch, [plan], between=lambda _, progress: ratios.append(float(progress.sums["policy"].total("ratio")))
    )
    tokens = plan.tokens[0]
    assert ratios[1] / tokens == pytest.approx(math.exp(0.25), rel=1e-5)
    assert report.metrics["rollout/logprob_abs_diff_mean"] == pytest.approx(0.25, rel=1e-4)
    assert torch.equal(report.batch.rollout.old_logprobs, rollout.sampled_logprobs)


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
    learners = (parts.roles.actor, parts.roles.critic)
    before = [weights(role) for role in learners]
    report = parts.updater.update(batch, [plan], train_actor=False)
    moved = [not all(map(torch.equal, was, weights(role))) for was, role in zip(before, learners, strict=True)]
    assert moved == [False, True] and "loss/policy" not in report.metrics and "loss/value" in report.metrics
    index = plan.index
    tokens = float(index.responses.sum())
    actor, critic = (role.operations.of_rows(index.lengths, head_tokens=tokens) for role in learners)
    assert 0 < report.operations == critic < actor, "what the utilisation of the GPUs counts"
    assert parts.updater.update(batch, [plan] * 2).operations == 2 * (actor + critic)


@pytest.mark.parametrize(("estimator", "function"), [("k2", kl_k2), ("k3", kl_k3)])
def test_the_kl_may_be_a_term_of_the_loss(estimator: Any, function: Any, build: Any) -> None:
    config = replace(ALGORITHM, kl=KLConfig(where="loss", estimator=estimator))
    parts = build(algorithm=config)
    batch, _ = collect(parts)
    assert batch.rewards.ne(0).sum(dim=1).max() == 1, "no penalty in the reward"
    mini_batch = MiniBatch(1.0, 1.0, kl_coef=0.3)
    loss, current = parts.updater.policy_loss(batch, mini_batch)
    plain = PolicyLoss(parts.roles.actor, PPO(replace(config, kl=KLConfig())), temperature=0.8, max_tokens=10)
    without, _ = plain(batch, mini_batch)
    kl = masked_sum(function(current, ref_logprobs=batch.rollout.ref_logprobs), mask=batch.rollout.response_mask)
    torch.testing.assert_close(loss.total - without.total, 0.3 * kl, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss.stats["kl"], kl, atol=1e-5, rtol=1e-4)
    assert float(kl) > 0.01


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_loss_may_be_a_mean_over_the_tokens_that_a_correction_keeps(epochs: int, build: Any) -> None:
    found = []
    for counts in (True, False):
        correction = CorrectionConfig(method="mask", count_masked=counts)
        kl = KLConfig(where="loss", estimator="k2")
        parts = build(algorithm=replace(ALGORITHM, epochs=epochs, correction=correction, kl=kl))
        batch, plan = collect(parts, mini_batches=1)
        mask = batch.rollout.response_mask
        dropped = mask & (torch.arange(mask.shape[1]) % 3 == 0)
        drawn = batch.rollout.drawn_logprobs - 5.0 * dropped  # ratios of exp(5), and of 1
        batch = replace(batch, rollout=replace(batch.rollout, drawn_logprobs=drawn), advantages=1.0 * mask)
        metrics = parts.updater.update(batch, [plan]).metrics
        found.append(metrics["loss/policy"])
        kept = 1 - float(dropped.sum() / mask.sum())
        assert metrics["rollout/correction_mean"] == pytest.approx(kept, abs=1e-4)
    assert 0.3 < kept < 0.9 and found == pytest.approx([-kept, -1.0], abs=1e-4)


def test_a_rejected_completion_has_no_gradient(world: World, build: Any) -> None:
    correction = CorrectionConfig(clip=10.0, reject=RejectionConfig(high=1.05))
    parts = build(algorithm=replace(ALGORITHM, correction=correction, kl=None))
    batch, _ = collect(parts)
    mask = batch.rollout.response_mask
    apart = torch.zeros(len(mask), 1)
    apart[3] = 0.1  # a geometric mean of exp(0.1)
    rollout = replace(batch.rollout, drawn_logprobs=batch.rollout.old_logprobs - apart * mask)
    batch = replace(batch, rollout=rollout, advantages=1.0 * mask)
    loss, _ = parts.updater.policy_loss(batch.rows([3, 1]), MiniBatch(1.0, 1.0))
    kept = float(mask[1].sum())
    found = [float(loss.stats[f"correction{name}"]) for name in ("", "_squares", "_cut")]
    assert [-float(loss.total.detach()), *found] == pytest.approx([kept, kept, kept, float(mask[3].sum())], abs=1e-3)
    assert parts.updater.policy_loss.kept(rollout).any(dim=1).tolist() == [row != 3 for row in range(len(mask))]


def test_the_entropy_bonus_is_the_entropy_of_the_whole_distribution(build: Any) -> None:
    parts = build()
    batch, _ = collect(parts)
    plain, with_bonus = (
        PolicyLoss(parts.roles.actor, PPO(replace(ALGORITHM, entropy_coef=coef)), temperature=0.8, max_tokens=10)(
            batch, MiniBatch(1.0, 1.0)
        )[0].total
        for coef in (0.0, 0.25)
    )
    rows = batch.rollout
    logits = parts.roles.actor.lm(input_ids=rows.input_ids, attention_mask=rows.attention_mask.long()).logits / 0.8
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    expected = 0.25 * masked_sum(entropy, mask=rows.response_mask[:, 1:])
    assert float(expected.detach()) > 1
    torch.testing.assert_close(plain - with_bonus, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("counts_masked", [None, True, False])
def test_tokens_of_positive_scores_are_made_likelier_by_their_mean(
    counts_masked: bool | None, world: World, build: Any
) -> None:
    """VAPO's term: a mean over the positive tokens of the mini-batch, not of the micro-batch or of all tokens; a token
    that a correction masks has no gradient from it either."""
    correction = None if counts_masked is None else CorrectionConfig(method="mask", count_masked=counts_masked)
    parts = build()
    batch, plan = collect(parts)
    mask = batch.rollout.response_mask
    scores = torch.linspace(-1, 1, len(mask))
    kept = mask & (torch.arange(mask.shape[1]) % 3 != 0) if correction else mask
    drawn = batch.rollout.old_logprobs - 0.75 * (mask & ~kept)  # drawn with half the probability: a weight above clip
    rollout = replace(batch.rollout, scores=scores, drawn_logprobs=drawn)
    batch = replace(batch, rollout=rollout, advantages=0.0 * batch.advantages, selected=kept)  # to travel with its rows
    updater = Updater(parts.roles, VAPO(VAPOConfig(positive_coef=0.3, correction=correction)), rollout=SAMPLING)
    total, expected = 0.0, 0.0
    for mini_batch in updater._mini_batches(batch, plan, 0.0, None):
        rows = [row for row in mini_batch.rows if scores[row] > 0]
        positive = int((mask if counts_masked else kept)[rows].sum())
        assert mini_batch.inputs.extra_tokens == positive > 0
        for indices in mini_batch.micro_batches[parts.roles.actor.world]:
            local = mini_batch.local(indices)
            loss, current = updater.policy_loss(local, mini_batch.inputs)
            total += float(loss.total.detach()) / mini_batch.inputs.tokens
            wanted = local.rollout.response_mask & local.selected & (local.rollout.scores > 0)[:, None]  # type: ignore[operator]
            expected -= 0.3 * float(current[wanted].sum()) / positive
    assert total == pytest.approx(expected, rel=1e-4) and expected > 0.5


@pytest.mark.parametrize("limit", [0.0, 0.01])
def test_a_gradient_is_scaled_down_to_its_limit(limit: float, world: World, paths: dict[str, str]) -> None:
    """AdamW with lr and eps of 10^6 each subtracts the gradient."""
    optimizer = OptimizerConfig(lr=1e6, eps=1e6, schedule="constant", warmup_fraction=0.0, max_grad_norm=limit)
    critic = build_engine(EngineSpec("critic", paths["reward"], ModelConfig(), ZeroConfig(), 0, optimizer), world)
    before = weights(critic)
    ids = torch.tensor([[5, 6, 7, 8]])
    critic.backward(critic(ids, ids > 0).square().sum(), count=1.0)
    norm = critic.step().grad_norm
    moved = [was.double() - now for was, now in zip(before, weights(critic), strict=True)]
    assert norm is not None and norm > 0.1
    assert math.hypot(*(float(part.norm()) for part in moved)) == pytest.approx(limit or norm, rel=1e-2)


@pytest.mark.parametrize(("unbiased", "shifted"), [(True, True), (False, True), (True, False)])
def test_rewards_and_advantages_are_whitened_as_asked(unbiased: bool, shifted: bool, world: World, build: Any) -> None:
    parts = build()
    rollout, _ = sample_and_score(parts)
    mask = rollout.response_mask

    def estimated(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        learner = PPO(replace(ALGORITHM, **changes))
        batch = estimate_advantages(rollout, learner, scaling=parts.scaling, kl_coef=0.1, world=world)
        return batch.rewards[mask], batch.advantages[mask]

    def whitened(values: torch.Tensor, *, shifts: bool) -> torch.Tensor:
        return (values - values.mean()) / values.std(correction=int(unbiased)) + (0.0 if shifts else values.mean())

    rewards, advantages = estimated(whiten_advantages=False)
    of_rewards, _ = estimated(whiten_advantages=False, whiten_rewards=True, whiten_unbiased=unbiased)
    torch.testing.assert_close(of_rewards - of_rewards.mean(), whitened(rewards, shifts=True), atol=1e-4, rtol=1e-4)
    _, found = estimated(whiten_shift_mean=shifted, whiten_unbiased=unbiased)
    torch.testing.assert_close(found, whitened(advantages, shifts=shifted), atol=1e-4, rtol=1e-4)


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
    of_cut, _, cut_report = updated(masks=False, cut=True)
    for role in ("actor", "critic"):
        learned, expected = (weights(getattr(of.roles, role)) for of in (parts, of_cut))
        assert all(map(torch.equal, learned, expected))
    assert report.metrics == cut_report.metrics and report.trained_tokens == cut_report.trained_tokens
    _, every, every_report = updated(masks=False, cut=False)
    assert torch.equal(batch.advantages, every.advantages)
    of_all, found = (rollout_metrics(of.batch, world) for of in (every_report, report))
    assert found == pytest.approx(of_all, abs=1e-5) and found["completions/clipped_ratio"] == 3 / 8
    assert report.ratios is None or report.ratios[~batch.rollout.stopped].isnan().all()


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
    penalized = PenaltiesConfig(missing_eos=0.5, length=0.25)
    changes: dict[str, Any] = {"score_clip": None, "score_scaling": "running", "whiten_advantages": False}
    parts = build(algorithm=replace(ALGORITHM, penalties=penalized, **changes))
    rollout, _ = sample_and_score(parts)
    assert rollout.scores is not None and rollout.penalties is not None
    penalties = 0.25 * rollout.response_mask.sum(dim=1) + 0.5 * (~rollout.stopped)
    torch.testing.assert_close(rollout.penalties, penalties * rollout.scores.std(), atol=1e-5, rtol=1e-4)
    batch = parts.estimate(rollout, kl_coef=0.0)
    scaled = (rollout.scores - rollout.scores.mean()) / rollout.scores.std()
    torch.testing.assert_close(batch.rewards.sum(dim=1), scaled - penalties, atol=1e-5, rtol=1e-4)
    before = parts.scaling.state_dict()
    parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=2), evaluates=True)
    assert parts.scaling.state_dict() == before, "scores of an evaluation do not count"


@pytest.mark.parametrize(("least", "expected"), [(None, [0.0, 2.0, 4.0, 6.0]), (3.0, [4.0, 6.0])])
def test_what_an_algorithm_selects_from_is_scaled_and_counted(
    least: float | None, expected: list[float], world: World, build: Any
) -> None:
    """A penalty of one scaled score is one standard deviation of the scores where completions are ranked, and running
    statistics are of all completions, also of those that are not selected."""
    settings: dict[str, Any] = {"penalties": PenaltiesConfig(missing_eos="auto"), "score_scaling": "running"}
    parts = build(algorithm=replace(ALGORITHM, **settings), reward=Reward([Judge()], world))
    sampled = parts.sampler.sample(PROMPTS, step=1)
    sampled = replace(sampled, stopped=torch.arange(len(sampled)) % 2 == 0)
    data, stream = Dataset.from_list(PROMPTS), RowStream(len(PROMPTS), epochs=1, seed=0)
    steps = StepStream(parts.sampler, prompts=data, stream=stream, per_step=4, total_steps=1)
    steps.take = lambda step: ([0, 1, 2, 3], sampled)  # type: ignore[method-assign]
    rollout = Collector(steps, parts.scorer, RAFT(RAFTConfig(**settings, select_above=least))).collect(1)
    assert rollout.scores is not None and rollout.scores.tolist() == expected
    every = torch.arange(8.0)
    scaling = {"objective/scaling_mean": every.mean(), "objective/scaling_std": every.std()}
    assert parts.scaling.metrics() == pytest.approx({name: float(value) for name, value in scaling.items()})
    assert rollout.metrics["objective/scores"] == pytest.approx(float(every.mean() - every.std() / 2))


def test_scaling_knows_all_scores_so_far_and_comes_back_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(size) * 3 + 5 for size in (1, 7, 30)]
    running = ScoreScaling("running")
    for number, part in enumerate(parts):
        seen = torch.cat(parts[: number + 1])
        expected = (part - seen.mean()) / (seen.std() if len(seen) > 1 else 1.0)
        torch.testing.assert_close(scaled(running, part), expected, atol=1e-5, rtol=1e-4)
    initial, again = ScoreScaling("initial"), ScoreScaling("initial")
    initial.observe(parts[2])
    assert again.needs_initial_scores
    again.load_state_dict(initial.state_dict())
    assert not again.needs_initial_scores
    torch.testing.assert_close(again.scaled(parts[1]), (parts[1] - parts[2].mean()) / parts[2].std())


@pytest.mark.parametrize("keep", [False, True])
def test_an_averaged_actor_generates_with_its_own_weights(keep: bool, build: Any) -> None:
    parts = build()
    actor = parts.roles.actor
    actor._rollout = replace(actor._rollout, keep_weights=keep)
    average = WeightAverage(actor.module, decay=0.999999)
    batch, plan = collect(parts)
    parts.updater.update(batch, [plan])
    moved = sample_and_score(parts)[0].sampled_logprobs
    with average.applied(), actor.other_weights():
        averaged = sample_and_score(parts)[0]
    assert torch.equal(sample_and_score(parts)[0].sampled_logprobs, moved)
    assert torch.equal(averaged.input_ids, batch.rollout.input_ids)
    assert not torch.equal(averaged.sampled_logprobs, moved)


def test_prompts_are_computed_once_in_scoring_and_updates(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By actor, reference, reward model and critic: the same values and gradients of fewer tokens."""

    def updated(least_tokens: int) -> tuple[Batch, UpdateReport]:
        monkeypatch.setattr(prefixes, "LEAST_TOKENS", least_tokens)
        parts = build(algorithm=replace(ALGORITHM, epochs=2))
        batch, plan = collect(parts)
        return batch, parts.updater.update(batch, [plan, plan])

    (shared, report), (separate, expected) = updated(2), updated(99)
    names = ("scores", "old_logprobs", "ref_logprobs", "old_values")
    for name in names:
        one, other = (getattr(batch.rollout, name) for batch in (shared, separate))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for name in ("actor/grad_norm", "critic/grad_norm", "loss/policy", "loss/value"):
        assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-5)
    tokens, of_separate = report.trained_tokens, expected.trained_tokens
    groups, prompts = shared.rollout.groups, [len(prompt["input_ids"]) for prompt in PROMPTS]
    assert len(groups) == 8 and tokens.shared == 2 * sum(prompts) and tokens.passes == 2
    assert tokens.computed + tokens.shared == of_separate.computed and of_separate.shared == 0
    assert report.operations < expected.operations
