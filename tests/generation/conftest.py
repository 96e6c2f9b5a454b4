"""Fixtures of the tests of generation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid_rlhf.generation.model.decoder import Decoder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each forward of a decoder."""
    sizes: list[int] = []
    hidden = Decoder.hidden
    monkeypatch.setattr(
        Decoder, "hidden", lambda self, t, *rest, **more: sizes.append(len(t)) or hidden(self, t, *rest, **more)
    )
    yield sizes
