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
os.environ.setdefault("HYBRID_RLHF_PRODUCTS", "onednn")  # the same bits in every test, whatever a measurement says

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels.py then runs on a CPU

from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from hybrid_rlhf.runtime.world import World, close_world, init_world
from tests.support.covering import mark_all_but_covering
from tests.support.generation import GENERATOR
from tests.support.steps import write_lines, write_rows
from tests.support.tiny import tiny_config, tiny_model, tiny_tokenizer

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Combinations beyond pairs are `faults`. Files with a slow test first: a worker that starts one last would run it
    while the others are idle."""
    mark_all_but_covering(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


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


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Actor and reward model, which has a head; the reference is another model, so that the KL is not zero."""
    folder = tmp_path_factory.mktemp("roles")
    for seed, name in ((0, "actor"), (2, "reference")):
        tiny_model(seed).save_pretrained(folder / name)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(folder / "reward")
    return {name: str(folder / name) for name in ("actor", "reward", "reference")}
