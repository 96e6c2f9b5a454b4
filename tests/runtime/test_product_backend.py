"""The library of a CPU's products: measured once per machine, kept by a run, the same on all ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.functional import operations
from hybrid_rlhf.functional.operations import Backend
from hybrid_rlhf.runtime import product_backend
from hybrid_rlhf.runtime.product_backend import RECORD, VARIABLE, choose_product_backend, machine_key, measure
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import user_error
from tests.support.ranks import run_ranks

WORLD = solo_world(torch.device("cpu"))


@pytest.fixture(autouse=True)
def unforced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    operations.use_backend("onednn")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a run and of the cache; the latter does not exist yet."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run", tmp_path / "cache"


def measured_as(monkeypatch: pytest.MonkeyPatch, faster: Backend) -> list[int]:
    """Let a measurement say which one is faster; counts the measurements."""
    calls: list[int] = []

    def measure() -> dict[Backend, float]:
        calls.append(1)
        return {name: 0.1 if name == faster else 0.2 for name in operations.BACKENDS}

    monkeypatch.setattr(product_backend, "measure", measure)
    return calls


def chosen(places: tuple[Path, Path], *, checkpoint: Path | None = None, deterministic: bool = False) -> Backend:
    run, cache = places
    choice = choose_product_backend(WORLD, run, checkpoint=checkpoint, deterministic=deterministic, cache=cache)
    assert operations.backend() == choice
    return choice


@pytest.mark.parametrize("faster", operations.BACKENDS)
def test_the_faster_one_is_measured_once_per_machine(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, faster: Backend, log_lines: list[str]
) -> None:
    calls = measured_as(monkeypatch, faster)
    assert [chosen(places), chosen(places)] == [faster, faster]
    assert len(calls) == 1
    assert len(log_lines) == 2 and "measured:" in log_lines[0] and "measured earlier" in log_lines[1]
    monkeypatch.setattr(product_backend, "machine_key", lambda: "another machine")
    chosen(places)
    assert len(calls) == 2
    assert set(json.loads((places[1] / RECORD).read_text())) == {machine_key(), "another machine"}
    assert [path.name for path in places[1].iterdir()] == [RECORD], "nothing is left beside it"


def test_a_run_that_resumes_keeps_its_choice_whatever_the_cache_says(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured_as(monkeypatch, "torch")
    assert chosen(places) == "torch"
    (places[1] / RECORD).write_text(json.dumps({machine_key(): "onednn"}))
    checkpoint = places[0] / "checkpoints" / "step_2"
    assert chosen(places, checkpoint=checkpoint) == "torch", "its own folder"
    (tmp_path / "other").mkdir()
    assert chosen((tmp_path / "other", places[1]), checkpoint=checkpoint) == "torch", "another run's checkpoint"
    assert chosen((tmp_path / "other", places[1])) == "onednn", "a start takes the machine's choice"


def test_a_choice_can_be_forced_and_a_deterministic_run_measures_nothing(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured_as(monkeypatch, "torch")
    assert chosen(places, deterministic=True) == "onednn"
    monkeypatch.setenv(VARIABLE, "torch")
    assert chosen(places, deterministic=True) == "torch"
    assert not calls and not places[1].exists()
    monkeypatch.setenv(VARIABLE, "mkl")
    with user_error("must be onednn or torch, got 'mkl'"):
        chosen(places)


@pytest.mark.parametrize("broken", ["{", "[]", json.dumps({"x": 1}), None], ids=str)
def test_a_broken_cache_is_measured_again(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    measured_as(monkeypatch, "torch")
    if broken is None:
        places[1].write_text("a file where the folder should be")
    else:
        places[1].mkdir()
        (places[1] / RECORD).write_text(broken)
    assert chosen(places) == "torch"
    assert broken is None or json.loads((places[1] / RECORD).read_text())[machine_key()] == "torch"


def test_the_measurement_times_both_and_leaves_everything_as_it_was() -> None:
    state, before = torch.get_rng_state(), operations.backend()
    start = time.process_time()
    seconds = measure()
    assert time.process_time() - start < 60, "under a second on a fast machine of its own"
    assert set(seconds) == set(operations.BACKENDS) and min(seconds.values()) > 0
    assert torch.equal(torch.get_rng_state(), state) and operations.backend() == before


def both_ranks(world: World, folder: str) -> tuple[Backend, Backend]:
    """What a rank is given, where each would have measured another one."""
    os.environ.pop(VARIABLE, None)  # of the process that this one is forked from
    own: Backend = BOTH[world.rank]
    product_backend.measure = lambda: {name: 0.1 if name == own else 0.2 for name in operations.BACKENDS}
    run, cache = Path(folder) / "run", Path(folder) / "cache"
    run.mkdir(exist_ok=True)
    return choose_product_backend(world, run, checkpoint=None, deterministic=False, cache=cache), operations.backend()


BOTH: tuple[Backend, Backend] = ("torch", "onednn")


def test_ranks_agree(tmp_path: Path) -> None:
    assert run_ranks(both_ranks, 2, tmp_path, str(tmp_path)) == [("torch", "torch")] * 2
