"""The kill matrix: a run that is cut off anywhere, on any rank, ends as one that was not, bit for bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from tests.support.faults import Point, run_step
from tests.support.marks import faults, slow
from tests.support.steps import MODULES, run_outputs, step_line

RANKS = 2
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


def go_on(name: str, line: list[str], output: Path, *more: str) -> dict[str, Any]:
    assert run_step(MODULES[name], RANKS, [*line, "--resume", "auto", *more]) == [0] * RANKS
    assert (output / "finished.json").exists()
    left = [path.name for path in (output / "checkpoints").iterdir()]
    assert not [name for name in left if name.endswith(".partial")], left
    return run_outputs(output)


@pytest.mark.parametrize(("name", "point"), [marked(*entry) for entry in POINTS])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    name: str, point: Point, whole: Any, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    line = step_line(name, tmp_path / "out", model_folder, pair_rows)
    want = whole(name)
    codes = run_step(MODULES[name], RANKS, line, point)
    assert -signal.SIGKILL in codes, "the point is never reached"
    assert go_on(name, line, tmp_path / "out") == want


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.faults
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_happened(
    asynchronous: bool, whole: Any, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    line = step_line("ppo", tmp_path / "out", model_folder, pair_rows, "--train.save_async", str(asynchronous).lower())
    want = whole("ppo")
    for place, call in (
        (f"{RL}.updates.updater:Updater._update_actor", 14),
        ("hybrid_rlhf.loop.checkpointing:load_checkpoint", 1),
        (SCORING, 3),
    ):
        resume = ["--resume", "auto"] if (tmp_path / "out").exists() else []
        point = Point(place, call, rank=call % RANKS)
        assert -signal.SIGKILL in run_step(MODULES["ppo"], RANKS, [*line, *resume], point)
    assert go_on("ppo", line, tmp_path / "out") == want


@pytest.mark.parametrize(
    ("name", "point"),
    [
        slow("ppo", Point(f"{RL}.updates.updater:Updater._update_critic", 7, 1, signal=signal.SIGTERM)),
        faults("ppo", Point(SCORING, 4, 0, signal=signal.SIGTERM)),
        faults("sft", Point(f"{ENGINES}.engine:ModelEngine.step", 3, 1, signal=signal.SIGTERM)),
    ],
    ids=str,
)
def test_sigterm_saves_mid_step_and_stops(
    name: str, point: Point, whole: Any, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    line = step_line(name, tmp_path / "out", model_folder, pair_rows)
    want = whole(name)
    assert run_step(MODULES[name], RANKS, line, point) == [STOPPED_EXIT_CODE] * RANKS
    names = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    if name == "ppo":
        assert any("_update_" in name for name in names), f"a step with updates left is kept: {names}"
    assert go_on(name, line, tmp_path / "out") == want


@pytest.mark.parametrize(
    ("point", "code"),
    [
        faults(Point(f"{RL}.updates.updater:Updater._update_critic", 7, 0, signal=signal.SIGTERM), STOPPED_EXIT_CODE),
        faults(Point(f"{ENGINES}.separate.transfer:WeightTransfer.receive", 4, 1), -signal.SIGKILL),
    ],
    ids=str,
)
def test_a_run_with_a_sampler_of_its_own_is_cut_off_and_goes_on(
    point: Point, code: int, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    """By a signal to a rank that trains, and by the death of one that receives weights."""
    separate = ["--placement", "separation"]
    whole = step_line("ppo", tmp_path / "whole", model_folder, pair_rows, *separate)
    assert run_step(MODULES["ppo"], RANKS, whole) == [0] * RANKS
    line = step_line("ppo", tmp_path / "out", model_folder, pair_rows, *separate)
    assert code in run_step(MODULES["ppo"], RANKS, line, point)
    assert go_on("ppo", line, tmp_path / "out") == run_outputs(tmp_path / "whole")


@pytest.mark.faults
def test_sigusr1_saves_and_continues(whole: Any, model_folder: Path, pair_rows: Path, tmp_path: Path) -> None:
    line = step_line("ppo", tmp_path / "out", model_folder, pair_rows, "--train.keep_last", "99")
    want = whole("ppo")
    point = Point(f"{RL}.updates.updater:Updater._update_actor", 6, 1, signal=signal.SIGUSR1)
    assert run_step(MODULES["ppo"], RANKS, line, point) == [0] * RANKS
    assert any("_update_" in path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert run_outputs(tmp_path / "out") == want


@pytest.mark.faults
def test_a_run_resumes_with_other_ranks_and_another_zero_stage(
    whole: Any, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    for name, point in (
        ("sft", Point(f"{ENGINES}.engine:ModelEngine.step", 5)),
        ("ppo", Point(f"{RL}.updates.updater:Updater._update_critic", 7, 1, signal=signal.SIGTERM)),
    ):
        line = step_line(name, tmp_path / name, model_folder, pair_rows)
        run_step(MODULES[name], RANKS, line, point)
        zero = ["--zero.stage", "3"] if name == "sft" else "--actor.zero.stage 3 --critic.zero.stage 1".split()
        assert run_step(MODULES[name], 1, [*line, "--resume", "auto", *zero]) == [0]
        found, want = run_outputs(tmp_path / name)["metrics"], whole(name)["metrics"]
        assert len(found) == len(want) == 7
        for key in ("sft/loss",) if name == "sft" else ("loss/value", "loss/policy", "objective/scores"):
            steps = slice(1, None) if name == "sft" else slice(1, 3)  # later, sampled tokens may differ
            losses = [[line[key] for line in lines[steps]] for lines in (found, want)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5), key
        assert "on 1 ranks instead of 2" in (tmp_path / name / "log.txt").read_text()


@pytest.mark.faults
def test_deterministic_kernels_change_nothing_on_a_cpu(
    whole: Any, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    line = step_line("ppo", tmp_path / "out", model_folder, pair_rows, "--deterministic", "true")
    assert run_step(MODULES["ppo"], RANKS, line) == [0, 0]
    assert run_outputs(tmp_path / "out") == whole("ppo")
