"""All placements of a small family on four ranks, measured: how far is the one that the planner chooses from the best?

    python -m benchmarks.placement.exhaustive --emulate [--part 1/4] [--json FILE]
    hybrid-rlhf calibrate && python -m benchmarks.placement.exhaustive [--part 1/4] [--json FILE]
    python -m benchmarks.placement.exhaustive --read FILE FILE

The family: REINFORCE without a KL, so an actor, a reward model and, on ranks of its own or not, a sampler; all layouts
that the planner looks at, none of which differ by the numbers of ranks alone, and all sizes of tensor-parallel groups,
each role unsharded. Without --emulate small models run as they are and predictions are from the curves of this machine,
which should be idle. --part takes every k-th placement, for short calls; --read sums up the files of all parts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.placement.emulate import emulate_plans, shown_placement
from benchmarks.placement.runs import RunTimes, run_line, timed_line, write_inputs
from benchmarks.placement.settings import GIB, Setting
from hybrid_rlhf.configs.algorithms import ReinforceConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.command_line import parse_config
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.memory.shapes import Shapes
from hybrid_rlhf.placement.candidates import Options, layouts, plan_of, tensor_parallels
from hybrid_rlhf.placement.costs import Costs
from hybrid_rlhf.placement.job import JobReader, StepLengths
from hybrid_rlhf.placement.machines.stored import load_curves
from hybrid_rlhf.placement.memory import MemoryModel
from hybrid_rlhf.placement.plans import Cluster, StepPlan, flattening
from hybrid_rlhf.placement.search import Candidate, Search
from tests.support.ranks import run_ranks

RANKS = 4
ALGORITHM = ("--algorithm", "reinforce", "--algorithm.kl", "null")
EMULATED = Setting("a100", RANKS, "llama-1b", "llama-7b", 64, 256, 1024, 300.0)
REAL_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
REAL_ROWS, REAL_TOKENS = 32, 64
_PROMPT_TOKENS = 23.0
"""Of four digits with the chat template of the tests."""


def main() -> None:
    """Measure the family, or read what was measured, and print how far the planner's choice is from the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="*")
    options = parser.parse_args()
    records: list[dict[str, Any]] = [each for file in options.read or () for each in json.loads(file.read_text())]
    if not options.read:
        with tempfile.TemporaryDirectory() as name:
            measure = _emulated if options.emulate else _real
            for record in measure(Path(name), *map(int, options.part.split("/")), steps=options.steps):
                records.append(record)
                print(_line(record), flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    print(*_summary(records), sep="\n")


def family(search: Search) -> list[Candidate]:
    """All placements of the family that fit."""
    job, cluster = search.costs.job, search.costs.cluster
    plans = [
        plan_of(layout, Options((), together, 0))
        for layout in layouts(job, cluster)
        for together in tensor_parallels(job, layout, cluster)
    ]
    return [found for found in map(search.evaluate, plans) if found.time is not None]


def _emulated(folder: Path, part: int, parts: int, *, steps: int) -> Iterator[dict[str, Any]]:
    whole = EMULATED.search(folder)
    job = whole.costs.job
    config = replace(job.config, algorithm=ReinforceConfig(kl=None), critic=None)
    roles = {name: role for name, role in job.roles.items() if name in ("actor", "model")}
    job = replace(job, config=config, roles=roles)
    costs = Costs(job, whole.costs.curves, whole.costs.cluster)
    search = Search(costs, MemoryModel(job, device_bytes=whole.costs.curves.device_gib * GIB))
    found = family(search)
    yield from emulate_plans(
        search, found[part - 1 :: parts], folder, steps=steps, flattening_seconds=found[0].seconds, extra=ALGORITHM
    )


def _real(folder: Path, part: int, parts: int, *, steps: int) -> Iterator[dict[str, Any]]:
    curves = load_curves()
    if curves is None:
        raise UserError("predictions need curves of this machine, got none: run hybrid-rlhf calibrate")
    write_inputs(folder, prompts=REAL_ROWS * (steps + 2), **REAL_SIZES)
    whole = StepPlan(flattening(["actor", "model"], RANKS, zero={}))
    tokens = _run(folder, "lengths", whole, steps=2).mean_tokens
    config = parse_config(RLConfig, _run_line(folder, "predicted", whole, steps=steps))
    lengths = StepLengths(_PROMPT_TOKENS, (round(tokens),) * REAL_ROWS)
    job = JobReader(torch.device("cpu"), Shapes())(config, lengths, overrides={})
    search = Search(Costs(job, curves, Cluster(RANKS, RANKS)), MemoryModel(job, device_bytes=curves.device_gib * GIB))
    for number, candidate in list(enumerate(family(search)))[part - 1 :: parts]:
        times = _run(folder, str(number), candidate.plan, steps=steps)
        yield {
            "plan": candidate.plan.placement.style,
            "placement": candidate.plan.placement_setting(),
            "settings": candidate.plan.settings(),
            "predicted_seconds": candidate.seconds,
            "measured_seconds": times.step_seconds,
        }


def _run(folder: Path, name: str, plan: StepPlan, *, steps: int) -> RunTimes:
    return run_ranks(timed_line, RANKS, folder / f"{name}_ranks", _run_line(folder, name, plan, steps=steps))[0]


def _run_line(folder: Path, name: str, plan: StepPlan, *, steps: int) -> list[str]:
    line = run_line(folder, folder / name, plan, prompts=REAL_ROWS, new_tokens=REAL_TOKENS, steps=steps)
    return [*line, *ALGORITHM]


def _line(record: dict[str, Any]) -> str:
    seconds = _measured(record)
    return f"predicted {record['predicted_seconds']:7.2f} s  measured {seconds:7.2f} s  {shown_placement(record)}"


def _measured(record: dict[str, Any]) -> float:
    return float(record.get("measured_seconds", record.get("emulated_seconds")))


def _summary(records: Sequence[dict[str, Any]]) -> Iterable[str]:
    """How far the plan with the least predicted time is from that with the least measured one."""
    chosen = min(records, key=lambda each: each["predicted_seconds"])
    ordered = sorted(records, key=_measured)
    best, place = ordered[0], ordered.index(chosen) + 1
    yield f"best of {len(records)}: {_line(best)}"
    yield f"chosen:     {_line(chosen)}"
    yield f"the chosen plan is place {place}, {_measured(chosen) / _measured(best) - 1:.1%} slower than the best"
    yield f"the slowest: {_line(ordered[-1])}"


if __name__ == "__main__":
    main()
