"""PPO over real engines on one rank: what must hold before any learning curve means something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.algorithm import KLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.training import MicroBatches, OptimizerConfig, ZeroConfig
from hybrid_rlhf.data.collation import collate_tokens
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.engine import Role
from hybrid_rlhf.models.policy import scores_at_end
from hybrid_rlhf.rl.algorithms.ppo import PPO
from hybrid_rlhf.rl.metrics import rollout_metrics
from hybrid_rlhf.rl.mini_batches import MiniBatchPlanner
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.advantages import KLController
from hybrid_rlhf.rl.types import Batch
from hybrid_rlhf.rl.updates.policy_loss import MiniBatch
from hybrid_rlhf.rl.updates.updater import Progress, Updater
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.files.names import METRICS_FILE
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_main
from tests.support.rl import ALGORITHM, SAMPLING, collect, rollout_of, score
from tests.support.steps import step_line, write_rows

WHOLE = MiniBatch(tokens=1.0, sequences=1.0)

CPU = solo_world(torch.device("cpu"))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_first_mini_batch_has_ratio_1_exactly(lora_rank: int, world: World, build: Any) -> None:
    parts = build(lora_rank=lora_rank)
    batch, plan = collect(parts, mini_batches=2)
    updater = parts.updater
    for indices in plan.mini_batches(world)[0]:
        loss, _ = updater.policy_loss(batch.rows(indices), WHOLE)
        assert float(loss.stats["ratio"]) == float(loss.count), "every ratio is 1"
        assert float(loss.stats["approxkl"]) == 0 and float(loss.stats["clipfrac"]) == 0
    updater.update(batch, [plan])
    loss, _ = updater.policy_loss(batch.rows(plan.mini_batches(world)[0][0]), WHOLE)
    assert float(loss.stats["approxkl"]) > 0, "and no longer after an update"


def test_a_batch_is_what_the_roles_compute_of_each_row_alone(build: Any) -> None:
    parts = build(algorithm=replace(ALGORITHM, whiten_advantages=False))
    batch, _ = collect(parts)
    rollout, roles = batch.rollout, parts.roles
    assert len(set(rollout.lengths.tolist())) > 1
    with torch.no_grad():
        for row in range(len(rollout.input_ids)):
            length = int(rollout.lengths[row])
            ids = rollout.input_ids[row : row + 1, :length]
            mask = torch.ones_like(ids, dtype=torch.bool)
            response = rollout.response_mask[row, :length]
            old = roles.actor(ids, mask, response[None], 0.8)[0]
            torch.testing.assert_close(rollout.old_logprobs[row : row + 1, :length], old, atol=1e-5, rtol=1e-5)
            ref = roles.reference(ids, mask, response[None], 0.8)[0]  # type: ignore[misc]
            torch.testing.assert_close(rollout.ref_logprobs[row : row + 1, :length], ref, atol=1e-5, rtol=1e-5)
            score = float(scores_at_end(roles.reward._components[0]._engine(ids, mask), mask)) - 0.5 * (
                not bool(rollout.stopped[row])
            )
            assert float(rollout.penalized_scores[row]) == pytest.approx(score, abs=1e-5)
            reward = -0.1 * (old - ref)[0][response]
            reward[-1] += score
            torch.testing.assert_close(batch.rewards[row, :length][response], reward, atol=1e-5, rtol=1e-4)
            value = roles.critic(ids, mask)[0, :-1]
            torch.testing.assert_close(rollout.old_values[row, 1:length], value, atol=1e-5, rtol=1e-4)
    assert float((rollout.sampled_logprobs - rollout.old_logprobs).abs().max()) < 1e-5


def test_an_actor_with_adapters_is_its_own_reference(build: Any) -> None:
    parts = build(lora_rank=4)
    batch, plan = collect(parts)
    assert float(batch.rollout.kl.abs().max()) == 0, "the policy is the reference before the first update"
    parts.updater.update(batch, [plan])
    moved, _ = collect(parts)
    assert float(moved.rollout.kl.abs().max()) > 0
    same, _ = score(parts, batch.rollout)
    torch.testing.assert_close(same.ref_logprobs, batch.rollout.ref_logprobs, atol=0, rtol=0)


def gradients(roles: Roles, batch: Batch, micro: MicroBatches, which: str) -> list[torch.Tensor]:
    """The gradient of one mini-batch cut into micro-batches of a size."""
    engine = getattr(roles, which)
    updater = Updater(roles, PPO(replace(ALGORITHM, entropy_coef=0.1)), rollout=SAMPLING)
    plan = MiniBatchPlanner(micro, seed=0, world=CPU).plan(batch.rollout)
    for indices in plan.mini_batches(roles.world)[0]:
        mini_batch = MiniBatch(plan.tokens[0], plan.sequences[0], 0.1)
        loss = updater.value_loss(roles.critic, batch.rows(indices))
        if which == "actor":
            loss, _ = updater.policy_loss(batch.rows(indices), mini_batch)
        engine.backward(loss.total, count=plan.tokens[0])
    found = [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]
    engine.module.zero_grad()
    return found


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_no_split_into_micro_batches_changes_the_gradient(which: str, build: Any) -> None:
    parts = build()
    batch, _ = collect(parts)
    whole = gradients(parts.roles, batch, MicroBatches(8), which)
    assert whole and any(g.abs().max() > 1e-4 for g in whole)
    # 3 leaves empty rows, which must count for nothing
    for micro in (MicroBatches(1), MicroBatches(3), MicroBatches(4), MicroBatches(tokens=20)):
        for found, expected in zip(gradients(parts.roles, batch, micro, which), whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def test_ptx_text_moves_the_actor_and_is_logged(build: Any) -> None:
    row = {"input_ids": [3, 4, 5, 6], "loss_mask": [False, True, True, True]}
    losses = []
    for coef in (0.0, 1.0):
        parts = build()
        batch, plan = collect(parts)
        frozen = replace(batch, advantages=torch.zeros_like(batch.advantages))
        batches = iter([[collate_tokens([row], 0)]] * 9)
        updater = Updater(parts.roles, PPO(ALGORITHM), rollout=SAMPLING, ptx_batches=batches, ptx_coef=coef)
        losses.append([updater.update(frozen, [plan]).metrics["loss/ptx"] for _ in range(3)])
    assert losses[0][0] == pytest.approx(losses[0][2]), "without a coefficient nothing moves"
    assert losses[1][2] < losses[1][0]


def test_ptx_is_a_mean_over_the_tokens_that_have_a_log_prob(build: Any) -> None:
    parts = build()
    batch, plan = collect(parts)
    text = {"input_ids": [3, 4, 5], "loss_mask": [True, True, True]}  # plain text is learned from its first token on
    texts = iter([[collate_tokens([text], 0)]])
    updater = Updater(parts.roles, PPO(ALGORITHM), rollout=SAMPLING, ptx_batches=texts, ptx_coef=1.0)
    ids = torch.tensor([text["input_ids"]])
    with torch.no_grad():
        wanted = -parts.roles.actor(ids, ids > 0, ids > 0)[0][0, 1:].mean()
    assert updater.update(batch, [plan]).metrics["loss/ptx"] == pytest.approx(float(wanted), rel=1e-5)


def test_rollout_metrics_have_closed_forms() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=torch.bool)
    ones = torch.ones(2, 3)
    rollout = rollout_of(
        torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool),
        mask,
        input_ids=ones.long(),
        sampled_logprobs=-2.5 * ones * mask,
        stopped=torch.tensor([True, False]),
        scores=torch.tensor([1.0, 3.5]),
        penalties=torch.tensor([0.0, 0.5]),
        old_logprobs=-2 * ones * mask,
        ref_logprobs=-3 * ones * mask,
        old_values=0 * ones,
    )
    batch = Batch(rollout, rewards=ones * mask, advantages=ones, returns=ones * mask)
    metrics = rollout_metrics(batch, CPU)
    assert "objective/score_clipfrac" not in metrics
    clipped = replace(batch, clipped=torch.tensor([True, False]))
    assert rollout_metrics(clipped, CPU)["objective/score_clipfrac"] == 0.5
    assert metrics["objective/kl"] == 1.5  # 2 tokens and 1 token of 1 nat
    assert metrics["objective/entropy"] == 3.0
    assert metrics["objective/scores"] == 2.0
    assert metrics["objective/rlhf_reward"] == 1.5
    assert metrics["completions/mean_length"] == 1.5
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["rollout/logprob_abs_diff_mean"] == metrics["rollout/logprob_abs_diff_max"] == 0.5
    returns = torch.tensor([[9.0, 1, 2], [9.0, 4, 9]])
    for values, explained in ((returns, 1.0), (torch.full((2, 3), 0.3), 0.0)):
        learned = replace(batch, returns=returns, rollout=replace(rollout, old_values=values))
        assert rollout_metrics(learned, CPU)["val/explained_variance"] == pytest.approx(explained, abs=1e-5)


def test_the_first_values_are_0_unless_critic_path_names_a_scorer(world: World, paths: dict[str, str]) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    found = []
    for start in ("actor", "reward"):
        critic = build_engine(EngineSpec("critic", paths[start], ModelConfig(), ZeroConfig(), 0), world)
        reward = build_engine(EngineSpec("reward", paths[start], ModelConfig(), ZeroConfig(), 0), world)
        found.append((critic(ids, mask), reward(ids, mask)))
    assert (found[0][0] == 0).all() and (found[0][1] != 0).all(), "a fresh head: 0 of values, not of scores"
    assert torch.equal(*found[1]) and (found[1][0] != 0).all(), "a reward model brings its own"
    spec = EngineSpec("critic", paths["reward"], ModelConfig(), ZeroConfig(), 0, fresh_head=True)
    assert (build_engine(spec, world)(ids, mask) == 0).all()


@pytest.mark.parametrize(
    ("role", "head_lr", "fresh", "expected"),
    [
        ("critic", None, True, [1e-3, 1e-3, 0.1 / 32]),
        ("critic", 0.5, True, [1e-3, 1e-3, 0.5]),
        ("critic", None, False, [1e-3, 1e-3]),
        ("critic", 0.5, False, [1e-3, 1e-3, 0.5]),
        ("reward", None, True, [1e-3, 1e-3]),
    ],
)
def test_a_value_head_of_zeros_learns_faster_than_trained_layers(
    role: Role, head_lr: float | None, fresh: bool, expected: list[float], world: World, paths: dict[str, str]
) -> None:
    optimizer = OptimizerConfig(lr=1e-3, warmup_fraction=0.0)
    made = EngineSpec(
        role, paths["reward"], ModelConfig(), ZeroConfig(), 0, optimizer, fresh_head=fresh, head_lr=head_lr
    )
    groups = build_engine(made, world).deepspeed_engine.optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx(expected)
    if len(groups) == 3:
        assert [tuple(weight.shape) for weight in groups[2]["params"]] == [(1, 32)]


def test_plans_give_every_row_once_and_equal_work() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(2, 9, (16,))
    mask = torch.arange(9)[None] < lengths[:, None]
    rollout = rollout_of(mask, mask, stopped=lengths > 0)

    def dealt_to(rank: int, ranks: int, micro_batch: int) -> list[list[list[int | None]]]:
        planner = MiniBatchPlanner(MicroBatches(micro_batch), seed=1, world=CPU)
        return planner.plan(rollout, mini_batches=2).mini_batches(World(rank, ranks, rank, ranks, torch.device("cpu")))

    tokens = MiniBatchPlanner(MicroBatches(2), seed=1, world=CPU).plan(rollout, mini_batches=2).tokens

    for ranks in (1, 2, 4):
        dealt = [dealt_to(rank, ranks, 2) for rank in range(ranks)]
        assert len({len(mini) for mine in dealt for mini in mine}) == 1
        for number in range(2):
            rows = [row for mine in dealt for micro in mine[number] for row in micro]
            assert len(rows) == 8 and None not in rows
            first = {row for micro in dealt_to(0, 1, 8)[number] for row in micro}
            assert set(rows) == first, "a mini-batch is the same whatever the ranks"
            assert tokens[number] == sum(int(lengths[row]) for row in rows)


def test_the_kl_controller_follows_ziegler() -> None:
    controller = KLController(KLConfig(coef=0.2, target=6.0, horizon=100))
    controller.update(60.0, completions=10)
    assert controller.kl_coef == pytest.approx(0.2 * 1.02)  # the error is clipped to 0.2
    controller.update(5.4, completions=10)
    assert controller.kl_coef == pytest.approx(0.2 * 1.02 * 0.99)
    large = KLController(KLConfig(coef=0.2, target=6.0, horizon=100))
    large.update(0.0, completions=1000)
    assert large.kl_coef == pytest.approx(0.2 * 0.8), "a rollout counts for no more than the horizon"
    resumed, fixed = KLController(KLConfig(coef=0.1, target=6.0)), KLController(KLConfig(coef=0.2))
    fixed.update(60.0, completions=10)
    for other in (resumed, fixed):
        other.load_state_dict(controller.state_dict())
    assert resumed.kl_coef == controller.kl_coef
    assert fixed.kl_coef == 0.2, "a resumed run has the coefficient of its settings"


@pytest.mark.slow
def test_the_kl_coefficient_waits_for_the_actor(model_folder: Path, tmp_path: Path) -> None:
    """While the critic alone learns, the KL is 0 by construction and says nothing of the target."""
    rows, run = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    warmup = "--critic.warmup_steps 2 --algorithm.kl.horizon 10 --train.max_steps 4 --ptx null"
    run_main("hybrid_rlhf.cli.rl", 1, step_line("ppo", run, model_folder, rows, warmup))
    steps = [line for line in read_lines(run / METRICS_FILE) if line["step"]]
    assert [line["objective/kl_coef"] == 0.05 for line in steps] == [True, True, True, False]


def test_a_row_that_two_roles_skip_is_reported_once(world: World, build: Any) -> None:
    """Each role wrote it out."""
    parts = build()
    batch, plan = collect(parts)
    progress = Progress(world.device)
    assert parts.updater._skipped(progress, batch.rollout, plan.index) is None
    progress.skipped = {"critic": [3, 1], "actor": [1]}
    skipped = parts.updater._skipped(progress, batch.rollout, plan.index)
    assert skipped is not None and skipped.roles == ["actor", "critic"] and skipped.numbers == [1, 3]
    assert torch.equal(skipped.rows.lengths, batch.rollout.lengths[[1, 3]])
