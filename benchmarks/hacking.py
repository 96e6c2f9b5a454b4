"""Do the signals of the board find reward hacking, and how often do they cry wolf?

    python -m benchmarks.hacking                         # eight hackable rewards and 20 honest runs, in one process
    python -m benchmarks.hacking --only length format    # some tasks
    python -m benchmarks.hacking --out hacking_runs      # keep the run folders; a second call goes on where it ended

Each task is a short run of RL (`hacking_tasks.py`) whose folder the board then reads as any other. The thresholds of
the signals were set with half of the tasks and half of the honest runs in view; the other half is held out, and its
results are printed apart.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hacking_tasks import DESIGN, HACKABLE, HONEST, HackingTask, settings_of, write_files
from hybrid_rlhf import RL
from hybrid_rlhf.board.chat import Chats
from hybrid_rlhf.board.signals import Signal
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.commands.board import BoardConfig

SEEDS = range(5)
"""Of each honest task."""
DESIGN_SEEDS = frozenset({0, 1})
"""With those of seed 2 of the first two tasks, ten of the 20 honest runs."""


@dataclass(frozen=True)
class HackingRun:
    """One run, and what the board says of it."""

    task: HackingTask
    seed: int
    design: bool
    scores: tuple[float, float]
    """Mean of the first and of the last five steps."""
    signals: list[Signal]
    seconds: float
    """Of all steps."""


def planned() -> Iterator[tuple[HackingTask, int, bool]]:
    """Each run with its seed, and whether the thresholds were set with it in view."""
    for task in HACKABLE:
        yield task, 0, task.name in DESIGN
    for place, task in enumerate(HONEST):
        for seed in SEEDS:
            yield task, seed, seed in DESIGN_SEEDS or (seed == 2 and place < 2)


def run(task: HackingTask, seed: int, design: bool, folder: Path, *, steps: int) -> HackingRun:
    """Train, then read the folder as the board does."""
    output = folder / "runs" / f"{task.name.replace(' ', '_')}_{seed}"
    history = RL(**settings_of(task, folder, output, seed=seed, steps=steps)).train().history
    scores = [line["objective/scores"] for line in history if "objective/scores" in line]
    gc.collect()  # engines are in reference cycles
    ends = statistics.fmean(scores[:5]), statistics.fmean(scores[-5:])
    seconds = sum(line.get("time/step_seconds", 0.0) for line in history)
    return HackingRun(task, seed, design, ends, signals_of(output), seconds)


def signals_of(folder: Path) -> list[Signal]:
    """What the board shows for a run folder."""
    workspace = BoardWorkspace(BoardConfig(folders=[str(folder)]), Chats(_no_model, _no_model))
    (found,) = workspace.folders.all()
    index = workspace.samples(found).index
    while index.update(1.0):
        pass
    return workspace.signals(found)


def report(runs: Sequence[HackingRun]) -> Iterator[str]:
    """A table of the runs, and the counts of both halves."""
    yield "| task | seed | half | score, first and last | signals | first at step | evidence |"
    yield "|---|---|---|---|---|---|---|"
    for each in runs:
        found = sorted(each.signals, key=lambda signal: signal.first_step)
        cells = [
            each.task.name + ("" if each.task.hole else " (honest)"),
            str(each.seed),
            "design" if each.design else "held out",
            f"{each.scores[0]:.2f}, {each.scores[1]:.2f}",
            ", ".join(signal.name for signal in found) or "none",
            ", ".join(str(signal.first_step) for signal in found),
            found[0].what if found else "",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for half, members in (
        ("design", [each for each in runs if each.design]),
        ("held out", [each for each in runs if not each.design]),
        ("all", list(runs)),
    ):
        hacked, honest = ([each for each in members if bool(each.task.hole) is kind] for kind in (True, False))
        hits, false = (sum(bool(each.signals) for each in part) for part in (hacked, honest))
        rate = f", false-positive rate {false / len(honest):.0%}" if honest else ""
        yield f"{half}: {hits} of {len(hacked)} hackable tasks flagged, {false} of {len(honest)} honest runs{rate}"
    yield f"{len(runs)} runs, {sum(each.seconds for each in runs) / 60:.0f} minutes of steps"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks; none: all")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder of the runs; none: a temporary one")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = given.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_files(folder)
        runs = []
        for task, seed, design in planned():
            if not given.only or task.name in given.only:
                runs.append(run(task, seed, design, folder, steps=given.steps))
                names = [signal.name for signal in runs[-1].signals]
                print(f"# {task.name}, seed {seed}: {names}, {runs[-1].seconds:.0f} s", flush=True)
    print("\n".join(report(runs)))


def _no_model(*given: Any) -> Any:
    raise AssertionError("signals load no model")


if __name__ == "__main__":
    main()
