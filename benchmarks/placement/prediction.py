"""Steps of PPO on this machine, measured next to what the planner predicts from its calibrated curves.

    hybrid-rlhf calibrate && python -m benchmarks.placement.prediction [--cases thirty] [--steps 5] [--json FILE]

Random Llamas of several sizes, with completions of several lengths, on 1 to 8 ranks under several placements. Nothing
is fitted to these runs; the cases of `drawn` were drawn after the form of the curves was final. The first two steps of
a run warm up, and medians of the others count. The planner takes the mean length of the completions from the run.
--measured FILE predicts the runs of an earlier --json again, from other curves.
A shared machine changes its speed: a fixed piece of work on every core is timed before and after each run. "scaled" is
the error of the step at the speed of the first of these times, which should follow the calibration at once.
Beside its prediction: RLinf's linear rule, from the measured phases of the same step under flattening ("linear"), and
the prediction with communication at no cost, as in ReaL's search ("silent"; rules.py). Run it on an idle machine:
ranks share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.placement.rules import linear_rule, without_communication
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.curves import MachineCurves
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import StepLengths, read_job
from hybrid_rlhf.planning.machines.runs import ALL_ROWS
from hybrid_rlhf.planning.machines.stored import load_curves
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.prediction_errors import STEP, PredictionReport
from hybrid_rlhf.planning.step_time import step_time
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.placement import PlacedRoles, resolve_placement
from tests.support.tiny import VOCABULARY, tiny_tokenizer

PHASES = ("weight_sync", "generation", "scoring", "training", "other")
"""As measured; of these, the planner's `gather` and `loop` are `other`."""
PROMPT = "prompt {:04}"
PROMPT_TOKENS = float(len(encode_prompt([{"role": "user", "content": PROMPT.format(1)}], tiny_tokenizer())))


