"""The kill matrix: a run that is cut off anywhere, on any rank, ends as one that was not, bit for bit."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from tests.support.faults import Point, run_step
from tests.support.marks import faults, slow
from tests.support.steps import MODULES, checkpoint_names, run_outputs, step_line

RANKS = 2
Run = Callable[..., list[int]]
RL, ENGINES, RUNTIME = "hybrid_rlhf.rl", "hybrid_rlhf.engines", "hybrid_rlhf.runtime"
SCORING = f"{RL}.rollouts.scoring:RolloutScorer.compute_logprobs"
OF_ALL_STEPS = [
    (f"{ENGINES}.engine:ModelEngine.backward", 6),
    (f"{ENGINES}.engine:ModelEngine.step", 6),
    (f"{ENGINES}.saved.checkpoints:save_file", 3),
    (f"{ENGINES}.saved.checkpoints:flush", 3),
    (f"{ENGINES}.saved.checkpoints:write_manifest", 3),
    (f"{ENGINES}.saved.checkpoints:prune_checkpoints", 3),
    (f"{ENGINES}.saved.checkpoints:CheckpointWriter._commit", 3),
    ("hybrid_rlhf.runtime.files.atomic:os.replace", 6),
    (f"{RUNTIME}.files.checkpoint_folder:shutil.rmtree", 1),
    (f"{RUNTIME}.observability.metrics:MetricsWriter.write", 7),
    ("hybrid_rlhf.models.pretrained.saving:save_file", 1),
    ("hybrid_rlhf.models.pretrained.saving:os.replace", 3),
    (f"{RUNTIME}.world:World.all_reduce", 12),
]
"""Places with the calls that a run makes of them, at least."""
OF_PPO = [
    (f"{ENGINES}.hybrid:HybridEngine._synced_backend", 7),
    ("hybrid_rlhf.generation.engine:GenerationEngine.generate", 7),
    ("hybrid_rlhf.generation.engine:GenerationEngine.close", 7),
    (SCORING, 7),
    (f"{RL}.parts:RLParts.estimate", 6),
    (f"{RL}.updates.updater:Updater._update_actor", 20),
    (f"{RL}.updates.updater:Updater._update_critic", 20),
    (f"{RL}.rollouts.advantages:KLController.update", 6),
    (f"{ENGINES}.averaging:WeightAverage.update", 20),
    (f"{RL}.roles.roles:copy_weights", 2),
    (f"{RUNTIME}.observability.samples:SampleLog.write", 6),
    (f"{RUNTIME}.world:World.all_gather_objects", 8),
]
MAIN_RANK_ONLY = "write_manifest prune_checkpoints _commit rmtree MetricsWriter saving SampleLog os.replace".split()


def points() -> list[tuple[str, Point]]:
    """One at each place of each step, seeded in its call, its rank and its side."""
    chance = random.Random(0)
    found = []
    for name in MODULES:
        for place, calls in OF_ALL_STEPS + OF_PPO * (name == "ppo"):
            rank = 0 if any(word in place for word in MAIN_RANK_ONLY) else chance.randrange(RANKS)
            found.append((name, Point(place, chance.randint(1, calls), rank, chance.choice(("before", "after")))))
    return found


POINTS = points()
assert len(POINTS) >= 40


def marked(name: str, point: Point) -> Any:
    mark = pytest.mark.slow if name == "ppo" and point.place.endswith("_update_critic") else pytest.mark.faults
    return pytest.param(name, point, marks=mark, id=f"{name}-{point}")


@pytest.fixture(scope="module")
def whole(model_folder: Path, pair_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each step leaves when nothing happens; made when first asked for."""
    left: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in left:
            output = tmp_path_factory.mktemp("whole") / name
            assert run_step(MODULES[name], RANKS, step_line(name, output, model_folder, pair_rows)) == [0] * RANKS
            left[name] = run_outputs(output)
        return left[name]

    return of


def go_on(tiny_run: Run, name: str, output: Path, *more: str) -> dict[str, Any]:
    assert tiny_run(name, "--resume auto", *more) == [0] * RANKS
    assert (output / "finished.json").exists()
    assert not [name for name in checkpoint_names(output) if name.endswith(".partial")]
    return run_outputs(output)


