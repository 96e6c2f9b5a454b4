"""A world of one, and the folders of the roles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.runtime.world import World, close_world, init_world
from tests.tiny import tiny_config, tiny_model


@pytest.fixture(scope="module")  # a main that a test of another module calls in this process closes its own
def world() -> Iterator[World]:
    yield init_world()
    close_world()


@pytest.fixture(scope="package")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Actor and reward model, which has a head; the reference is another model, so that the KL is not zero."""
    folder = tmp_path_factory.mktemp("roles")
    for seed, name in ((0, "actor"), (2, "reference")):
        tiny_model(seed).save_pretrained(folder / name)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(folder / "reward")
    return {name: str(folder / name) for name in ("actor", "reward", "reference")}
