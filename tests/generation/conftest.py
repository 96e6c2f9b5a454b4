"""Fixtures of the tests of generation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.runtime.world import default_device


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each forward of a decoder."""
    sizes = []
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
    monkeypatch.setattr(choice, "kernels_for", lambda device, dtype: kernels)
    yield
