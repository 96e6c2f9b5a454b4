"""The same seed gives the same scores, losses and weights wherever the roles live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.planning.stored import save_machine
from tests.support.marks import faults, slow
from tests.support.placement import cpu_machine
from tests.support.placements import (
    LORA,
    MORE_ALGORITHMS,
    TOLERANCE,
    ZERO_3,
    PlacementTrial,
    assert_same_run,
    fixed_trials,
    launch_placed,
    launch_together,
    metrics_of,
    output_of,
    placement_workspace,
    random_trial,
    weights_of,
)

REFRESHED = "--actor.lora.rank 4 --reference.refresh_every 1".split()
"""The reference is a model of its own that takes the actor's weights, from other ranks too."""
TENSOR_PARALLEL = "--rollout.tensor_parallel 2".split()
REFILLED = "--algorithm.dynamic_sampling.max_refills 2 --rollout.prompts_per_step 4".split()
MIXED = "--actor.ema_decay 0.9 --ptx.coef 0.5 --ptx.max_length 32 --ptx.sources texts.jsonl".split()
EPISODES = f"--environment.path {__file__}:Questions --rollout.sampling.max_new_tokens 40".split()
SHARED_BASE = (*LORA, "--critic.share_base", "true")
"""The critic's adapters are on the actor's weights, whose ranks it shares."""
TAUGHT = "--teacher.path teacher".split()
LIKELY = "--teacher.loss reverse --teacher.top_k 4".split()
EVALUATED = ("--train.eval_every", "1")
FREE_OF_KL = ("--algorithm.kl", "null", "--reward.components", "[{function: 'tests.support.steps:brevity'}]")
"""What the critic learns depends on the actor through its tokens alone."""
Case = tuple[str, int, str, tuple[str, ...]]
CASES: list[Case] = [
    ("ppo", 2, "separation", ()),
    ("grpo", 2, "separation", (*REFILLED,)),
]
SLOW_CASES: list[Case] = [
    ("grpo", 2, "interleaving", (*TAUGHT, *ZERO_3)),
    ("ppo", 3, "{actor: {ranks: 0-1, zero: 2}, critic: {ranks: 2}, judge: {ranks: 0}, reference: {ranks: 1-2}}", ()),
]
MORE_CASES: list[Case] = [
    ("ppo", 4, "{style: separation, critic_copy: {tensor_parallel: 2}}", (*ZERO_3, *TENSOR_PARALLEL)),
    ("ppo", 3, "{teacher: {ranks: 1-2, zero: 3}, actor: {ranks: 0}}", (*TAUGHT,)),
    ("grpo", 3, "{style: separation, teacher: {ranks: 0-1, zero: 3}}", (*TAUGHT, *LIKELY)),
    ("online_dpo", 3, "{sampler: {ranks: 1-2, tensor_parallel: 2}, judge: {ranks: 0-1}}", ()),
    ("ppo", 3, "{sampler: {ranks: 0-1, tensor_parallel: 2}, actor: {ranks: 2}}", ()),
    ("grpo", 4, "{sampler: {ranks: 2-3, tensor_parallel: 2}}", (*LORA,)),
    ("ppo", 3, "{sampler: {ranks: 0}, actor: {ranks: 1-2}}", (*MIXED,)),
    ("ppo", 2, "separation", (*EPISODES,)),
    ("ppo", 2, "separation", (*SHARED_BASE,)),
    ("ppo", 4, "{actor: {ranks: 2-3}, critic: {ranks: 0-1}, reference: {ranks: 0}, reward: {ranks: 1}}", (*REFRESHED,)),
    ("ppo", 3, "{style: separation, critic_copy: {tensor_parallel: 1}}", (*LORA,)),
    ("ppo", 4, "{sampler: {ranks: 0}, actor: {ranks: 1-3}, critic: {ranks: 0-1}, reference: {ranks: 2}}", ()),
    ("remax", 3, "separation", ()),
    ("ppo", 4, "{actor: {ranks: 1-3}, critic: {ranks: '0,2', zero: 3}, judge: {ranks: 0}}", (*ZERO_3,)),
    ("grpo", 3, "{actor: {ranks: '0,2'}, reference: {ranks: 1, zero: 3}, judge: {ranks: 0-2}}", (*REFRESHED,)),
    ("online_dpo", 3, "{actor: {ranks: 1-2}, reference: {ranks: 0}, judge: {ranks: 1}}", (*ZERO_3,)),
    ("grpo", 3, "{style: separation, actor: {ranks: 0}, reference: {ranks: 1-2, zero: 3}}", ()),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return placement_workspace(tmp_path_factory.mktemp("placements"), model_folder)


class Questions:
    """An environment of two turns."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """See Environment."""
        self.turns = 0

    def step(self, completion: str) -> tuple[str, float, bool]:
        """See Environment."""
        self.turns += 1
        return "and?", float(len(completion)), self.turns == 2


@pytest.mark.parametrize(
    ("algorithm", "ranks", "placement", "extra"),
    [
        *CASES,
        *(slow(*case) for case in SLOW_CASES),
        *(faults(*case) for case in MORE_CASES),
    ],
)
def test_a_placement_computes_what_one_rank_does(
    algorithm: str, ranks: int, placement: str, extra: tuple[str, ...], workspace: Path
) -> None:
    layout = {*ZERO_3, *TENSOR_PARALLEL}
    alone = launch_placed(workspace, algorithm, 1, "flattening", () if {*extra} <= layout else extra)
    assert_same_run(launch_placed(workspace, algorithm, ranks, placement, extra), alone)


def assert_same_as_alone(workspace: Path, trials: Sequence[PlacementTrial]) -> None:
    """Trials of equally many ranks run one after the other in the same processes. The watchdog of a run limits the time
    of each phase, so a deadlock fails."""
    for ranks in sorted({trial.ranks for trial in trials}):
        launch_together(workspace, [trial for trial in trials if trial.ranks == ranks])
    launch_together(workspace, [*{trial.alone: None for trial in trials}])
    for trial in trials:
        assert_same_run(output_of(workspace, trial), output_of(workspace, trial.alone))


@pytest.mark.faults
@pytest.mark.parametrize("style", ["separation", "interleaving"])
def test_other_algorithms_compute_what_they_do_on_one_rank(style: str, workspace: Path) -> None:
    assert_same_as_alone(workspace, [PlacementTrial(f"{name} {style}", name, 2, style) for name in MORE_ALGORITHMS])


@pytest.mark.faults
def test_fixed_and_random_placements_on_up_to_eight_ranks_neither_hang_nor_differ(workspace: Path) -> None:
    """A part; `python -m benchmarks.placement.trials` runs all of them, resumes, and writes their page."""
    assert_same_as_alone(
        workspace, [*fixed_trials((2,))[::5], *fixed_trials((8,))[::7], *(random_trial(seed) for seed in range(4, 12))]
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        faults((2, "flattening"), (3, "{actor: {ranks: 1-2}, critic: {ranks: 0}}")),
        faults((3, "{actor: {ranks: '0,2'}, critic: {ranks: 1, zero: 3}, judge: {ranks: 0}}"), (1, "flattening")),
        ((2, "interleaving"), (2, "{actor: {ranks: 0}, critic: {ranks: 1}}")),
    ],
)
def test_a_checkpoint_resumes_under_another_placement(
    before: tuple[int, str], after: tuple[int, str], workspace: Path, tmp_path: Path
) -> None:
    whole, run = launch_placed(workspace, "ppo", 1, "flattening", EVALUATED), tmp_path / "run"
    stops = ("--train.save_every", "1", "--train.max_steps", "1")
    launch_placed(workspace, "ppo", *before, (*EVALUATED, *stops), output=run)
    (run / "finished.json").unlink()
    launch_placed(workspace, "ppo", *after, (*EVALUATED, "--resume", "auto"), output=run)
    assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "actor"), [faults(2, "1"), (3, "2")])
def test_a_role_that_keeps_its_ranks_resumes_bit_for_bit(
    ranks: int, actor: str, workspace: Path, tmp_path: Path
) -> None:
    """Weights and both moments: the critic learns from the same tokens under both placements, the actor has moved."""
    settings = (*EVALUATED, *FREE_OF_KL)
    whole, run = launch_placed(workspace, "ppo", 2, "flattening", settings), tmp_path / "run"
    stops = ("--train.save_every", "1", "--train.max_steps", "1")
    launch_placed(workspace, "ppo", 2, "flattening", (*settings, *stops), output=run)
    before = weights_of(run)
    (run / "finished.json").unlink()
    moved = f"{{actor: {{ranks: {actor}}}, critic: {{ranks: 0-1}}}}"
    launch_placed(workspace, "ppo", ranks, moved, (*settings, "--resume", "auto"), output=run)
    assert_same_run(run, whole)
    expected, critic = weights_of(whole), 0
    for name, weight in weights_of(run).items():
        if name.startswith("critic."):
            assert torch.equal(weight, expected[name]), name
            critic += not torch.equal(weight, before[name])
    assert critic > 10, "it has learned since"


@pytest.mark.slow
def test_the_planner_places(workspace: Path, tmp_path: Path) -> None:
    save_machine(cpu_machine(), 2, str(tmp_path / "cache"))
    settings = ("--data.cache_dir", str(tmp_path / "cache"), "--train.max_steps", "5")
    run = launch_placed(workspace, "ppo", 2, "auto", settings, output=tmp_path / "run")
    found = [line for line in metrics_of(run) if "loss/policy" in line]
    assert len(found) == 5
    assert weights_of(run)
    alone = launch_placed(workspace, "ppo", 1, "flattening", ("--train.max_steps", "5"))
    for name, weight in weights_of(alone).items():
        torch.testing.assert_close(weights_of(run)[name], weight, atol=TOLERANCE, rtol=TOLERANCE)
