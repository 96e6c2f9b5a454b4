"""What train.py makes of its line before a step starts: folders, where models start from, and what a run resumes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.pipeline import FOLDERS, STEP_NAMES, PipelineConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.command_line import parse_config, read_config, save_config
from tests.support.commands import CommandLine
from tests.support.messages import assistant, user
from tests.support.steps import write_lines


def steps_of(line: str = "") -> dict[str, Any]:
    config = parse_config(PipelineConfig, line.split())
    return {name: train.step_config(name, config) for name in STEP_NAMES}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The settings of each step that main starts; in a folder of its own, and nothing runs."""
    settings: list[dict[str, Any]] = []

    def tee(command: list[str], log: Path, base: object) -> train.CommandEnd:
        settings.append(read_config(Path(command[-1])))
        return train.CommandEnd(0, [])

    monkeypatch.chdir(tmp_path)
    leave_rows(tmp_path / "rows.jsonl")
    monkeypatch.setattr(train, "tee", tee)
    monkeypatch.setattr(train, "show_changes", lambda steps, *, last: None)
    return settings


@pytest.fixture
def refused(cli: CommandLine) -> Callable[[str], str]:
    """The error of a line of train."""
    return lambda line: cli.refused(f"train {line}").removeprefix("error: ").rstrip("\n")


Refused = Callable[[str], str]
DATA = "--data.sources rows.jsonl"
BASE = f"--base_model BASE {DATA}"


def leave_rows(file: Path, count: int = 1000) -> None:
    write_lines(file, ({"prompt": str(number), "chosen": "a", "rejected": "b"} for number in range(count)))


def leave_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_a_folder_that_is_named_counts_though_it_is_a_steps_default() -> None:
    steps = steps_of("--output_dir run2 --sft.output_dir output/step1_sft --base_model BASE")
    assert steps["sft"].output_dir == steps["reward"].model.path == steps["rl"].model.path == "output/step1_sft"
    assert steps["rl"].reward.components == [steps["reward"].output_dir] == ["run2/step2_reward"]
    assert {name: step.output_dir for name, step in steps_of().items()} == {
        name: f"output/{folder}" for name, folder in FOLDERS.items()
    }
    assert steps_of("--sft.output_dir {output_dir}/other")["sft"].output_dir == "output/other"
    assert SFTConfig().output_dir == "output/step1_sft", "of the step's own main"


def test_without_an_sft_model_every_step_starts_from_the_base(
    started: list[dict[str, Any]], cli: CommandLine, tmp_path: Path
) -> None:
    cli(f"train {BASE} --steps reward,rl")
    cli(f"train {BASE} --steps preference")
    leave_model(tmp_path / "output" / "step1_sft")
    cli(f"train {BASE} --steps reward,rl")
    cli(f"train {BASE} --steps reward,rl --rl.model.path MINE")
    starts = [step["model.path"] for step in started]
    assert starts == ["BASE"] * 3 + ["output/step1_sft"] * 3 + ["MINE"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--base_model BASE --steps rl",
            "step rl needs a reward model, output/step2_reward holds none: add reward to --steps, or give "
            "--rl.reward.components",
        ),
        (
            "--steps sft,rl --rl.model.path MINE --rl.reward.components RM",
            "step sft starts from a model, got none: give --base_model, or --sft.model.path",
        ),
        (
            "--base_model BASE --sft.seed 1",
            "steps that share data.split need one seed, got {'sft': 1, 'reward': 42, 'preference': 42, 'rl': 42}: give "
            "--seed",
        ),
    ],
)
def test_steps_that_do_not_fit_together_are_refused_before_the_first(
    line: str, message: str, started: list[Any], refused: Refused
) -> None:
    assert refused(f"{line} {DATA}") == message and not started


