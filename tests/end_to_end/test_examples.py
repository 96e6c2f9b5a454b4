"""The examples run as they stand, and stay as short as they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.faults.steps import write_rows

ROOT = Path(__file__).parents[2]
FLOW = ROOT / "examples" / "custom_flow.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_a_loop_of_ones_own_is_a_short_file_that_learns_and_evaluates(tmp_path: Path, model_folder: Path) -> None:
    assert len(FLOW.read_text().splitlines()) < 120
    rows, output = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(FLOW),
            "--actor.path", str(model_folder), "--judge", str(model_folder), "--data.sources", str(rows),
            "--data.cache_dir", str(tmp_path / "cache"), "--output_dir", str(output), "--train.max_steps", "4",
            "--train.eval_every", "2", "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "6",
            "--rollout.max_prompt_tokens", "48", "--data.max_eval_rows", "4", "--logging.tensorboard", "false",
        ],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    parts = {f"reward/{name}/mean" for name in ("brevity", "politeness", "judge")}
    assert all(parts < set(line) and line["actor/grad_norm"] > 0 for line in lines)
    assert ["eval/scores" in line for line in lines] == [False, True, False, True]
    assert (output / "actor" / "model.safetensors").exists() and not (output / "critic").exists()


def test_a_mistake_in_it_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FLOW), "--jugde", "x"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (2, "error: unknown option --jugde: the nearest is judge\n")
