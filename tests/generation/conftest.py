"""Fixtures of the tests of generation."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from hybrid_rlhf.generation import sampler
from hybrid_rlhf.generation.model import decoder, layers
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.runtime.world import default_device


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each forward of a decoder."""
    sizes: list[int] = []
    hidden = Decoder.hidden
    monkeypatch.setattr(
        Decoder, "hidden", lambda self, t, *rest, **more: sizes.append(len(t)) or hidden(self, t, *rest, **more)
    )
    yield sizes


@pytest.fixture
def on_the_device() -> Iterator[None]:
    """Tensors of a test are made where the kernels run."""
    with default_device():
        yield


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels on the CPU too."""
    kernels = importlib.import_module("hybrid_rlhf.generation.model.kernels")
    for module in (decoder, layers, sampler):
        monkeypatch.setattr(module, "kernels_for", lambda device, dtype: kernels)
    yield
