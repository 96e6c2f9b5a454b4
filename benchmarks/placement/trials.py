"""Does every placement compute what one rank does, and end? Fixed and random placements.

    python -m benchmarks.placement.trials [--random 300] [--fixed 192] [--most_ranks 8] [--folder FOLDER]

Fixed: PPO, GRPO and online DPO, with and without LoRA, under ZeRO 0 and 3, on 1, 2, 4 and 8 ranks, in all styles and
hybrids of odd and unequal groups. Random: roles on any ranks, a seed per trial. A trial is two rollouts of a tiny
model; metrics, samples and saved weights are compared with those of one rank, to 1e-5. A phase that takes four minutes
counts as a deadlock. Several trials of as many ranks share their processes, each in a process group of its own. A call
resumes: it leaves out what was the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, find, write
from tests.support.placements import (
    PlacementTrial,
    assert_same_run,
    fixed_trials,
    is_finished,
    launch_together,
    output_of,
    placement_workspace,
    random_trial,
)
from tests.support.tiny import tiny_model, tiny_tokenizer

_RECORDS = "placement_trials.jsonl"
_SAME = "same"


def main() -> None:
    """Run what has not been run, and record the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=300, help="seeds 0 to this")
    parser.add_argument("--fixed", type=int, default=len(fixed_trials()), help="the first of them; 0: none")
    parser.add_argument("--most_ranks", type=int, default=8)
    parser.add_argument("--together", type=int, default=12, help="trials that share their processes")
    parser.add_argument("--folder", type=Path, default=Path("output/placement_trials"))
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder of placement.zip")
    options = parser.parse_args()
    trials = [trial for trial in fixed_trials()[: options.fixed] if trial.ranks <= options.most_ranks]
    trials += [random_trial(seed, most_ranks=options.most_ranks) for seed in range(options.random)]
    workspace = _workspace(options.folder.resolve())
    records = [*map(json.loads, (find("placement", _RECORDS, options.records) or "").splitlines())]
    done = {record["trial"] for record in records if record["result"] == _SAME}
    left = [trial for trial in trials if trial.name not in done]
    print(f"{len(trials)} trials, {len(trials) - len(left)} done before", flush=True)
    for number, record in enumerate(_run(workspace, left, options.together), start=1):
        records.append(record)  # after each, so that a call that is stopped loses nothing
        write("placement", _RECORDS, "".join(json.dumps(each) + "\n" for each in records), options.records)
        print(f"{number} of {len(left)}: {record['trial']} on {record['ranks']}: {record['result']}", flush=True)


def _workspace(folder: Path) -> Path:
    """Models and prompts, made by the first call."""
    if not (folder / "workspace" / "judge" / "tokenizer.json").exists():
        shutil.rmtree(folder / "workspace", ignore_errors=True)
        (folder / "workspace").mkdir(parents=True)
        tiny_model().save_pretrained(folder / "tiny")
        tiny_tokenizer().save_pretrained(folder / "tiny")
        placement_workspace(folder / "workspace", folder / "tiny")
    return folder / "workspace"


def _run(workspace: Path, trials: Sequence[PlacementTrial], together: int) -> Iterator[dict[str, Any]]:
    """The result of each trial, in the order in which they end: few ranks first."""
    for _, group in itertools.groupby(sorted(trials, key=lambda trial: trial.ranks), key=lambda trial: trial.ranks):
        of_ranks = list(group)
        for first in range(0, len(of_ranks), together):
            yield from _together(workspace, of_ranks[first : first + together])


def _together(workspace: Path, trials: Sequence[PlacementTrial]) -> Iterator[dict[str, Any]]:
    """Trials in the same processes; after a failure the rest in others."""
    left = list(trials)
    launch_together(workspace, [*{trial.alone: None for trial in trials}])
    for trial in left:
        if not is_finished(output_of(workspace, trial)):
            shutil.rmtree(output_of(workspace, trial), ignore_errors=True)  # of a call that was stopped
    while left:
        failure = None
        try:
            launch_together(workspace, left)
        except Exception as error:  # noqa: BLE001 - a trial that fails is a result
            failure = f"{type(error).__name__}: {error}"
        while left and (failure is None or is_finished(output_of(workspace, left[0]))):
            yield _compared(workspace, left.pop(0))
        if failure is not None:
            if not left:
                raise RuntimeError(f"all trials finished and their processes failed: {failure}")
            yield _record(left.pop(0), f"failed: {failure}")


def _compared(workspace: Path, trial: PlacementTrial) -> dict[str, Any]:
    try:
        assert_same_run(output_of(workspace, trial), output_of(workspace, trial.alone))
    except AssertionError as error:
        return _record(trial, f"differs: {error}")
    return _record(trial, _SAME)


def _record(trial: PlacementTrial, result: str) -> dict[str, Any]:
    found = {"trial": trial.name, "algorithm": trial.algorithm, "ranks": trial.ranks, "placement": trial.placement}
    return {**found, "extra": list(trial.extra), "result": result, "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    main()
