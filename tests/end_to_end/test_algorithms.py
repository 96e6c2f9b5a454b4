"""docs/algorithms.md: its tables hold what the code does, and each of its commands runs, in small."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import train
from hybrid_rlhf.configs.algorithms import ON_POLICY, PREFERENCE
from hybrid_rlhf.configs.cli import read_config, save_config
from hybrid_rlhf.configs.reward import PreferenceConfig
from tests.engines.ranks import run_main
from tests.faults.steps import write_rows

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
COMMANDS = re.findall(r"^    python train\.py (.*)$", PAGE, re.MULTILINE)
SMALL = {
    "train.max_steps": 2, "data.max_length": 64, "data.max_eval_rows": 4, "logging.tensorboard": False,
    "lora.rank": 4, "actor.lora.rank": 0, "critic.lora.rank": 0, "rollout.prompts_per_step": 4,
    "rollout.max_new_tokens": 6, "rollout.max_prompt_tokens": 48, "model.path": "", "actor.path": "",
    "reward.path": "", "data.sources": "", "data.cache_dir": "", "train.save_every": 1,
}  # fmt: skip
"""Changed where a step has the key; what is empty the test fills in."""


def test_the_tables_hold_what_the_code_does() -> None:
    for table, after, before in ((ON_POLICY, "## On-policy", "## Preferences"), (PREFERENCE, "## Preferences", "~")):
        section = PAGE[PAGE.index(after) : PAGE.index(before) if before in PAGE else None]
        rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.MULTILINE)
        assert [name for name, _ in rows] == [*table, *table], "each in both tables"
        for name, row in rows[len(table) :]:
            told = dict(re.findall(r"`([\w.]+)` ([\w.-]+)(?: ·| \|)", row.partition("|")[0] + "|"))
            assert told == {key: json.dumps(value).strip('"') for key, value in table[name].defaults.items()}, name


def test_each_algorithm_has_a_command() -> None:
    named = [re.findall(r"algorithm (\w+)", line) or ["dpo"] for line in COMMANDS]
    assert [name for (name,) in named] == [*ON_POLICY, *PREFERENCE]


def test_each_loss_of_a_reward_model_is_described_and_has_a_command() -> None:
    section = PAGE[PAGE.index("## Reward models") :].split("\n## ")[0]
    losses = get_args(get_type_hints(PreferenceConfig)["loss"])
    assert re.findall(r"^\| (\w+)(?: \(default\))? \|", section, re.MULTILINE) == [*losses]
    steps = [_step(line) for line in re.findall(r"^python train\.py (.*)$", section, re.MULTILINE)]
    assert {name for name, _ in steps} == {"reward"} and {step.preference.loss for _, step in steps} == {*losses}
    assert len({step.output_dir for _, step in steps}) == len(steps)


def _step(line: str) -> tuple[str, Any]:
    """The last step of a command of the page, as train.py would run it."""
    config = train.parse_config(train.PipelineConfig, shlex.split(line), prog="train.py", defaults=train.DEMO)
    name = config.step_names[-1]
    return name, train.step_config(name, config)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, rows: Path) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "run"
    line = ["--model.path", str(model_folder), "--data.sources", str(rows), "--train.max_steps", "2"]
    run_main("training.step2_reward.main", 1, [*line, "--output_dir", str(folder), "--train.global_batch_size", "8"])
    return folder


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_run(line: str, tmp_path: Path, model_folder: Path, rows: Path, reward: Path) -> None:
    name, step = _step(line)
    save_config(step, tmp_path / "step.yaml")
    own = {
        "model.path": model_folder, "actor.path": model_folder, "reward.path": reward, "data.sources": rows,
        "data.cache_dir": rows.parent / "cache",
    }  # fmt: skip
    small = [f"--{key}={own.get(key, value)}" for key, value in SMALL.items() if key in read_config(step)]
    folder = tmp_path / "run"
    start = ["--config", str(tmp_path / "step.yaml"), *small, "--output_dir", str(folder)]
    run_main(train.MODULES[name], 1, start)
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [told["step"] for told in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for told in lines for value in told.values())
    assert lines[1]["grad_norm" if name == "preference" else "actor/grad_norm"] > 0
    if name == "preference":
        assert (folder / "model.safetensors").exists()
        return
    traits = ON_POLICY[step.algorithm]
    assert (folder / "critic").exists() == traits.critic == ("loss/value" in lines[1])
    assert ("objective/kl" in lines[1]) == step.uses_reference == ("eval/kl" in lines[0])
    # and goes on from its checkpoint as if it had never ended
    (folder / "finished.json").unlink()
    weights = (folder / "actor" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "step_2")
    run_main(train.MODULES[name], 1, [*start, "--resume", "auto"])
    assert (folder / "actor" / "model.safetensors").read_bytes() == weights
