"""The fuzzer's targets: inputs that it found, what hypothesis makes up, and the fuzzer itself for a moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import CORPUS
from tests.fuzz.targets import TARGETS, all_targets, seeds

ROOT = Path(__file__).parents[2]
QUICK = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
FOUND = sorted(path for path in CORPUS.rglob("*") if path.is_file())
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]) | json, "content": json}),
    max_size=3,
)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_found_inputs_stay_fixed(path: Path) -> None:
    (TARGETS.get(path.parent.name) or all_targets)(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_takes_its_seeds_and_parts_of_them(name: str) -> None:
    for seed in seeds(name):
        for part in (seed, seed[: len(seed) // 2], seed[1:], seed + b"\xff", seed.replace(b":", b"")):
            TARGETS[name](part)


@QUICK
@given(st.dictionaries(st.sampled_from(["seed", "steps", "plan", "name", "profile_steps", "parts", "data"]), json))
def test_any_values_of_a_config(content: dict[str, object]) -> None:
    import yaml

    TARGETS["yaml"](yaml.safe_dump(content).encode("utf-8", "surrogatepass"))


@QUICK
@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "prompt", "chosen", "rejected", "completion", "margin", "responses", "ranks", "text"]
        ),
        json | messages | st.text(max_size=5),
    )
)
def test_any_columns_of_a_row(row: dict[str, object]) -> None:
    import json as writer

    TARGETS["jsonl"](writer.dumps(row).encode())


def fuzz(target: str, seconds: int) -> None:
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 only")
    line = [sys.executable, "-m", "tests.fuzz.readers", "--target", target, "--seconds", str(seconds)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=seconds + 200, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 100, done.stdout


@pytest.mark.faults
@pytest.mark.parametrize("target", TARGETS)
def test_a_reader_for_two_minutes(target: str) -> None:
    fuzz(target, 120)
