"""PPO over real engines on one rank: what must hold before any learning curve means something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rlhf.algorithms.experience import Experience, Layout, Sequences
from hybrid_rlhf.algorithms.kl_controller import KLController
from hybrid_rlhf.algorithms.on_policy.ppo import PPO
from hybrid_rlhf.algorithms.policy_loss import MiniBatch
from hybrid_rlhf.algorithms.rewards import Reward
from hybrid_rlhf.algorithms.rewards.models import ModelPart
from hybrid_rlhf.algorithms.roles import Roles
from hybrid_rlhf.algorithms.rollout import Rollout
from hybrid_rlhf.algorithms.rollout_metrics import rollout_metrics
from hybrid_rlhf.algorithms.sums import RunningSums
from hybrid_rlhf.algorithms.updater import Updater
from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.on_policy import AlgorithmConfig
from hybrid_rlhf.configs.rewards import RewardPartConfig
from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.configs.sections import LoraConfig, ModelConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.data.collation import collate_tokens
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.engine import Role
from hybrid_rlhf.models.policy import scores_at_end
from hybrid_rlhf.runtime.timers import Timers
from hybrid_rlhf.runtime.world import World
from tests.tiny import tiny_tokenizer

PROMPTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [9, 8]}, {"input_ids": [4, 4, 4, 4]}, {"input_ids": [11, 3]}]
ALGORITHM = AlgorithmConfig(kl_coef=0.1, missing_eos_penalty=0.5, epochs=2, mini_batches=1)
ONCE = replace(ALGORITHM, epochs=1)
SAMPLING = RolloutConfig(prompts_per_step=4, samples_per_prompt=2, max_new_tokens=10, temperature=0.8)
WHOLE = MiniBatch(tokens=1.0, sequences=1.0)


def build(
    world: World, paths: dict[str, str], *, algorithm: AlgorithmConfig = ALGORITHM, micro: int = 2, lora: int = 0
) -> tuple[Roles, Rollout]:
    def spec(role: Any, path: str, lr: float | None) -> EngineSpec:
        optimizer = None if lr is None else OptimizerConfig(lr=lr, schedule="constant", warmup_fraction=0.0)
        adapters = LoraConfig(rank=lora) if role == "actor" else LoraConfig()
        return EngineSpec(role, paths[path], ModelConfig(), ZeroConfig(), 0, optimizer, adapters)

    roles = Roles(
        build_actor(spec("actor", "actor", 1e-2), world),
        Reward(
            [ModelPart(RewardPartConfig(model=paths["reward"]), build_engine(spec("reward", "reward", None), world))],
            world,
        ),
        build_engine(spec("critic", "reward", 1e-2), world),
        None if lora else build_engine(spec("reference", "reference", None), world),
    )
    rollout = Rollout(
        roles, sampling=SAMPLING, algorithm=PPO(algorithm), tokenizer=tiny_tokenizer(),
        stop_token_ids=tuple(range(3, 20)), micro_batches=MicroBatches(micro), seed=0, timers=Timers(world.device),
    )  # fmt: skip
    return roles, rollout


def collect(rollout: Rollout, *, mini_batches: int = 1) -> tuple[Experience, Layout]:
    sequences = rollout.sample(PROMPTS, step=1)
    layout = rollout.layout(sequences, step=1, epoch=0, mini_batches=mini_batches)
    return rollout.experience(rollout.score(rollout.rate(PROMPTS, sequences), layout), kl_coef=0.1), layout


@pytest.mark.parametrize("lora", [0, 4])
def test_the_first_mini_batch_has_ratio_1_exactly(lora: int, world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths, lora=lora)
    experience, layout = collect(rollout, mini_batches=2)
    updater = Updater(roles, PPO(ALGORITHM), rollout=SAMPLING)
    for indices in layout.mini_batches[0]:
        loss, _ = updater.policy_loss(experience, indices, WHOLE)
        assert float(loss.stats["ratio"]) == float(loss.count), "every ratio is 1"
        assert float(loss.stats["approxkl"]) == 0 and float(loss.stats["clipfrac"]) == 0
    updater.update(experience, [layout])
    loss, _ = updater.policy_loss(experience, layout.mini_batches[0][0], WHOLE)
    assert float(loss.stats["approxkl"]) > 0, "and no longer after an update"


def test_experience_is_what_the_roles_say_of_each_row_alone(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths, algorithm=replace(ALGORITHM, whiten_advantages=False))
    experience, _ = collect(rollout)
    sequences = experience.sequences
    assert len(set(sequences.lengths.tolist())) > 1
    with torch.no_grad():
        for row in range(len(sequences.input_ids)):
            length = int(sequences.lengths[row])
            ids = sequences.input_ids[row : row + 1, :length]
            mask = torch.ones_like(ids, dtype=torch.bool)
            response = sequences.response_mask[row, :length]
            old = roles.actor(ids, mask, response[None], 0.8)[0]
            torch.testing.assert_close(experience.old_logprobs[row : row + 1, :length], old, atol=1e-5, rtol=1e-5)
            ref = roles.reference(ids, mask, response[None], 0.8)[0]  # type: ignore[misc]
            torch.testing.assert_close(experience.ref_logprobs[row : row + 1, :length], ref, atol=1e-5, rtol=1e-5)
            score = float(scores_at_end(roles.reward._parts[0]._engine(ids, mask), mask)) - 0.5 * (
                not bool(sequences.stopped[row])
            )
            assert float(experience.scores[row]) == pytest.approx(score, abs=1e-5)
            reward = -0.1 * (old - ref)[0][response]
            reward[-1] += score
            torch.testing.assert_close(experience.rewards[row, :length][response], reward, atol=1e-5, rtol=1e-4)
            value = roles.critic(ids, mask)[0, :-1]
            torch.testing.assert_close(experience.old_values[row, 1:length], value, atol=1e-5, rtol=1e-4)
    assert float((sequences.sampled_logprobs - experience.old_logprobs).abs().max()) < 1e-5


def test_an_actor_with_adapters_is_its_own_reference(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths, lora=4)
    experience, layout = collect(rollout)
    assert float(experience.kl.abs().max()) == 0, "the policy is the reference before the first update"
    Updater(roles, PPO(ALGORITHM), rollout=SAMPLING).update(experience, [layout])
    moved, _ = collect(rollout)
    assert float(moved.kl.abs().max()) > 0
    same = rollout.score(rollout.rate(PROMPTS, experience.sequences), layout)
    torch.testing.assert_close(same.ref_logprobs, experience.ref_logprobs, atol=0, rtol=0)


def gradients(roles: Roles, experience: Experience, micro: MicroBatches, which: str) -> list[torch.Tensor]:
    """The gradient of one mini-batch cut into micro-batches of a size."""
    engine = getattr(roles, which)
    updater = Updater(roles, PPO(replace(ALGORITHM, entropy_coef=0.1)), rollout=SAMPLING)
    layout = Layout.plan(experience.sequences, mini_batches=1, micro_batches=micro, rank=0, ranks=1, seed=[0])
    for indices in layout.mini_batches[0]:
        mini_batch = MiniBatch(layout.counts[0], layout.sizes[0], 0.1)
        loss = updater.value_loss(roles.critic, experience, indices)
        if which == "actor":
            loss, _ = updater.policy_loss(experience, indices, mini_batch)
        engine.backward(loss.total, count=layout.counts[0])
    found = [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]
    engine.module.zero_grad()
    return found


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_no_split_into_micro_batches_changes_the_gradient(which: str, world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths)
    experience, _ = collect(rollout)
    whole = gradients(roles, experience, MicroBatches(8), which)
    assert whole and any(g.abs().max() > 1e-4 for g in whole)
    # 3 leaves empty rows, which must count for nothing
    for micro in (MicroBatches(1), MicroBatches(3), MicroBatches(4), MicroBatches(tokens=20)):
        for found, expected in zip(gradients(roles, experience, micro, which), whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def test_updates_raise_the_probability_of_what_was_better_than_expected(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths)
    experience, layout = collect(rollout)
    mask = experience.sequences.response_mask
    better = mask & (experience.advantages > 0)
    Updater(roles, PPO(ALGORITHM), rollout=SAMPLING).update(experience, [layout])
    change = rollout.score(rollout.rate(PROMPTS, experience.sequences), layout).old_logprobs - experience.old_logprobs
    assert float(change[better].mean()) > float(change[mask & ~better].mean())


def test_ptx_text_moves_the_actor_and_is_logged(world: World, paths: dict[str, str]) -> None:
    row = {"input_ids": [3, 4, 5, 6], "loss_mask": [False, True, True, True]}
    losses = []
    for coef in (0.0, 1.0):
        roles, rollout = build(world, paths)
        experience, layout = collect(rollout)
        frozen = replace(experience, advantages=torch.zeros_like(experience.advantages))
        batches = iter([[collate_tokens([row], 0)]] * 9)
        updater = Updater(roles, PPO(replace(ALGORITHM, ptx_coef=coef)), rollout=SAMPLING, ptx_batches=batches)
        losses.append([updater.update(frozen, [layout]).metrics["loss/ptx"] for _ in range(3)])
    assert losses[0][0] == pytest.approx(losses[0][2]), "without a coefficient nothing moves"
    assert losses[1][2] < losses[1][0]


def test_ptx_is_a_mean_over_the_tokens_that_have_a_log_prob(world: World, paths: dict[str, str]) -> None:
    roles, rollout = build(world, paths)
    experience, layout = collect(rollout)
    text = {"input_ids": [3, 4, 5], "loss_mask": [True, True, True]}  # plain text is learned from its first token on
    updater = Updater(roles, PPO(replace(ALGORITHM, ptx_coef=1.0)), rollout=SAMPLING,
                      ptx_batches=iter([[collate_tokens([text], 0)]]))  # fmt: skip
    ids = torch.tensor([text["input_ids"]])
    with torch.no_grad():
        wanted = -roles.actor(ids, ids > 0, ids > 0)[0][0, 1:].mean()
    assert updater.update(experience, [layout]).metrics["loss/ptx"] == pytest.approx(float(wanted), rel=1e-5)


def test_rollout_metrics_have_closed_forms() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=torch.bool)
    ones = torch.ones(2, 3)
    sequences = Sequences(
        ones.long(),
        torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool),
        mask,
        -2.5 * ones * mask,
        -2.5 * ones * mask,
        torch.tensor([True, False]),
        0 * mask.long(),
    )
    experience = Experience(
        sequences, old_logprobs=-2 * ones * mask, ref_logprobs=-3 * ones * mask, old_values=0 * ones,
        scores=torch.tensor([1.0, 3.0]), rewards=ones * mask, advantages=ones, returns=ones * mask,
    )  # fmt: skip
    metrics = rollout_metrics(experience)
    assert "objective/score_clipfrac" not in metrics
    clipped = replace(experience, clipped=torch.tensor([True, False]))
    assert rollout_metrics(clipped)["objective/score_clipfrac"] == 0.5
    assert metrics["objective/kl"] == 1.5  # 2 tokens and 1 token of 1 nat
    assert metrics["objective/entropy"] == 3.0
    assert metrics["objective/scores"] == 2.0
    assert metrics["objective/rlhf_reward"] == 1.5
    assert metrics["completions/mean_length"] == 1.5
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["rollout/logprob_abs_diff_mean"] == metrics["rollout/logprob_abs_diff_max"] == 0.5


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
    )  # fmt: skip
    groups = build_engine(made, world).deepspeed_engine.optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx(expected)
    if len(groups) == 3:
        assert [tuple(weight.shape) for weight in groups[2]["params"]] == [(1, 32)]


def test_explained_variance_is_1_for_a_perfect_critic() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    returns = torch.randn(2, 3)
    sequences = Sequences(mask.long(), mask, mask, returns, returns, torch.ones(2, dtype=torch.bool), 0 * mask.long())

    def variance(values: torch.Tensor) -> float | None:
        zero = torch.zeros(2, 3)
        return Experience(sequences, zero, torch.zeros(2), zero, zero, zero, values, returns).explained_variance

    assert variance(returns) == 1.0
    assert variance(torch.full((2, 3), 0.3)) == pytest.approx(0.0, abs=1e-5)


def test_layouts_give_every_row_once_and_equal_work() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(2, 9, (16,))
    mask = torch.arange(9)[None] < lengths[:, None]
    sequences = Sequences(mask.long(), mask, mask, mask.float(), mask.float(), lengths > 0, 0 * mask.long())
    for ranks in (1, 2, 4):
        plans = [
            Layout.plan(sequences, mini_batches=2, micro_batches=MicroBatches(2), rank=rank, ranks=ranks, seed=[1])
            for rank in range(ranks)
        ]
        assert len({len(mini) for plan in plans for mini in plan.mini_batches}) == 1
        for number in range(2):
            rows = [row for plan in plans for micro in plan.mini_batches[number] for row in micro]
            assert len(rows) == 8 and None not in rows
            first = {
                row
                for micro in Layout.plan(
                    sequences, mini_batches=2, micro_batches=MicroBatches(8), rank=0, ranks=1, seed=[1]
                ).mini_batches[number]
                for row in micro
            }
            assert set(rows) == first, "a mini-batch is the same whatever the ranks"
            assert plans[0].counts[number] == sum(int(lengths[row]) for row in rows)


def test_the_kl_controller_follows_ziegler() -> None:
    controller = KLController(AlgorithmConfig(kl_coef=0.2, kl_target=6.0, kl_horizon=100))
    controller.update(60.0, completions=10)
    assert controller.kl_coef == pytest.approx(0.2 * 1.02)  # the error is clipped to 0.2
    controller.update(5.4, completions=10)
    assert controller.kl_coef == pytest.approx(0.2 * 1.02 * 0.99)
    large = KLController(AlgorithmConfig(kl_coef=0.2, kl_target=6.0, kl_horizon=100))
    large.update(0.0, completions=1000)
    assert large.kl_coef == pytest.approx(0.2 * 0.8), "a rollout counts for no more than the horizon"
    fixed = KLController(AlgorithmConfig(kl_coef=0.2))
    fixed.update(60.0, completions=10)
    assert fixed.kl_coef == 0.2


def test_running_sums_divide_once(world: World) -> None:
    from hybrid_rlhf.functional.losses import LossSum

    sums = RunningSums(torch.device("cpu"))
    for total, count in ((6.0, 2), (3.0, 1)):
        sums.add(LossSum(torch.tensor(total), torch.tensor(count), {"x": torch.tensor(1.5)}))
    assert sums.means(world) == {"loss": 3.0, "count": 3.0, "x": 1.0}