def test_data_that_a_later_step_lacks_is_refused_before_the_first_step(
    started: list[Any], refused: Refused, cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    write_lines(tmp_path / "chats.jsonl", [{"messages": [user("x"), assistant("x")]}] * 200)
    for line, rule in (
        (
            f"{BASE} --rl.data.sources nosuch.jsonl",
            "step rl: a data source must be a file, a folder or a hub name, nosuch.jsonl does not exist",
        ),
        (f"{BASE} --rl.data.sources bad.jsonl", "step rl: bad.jsonl:1: a line must be JSON"),
        ("--base_model BASE --data.sources chats.jsonl", "step reward: chats.jsonl:1: a row must have"),
        ("--base_model BASE", "step sft: data.sources must have at least one file"),
        (f"{BASE} --rl.ptx.coef 1 --rl.ptx.sources no.jsonl", "step rl: a data source must be"),
    ):
        error = refused(line)
        assert error.startswith(rule), error
    assert not started
    cli(f"train {BASE} --reward.data.sources owner/data")  # a hub name
    assert len(started) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rl.critic.path ./no", "step rl: a model must be a folder, a .gguf file or a hub name, ./no is none"),
        ("--rl.reward.components run", "step rl: a model folder must have a config.json, run has none: give run/actor"),
        ("--rl.teacher.path a/b/c", "step rl: a model must be"),
        ("--rl.reward.components '{judge: {path: ./no}}'", "step rl: a model must be a folder, a .gguf file"),
        ("--sft.distill.teacher no.gguf", "step sft: a model file must exist, no.gguf does not exist"),
        ("--steps sft,preference --preference.reference.path http://a/b", "step preference: a model must be a folder"),
    ],
)
def test_a_model_that_a_later_step_lacks_is_refused_before_the_first_step(
    options: str, message: str, started: list[Any], refused: Refused, tmp_path: Path
) -> None:
    """Without this check the earlier steps would train first."""
    leave_model(tmp_path / "run" / "actor")
    assert refused(f"{BASE} {options}").startswith(message) and not started


def test_models_that_a_step_can_load_are_no_mistake(
    started: list[Any], cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the name `embedded`, one below the home folder that a step writes, and one that is not loaded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "embedded").mkdir()
    leave_model(tmp_path / "warm")
    cli(f"train --base_model embedded {DATA} --rl.critic.path ~/output/step2_reward")
    cli(f"train --base_model ./gone {DATA} --steps sft --sft.resume warm --output_dir other")
    assert len(started) == 4


def test_steps_that_lack_rows_are_refused_together(
    started: list[Any], refused: Refused, cli: CommandLine, tmp_path: Path
) -> None:
    """100 pairs failed in stages: RL's prompts first, with fewer of them SFT, after its process had started."""
    leave_rows(tmp_path / "few.jsonl", 100)
    line = "--base_model BASE --data.sources few.jsonl"
    assert refused(line) == (
        "step sft: the training data must have at least one batch of 32 rows, got 19: add rows or reduce "
        "sft.train.global_batch_size to 19 or less; "
        "step rl: a step takes 256 prompts, the training data has 38: add rows or set "
        "rl.rollout.prompts_per_step to 38 or less"
    )
    assert not started
    write_lines(tmp_path / "turns.jsonl", [{"messages": [user("x"), assistant("x")] * 2}] * 20)
    cli(f"train {line} --sft.data.sources turns.jsonl --rl.rollout.prompts_per_step 38")
    assert len(started) == 3, "a template may make several rows of a conversation"


@pytest.mark.slow
def test_code_that_does_not_load_is_refused_before_the_first_step(
    started: list[Any], refused: Refused, tmp_path: Path
) -> None:
    """With the process that loads it; no step starts."""
    (tmp_path / "rules.py").write_text("def correct(prompts, completions, answer, **columns): ...\n")
    (tmp_path / "game.py").write_text("class Game:\n    def reset(self, row): ...\n")
    for line, rule in (
        (
            "--rl.reward.components '[{function: nofile.py:f}]'",
            "step rl: rl.reward.components: function nofile.py:f cannot be imported",
        ),
        (
            "--rl.reward.components '[{function: rules.py:correct}]'",
            "step rl: reward component correct needs the column answer, the data has prompt, chosen, rejected: rename "
            "or add it, or read another",
        ),
        ("--rl.environment.path game.py:Game", "step rl: an environment must have reset(row) and step(completion)"),
    ):
        error = refused(f"{BASE} {line}")
        assert error.startswith(rule), error
    assert not started


