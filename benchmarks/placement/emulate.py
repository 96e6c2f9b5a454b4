"""Styles of placement side by side on emulated machines: predicted and emulated seconds of a step.

    python -m benchmarks.placement.emulate [--cases NAME,NAME] [--steps 6] [--json FILE]

Each case is a job on a machine by its data sheet. The planner's best plan of each style runs on as many ranks of this
machine as the emulated one has; emulation.py says what is real and what is slept. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.placement.emulation import Emulation, run_emulated
from benchmarks.placement.runs import WARM_STEPS, run_line, write_inputs
from benchmarks.placement.settings import Setting
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import ZeroStage
from hybrid_rlhf.planning.plans import LEARNERS, StepPlan
from hybrid_rlhf.planning.search import STYLES, Candidate, Search
from hybrid_rlhf.runtime.placement import Placement
from tests.support.ranks import run_ranks

REAL_TOKENS = 24
"""Of the longest real completion."""
REAL_SECONDS_PER_RANK = 1.5
"""Of a step of flattening, times its ranks, which share cores for the real work; the pace of the sleeps follows."""


@dataclass(frozen=True)
class EmulatedCase:
    """A job on a machine."""

    what: str
    setting: Setting
    zero: ZeroStage | None = None
    """ZeRO stage of actor and critic; none: the planner's."""


CASES = {
    "paper": EmulatedCase(
        "the placement paper's regime: generation-bound, ZeRO-3 over two hosts of four ranks, 12 GiB/s between them",
        Setting("a100", 8, "llama-7b", "llama-7b", 32, 256, 2048, 480.0, link_gib_per_second=12.0, ranks_per_host=4),
        zero=3,
    ),
    "slow_link": EmulatedCase(
        "two hosts of two ranks, 3 GiB/s between them",
        Setting("a100", 4, "llama-7b", "llama-7b", 64, 256, 480, link_gib_per_second=3.0, ranks_per_host=2),
    ),
    "ahead": EmulatedCase(
        "long-tailed completions, sampled one step ahead where the sampler is separate",
        Setting("a100", 4, "llama-1b", "llama-1b", 64, 512, 2048, 300.0, policy_lag=1),
    ),
    "heavy_reward": EmulatedCase(
        "a reward model of 34B beside an actor of 1B, two hosts of two ranks, 3 GiB/s between them",
        Setting(
            "a100",
            4,
            "llama-1b",
            "llama-1b",
            64,
            512,
            128,
            reward="llama-34b",
            link_gib_per_second=3.0,
            ranks_per_host=2,
        ),
    ),
    "heavy_reward_one_host": EmulatedCase(
        "the same on one host", Setting("a100", 4, "llama-1b", "llama-1b", 64, 512, 128, reward="llama-34b")
    ),
    "short": EmulatedCase(
        "short completions, balanced models that fit together", Setting("a100", 4, "llama-1b", "llama-1b", 64, 1024, 32)
    ),
    "short_two_ranks": EmulatedCase("the same on two ranks", Setting("a100", 2, "llama-1b", "llama-1b", 64, 1024, 32)),
}


