"""The parts that measure a GPU, on tiny shapes and a CPU: they run, are recorded, and are not run twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_hour, results

ROOT = Path(__file__).parents[2]


def run(output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_hour", "--small", "--output", str(output), *more]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.faults
def test_all_parts_run_and_are_recorded(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = {part: json.loads(results.read("gpu", f"{part}.json", tmp_path)) for part in gpu_hour.PARTS}
    assert all(record["done"] and record["small"] and record["figures"] for record in records.values())
    errors = [item["relative_error"] for item in records["kernels"]["figures"].values() if "relative_error" in item]
    assert len(errors) == 4 and all(error < 1e-5 for error in errors)
    assert "passed" in records["tests"]["figures"]["tests"]["summary"]
    for part in ("grpo_8192", "grpo", "ppo"):
        figures = records[part]["figures"][part]
        assert len(figures["steps"]) == 3 and {"generation", "scoring", "training"} <= set(figures["profiled"])
        assert "generation" in {phase["phase"] for phase in figures["memory"]["phases"]}
    assert set(records["updates"]["figures"]) == {"gradients summed in fp32", "gradients summed in bf16"}
    assert run(tmp_path).stdout.count("done already") == len(gpu_hour.PARTS)


def test_the_most_valuable_parts_come_first_and_are_short() -> None:
    """The first call on a rented GPU may have ten minutes."""
    first = list(gpu_hour.PARTS)[:6]
    assert first == ["host", "grpo_8192", "grpo", "updates", "decoding", "lora_7b"]
    assert all(gpu_hour.LONGER.get(part, gpu_hour.PART_SECONDS) <= 120 for part in first)


@pytest.mark.faults
def test_an_interrupted_part_resumes_after_its_last_figure(tmp_path: Path) -> None:
    cut = {"done": False, "figures": {"launch": {"kept": 1}}, "failure": "cut"}
    results.write("gpu", "host.json", json.dumps(cut), tmp_path)
    done = run(tmp_path, "--part", "host")
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(results.read("gpu", "host.json", tmp_path))
    assert record["figures"]["launch"] == {"kept": 1} and "limits" in record["figures"]
    assert record["done"] and "failure" not in record


@pytest.mark.faults
def test_a_part_without_time_is_left_to_the_next_call(tmp_path: Path) -> None:
    done = run(tmp_path, "--minutes", "0.1", "--part", "kernels")
    assert "no time left" in done.stdout and results.names("gpu", tmp_path) == []


def test_the_tests_of_all_triton_kernels_run_and_cublas_may_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of sampling did not, and the deterministic one failed without CUBLAS_WORKSPACE_CONFIG."""
    words: set[str] = set()

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        words.update(command)
        assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        return subprocess.CompletedProcess(command, 0, stdout="1 passed", stderr="")

    class Now:
        def measure(self, name: str, part: Callable[[], Any]) -> None:
            part()

    monkeypatch.setattr(subprocess, "run", run)
    gpu_hour.gpu_tests(Now(), small=False)  # type: ignore[arg-type]
    files = {f"tests/generation/{path.name}" for path in ROOT.glob("tests/generation/test_*kernels.py")}
    assert files - {"tests/generation/test_cpu_kernels.py"} | {"tests/gpu/test_memory.py"} <= words


def test_without_a_gpu_it_fails_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_hour, "ON_GPU", False)
    monkeypatch.setattr(sys, "argv", ["gpu_hour", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="measures a GPU, torch sees none"):
        gpu_hour.main()
