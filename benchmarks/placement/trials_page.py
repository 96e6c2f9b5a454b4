"""Writes the section of docs/benchmarks/placement.md from the records of trials.py and exhaustive.py."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.placement.emulate import shown_placement
from benchmarks.placement.page import write_section
from benchmarks.results import RESULTS, find, write

TRIALS = "placement_trials.jsonl"
EXHAUSTIVE = {kind: f"placement_exhaustive_{kind}.jsonl" for kind in ("emulated", "measured")}
SAME = "same"
_HEAD = """## Placement trials

### Fixed and random placements

`python -m benchmarks.placement.trials`: each trial runs two rollouts of a tiny model with their updates, and compares
metrics, samples and saved weights with those of one rank, to 1e-5 in float32. A phase that takes four minutes counts as
a deadlock. Fixed: PPO, GRPO and online DPO, with and without LoRA, under ZeRO 0 and 3, in all styles, and on eight
ranks in six hybrids with odd and unequal groups. Random: roles on random ranks, with one seed per trial. The command
resumes (raw: `placement_trials.jsonl` in
[`benchmarks/results/placement.zip`](../../benchmarks/results/placement.zip)).
"""
_FAMILY = """### All placements of a family

`python -m benchmarks.placement.exhaustive [--emulate]`: REINFORCE without a KL on four ranks: an actor, a
reward model and a sampler, which may have separate ranks. The command runs all layouts that the planner considers, with
all sizes of tensor-parallel groups and each role unsharded, and compares the planner's choice with the best one. It
resumes (raw: `placement_exhaustive_*.jsonl`).
"""


def read_records(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records of a member of placement.zip; none if it does not exist."""
    return [json.loads(line) for line in (find("placement", name, folder) or "").splitlines()]


def add_record(name: str, record: dict[str, Any], folder: Path) -> None:
    """Append one, so that a call that is stopped loses nothing."""
    records = [*read_records(name, folder), record]
    write("placement", name, "".join(json.dumps(each) + "\n" for each in records), folder)


def stamped() -> dict[str, str]:
    """When and where a record was made."""
    return {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "machine": platform.machine()}


def write_page() -> None:
    """The section of all records."""
    lines = [_HEAD, *_trials(read_records(TRIALS)), _FAMILY]
    for kind, file in EXHAUSTIVE.items():
        records = read_records(file)
        if records:
            lines += [f"#### {kind.capitalize()}", "", *family_lines(records, kind), ""]
    write_section("trials", "\n".join(lines))


def _trials(records: Sequence[dict[str, Any]]) -> Iterable[str]:
    last = {record["trial"]: record for record in records}  # one that failed may have run again
    dates = sorted({record["date"] for record in last.values()})
    same = sum(record["result"] == SAME for record in last.values())
    yield f"{len(last)} trials were run until {dates[-1] if dates else 'now'}; {same} were the same as on one rank."
    yield ""
    yield "| kind | ranks | run | the same |"
    yield "|---|---|---|---|"
    kinds = {(name.startswith("random"), record["ranks"]) for name, record in last.items()}
    for is_random, ranks in sorted(kinds):
        run = [each for name, each in last.items() if (name.startswith("random"), each["ranks"]) == (is_random, ranks)]
        count = sum(each["result"] == SAME for each in run)
        yield f"| {'random' if is_random else 'fixed'} | {ranks} | {len(run)} | {count} |"
    yield ""
    for record in last.values():
        if record["result"] != SAME:
            words = " ".join([record["algorithm"], *record["extra"]])
            yield f"- `{record['trial']}`, {words}, `{record['placement']}`: {record['result'].splitlines()[0]}"


def family_lines(records: Sequence[dict[str, Any]], kind: str) -> Iterable[str]:
    """How far the plan with the least predicted time is from that with the least measured one, and all plans."""
    chosen = min(records, key=lambda each: each["predicted_seconds"])
    ordered = sorted(records, key=seconds_of)
    slower = seconds_of(chosen) / seconds_of(ordered[0]) - 1
    pairs = [(a, b) for place, a in enumerate(ordered) for b in ordered[place + 1 :]]
    right = sum(a["predicted_seconds"] <= b["predicted_seconds"] for a, b in pairs)
    yield (
        f"The chosen plan is place {ordered.index(chosen) + 1} of {len(records)}, {slower:.1%} slower than the best. "
        f"Of {len(pairs)} pairs of placements {right / max(1, len(pairs)):.0%} are in the predicted order."
    )
    yield ""
    yield f"| place | predicted | {kind} | placement |"
    yield "|---|---|---|---|"
    for place, each in enumerate(ordered, start=1):
        yield f"| {place} | {each['predicted_seconds']:.2f} s | {seconds_of(each):.2f} s | {shown_placement(each)} |"


def seconds_of(record: dict[str, Any]) -> float:
    """Of a step, measured or emulated."""
    return float(record.get("measured_seconds", record.get("emulated_seconds")))
