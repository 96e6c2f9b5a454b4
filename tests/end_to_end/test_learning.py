"""PPO learns: one run of the learning benchmark's smallest task, four epochs of two mini-batches a rollout."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from benchmarks.learning import (
    ABLATIONS,
    ALGORITHMS,
    CURRICULA,
    ONE_UPDATE,
    SAMPLERS,
    config_of,
    curve,
    last,
    merged,
    run,
    variants_of,
)
from benchmarks.learning_tasks import copy_task
from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.marks import slow


@pytest.mark.slow
def test_ppo_learns_to_copy(tmp_path: Path) -> None:
    task = copy_task(tmp_path, steps=40)
    scores = curve(run(config_of(task, {}), seed=0, threads=1), task.metric)
    assert scores[1] < 0.15, "a random policy"
    assert last([scores], 10)[0] > 0.85, "docs/benchmarks/learning.md has the band"


@pytest.mark.parametrize("task", [slow("copy"), "demo"])
def test_every_variant_of_the_benchmark_is_a_config(task: str, tmp_path: Path) -> None:
    for step in ("step1_sft", "step2_reward"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "config.json").write_text("{}")
    options = argparse.Namespace(
        task=task,
        steps=2,
        ablations=False,
        adapters=False,
        algorithms=[*RL_ALGORITHMS],
        samplers=[],
        teacher=None,
        dtypes=False,
        curriculum=False,
        demo=tmp_path,
    )
    variants = variants_of(options, tmp_path)
    if task == "copy":
        assert {*RL_ALGORITHMS} - {*ALGORITHMS} == {"remax"}
        variants |= variants_of(argparse.Namespace(**vars(options) | {"algorithms": None, "ablations": True}), tmp_path)
        variants |= variants_of(argparse.Namespace(**vars(options) | {"samplers": [*SAMPLERS]}), tmp_path)
        assert {*variants} == {*RL_ALGORITHMS, *ABLATIONS, *SAMPLERS}
        for changes in CURRICULA.values():
            assert config_of(variants["grpo"][0], merged({"algorithm": {"name": "grpo"}}, changes))
    for name, (run_of, changes) in variants.items():
        file = tmp_path / "c.yaml"
        file.write_text(yaml.safe_dump(config_of(run_of, changes)))
        config = parse_config(RLConfig, ["--config", str(file)])
        assert config.algorithm.name == (name if name in RL_ALGORITHMS else "ppo")
        if name == "remax":
            assert config.algorithm.updates_once and ONE_UPDATE["algorithm"]["epochs"] == 1
