"""docs/algorithms.md: its tables hold what the code does, and each of its commands runs, in small."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.parsing.building import flat, plain
from hybrid_rlhf.configs.preference import PREFERENCE_LOSSES
from hybrid_rlhf.configs.reward import RewardObjectiveConfig
from hybrid_rlhf.runtime.command_line import read_config, save_config
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.ranks import run_main
from tests.support.runs import ROOT

ALGORITHMS_PAGE = (ROOT / "docs" / "algorithms.md").read_text()
COMMANDS = re.findall(r"^    python train\.py (.*)$", ALGORITHMS_PAGE, re.MULTILINE)
STEP_1 = [line for line in re.findall(r"^python train\.py (.*)$", ALGORITHMS_PAGE, re.MULTILINE) if "--sft." in line]
TAUGHT = [line for line in re.findall(r"^python train\.py (.*)$", ALGORITHMS_PAGE, re.MULTILINE) if "--rl." in line]
SMALL = {
    "train.max_steps": 2,
    "data.max_length": 64,
    "data.max_eval_rows": 4,
    "logging.sinks": [],
    "lora.rank": 4,
    "actor.lora": "null",
    "rollout.prompts_per_step": 4,
    "rollout.sampling.max_new_tokens": 6,
    "rollout.max_prompt_tokens": 48,
    "model.path": "",
    "reward.components": "",
    "data.sources": "",
    "data.cache_dir": "",
    "train.save_every": 1,
    "critic.warmup_steps": 1,
    "teacher.path": "",
}
"""Changed where a step has the key; what is empty the test fills in."""
SMALL_STEP_1 = {"data.split": "null", "distill.sampling.max_new_tokens": 6, "distill.teacher": ""}
"""Besides, in step 1."""


def documented_step(line: str) -> tuple[str, Any]:
    """The last step of a command of the page, as train.py would run it."""
    config = train.parse_config(train.PipelineConfig, shlex.split(line), prog="train.py", defaults=train.DEMO)
    name = config.step_names[-1]
    return name, train.step_config(name, config)


def test_the_tables_hold_what_the_code_does() -> None:
    for table, after, before in (
        (RL_ALGORITHMS, "## On-policy", "## Preferences"),
        (PREFERENCE_LOSSES, "## Preferences", "~"),
    ):
        section = ALGORITHMS_PAGE[
            ALGORITHMS_PAGE.index(after) : ALGORITHMS_PAGE.index(before) if before in ALGORITHMS_PAGE else None
        ]
        rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.MULTILINE)
        assert [name for name, _ in rows] == [*table, *table], "each in both tables"
        for name, row in rows[len(table) :]:
            told = dict(re.findall(r"`([\w.]+)` ([^·|]+?)(?: ·| \|)", row.partition("|")[0] + "|"))
            assert told == {key: json.dumps(value).strip('"') for key, value in own_defaults(table, name).items()}, name


def own_defaults(table: dict[str, type], name: str) -> dict[str, Any]:
    """What a name brings: defaults that differ from those of the first other algorithm of a table that has the key."""
    mine = flat({"algorithm": plain(table[name]())})
    others = [flat({"algorithm": plain(kind())}) for other, kind in table.items() if other != name]
    first = {key: known[key] for known in reversed(others) for key in known}
    off = [
        key for key, value in mine.items() if value is None and any(other.startswith(f"{key}.") for other in others[0])
    ]
    changed = {key: value for key, value in mine.items() if key in off or first.get(key, ...) != value}
    return {} if name == next(iter(table)) else changed | getattr(table[name], "defaults_elsewhere", {})


def test_each_algorithm_has_a_command() -> None:
    named = [re.findall(r"algorithm (\w+)", line) or ["dpo"] for line in COMMANDS]
    assert [name for (name,) in named] == [*RL_ALGORITHMS, *PREFERENCE_LOSSES]


def test_distillation_condition_and_packing_have_commands() -> None:
    for key in ("distill.teacher", "distill.on_policy_fraction", "condition.buckets", "data.packing"):
        assert any(f"--sft.{key} " in line for line in STEP_1), key
    assert all("teacher output/step1_sft " in line for line in STEP_1 if "teacher" in line), "what the first one leaves"


def test_each_loss_of_a_reward_model_is_described_and_has_a_command() -> None:
    section = ALGORITHMS_PAGE[ALGORITHMS_PAGE.index("## Reward models") :].split("\n## ")[0]
    losses = get_args(get_type_hints(RewardObjectiveConfig)["loss"])
    assert re.findall(r"^\| (\w+)(?: \(default\))? \|", section, re.MULTILINE) == [*losses]
    steps = [documented_step(line) for line in re.findall(r"^python train\.py (.*)$", section, re.MULTILINE)]
    assert {name for name, _ in steps} == {"reward"} and {step.objective.loss for _, step in steps} == {*losses}
    assert len({step.output_dir for _, step in steps}) == len(steps)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, pair_rows: Path) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "run"
    line = f"--model.path {model_folder} --data.sources {pair_rows} --train.max_steps 2 --output_dir {folder}"
    run_main("hybrid_rlhf.cli.reward", 1, [*line.split(), "--train.global_batch_size", "8"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.faults)])
@pytest.mark.parametrize("line", [*COMMANDS, *STEP_1, *TAUGHT])
def test_the_commands_run(
    line: str,
    resumes: bool,
    tmp_path: Path,
    model_folder: Path,
    pair_rows: Path,
    reward: Path,
    write_jsonl: Callable[..., Path],
) -> None:
    name, step = documented_step(line)
    save_config(step, tmp_path / "step.yaml")
    scored = [{"prompt": f"say {i % 9}", "completion": str(i % 9), "score": i % 9} for i in range(60)]
    own = {
        "model.path": model_folder,
        "reward.components": reward,
        "data.sources": write_jsonl(scored) if name == "sft" else pair_rows,
        "data.cache_dir": pair_rows.parent / "cache",
        "distill.teacher": model_folder,
        "teacher.path": model_folder,
    }
    changes = SMALL | SMALL_STEP_1 if name == "sft" else SMALL
    small = [f"--{key}={own.get(key, value)}" for key, value in changes.items() if key in read_config(step)]
    folder = tmp_path / "run"
    start = ["--config", str(tmp_path / "step.yaml"), *small, "--output_dir", str(folder)]
    run_main(f"hybrid_rlhf.cli.{name}", 1, start)
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["grad_norm" if name in ("preference", "sft") else "actor/grad_norm"] > 0
    if name in ("preference", "sft"):
        assert (folder / "model.safetensors").exists()
        return
    assert (folder / "critic").exists() == step.algorithm.needs_critic == ("loss/value" in lines[1])
    assert ("objective/kl" in lines[1]) == step.uses_reference == ("eval/kl" in lines[0])
    if not resumes:
        return
    # resumed from its first checkpoint, it ends with the same weights
    (folder / "finished.json").unlink()
    weights = (folder / "actor" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "step_2")
    run_main(f"hybrid_rlhf.cli.{name}", 1, [*start, "--resume", "auto"])
    assert (folder / "actor" / "model.safetensors").read_bytes() == weights
