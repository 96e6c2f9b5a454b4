"""docs/defaults.md has every default of step 3 that decides what is learned, at its present value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.parsing.building import config_tree
from hybrid_rlhf.configs.preference import PREFERENCE_LOSSES, PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig

PAGE = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text()
ROWS = re.findall(
    r"^\| `(?:(\w+): )?([\w.]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE
)


def defaults_of(config_type: type, algorithms: list[str]) -> dict[str, Any]:
    """The default of every key under the first algorithm that has it; of a section that is off, null."""
    found: dict[str, Any] = {}
    for name in algorithms:
        tree = config_tree(config_type, ["--algorithm", name] if name else [])
        for section in tree.walk(off=True):
            found |= {section.name: None} if not section.is_on and section.name not in found else {}
            found |= {key.name: key.default for key in section.keys.values() if key.name not in found}
    return found


RL = defaults_of(RLConfig, list(RL_ALGORITHMS))
RL_KEYS = {key for name in RL_ALGORITHMS for key in config_tree(RLConfig, ["--algorithm", name]).all_keys(off=True)}
STEPS = {
    "": RL,
    "rl": RL,
    "preference": defaults_of(PreferenceStepConfig, list(PREFERENCE_LOSSES)),
    "reward": defaults_of(RewardConfig, [""]),
    "sft": defaults_of(SFTConfig, [""]),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0] + row[1])
def test_a_default_is_the_configs(row: tuple[str, ...]) -> None:
    step, key, shown = row[:3]
    assert shown_as(STEPS[step][key]) == shown


def test_every_key_of_the_algorithm_is_there_once() -> None:
    keys = [key for step, key, *_ in ROWS if not step]
    assert len(keys) == len(set(keys))
    assert {key for key in keys if key.startswith("algorithm.")} >= {
        key for key in RL_KEYS if key.startswith("algorithm.")
    }
    assert all(cell.strip() for row in ROWS for cell in row[1:])


def shown_as(value: Any) -> str:
    """As the table writes it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return yaml.safe_dump(list(value), default_flow_style=True).strip() if isinstance(value, tuple) else str(value)
