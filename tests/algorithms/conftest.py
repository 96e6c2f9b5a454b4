"""A world of one, and the folders of the roles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid_rlhf.runtime.world import World, close_world, init_world
from tests.tiny import tiny_model


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    yield init_world()
    close_world()


@pytest.fixture(scope="package")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Actor and reward model; the reference is another model, so that the KL is not zero."""
    folder = tmp_path_factory.mktemp("roles")
    for seed, name in enumerate(("actor", "reward", "reference")):
        tiny_model(seed).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("actor", "reward", "reference")}
