"""docs/defaults.md has every default of step 3 that decides what is learned, at its present value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rlhf.configs.cli import dotted_keys
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.presets import flat_defaults
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sft import SFTConfig

PAGE = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text()
ROWS = re.findall(
    r"^\| `(?:(\w+): )?([\w.]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE
)
STEPS = {"": PPOConfig, "ppo": PPOConfig, "preference": PreferenceStepConfig, "reward": RewardConfig, "sft": SFTConfig}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0] + row[1])
def test_a_default_is_the_configs(row: tuple[str, ...]) -> None:
    step, key, shown = row[:3]
    assert shown_as(flat_defaults(STEPS[step])[key]) == shown


def test_every_key_of_the_algorithm_is_there_once() -> None:
    keys = [key for step, key, *_ in ROWS if not step]
    assert len(keys) == len(set(keys))
    assert {key for key in keys if key.startswith("ppo.")} == {
        key for key in dotted_keys(PPOConfig) if key.startswith("ppo.")
    }
    assert all(cell.strip() for row in ROWS for cell in row[1:])


def shown_as(value: Any) -> str:
    """As the table writes it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return yaml.safe_dump(list(value), default_flow_style=True).strip() if isinstance(value, tuple) else str(value)
