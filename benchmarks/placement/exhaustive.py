"""All placements of a small family on four ranks, measured: how far is the one that the planner chooses from the best?

    python -m benchmarks.placement.exhaustive --emulate
    hybrid-rlhf calibrate && python -m benchmarks.placement.exhaustive

The family: REINFORCE without a KL, so an actor, a reward model and, on ranks of its own or not, a sampler; all layouts
that the planner looks at, none of which differ by the numbers of ranks alone, all sizes of tensor-parallel groups, and
the actor's ranks as further samplers; each role unsharded. Without --emulate small models run as they are and
predictions are from the curves of this machine, which should be idle. A call resumes: it leaves out what was measured
(another folder for --records measures again). At the end a section of docs/benchmarks/placement.md is written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.placement.emulate import emulate_plans, shown_placement
from benchmarks.placement.runs import RunTimes, run_line, timed_line, write_inputs
from benchmarks.placement.settings import GIB, Setting
from benchmarks.placement.trials_page import (
    EXHAUSTIVE,
    add_record,
    family_lines,
    read_records,
    seconds_of,
    stamped,
    write_page,
)
from benchmarks.results import RESULTS
from hybrid_rlhf.configs.algorithms import ReinforceConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.candidates import layouts, plan_of, samplings
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.device import Device, own_device
from hybrid_rlhf.planning.job import StepLengths, read_job
from hybrid_rlhf.planning.machines.datasheets import DATA_SHEETS
from hybrid_rlhf.planning.machines.stored import load_curves
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.plans import StepPlan, flattening
from hybrid_rlhf.planning.search import Candidate, Search
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.ranks import run_ranks

RANKS = 4
ALGORITHM = ("--algorithm", "reinforce", "--algorithm.kl", "null")
EMULATED = Setting("a100", RANKS, "llama-1b", "llama-7b", 64, 256, 1024, 300.0)
REAL_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
REAL_ROWS, REAL_TOKENS = 32, 64
_PROMPT_TOKENS = 23.0
"""Of four digits with the chat template of the tests."""


def main() -> None:
    """Measure what is left of the family, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder of placement.zip")
    options = parser.parse_args()
    kind = "emulated" if options.emulate else "measured"
    name = EXHAUSTIVE[kind]
    known = {_key(record) for record in read_records(name, options.records)}
    with tempfile.TemporaryDirectory() as folder:
        search, measure = (_emulated if options.emulate else _measured)(Path(folder), steps=options.steps)
        found = family(search)
        left = [each for each in found if _key(_described(each)) not in known]
        print(f"{len(found)} placements, {len(found) - len(left)} measured before", flush=True)
        start = time.monotonic()
        for number, candidate in enumerate(left, start=1):
            record = {**_described(candidate), **measure(candidate, found[0]), **stamped()}
            add_record(name, record, options.records)
            print(f"{number} of {len(left)} in {time.monotonic() - start:.0f} s: {_line(record)}", flush=True)
    print(*family_lines(read_records(name, options.records), kind), sep="\n")
    write_page()


def family(search: Search) -> list[Candidate]:
    """All placements of the family that fit; flattening first."""
    job, cluster = search.costs.job, search.costs.cluster
    plans = [
        plan_of(job, layout, {}, together=together)
        for layout in layouts(job, cluster)
        for together in samplings(job, layout, cluster)
    ]
    return [found for found in map(search.evaluate, plans) if found.time is not None]


Measure = Callable[[Candidate, Candidate], dict[str, Any]]
"""Seconds of a plan, given it and flattening."""


def _emulated(folder: Path, *, steps: int) -> tuple[Search, Measure]:
    whole = EMULATED.search(folder)
    job = whole.costs.job
    config = replace(job.config, algorithm=ReinforceConfig(kl=None), critic=None)
    roles = {name: role for name, role in job.roles.items() if name in ("actor", "model")}
    job = replace(job, config=config, roles=roles)
    costs = Costs(job, whole.costs.curves, whole.costs.cluster)
    search = Search(costs, MemoryModel(job, Device(job.device, RANKS, DATA_SHEETS[EMULATED.machine].device_gib * GIB)))

    def measure(candidate: Candidate, flattened: Candidate) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            found = emulate_plans(
                search, [candidate], Path(own), steps=steps, flattening_seconds=flattened.seconds, extra=ALGORITHM
            )
            return next(iter(found))

    return search, measure


def _measured(folder: Path, *, steps: int) -> tuple[Search, Measure]:
    curves = load_curves()
    if curves is None:
        raise UserError("predictions need curves of this machine, got none: run hybrid-rlhf calibrate")
    write_inputs(folder, prompts=REAL_ROWS * (steps + 2), **REAL_SIZES)
    whole = StepPlan(flattening(["actor", "model"], RANKS, zero={}))
    tokens = _run(folder, whole, steps=2).mean_tokens
    config = parse_config(RLConfig, _run_line(folder, "predicted", whole, steps=steps))
    lengths = StepLengths(_PROMPT_TOKENS, (round(tokens),) * REAL_ROWS)
    job = read_job(config, torch.device("cpu"), lengths=lengths)
    machine = own_device(RANKS, local=RANKS)
    search = Search(Costs(job, curves, machine.cluster), MemoryModel(job, machine))

    def measure(candidate: Candidate, flattened: Candidate) -> dict[str, Any]:
        return {"measured_seconds": _run(folder, candidate.plan, steps=steps).step_seconds}

    return search, measure


def _run(folder: Path, plan: StepPlan, *, steps: int) -> RunTimes:
    own = tempfile.mkdtemp(dir=folder)
    return run_ranks(timed_line, RANKS, Path(own) / "ranks", _run_line(folder, f"{own}/run", plan, steps=steps))[0]


def _run_line(folder: Path, name: str, plan: StepPlan, *, steps: int) -> list[str]:
    line = run_line(folder, folder / name, plan, prompts=REAL_ROWS, new_tokens=REAL_TOKENS, steps=steps)
    return [*line, *ALGORITHM]


def _described(candidate: Candidate) -> dict[str, Any]:
    plan = candidate.plan
    return {
        "plan": plan.placement.style,
        "placement": plan.placement_setting().as_given(),
        "settings": plan.settings(RLConfig()),
        "predicted_seconds": candidate.seconds,
    }


def _key(record: dict[str, Any]) -> str:
    """What a record is of."""
    return json.dumps([record["placement"], record["settings"]], sort_keys=True)


def _line(record: dict[str, Any]) -> str:
    predicted, seconds = record["predicted_seconds"], seconds_of(record)
    return f"predicted {predicted:7.2f} s  measured {seconds:7.2f} s  {shown_placement(record)}"


if __name__ == "__main__":
    main()
