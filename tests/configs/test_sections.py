"""Sections that are made in Python: their values are read and checked as those of a file."""

from __future__ import annotations

import copy
import datetime
import pickle
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import build_config, config_tree, nested
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.data import DataConfig, DataSource
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import OptimizerConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from tests.support.errors import refused


@pytest.mark.parametrize(
    ("kind", "values", "error"),
    [
        (SamplingParams, {"n": True}, "n must be int, got True: give for example 1"),
        (SamplingParams, {"top_p": 2}, "top_p must be in (0, 1], got 2: lower it, for example to 1.0"),
        (SamplingParams, {"logit_bias": {3: 101}}, "logit_bias must be in [-100, 100], got 101: lower it"),
        (OptimizerConfig, {"learning": 1}, "unknown key learning: "),
        (OptimizerConfig, {"shedule": "linear"}, "unknown key shedule: the nearest is schedule"),
        (DataConfig, {"sources": ["a", 3]}, "sources must be list[str or DataSource], got 3: see --help"),
        (RewardComponentConfig, {"urls": "x"}, "urls: a URL is http://HOST:PORT/PATH or https, got x"),
        (RLConfig, {"algorithm": 3}, "algorithm must be AlgorithmConfig, got 3: see --help"),
    ],
)
def test_a_wrong_value_is_refused(kind: type, values: dict[str, Any], error: str) -> None:
    assert refused(lambda: kind(**values)).startswith(error)


def test_values_have_the_types_of_their_fields() -> None:
    assert OptimizerConfig(lr=1, betas=[0.5, 0.75]) == OptimizerConfig(lr=1.0, betas=(0.5, 0.75))  # type: ignore[arg-type]
    assert SamplingParams(stop="x").stop == ("x",)  # type: ignore[arg-type]
    config = DataConfig(sources=["a", DataSource(path="b")])
    assert config == DataConfig(sources=["a", {"path": "b"}])  # type: ignore[list-item]
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_sections_do_not_share_their_defaults() -> None:
    first, second = RLConfig(), RLConfig()
    assert first == second and first.actor.optimizer.schedule == "constant"
    first.reward.components.append("rm")
    assert second.reward.components == RLConfig().reward.components == []


def test_a_value_from_a_file_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optimizer: {lr: -1}\n")
    assert refused(parse_config, SFTConfig, ["--config", str(file)]) == (
        f"{file}: optimizer.lr must be 0 or more, got -1: leave it out"
    )
    assert refused(parse_config, SFTConfig, ["--config", str(file), "--optimizer.lr", "-2"]).startswith("optimizer.lr")


@pytest.mark.parametrize("value", [[[1]], {"a": {"b": datetime.date(2020, 1, 1)}}, {1: 2}, 10**30], ids=repr)
def test_any_value_of_any_key_is_read_or_refused(value: Any, tmp_path: Path) -> None:
    for key in config_tree(RLConfig).all_keys(off=True):
        try:
            config = build_config(RLConfig, [Layer(nested({key: value}))])
        except UserError:
            continue
        save_config(config, tmp_path / "c.yaml")
        assert parse_config(RLConfig, ["--config", str(tmp_path / "c.yaml")]) == config, key
