"""The library of a CPU's products: that of the processor, the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.functional import operations
from hybrid_rlhf.functional.operations import Backend
from hybrid_rlhf.runtime import product_backend
from hybrid_rlhf.runtime.product_backend import VARIABLE, choose_product_backend
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import user_error
from tests.support.ranks import run_ranks

WORLD = solo_world(torch.device("cpu"))


@pytest.fixture(autouse=True)
def unforced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    operations.use_backend("onednn")


def chosen(*, deterministic: bool = False) -> Backend:
    choose_product_backend(WORLD, deterministic=deterministic)
    return operations.backend()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"vendor_id": "GenuineIntel"}, "torch"), ({"vendor_id": "AuthenticAMD"}, "onednn"), ({}, "onednn")],
    ids=["Intel", "AMD", "unknown"],
)
def test_the_processor_decides(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], expected: Backend, log_lines: list[str]
) -> None:
    monkeypatch.setattr(product_backend, "processor_fields", lambda: fields)
    assert chosen() == expected
    assert log_lines and "matrix products" in log_lines[0]


def test_a_choice_can_be_forced_and_a_deterministic_run_has_one_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_backend, "processor_fields", lambda: {"vendor_id": "GenuineIntel"})
    assert chosen(deterministic=True) == "onednn"
    monkeypatch.setenv(VARIABLE, "torch")
    assert chosen(deterministic=True) == "torch"
    monkeypatch.setenv(VARIABLE, "mkl")
    with user_error("must be onednn or torch, got 'mkl'"):
        chosen()


def both_ranks(world: World) -> Backend:
    """What a rank is given, where each has another processor."""
    os.environ.pop(VARIABLE, None)  # of the process that this one is forked from
    product_backend.faster_backend = lambda: BOTH[world.rank]
    choose_product_backend(world, deterministic=False)
    return operations.backend()


BOTH: tuple[Backend, Backend] = ("torch", "onednn")


def test_ranks_agree(tmp_path: Path) -> None:
    assert run_ranks(both_ranks, 2, tmp_path) == ["torch", "torch"]