def main() -> None:
    """Run the cases and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--styles", default=",".join(STYLES))
    parser.add_argument("--steps", type=int, default=4, help=f"the first {WARM_STEPS} are not counted")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="*", help="only print the table of these files")
    options = parser.parse_args()
    if options.read:
        print(*table([each for file in options.read for each in json.loads(file.read_text())]), sep="\n")
        return
    records: list[dict[str, Any]] = []
    for name in options.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{name}: {CASES[name].what}", flush=True)
            for record in emulated(CASES[name], Path(folder), options.styles.split(","), steps=options.steps):
                records.append({"case": name, **record})
                print(_line(record), flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


def emulated(case: EmulatedCase, folder: Path, styles: Sequence[str], *, steps: int) -> Iterator[dict[str, Any]]:
    """The best plan of each of some styles, predicted and emulated."""
    search = case.setting.search(folder)
    # without a lag a plan that samples on the actor's ranks may use tensor parallelism
    at_once = search if not case.setting.policy_lag else replace(case.setting, policy_lag=0).search(folder)
    found = {each.plan.placement.style: each for each in _candidates(case, at_once)}
    found |= {each.plan.placement.style: each for each in _candidates(case, search) if each.plan.policy_lag}
    wanted = [found[style] for style in STYLES if style in found and style in styles]
    yield from emulate_plans(search, wanted, folder, steps=steps, flattening_seconds=found["flattening"].seconds)


def emulate_plans(
    search: Search,
    candidates: Iterable[Candidate],
    folder: Path,
    *,
    steps: int,
    flattening_seconds: float,
    extra: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Plans of a job, predicted and emulated.

    Args:
        search: of the job.
        candidates: the plans.
        folder: for models and runs.
        steps: of each run.
        flattening_seconds: predicted; the pace is that at which they take REAL_SECONDS_PER_RANK.
        extra: more words of the command line.
    """
    job = search.costs.job
    pace = REAL_SECONDS_PER_RANK * search.costs.cluster.ranks / flattening_seconds
    write_inputs(folder, prompts=len(job.lengths.completions) * (steps + 2), num_hidden_layers=1)
    for number, candidate in enumerate(candidates):
        shrink = -(-max(job.lengths.completions) // REAL_TOKENS)
        emulation = Emulation.of(
            search.costs, candidate.plan, rows_at_once=candidate.memory.rows_at_once, shrink=shrink, pace=pace
        )
        count = len(job.lengths.completions)
        line = run_line(
            folder, folder / f"run{number}", candidate.plan, prompts=count, new_tokens=REAL_TOKENS, steps=steps
        )
        ranks = search.costs.cluster.ranks
        times = run_ranks(run_emulated, ranks, folder / f"ranks{number}", [*line, *extra], emulation)
        yield {
            "plan": candidate.plan.placement.style,
            "placement": candidate.plan.placement_setting().as_given(),
            "settings": candidate.plan.settings(RLConfig()),
            "predicted_seconds": candidate.seconds,
            "emulated_seconds": times[0].step_seconds / pace,
            "pace": pace,
            "processor_part": max(each.processor_seconds for each in times) / times[0].step_seconds,
        }


def _candidates(case: EmulatedCase, search: Search) -> Iterator[Candidate]:
    for found in search.run().ranked:
        if found.time is not None:
            yield found if case.zero is None else search.evaluate(_staged(found.plan, case.zero))


def _staged(plan: StepPlan, zero: ZeroStage) -> StepPlan:
    """The plan with another ZeRO stage of the learners."""
    roles = {name: replace(role, zero=zero) if name in LEARNERS else role for name, role in plan.roles.items()}
    return replace(plan, placement=Placement(roles, plan.placement.style))


def _line(record: dict[str, Any]) -> str:
    predicted, found = record["predicted_seconds"], record["emulated_seconds"]
    return (
        f"{record['plan']:14} predicted {predicted:7.2f} s  emulated {found:7.2f} s  {predicted / found - 1:+7.1%}  "
        f"(processor {record['processor_part']:.0%} of a step)  {shown_placement(record)}"
    )


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """In Markdown, with gains over flattening."""
    yield "| case | style | predicted | emulated | error | predicted gain | emulated gain | placement |"
    yield "|---|---|---|---|---|---|---|---|"
    flattened = {each["case"]: each for each in records if each["plan"] == "flattening"}
    for each in sorted(records, key=lambda each: ([*CASES].index(each["case"]), STYLES.index(each["plan"]))):
        predicted, found = each["predicted_seconds"], each["emulated_seconds"]
        base = flattened[each["case"]]
        gains = f"{base['predicted_seconds'] / predicted:.2f}x | {base['emulated_seconds'] / found:.2f}x"
        yield (
            f"| {each['case']} | {each['plan']} | {predicted:.1f} s | {found:.1f} s | {predicted / found - 1:+.0%} "
            f"| {gains} | {shown_placement(each)} |"
        )


def shown_placement(record: dict[str, Any]) -> str:
    """The placement of a record in words."""
    roles = []
    for name, keys in record["placement"].items():
        zero, together = keys.get("zero", 0), keys.get("tensor_parallel", 1)
        roles.append(f"{name} {keys['ranks']}" + f" ZeRO-{zero}" * bool(zero) + f" TP {together}" * (together > 1))
    settings = [f"{key} {str(value).lower()}" for key, value in record["settings"].items()]
    return ", ".join(roles + settings)


if __name__ == "__main__":
    main()
