"""PPO over real engines on one rank: what must hold before any learning curve means something."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
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
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    for row, length in enumerate(rollout.lengths.tolist()):
        ids, response = rollout.input_ids[row : row + 1, :length], rollout.response_mask[row : row + 1, :length]
        mask = torch.ones_like(response)
        with torch.no_grad():
            old, ref = (role(ids, mask, response, 0.8)[0] for role in (roles.actor, roles.reference))
            score = scores_at_end(roles.reward._components[0]._engine(ids, mask), mask)[0]
            value = roles.critic(ids, mask)
        score = score - 0.5 * ~rollout.stopped[row]
        reward = -0.1 * (old - ref)[response]
        reward[-1] += score
        close(rollout.old_logprobs[row : row + 1, :length], old)
        close(rollout.ref_logprobs[row : row + 1, :length], ref)
        close(rollout.penalized_scores[row], score)
        close(batch.rewards[row, :length][response[0]], reward)
        close(rollout.old_values[row, 1:length], value[0, :-1])
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


def test_ptx_text_moves_the_actor_by_a_mean_over_the_tokens_that_have_a_log_prob(build: Any) -> None:
    text = {"input_ids": [3, 4, 5], "loss_mask": [True, True, True]}  # plain text is learned from its first token on
    ids = torch.tensor([text["input_ids"]])
    losses = []
    for coef in (0.0, 1.0):
        parts = build()
        batch, plan = collect(parts)
        frozen = replace(batch, advantages=torch.zeros_like(batch.advantages))
        with torch.no_grad():
            first = -float(parts.roles.actor(ids, ids > 0, ids > 0)[0][0, 1:].mean())
        texts = iter([[collate_tokens([text], 0)]] * 9)
        updater = Updater(parts.roles, PPO(ALGORITHM), rollout=SAMPLING, ptx_batches=texts, ptx_coef=coef)
        losses.append([updater.update(frozen, [plan]).metrics["loss/ptx"] for _ in range(3)])
        assert losses[-1][0] == pytest.approx(first, rel=1e-5)
    assert losses[0][2] == pytest.approx(losses[0][0]) and losses[1][2] < losses[1][0], "by its coefficient"


def test_rollout_metrics_have_closed_forms() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=torch.bool)
    ones = torch.ones(2, 3)
    rollout = rollout_of(
        torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool),
        mask,
        sampled_logprobs=-2.5 * mask,
        stopped=torch.tensor([True, False]),
        scores=torch.tensor([1.0, 3.5]),
        penalties=torch.tensor([0.0, 0.5]),
        old_logprobs=-2.0 * mask,
        ref_logprobs=-3.0 * mask,
    )
    batch = Batch(rollout, rewards=ones * mask, advantages=ones)
    clipped = replace(batch, clipped=torch.tensor([True, False]))
    assert rollout_metrics(clipped, CPU) == rollout_metrics(batch, CPU) | {"objective/score_clipfrac": 0.5}
    expected = {
        "objective/kl": 1.5,  # 2 tokens and 1 token of 1 nat
        "objective/entropy": 3.0,
        "objective/scores": 2.0,
        "objective/rlhf_reward": 1.5,
        "completions/mean_length": 1.5,
        "completions/clipped_ratio": 0.5,
        "rollout/logprob_abs_diff_mean": 0.5,
        "rollout/logprob_abs_diff_max": 0.5,
    }
    assert rollout_metrics(batch, CPU).items() >= expected.items()
    returns = torch.tensor([[9.0, 1, 2], [9.0, 4, 9]])
    for values, explained in ((returns, 1.0), (0.3 * ones, 0.0)):
        learned = replace(batch, returns=returns, rollout=replace(rollout, old_values=values))
        assert rollout_metrics(learned, CPU)["val/explained_variance"] == pytest.approx(explained, abs=1e-5)


def test_the_difference_to_the_sampler_is_told_by_depth() -> None:
    """Of response tokens at their place in the row, where a depth has enough of them for a mean."""
    width = 65536 + 64
    mask = torch.zeros(2, width, dtype=torch.bool)
    mask[0, 900:] = True
    mask[1, 500:1024] = mask[1, 1024:1087] = True
    generator = torch.Generator().manual_seed(0)
    sampled, old = -torch.rand(2, 2, width, generator=generator).double()
    rollout = rollout_of(torch.ones_like(mask), mask, sampled_logprobs=sampled, old_logprobs=old)
    rollout = replace(rollout, scores=torch.zeros(2), penalties=torch.zeros(2))
    batch = Batch(rollout, rewards=torch.zeros(2, width), advantages=torch.zeros(2, width))
    begins = [0, 1024, 4096, 16384, 65536, width]
    slow = [
        [
            abs(float(s - o))
            for row in range(2)
            for s, o, m in zip(sampled[row, a:b], old[row, a:b], mask[row, a:b], strict=True)
            if m
        ]
        for a, b in pairwise(begins)
    ]
    assert len(slow[-1]) == 64
    told = rollout_metrics(batch, CPU)
    for name, differences in zip(("first", "1k", "4k", "16k", "64k"), slow, strict=True):
        assert told[f"rollout/logprob_abs_diff_at_{name}"] == pytest.approx(sum(differences) / len(differences))
    assert told["rollout/logprob_abs_diff_mean"] == pytest.approx(sum(map(sum, slow)) / sum(map(len, slow)))
    mask[0, -1] = False
    assert "rollout/logprob_abs_diff_at_64k" not in rollout_metrics(batch, CPU), "63 tokens are too few"


def test_the_first_values_are_0_unless_critic_path_names_a_scorer(world: World, paths: dict[str, str]) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])

    def outputs(role: Role, path: str, **settings: Any) -> torch.Tensor:
        spec = EngineSpec(role, paths[path], ModelConfig(), ZeroConfig(), 0, **settings)
        return build_engine(spec, world)(ids, ids > 0)

    assert not outputs("critic", "actor").any() and not outputs("critic", "reward", fresh_head=True).any()
    assert torch.equal(outputs("critic", "reward"), outputs("reward", "reward")), "a reward model brings its own"


@pytest.mark.parametrize(
    ("role", "head_lr", "fresh", "of_head"),
    [
        ("critic", None, True, [0.1 / 32]),
        ("critic", None, False, []),
        ("critic", 0.5, False, [0.5]),
        ("reward", None, True, []),
    ],
)
def test_a_value_head_of_zeros_learns_faster_than_trained_layers(
    role: Role, head_lr: float | None, fresh: bool, of_head: list[float], world: World, paths: dict[str, str]
) -> None:
    optimizer = OptimizerConfig(lr=1e-3, warmup_fraction=0.0)
    made = EngineSpec(
        role, paths["reward"], ModelConfig(), ZeroConfig(), 0, optimizer, fresh_head=fresh, head_lr=head_lr
    )
    groups = build_engine(made, world).deepspeed_engine.optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-3, *of_head])
    assert not of_head or [tuple(weight.shape) for weight in groups[2]["params"]] == [(1, 32)]


def test_plans_give_every_row_once_and_equal_work() -> None:
    lengths = torch.randint(2, 9, (16,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9)[None] < lengths[:, None]
    planner = MiniBatchPlanner(MicroBatches(2), seed=1, world=CPU)
    plan = planner.plan(rollout_of(mask, mask), mini_batches=2)
    for ranks in (1, 2, 4):
        dealt = [plan.mini_batches(World(rank, ranks, rank, ranks, CPU.device)) for rank in range(ranks)]
        assert len({len(mini) for mine in dealt for mini in mine}) == 1
        for number in range(2):
            rows = [row for mine in dealt for micro in mine[number] for row in micro]
            assert sorted(rows) == sorted(plan.rows_of(number)) and len(rows) == 8, "whatever the ranks"
            assert plan.tokens[number] == sum(int(lengths[row]) for row in rows)  # type: ignore[index]
    assert sorted(plan.rows_of(0) + plan.rows_of(1)) == [*range(16)]
    few = planner.plan(rollout_of(mask[:3], mask[:3]), mini_batches=8)
    assert few.sequences == [1, 1, 1], "none is empty"


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
    progress.skipped = {"critic": [3, 1], "actor": [1]}
    skipped = parts.updater._skipped(progress, batch.rollout, plan.index)
    assert (skipped.roles, skipped.numbers) == (["actor", "critic"], [1, 3])
    assert torch.equal(skipped.rows.lengths, batch.rollout.lengths[[1, 3]])
