"""Steps of flattening on this machine, measured next to what the planner predicts from its calibrated curves.

    hybrid-rlhf calibrate && python -m benchmarks.placement.prediction [--ranks 1,2] [--steps 5] [--json FILE]

Random Llamas of several sizes run PPO; the first two steps of each run warm up, and medians of the others count. Run it
on an idle machine: ranks share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.command_line import parse_config
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.memory.shapes import Shapes
from hybrid_rlhf.placement.costs import Costs
from hybrid_rlhf.placement.curves import MachineCurves
from hybrid_rlhf.placement.job import JobReader, StepLengths
from hybrid_rlhf.placement.machines.stored import load_curves
from hybrid_rlhf.placement.plans import Cluster, StepPlan, flattening
from hybrid_rlhf.placement.report import STEP, PredictionReport, summary
from hybrid_rlhf.placement.schedule import step_time
from tests.support.tiny import VOCABULARY, tiny_tokenizer

PHASES = ("weight_sync", "generation", "scoring", "training")


@dataclass(frozen=True)
class Case:
    """A run."""

    hidden: int
    layers: int
    prompts: int
    new_tokens: int
    zero: int = 0
    mini_batches: int = 2


CASES = (
    Case(64, 2, 16, 16),
    Case(64, 4, 32, 32),
    Case(128, 4, 32, 32),
    Case(256, 2, 32, 32),
    Case(256, 4, 32, 64),
    Case(128, 4, 32, 32, zero=2),
    Case(128, 4, 32, 32, zero=3),
)


def main() -> None:
    """Run all cases and print errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    curves = load_curves()
    if curves is None:
        raise UserError("predictions need curves of this machine, got none: run hybrid-rlhf calibrate")
    reports, records = [], []
    for ranks in map(int, options.ranks.split(",")):
        for case in CASES:
            with tempfile.TemporaryDirectory() as name:
                line = prepare(Path(name), case)
                measured = run(Path(name), line, ranks=ranks, steps=options.steps)
                report = PredictionReport.of(predict(line, curves, case, ranks, measured), measured)
            print(f"\n{case} on {ranks} ranks", *report.lines(), sep="\n", flush=True)
            reports.append(report)
            records.append({**asdict(case), "ranks": ranks, "metrics": report.metrics()})
    print("\nstep:", summary(reports))
    for phase in PHASES:
        print(f"{phase}:", summary(reports, phase))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


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
    rows = [json.dumps({"prompt": f"prompt {number:04}"}) for number in range(case.prompts * 40)]
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
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def run(folder: Path, line: list[str], *, ranks: int, steps: int) -> dict[str, float]:
    """Median seconds of the phases of a run, and the mean tokens of completions and prompts."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*start, "hybrid_rlhf.cli.rl", *line, "--train.max_steps", str(steps + 2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    rows: list[dict[str, Any]] = [
        json.loads(row) for row in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if "time/step_seconds" in row][2:]
    found = {phase: statistics.median(row[f"time/{phase}_seconds"] for row in rows) for phase in (STEP, *PHASES)}
    found["weight_sync"] += statistics.median(row.get("time/weight_check_seconds", 0.0) for row in rows)
    return found | {"tokens": statistics.fmean(row["completions/mean_length"] for row in rows)}


def predict(
    line: list[str], curves: MachineCurves, case: Case, ranks: int, measured: dict[str, float]
) -> dict[str, float]:
    """Predicted seconds of the phases."""
    config = parse_config(RLConfig, line)
    lengths = StepLengths(45.0, (round(measured["tokens"]),) * case.prompts)  # prompts with the chat template
    job = JobReader(torch.device("cpu"), Shapes())(config, lengths, overrides={})
    zero = {role.name: case.zero if role.is_trained or case.zero == 3 else 0 for role in job.roles.values()}
    plan = StepPlan(flattening(list(job.roles), ranks, zero=zero))
    time = step_time(Costs(job, curves, Cluster(ranks, ranks)), plan, rows_at_once=10**6)
    return {**time.phases, STEP: time.step_seconds}


if __name__ == "__main__":
    main()
