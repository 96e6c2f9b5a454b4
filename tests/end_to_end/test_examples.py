"""The examples run as they stand, on a tiny model, and stay short; the public names import lazily."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

import hybrid_rlhf
from hybrid_rlhf import SFT, UserError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run_example(file: Path, model: Path, output: Path, *launcher: str) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(file), "--model", str(model), "--output_dir", str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=output.parent,
        env={**ENVIRONMENT, "HOME": str(output.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs(file: Path, model_folder: Path, tmp_path: Path) -> None:
    assert len(file.read_text().splitlines()) <= 100
    run_example(file, model_folder, tmp_path / "out")
    lines = [json.loads(line) for path in tmp_path.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    assert any(name.endswith(("/loss", "loss/policy")) for line in lines for name in line)
    assert list(tmp_path.rglob("model.safetensors"))


def test_a_loop_of_ones_own_trains_and_evaluates_on_two_ranks(model_folder: Path, tmp_path: Path) -> None:
    file = ROOT / "examples" / "custom_loop.py"
    imported = [node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    assert len([module for module in imported if (module or "").startswith("hybrid_rlhf")]) <= 6
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run_example(file, model_folder, tmp_path / "run", *torchrun)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 and "eval/scores" in line for line in lines)
    assert (tmp_path / "run" / "actor" / "model.safetensors").exists() and not (tmp_path / "run" / "critic").exists()


def test_public_names_import_lazily() -> None:
    code = (
        "import sys, hybrid_rlhf; assert 'torch' not in sys.modules and 'datasets' not in sys.modules; "
        "print(*(getattr(hybrid_rlhf, name).__name__ for name in hybrid_rlhf.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout.split() == hybrid_rlhf.__all__
    assert set(hybrid_rlhf.__all__) <= set(dir(hybrid_rlhf))
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        hybrid_rlhf.Trainer  # noqa: B018


def test_rows_in_memory_and_on_disk_are_the_same_data(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(4)]
    kept = (rows, datasets.Dataset.from_list(rows))
    steps = [SFT(model=model_folder, data={"sources": data, "cache_dir": str(tmp_path)}) for data in kept]
    sources = [step.config.data.sources for step in steps]
    assert sources[0] == sources[1] and str(sources[0][0]).startswith(str(tmp_path))
    assert [json.loads(line) for line in Path(str(sources[0][0])).read_text().splitlines()] == rows
    assert SFT(model=model_folder, data=tmp_path / "rows.jsonl").config.data.sources == [str(tmp_path / "rows.jsonl")]
    with pytest.raises(UserError, match="data must have rows, got none"):
        SFT(model=model_folder, data=[])
    with pytest.raises(UserError, match="keywords: unknown key trian: the nearest is train"):
        SFT(model=model_folder, data=rows, trian={"max_steps": 1})
