"""The command line: where keys come from, and the one line that answers each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.parsing.building import config_tree
from hybrid_rlhf.configs.parsing.help import field_docs
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.commands import CommandLine
from tests.support.errors import user_error


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(
        "seed: 1\noptimizer:\n  lr: 1e-3\n  weight_decay: 0.1\ndata:\n  sources: [a.jsonl, {path: b, weight: 2}]\n"
    )
    return path


def test_files_come_first_wherever_they_stand(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "d.yaml"
    other.write_text("optimizer: {weight_decay: 0.2}\n")
    first = parse_config(SFTConfig, ["--config", str(file), "--optimizer.lr", "5e-4"])
    assert parse_config(SFTConfig, ["--optimizer.lr=5e-4", f"--config={file}"]) == first
    assert (first.seed, first.optimizer.lr, first.optimizer.weight_decay) == (1, 5e-4, 0.1)
    assert first.data.sources == ["a.jsonl", DataSource(path="b", weight=2.0)]
    both = parse_config(SFTConfig, ["--config", str(file), "--config", str(other)])
    assert (both.optimizer.lr, both.optimizer.weight_decay) == (1e-3, 0.2)
    under = parse_config(SFTConfig, ["--config", str(other)], defaults=file)
    assert (under.seed, under.optimizer.weight_decay) == (1, 0.2)


def test_a_bare_word_is_a_list_of_one_and_local_rank_is_passed_over(tmp_path: Path) -> None:
    config = parse_config(SFTConfig, ["--data.sources", "a.jsonl", "--local_rank=3", "--data.split", "[2, 4, 4]"])
    assert config.data.sources == ["a.jsonl"] and config.data.split == [2, 4, 4]
    assert parse_config(SFTConfig, ["--lora.target_modules", "all-linear"]).lora.target_modules == "all-linear"
    (tmp_path / "one.yaml").write_text("data: {sources: a.jsonl}\n")
    assert parse_config(SFTConfig, ["--config", str(tmp_path / "one.yaml")]).data.sources == ["a.jsonl"]


def test_lists_and_sections_on_the_line_lie_over_the_files(file: Path) -> None:
    line = ["--config", str(file), "--data.sources", "{path: c, weight: 0.5}", "--optimizer", "{lr: 1e-4}"]
    config = parse_config(SFTConfig, line)
    assert config.data.sources == [DataSource(path="c", weight=0.5)]
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-4, 0.1)
    assert parse_config(SFTConfig, [*line, "--optimizer.lr", "1e-5"]).optimizer.lr == 1e-5
    assert parse_config(SFTConfig, ["--data.sources", "a: b.jsonl"]).data.sources == ["a: b.jsonl"]


def test_a_file_of_comments_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# seed: 3\n")
    assert parse_config(SFTConfig, ["--config", str(tmp_path / "c.yaml")]) == SFTConfig()


def test_a_mistake_is_one_line_without_its_secrets(cli: CommandLine) -> None:
    """Which line answers which mistake: tests/fuzz."""
    error = cli.refused("sft --model.path 'a\nb' 'https://me:pass@host/?key=abc'")
    assert error == (
        "error: options start with --, got 'https://***@host/?key=***': write --KEY VALUE, and a list as '[A, B]', see "
        "--help\n"
    )


def test_steps_are_sorted() -> None:
    assert parse_config(PipelineConfig, ["--steps", "rl, sft"]).step_names == ["sft", "rl"]


@pytest.mark.parametrize(("algorithm", "most"), [("ppo", 80), ("grpo", 60)])
def test_help_of_rl_shows_few_keys_and_help_all_every_key(algorithm: str, most: int, cli: CommandLine) -> None:
    tree = config_tree(RLConfig, ["--algorithm", algorithm])
    some, every = (
        {*re.findall(r"^  --([\w.-]+)", cli(f"rl --algorithm {algorithm} {word}").out, re.MULTILINE)}
        - {"config", "help", "help-all"}
        for word in ("--help", "--help-all")
    )
    assert len(some) <= most and {"rollout.prompts_per_step", "actor.optimizer.lr"} <= some
    assert ("critic.path" in some) == (algorithm == "ppo")
    assert every == {"algorithm.name", *tree.all_keys(off=True)}
    unused = {"actor.lora", "environment", "ptx", "algorithm.correction"}
    assert unused <= some and not unused & every


@pytest.mark.parametrize("config_type", [SFTConfig, RewardConfig, RLConfig, PreferenceStepConfig, PipelineConfig])
def test_every_key_explains_itself(config_type: Any) -> None:
    for key in config_tree(config_type).all_keys(off=True).values():
        assert len(field_docs(key.owner).get(key.name.rpartition(".")[2], "")) > 15, key.name


def test_a_switch_may_stand_bare_and_the_line_may_be_empty() -> None:
    switch = "--sft.model.gradient_checkpointing"
    for line, checkpoints, seed in (
        ([], False, None),
        ([switch], True, None),
        ([switch, "--seed", "1"], True, 1),
        ([switch, "false", "--seed", "1"], False, 1),
        (["--seed=1", switch], True, 1),
    ):
        config = parse_config(PipelineConfig, line)
        assert (config.sft.model.gradient_checkpointing, config.seed) == (checkpoints, seed), line
    with user_error("--seed needs a value, got none"):
        parse_config(PipelineConfig, ["--seed", switch])


def test_what_a_choice_brings_lies_between_a_demo_and_the_user(tmp_path: Path) -> None:
    demo, mine = tmp_path / "demo.yaml", tmp_path / "mine.yaml"
    demo.write_text(
        "rl: {algorithm: {kl: {coef: 0.5}, gae_lambda: 0.7}, rollout: {sampling: {n: 3}, max_prompt_tokens: 9}}"
    )
    mine.write_text("rl: {algorithm: grpo, rollout: {sampling: {n: 4}}}")
    config = parse_config(PipelineConfig, ["--config", str(mine)], defaults=demo).rl
    assert config.algorithm.kl is not None and config.rollout.max_prompt_tokens == 9
    assert (config.algorithm.kl.coef, config.rollout.sampling.n) == (0.04, 4)
    other = parse_config(PipelineConfig, ["--rl.algorithm", "rloo"], defaults=demo).rl
    assert other.rollout.sampling.n == 4, "the algorithm's default lies over the demo's"
