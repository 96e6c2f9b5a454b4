"""On-policy distillation: what a teacher adds to the advantages, whose gradient that is, and runs with a teacher."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.metrics import rollout_metrics
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling, estimate_advantages
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.world import solo_world
from tests.support.faults import Point, run_step
from tests.support.marks import slow
from tests.support.rl import rollout_of
from tests.support.steps import MODULES, run_outputs, step_line, write_rows
from tests.support.tiny import save_tiny, tiny_model

CPU = solo_world(torch.device("cpu"))


def scored(*, has_reward: bool = True, seed: int = 0) -> Rollout:
    """Completions of three prompts, some with a gap; NaN outside the mask."""
    chance = torch.Generator().manual_seed(seed)
    time = torch.arange(9)
    mask = (time >= 1) & (time < 1 + torch.randint(1, 7, (6, 1), generator=chance))
    mask &= (torch.rand(mask.shape, generator=chance) > 0.2) | (time == 1)
    old, teacher, values = (
        torch.where(mask, -3 * torch.rand(mask.shape, generator=chance), torch.nan) for _ in range(3)
    )
    scores = torch.randn(6, generator=chance) if has_reward else torch.zeros(6)
    return rollout_of(
        mask,
        mask,
        groups=torch.tensor([0, 0, 1, 1, 2, 2]),
        scores=scores,
        penalties=torch.zeros(6),
        greedy_scores=torch.zeros(6),
        greedy_penalties=torch.zeros(6),
        old_logprobs=old,
        teacher_logprobs=teacher,
        old_values=values,
        components={"r": scores} if has_reward else {},
    )


def estimated(rollout: Rollout, name: str, *, coef: float) -> Batch:
    """The batch by an algorithm without a KL penalty."""
    learner = ALGORITHMS[name](replace(RL_ALGORITHMS[name](), kl=None))
    scaling = ScoreScaling("none")
    return estimate_advantages(rollout, learner, scaling=scaling, kl_coef=0.0, world=CPU, teacher_coef=coef)


@pytest.mark.parametrize(
    ("name", "has_reward"), [("grpo", True), ("grpo", False), ("gdpo", True), ("remax", True), ("ppo", True)]
)
def test_each_token_gets_its_own_log_ratio_after_whitening(name: str, has_reward: bool) -> None:
    """Catches a log-ratio that earlier tokens share, one that is whitened, or one that a critic would learn; the metric
    is its mean over tokens, and equal groups are those of a reward."""
    rollout = scored(has_reward=has_reward)
    plain = estimated(replace(rollout, teacher_logprobs=None), name, coef=0.7)
    batch = estimated(rollout, name, coef=0.7)
    assert rollout.old_logprobs is not None and rollout.teacher_logprobs is not None
    mask = rollout.response_mask
    log_ratio = torch.where(mask, rollout.teacher_logprobs - rollout.old_logprobs, 0.0)
    torch.testing.assert_close(batch.advantages, plain.advantages + 0.7 * log_ratio, atol=1e-5, rtol=0)
    assert torch.equal(batch.rewards, plain.rewards)
    assert has_reward or not plain.advantages.any()
    if name == "ppo":
        assert batch.returns is not None and plain.returns is not None and torch.equal(batch.returns, plain.returns)
    metrics = rollout_metrics(batch, CPU)
    assert metrics["teacher/kl"] == pytest.approx(-float(log_ratio[mask].mean()), rel=1e-5)
    assert ("rollout/frac_reward_zero_std" in metrics) == has_reward, "else every such run is warned about it"


TOKENS = 3
SEQUENCES = list(itertools.product(range(TOKENS), repeat=2))


def policy(first: Tensor, second: Tensor) -> Tensor:
    """[9, 2] log-probs of both tokens of every sequence; the second depends on the first."""
    chosen = torch.tensor(SEQUENCES)
    return torch.stack([first.log_softmax(0)[chosen[:, 0]], second.log_softmax(1)[chosen[:, 0], chosen[:, 1]]], dim=1)


def expected_gradient(parameters: list[Tensor], teacher: Tensor, name: str) -> tuple[Tensor, ...]:
    """The exact mean, over the sequences that the policy samples, of the gradient of an algorithm's loss; a prompt and
    two tokens."""
    current, teacher_logprobs = (pad(logprobs, (1, 0)) for logprobs in (policy(*parameters), teacher))
    zeros, mask = torch.zeros(9), torch.tensor([[False, True, True]]).expand(9, 3)
    known = {"scores": zeros, "penalties": zeros, "groups": zeros.long(), "teacher_logprobs": teacher_logprobs}
    rollout = rollout_of(torch.ones_like(mask), mask, old_logprobs=current.detach(), **known)
    batch = estimated(rollout, name, coef=1.0)
    chances = current.detach().sum(dim=1, keepdim=True).exp()
    learner = ALGORITHMS[name](RL_ALGORITHMS[name]())
    loss = learner.loss(current, batch, weights=chances, tokens_per_completion=2.0)
    return torch.autograd.grad(loss.total, parameters)


@pytest.mark.parametrize("name", ["reinforce", "grpo", "cispo", "sapo"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_at_each_token(name: str) -> None:
    """A closed form on a categorical policy. Catches the sign, the forward KL, and credit for later tokens, whose
    gradient is that of the KL of whole sequences."""
    chance = torch.Generator().manual_seed(4)
    first, second, *teacher = (
        torch.randn(shape, generator=chance, dtype=torch.float64) for shape in (3, (3, 3), 3, (3, 3))
    )
    parameters = [first.requires_grad_(), second.requires_grad_()]
    found = expected_gradient(parameters, policy(*teacher), name)
    of_first, of_second = (
        (student.softmax(-1) * (student.log_softmax(-1) - of.log_softmax(-1))).sum(-1)
        for student, of in zip(parameters, teacher, strict=True)
    )
    chances = first.softmax(0)
    at_each_token, of_sequences = (of_first + (of * of_second).sum() for of in (chances.detach(), chances))
    expected = torch.autograd.grad(at_each_token, parameters, retain_graph=True)
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted.to(mine), atol=1e-6, rtol=1e-5)
    other = torch.autograd.grad(of_sequences, parameters)
    assert (other[0] - expected[0]).abs().max() > 0.01, "the two can be told apart"


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save_tiny(folder, tiny_model(3))
    return folder


ALONE = (
    "--algorithm grpo --reward.components [] --algorithm.kl null --ptx null --reference.refresh_every 0 "
    "--actor.ema_decay 0 --algorithm.score_scaling none --rollout.sampling.n 4"
).split()


def line_of(output: Path, model: Path, rows: Path, teacher: Path, *more: str) -> list[str]:
    """A run of six rollouts; `ALONE` in `more`: without a reward."""
    return step_line("ppo", output, model, rows, "--teacher.path", str(teacher), *more)


def metric(output: Path, name: str) -> list[float]:
    return [line[name] for line in run_outputs(output)["metrics"] if name in line]


def test_a_student_approaches_its_teacher_without_a_reward(
    model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Catches a teacher that is not read in training or in evaluations, and one that is the actor."""
    rows = write_rows(tmp_path / "rows.jsonl")
    more = "--actor.optimizer.lr 3e-3 --rollout.offload_frozen true --rollout.sampling.n 16 --train.epochs 4 "
    more += "--train.max_steps 12 --train.eval_every 12"
    run = tmp_path / "run"
    assert run_step(MODULES["ppo"], 1, line_of(run, model_folder, rows, teacher_folder, *ALONE, *more.split())) == [0]
    held_out = metric(run, "eval/teacher_kl")
    assert len(held_out) == 2 and held_out[-1] < 0.8 * held_out[0], held_out
    assert metric(run, "teacher/kl")[0] > 0.5 and set(metric(run, "objective/scores")) == {0.0}
    assert not metric(run, "objective/kl"), "no reference"
    log = (run / "log.txt").read_text()
    assert "teacher: 1 x log(p_teacher / p_actor) of each token is added to its advantage, which is 0 without" in log


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ([*ALONE, *"--algorithm.entropy.share 0.2 --algorithm.entropy.bounds [0,9]".split()], "policy/selected_tokens"),
        slow(
            "--algorithm ppo --teacher.coef 0.5 --algorithm.entropy.method adaptive --algorithm.entropy.target 5.2 "
            "--algorithm.entropy.step 0.01".split(),
            "policy/entropy_coef",
        ),
    ],
    ids=["alone, clip_cov", "ppo, adaptive"],
)
def test_a_run_that_stops_within_a_step_resumes(
    more: list[str], name: str, model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Catches teacher log-probs, a coefficient of the entropy or a selection of tokens that is not of the checkpoint:
    all metrics and weights are the same."""
    rows = write_rows(tmp_path / "rows.jsonl")
    more = [*more, "--train.max_steps", "4", "--train.eval_every", "0"]
    whole, cut = (line_of(tmp_path / name, model_folder, rows, teacher_folder, *more) for name in ("whole", "cut"))
    assert run_step(MODULES["ppo"], 1, whole) == [0]
    point = Point("hybrid_rlhf.rl.updates.updater:Updater._update_actor", 10, 0, signal=signal.SIGTERM)
    assert run_step(MODULES["ppo"], 1, cut, point) == [STOPPED_EXIT_CODE]
    assert run_step(MODULES["ppo"], 1, [*cut, "--resume", "auto"]) == [0]
    assert run_outputs(tmp_path / "cut") == run_outputs(tmp_path / "whole")
    values = metric(tmp_path / "whole", name)
    assert len(values) == 4 and max(values) > 0