def test_a_finished_step_is_not_checked_and_another_run_in_a_later_folder_is(
    started: list[Any], refused: Refused, cli: CommandLine, tmp_path: Path
) -> None:
    line = f"{BASE} --sft.data.sources gone.jsonl --steps sft,reward"
    steps = steps_of(line)
    for name in ("sft", "reward"):
        folder = tmp_path / steps[name].output_dir
        leave_model(folder)
        save_config(steps[name], folder / "config.yaml")
    assert "step sft: a data source must be" in refused(line)
    (tmp_path / steps["sft"].output_dir / "finished.json").write_text("{}")
    assert "with other settings (reward.data.max_length)" in refused(f"{line} --reward.data.max_length 7")
    assert not started
    cli(f"train {line}")
    assert len(started) == 1


@pytest.mark.parametrize("line", [BASE, ""], ids=["data", "demo"])
def test_an_output_dir_that_cannot_be_written_is_refused(
    line: str, started: list[dict[str, Any]], cli: CommandLine
) -> None:
    Path("file").touch()
    message = cli.refused(f"train {line} --output_dir file/runs")
    assert "output_dir must be a writable folder, file/runs is not (Not a directory): choose another" in message
    assert not started


def test_the_demos_settings_are_for_the_demos_model(started: list[dict[str, Any]], cli: CommandLine) -> None:
    cli(f"train {DATA} --steps sft,reward --sft.model.path MINE")
    cli(f"train {DATA} --steps sft --output_dir demo")
    assert [step.get("lora.rank") for step in started] == [None, None, 16]
    assert [step["model.path"] for step in started] == ["MINE", "output/step1_sft", "embedded"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("never", "auto"),
        ("auto", "auto"),
        ("RUN/checkpoints/step_2", "RUN/checkpoints/step_2"),
        ("other", "other"),
        ("begun", "auto"),
    ],
)
def test_a_run_resumes_from_what_the_line_names(
    named: str, expected: str, started: list[dict[str, Any]], tmp_path: Path, cli: CommandLine
) -> None:
    """A warm start begins a run once: the same command resumes it."""
    run = tmp_path / "run"
    line = f"{BASE} --steps sft --sft.output_dir {run}"
    run.mkdir()
    resume = named.replace("RUN", str(run))
    begun = "begun" if named == "begun" else resume if named.startswith("RUN") else "never"
    save_config(replace(steps_of(line)["sft"], resume=begun), run / "config.yaml")
    out = cli(f"train {line} --sft.resume {resume}").out
    assert [step["resume"] for step in started] == [expected.replace("RUN", str(run))]
    assert ("resuming the unfinished run" in out) == (expected == "auto")


@pytest.mark.parametrize(
    ("actor", "base"), [("", "BASE"), ("--rl.model.path MINE", None)], ids=["from SFT", "from its own"]
)
def test_the_report_compares_with_where_the_last_step_started(
    actor: str, base: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Mock()
    monkeypatch.setitem(sys.modules, "hybrid_rlhf.cli.saved_models.comparison", compare)
    train.show_changes(steps_of(f"--base_model BASE {actor}"), last="rl")
    told = compare.report.call_args.kwargs
    assert told["base_model"] == base and told["last"].output_dir == "output/step3_ppo"


def test_the_settings_that_train_hands_to_a_step_are_read_by_it(
    started: list[Any], tmp_path: Path, cli: CommandLine
) -> None:
    """The demo's too, whose critic GRPO has none of; another base model has none of the demo's rates."""
    leave_model(tmp_path / "output" / "step2_reward")
    demo = f"train {DATA} --steps rl --rl.algorithm grpo"
    cli(demo)
    cli(f"{demo} --output_dir other --base_model BASE --rl.actor.lora.rank 4 --rl.reward.components RM")
    first, second = (
        parse_config(RLConfig, ["--config", f"{folder}/logs/step3_ppo.yaml"]) for folder in ("output", "other")
    )
    assert (first.algorithm.name, first.actor.optimizer.lr, first.rollout.prompts_per_step) == ("grpo", 4e-4, 48)
    assert (second.actor.optimizer.lr, second.algorithm.mini_batches, second.rollout.prompts_per_step) == (None, 4, 64)