@dataclass(frozen=True)
class Case:
    """A run."""

    hidden: int
    layers: int
    prompts: int
    new_tokens: int
    ranks: int = 1
    placement: str = "flattening"
    """As on the command line."""
    zero: int = 0
    mini_batches: int = 2
    hosts: int = 1

    @property
    def cluster(self) -> Cluster:
        """The hosts, with equally many ranks."""
        return Cluster(self.ranks, self.ranks // self.hosts)


_TENSOR_PARALLEL = "{sampler: {ranks: 2-3, tensor_parallel: 2}}"
_UNEQUAL = "{actor: {ranks: 0-2}, critic: {ranks: 3}, reference: {ranks: 3}, reward: {ranks: 0-1}}"
CASES = (
    Case(64, 2, 16, 16),
    Case(64, 4, 32, 32),
    Case(128, 4, 32, 32),
    Case(256, 2, 32, 32),
    Case(256, 4, 32, 64),
    Case(64, 4, 32, 32, ranks=2),
    Case(128, 4, 32, 32, ranks=2),
    Case(256, 2, 32, 32, ranks=2),
    Case(128, 4, 32, 32, ranks=2, zero=2),
    Case(128, 4, 32, 32, ranks=2, zero=3),
    Case(128, 4, 32, 32, ranks=2, placement="interleaving"),
    Case(128, 4, 32, 32, ranks=2, placement="separation"),
    Case(256, 2, 32, 32, ranks=2, placement="separation"),
    Case(128, 4, 32, 32, ranks=4),
    Case(256, 2, 32, 32, ranks=4),
    Case(128, 4, 32, 32, ranks=4, zero=3),
    Case(128, 4, 32, 32, ranks=4, placement="interleaving"),
    Case(128, 4, 32, 32, ranks=4, placement="separation"),
    Case(256, 2, 32, 32, ranks=4, placement=_TENSOR_PARALLEL),
    Case(128, 4, 32, 32, ranks=4, placement=_UNEQUAL),
    Case(192, 3, 24, 48),
    Case(128, 6, 16, 64),
    Case(384, 2, 16, 32),
    Case(128, 4, 32, 32, mini_batches=4),
    Case(192, 3, 24, 48, ranks=2),
    Case(192, 3, 24, 48, ranks=2, placement="separation"),
    Case(256, 3, 48, 24, ranks=2, placement="interleaving"),
    Case(192, 3, 24, 48, ranks=4),
    Case(192, 3, 24, 48, ranks=4, placement="separation"),
    Case(128, 2, 64, 24, ranks=8),
)
SECOND = (
    Case(96, 5, 20, 40),
    Case(320, 2, 24, 32),
    Case(160, 3, 48, 32, mini_batches=1),
    Case(96, 5, 20, 40, ranks=2),
    Case(320, 2, 24, 32, ranks=2, placement="separation"),
    Case(160, 3, 48, 32, ranks=2, placement="interleaving"),
    Case(160, 3, 32, 32, ranks=2, zero=1),
    Case(320, 2, 24, 32, ranks=4),
    Case(160, 3, 48, 32, ranks=4, placement="separation"),
    Case(96, 4, 64, 24, ranks=8),
)
"""Ten more, which the last change of the form was made after."""
_DRAWN_SEED = 2026112503
_PROBE_SECONDS = 2.0


def drawn(count: int = 10) -> tuple[Case, ...]:
    """Random cases that nobody has chosen."""
    chance = random.Random(_DRAWN_SEED)
    cases: list[Case] = []
    while len(cases) < count:
        ranks = chance.choice((1, 2, 2, 4, 4, 8))
        sizes = (
            chance.choice((64, 96, 128, 160, 192, 256, 320)),
            chance.randint(2, 6),
            chance.choice((16, 32, 48, 64)),
        )
        placements = ("flattening", "interleaving", "separation") if ranks in (2, 4) else ("flattening",)
        case = Case(
            *sizes,
            chance.choice((16, 24, 32, 48, 64)),
            ranks=ranks,
            placement=chance.choice(placements),
            mini_batches=chance.choice((1, 2)),
        )
        if ranks > 1 and case.placement == "flattening":
            case = replace(case, zero=chance.choice((0, 1, 2, 3)))
        if case not in (*CASES, *SECOND, *cases):
            cases.append(case)
    return tuple(cases)


def work_per_second(seconds: float) -> float:
    """Rounds per second of a product of matrices, a pass over memory and interpreted code, on one thread."""
    torch.set_num_threads(1)
    matrix, large = torch.randn(512, 512), torch.randn(4_000_000)
    rounds, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        matrix @ matrix
        large * 2.0
        sum(range(100_000))
        rounds += 1
    return rounds / (time.perf_counter() - start)


@dataclass
class SpeedProbe:
    """How fast this machine is, with work on every core."""

    speeds: list[float] = field(default_factory=list)
    """Relative to the first, in the order of the calls."""

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        self._workers = ProcessPoolExecutor(cores, mp_context=get_context("spawn"))
        self._seconds = [_PROBE_SECONDS] * cores
        self._first = 1.0
        self._speed()
        self._first = self._speed()
        self.speeds.append(1.0)

    def _speed(self) -> float:
        return statistics.fmean(self._workers.map(work_per_second, self._seconds)) / self._first

    def since_last(self) -> float:
        """Mean of the speed now and at the last call, relative to the first."""
        self.speeds.append(self._speed())
        return statistics.fmean(self.speeds[-2:])


def main() -> None:
    """Run all cases and print errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=("all", "known", "drawn", "thirty"), default="all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measured", type=Path, help="predict the runs of such a file again")
    options = parser.parse_args()
    curves = load_curves()
    if curves is None:
        raise UserError("predictions need curves of this machine, got none: run hybrid-rlhf calibrate")
    known_cases, new = CASES + SECOND, drawn()
    groups = {"known": known_cases, "drawn": new, "all": known_cases + new, "thirty": CASES[:20] + new}
    cases = groups[options.cases]
    earlier: list[dict[str, Any]] = json.loads(options.measured.read_text()) if options.measured else []
    known = {Case(**record["case"]): record["measured"] for record in earlier}
    probe = None if earlier else SpeedProbe()
    measured: dict[Case, dict[str, float]] = {}
    reports: dict[Case, PredictionReport] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            line = prepare(Path(name), case)
            measured[case] = known.get(case) or run(Path(name), line, ranks=case.ranks, steps=options.steps)
            if probe is not None:
                measured[case]["speed"] = probe.since_last()
            measured[case]["scaled"] = measured[case][STEP] * measured[case].get("speed", 1.0)
            predicted = predict(line, curves, case, measured[case])
            flattened = measured.get(replace(case, placement="flattening"))
            if flattened is not None and case.placement != "flattening":
                plan = plan_of(parse_config(RLConfig, line), case)
                predicted["linear"] = linear_rule(flattened, plan, ranks=case.ranks)
                measured[case]["linear"] = measured[case][STEP]
            reports[case] = PredictionReport.of(predicted, measured[case])
        print(f"\n{case}, speed {measured[case].get('speed', 1.0):.3f}", *reports[case].lines(), sep="\n", flush=True)
    for kind in (STEP, "scaled", *PHASES, "silent", "linear"):
        chosen = [report for report in reports.values() if kind in report.seconds]
        if chosen:
            print(f"{kind} ({len(chosen)} runs):", summary(chosen, kind))
    if options.json:
        records = [
            {"case": asdict(case), "measured": measured[case], "metrics": report.metrics()}
            for case, report in reports.items()
        ]
        options.json.write_text(json.dumps(records, indent=1))


def summary(reports: Sequence[PredictionReport], phase: str = STEP) -> dict[str, float]:
    """Errors of many runs: mean absolute, and the 90th percentile, linear between two errors.

    Raises:
        ValueError: when no report has the phase.
    """
    errors = [abs(report.seconds[phase].relative) for report in reports if phase in report.seconds]
    if not errors:
        raise ValueError(f"no report has the phase {phase}")
    return {"mean_absolute_error": statistics.fmean(errors), "percentile_90_error": float(np.percentile(errors, 90))}


def prepare(folder: Path, case: Case) -> list[str]:
    """Write models and prompts; the settings of the run."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=max(1, case.hidden // 64),
        num_key_value_heads=max(1, case.hidden // 64),
        pad_token_id=2,
        num_labels=1,
    )
    torch.manual_seed(0)
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(config).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    rows = [json.dumps({"prompt": PROMPT.format(number)}) for number in range(case.prompts * 40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    settings = {
        "model.path": folder / "actor",
        "data.sources": f"[{folder / 'rows.jsonl'}]",
        "reward.components": f"[{folder / 'reward'}]",
        "output_dir": folder / "run",
        "actor.zero.stage": case.zero,
        "algorithm.mini_batches": case.mini_batches,
        "rollout.prompts_per_step": case.prompts,
        "rollout.max_prompt_tokens": 64,
        "rollout.sampling.max_new_tokens": case.new_tokens,
        "rollout.kv_cache_gib": 0.25,
        "placement": case.placement,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def run(folder: Path, line: list[str], *, ranks: int, steps: int) -> dict[str, float]:
    """Run on one host; see `medians`."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*start, "hybrid_rlhf.cli.rl", *line, "--train.max_steps", str(steps + 2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return medians(folder)


def medians(folder: Path) -> dict[str, float]:
    """Median seconds of the phases of the run in a folder, and the mean tokens of its completions."""
    rows: list[dict[str, Any]] = [
        json.loads(row) for row in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if "time/step_seconds" in row][2:]
    found = {phase: statistics.median(row[f"time/{phase}_seconds"] for row in rows) for phase in (STEP, *PHASES)}
    found["weight_sync"] += statistics.median(row.get("time/weight_check_seconds", 0.0) for row in rows)
    found["silent"] = found[STEP]
    return found | {"tokens": statistics.fmean(row["completions/mean_length"] for row in rows)}


def predict(line: list[str], curves: MachineCurves, case: Case, measured: dict[str, float]) -> dict[str, float]:
    """Predicted seconds of the phases, and of the step without communication as "silent"."""
    config = parse_config(RLConfig, line)
    lengths = StepLengths(PROMPT_TOKENS, (round(measured["tokens"]),) * case.prompts)
    costs = Costs(read_job(config, torch.device("cpu"), lengths=lengths), curves, case.cluster)
    plan = plan_of(config, case)
    predicted = step_time(costs, plan, rows_at_once=ALL_ROWS)
    silent = without_communication(costs, plan, rows_at_once=ALL_ROWS)
    other = predicted.phases["gather"] + predicted.phases["loop"]
    step = {STEP: predicted.step_seconds, "scaled": predicted.step_seconds}
    return {**predicted.phases, "other": other, **step, "silent": silent}


def plan_of(config: RLConfig, case: Case) -> StepPlan:
    """The plan of a run."""
    frozen = 3 if case.zero == 3 else 0
    zero = {"actor": case.zero, "critic": case.zero, "reference": frozen, config.reward.named[0].label: frozen}
    return StepPlan(resolve_placement(config.placement, PlacedRoles(zero), ranks=case.ranks))


if __name__ == "__main__":
    main()
