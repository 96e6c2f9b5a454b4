"""Shared fixtures: a tiny tokenizer and tiny random models, built here; nothing comes from a network."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Else `init_world` gives the process a thread for each core. The threads of several pytest workers spin while they
# wait, and take each other's cores: the tests after it ran 20 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HYBRID_RLHF_PRODUCTS", "onednn")  # the same bits in every test, on any processor

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels.py then runs on a CPU

from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.runtime.world import World, close_world, init_world
from tests.support.commands import CommandLine
from tests.support.covering import mark_all_but_covering
from tests.support.faults import Armed, run_step
from tests.support.generation import GENERATOR
from tests.support.steps import MODULES, step_line, write_lines, write_rows
from tests.support.tiny import save_tiny, tiny_model, tiny_scorer, tiny_tokenizer

torch.set_num_threads(1)
# How long an example takes depends on the machine and what else it runs, not on what is tested.
hypothesis.settings.register_profile("tests", parent=hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("tests")
LONGEST = ("vllm", "tinker", "evals", "end_to_end")
"""Folders whose files take a minute or more: they start other servers, or whole runs."""


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Combinations beyond pairs are `faults`. Files with a slow test first, the longest before others: a worker that
    starts one last would run it while the others are idle."""
    mark_all_but_covering(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name not in LONGEST))


def pytest_collection_finish() -> None:
    """Every engine that is built collects garbage, which need not look at all that is imported."""
    if "hybrid_rlhf.loop.report" in sys.modules:
        import_module("tests.support.shortened")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_tokens() -> None:
    """A test's `random_tokens` do not depend on the tests before it."""
    GENERATOR.manual_seed(1)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("model"), tiny_model())


@pytest.fixture(scope="session")
def stopping_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose completions have many lengths."""
    from tests.support.ahead import save_stopping_model  # imports deepspeed, which most tests need not

    return save_stopping_model(tmp_path_factory.mktemp("stopping"))


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Messages of the library's logger."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hybrid_rlhf")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines and give the path."""

    def write(rows: Sequence[dict[str, Any]], name: str = "rows.jsonl") -> Path:
        return write_lines(tmp_path / name, rows)

    return write


@pytest.fixture(scope="module")  # a main that a test of another module calls in this process closes its own
def world() -> Iterator[World]:
    yield init_world()
    close_world()


@pytest.fixture(scope="session")
def pair_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of preference pairs that every step reads."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture
def tiny_run(model_folder: Path, pair_rows: Path, tmp_path: Path) -> Callable[..., list[int]]:
    """Runs a step in the folder `out`, or in another one, and returns the exit codes of its ranks."""

    def run(
        name: str, *more: str, ranks: int = 2, output: Path | None = None, armed: Armed | None = None, **options: Any
    ) -> list[int]:
        line = step_line(name, output or tmp_path / "out", model_folder, pair_rows, *more)
        return run_step(MODULES[name], ranks, line, armed, **options)

    return run


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Actor and reward model, which has a head; the reference is another model, so that the KL is not zero."""
    folder = tmp_path_factory.mktemp("roles")
    for seed, name in ((0, "actor"), (2, "reference")):
        tiny_model(seed).save_pretrained(folder / name)
    save_tiny(folder / "reward", tiny_scorer())
    return {name: str(folder / name) for name in ("actor", "reward", "reference")}