@pytest.mark.parametrize(("name", "point"), [marked(*entry) for entry in POINTS])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    name: str, point: Point, whole: Any, tiny_run: Run, tmp_path: Path
) -> None:
    want = whole(name)
    assert -signal.SIGKILL in tiny_run(name, armed=point), "the point is never reached"
    assert go_on(tiny_run, name, tmp_path / "out") == want


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.faults
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_happened(
    asynchronous: str, whole: Any, tiny_run: Run, tmp_path: Path
) -> None:
    how = f"--train.save_async {asynchronous}"
    want = whole("ppo")
    for place, call in (
        (f"{RL}.updates.updater:Updater._update_actor", 14),
        ("hybrid_rlhf.loop.checkpointing:load_checkpoint", 1),
        (SCORING, 3),
    ):
        resume = ["--resume auto"] if (tmp_path / "out").exists() else []
        assert -signal.SIGKILL in tiny_run("ppo", how, *resume, armed=Point(place, call, rank=call % RANKS))
    assert go_on(tiny_run, "ppo", tmp_path / "out", how) == want


@pytest.mark.parametrize(
    ("name", "point"),
    [
        slow("ppo", Point(f"{RL}.updates.updater:Updater._update_critic", 7, 1, signal=signal.SIGTERM)),
        faults("ppo", Point(SCORING, 4, 0, signal=signal.SIGTERM)),
        faults("sft", Point(f"{ENGINES}.engine:ModelEngine.step", 3, 1, signal=signal.SIGTERM)),
    ],
    ids=str,
)
def test_sigterm_saves_mid_step_and_stops(name: str, point: Point, whole: Any, tiny_run: Run, tmp_path: Path) -> None:
    want = whole(name)
    assert tiny_run(name, armed=point) == [STOPPED_EXIT_CODE] * RANKS
    if name == "ppo":
        names = checkpoint_names(tmp_path / "out")
        assert any("_update_" in name for name in names), f"a step with updates left is kept: {names}"
    assert go_on(tiny_run, name, tmp_path / "out") == want


@pytest.mark.parametrize(
    ("point", "code"),
    [
        faults(Point(f"{RL}.updates.updater:Updater._update_critic", 7, 0, signal=signal.SIGTERM), STOPPED_EXIT_CODE),
        faults(Point(f"{ENGINES}.separate.transfer:WeightTransfer.receive", 4, 1), -signal.SIGKILL),
    ],
    ids=str,
)
def test_a_run_with_a_sampler_of_its_own_is_cut_off_and_goes_on(
    point: Point, code: int, tiny_run: Run, tmp_path: Path
) -> None:
    """By a signal to a rank that trains, and by the death of one that receives weights."""
    separate = "--placement separation"
    assert tiny_run("ppo", separate, output=tmp_path / "whole") == [0] * RANKS
    assert code in tiny_run("ppo", separate, armed=point)
    assert go_on(tiny_run, "ppo", tmp_path / "out", separate) == run_outputs(tmp_path / "whole")


@pytest.mark.faults
def test_sigusr1_saves_and_continues(whole: Any, tiny_run: Run, tmp_path: Path) -> None:
    want = whole("ppo")
    point = Point(f"{RL}.updates.updater:Updater._update_actor", 6, 1, signal=signal.SIGUSR1)
    assert tiny_run("ppo", "--train.keep_last 99", armed=point) == [0] * RANKS
    assert any("_update_" in name for name in checkpoint_names(tmp_path / "out"))
    assert run_outputs(tmp_path / "out") == want


@pytest.mark.faults
def test_a_run_resumes_with_other_ranks_and_another_zero_stage(whole: Any, tiny_run: Run, tmp_path: Path) -> None:
    for name, point, zero, keys, steps in (
        ("sft", Point(f"{ENGINES}.engine:ModelEngine.step", 5), "--zero.stage 3", ("sft/loss",), slice(1, None)),
        (
            "ppo",
            Point(f"{RL}.updates.updater:Updater._update_critic", 7, 1, signal=signal.SIGTERM),
            "--actor.zero.stage 3 --critic.zero.stage 1",
            ("loss/value", "loss/policy", "objective/scores"),
            slice(1, 3),  # later, sampled tokens may differ
        ),
    ):
        output = tmp_path / name
        tiny_run(name, armed=point, output=output)
        assert tiny_run(name, "--resume auto", zero, ranks=1, output=output) == [0]
        found, want = run_outputs(output)["metrics"], whole(name)["metrics"]
        assert len(found) == len(want) == 7
        for key in keys:
            losses = [[line[key] for line in lines[steps]] for lines in (found, want)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5), key
        assert "on 1 ranks instead of 2" in (output / "log.txt").read_text()


@pytest.mark.faults
def test_deterministic_kernels_change_nothing_on_a_cpu(whole: Any, tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run("ppo", "--deterministic true") == [0, 0]
    assert run_outputs(tmp_path / "out") == whole("ppo")
