"""The parts of an RL step over the tiny models, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.runtime.world import World
from tests.support.programs import program_parts
from tests.support.rl import build_parts


@pytest.fixture
def build(world: World, paths: dict[str, str]) -> Callable[..., RLParts]:
    """`build_parts` of these models."""
    return partial(build_parts, world, paths)


@pytest.fixture
def build_program(world: World, paths: dict[str, str]) -> Callable[..., RLParts]:
    """`program_parts` of the actor."""
    return partial(program_parts, world, paths["actor"])
