"""The command line: where keys come from, and the one line that answers each mistake."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.cli import dotted_keys, parse_config, save_config, user_errors
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sections import DataSource
from hybrid_rlhf.configs.sft import SFTConfig
from train import with_bare_plan

CONFIGS = [SFTConfig, RewardConfig, PPOConfig, PipelineConfig]


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
    lines = [
        ["--config", str(file), "--optimizer.lr", "5e-4"],
        ["--optimizer.lr", "5e-4", "--config", str(file)],
        [f"--config={file}", "--optimizer.lr=5e-4"],
    ]
    first, *others = [parse_config(SFTConfig, line) for line in lines]
    assert all(config == first for config in others)
    assert (first.seed, first.optimizer.lr, first.optimizer.weight_decay) == (1, 5e-4, 0.1)
    assert first.data.sources == ["a.jsonl", DataSource(path="b", weight=2.0)]
    both = parse_config(SFTConfig, ["--config", str(file), "--config", str(other)])
    assert (both.optimizer.lr, both.optimizer.weight_decay) == (1e-3, 0.2)
    under = parse_config(SFTConfig, ["--config", str(other)], defaults=file)
    assert (under.seed, under.optimizer.weight_decay) == (1, 0.2)


def test_a_bare_word_is_a_list_of_one_and_local_rank_is_passed_over() -> None:
    config = parse_config(SFTConfig, ["--data.sources", "a.jsonl", "--local_rank=3", "--data.split", "[2, 4, 4]"])
    assert config.data.sources == ["a.jsonl"] and config.data.split == [2, 4, 4]
    assert parse_config(SFTConfig, ["--lora.target_modules", "all-linear"]).lora.target_modules == "all-linear"


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


@pytest.mark.parametrize("config_type", CONFIGS)
def test_a_saved_config_reads_back_equal(config_type: Any, tmp_path: Path) -> None:
    config = config_type()
    if hasattr(config, "optimizer"):
        config = replace(config, optimizer=replace(config.optimizer, betas=(0.8, 0.99), lr=3e-7))
    if hasattr(config, "actor"):
        config = replace(config, ppo=replace(config.ppo, score_clip=None, kl_target=6.0))
    config = replace(config, data=replace(config.data, sources=["a", DataSource(path="b", weight=0.5, split_name="x")]))
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(config_type, ["--config", str(tmp_path / "c.yaml")]) == config
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_a_mistake_is_one_line_without_its_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    """Which line answers which mistake: tests/fuzz."""
    with pytest.raises(SystemExit) as stopped, user_errors():
        parse_config(SFTConfig, ["--model.path", "a\nb", "https://me:pass@host/?key=abc"])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err == ("error: options start with --, got 'https://***@host/?key=***': write --KEY VALUE, see --help\n")


def test_steps_are_sorted() -> None:
    assert parse_config(PipelineConfig, ["--steps", "ppo, sft"]).step_names == ["sft", "ppo"]


def test_a_full_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, user_errors():
        raise OSError(errno.ENOSPC, "No space left on device", "/out/model")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: no space left on the device of /out/model: free some and resume\n"
    with pytest.raises(PermissionError), user_errors():
        raise PermissionError("a bug of ours is no user's mistake")


def test_step_3_has_few_keys() -> None:
    assert len(dotted_keys(PPOConfig)) <= 140


def test_parsing_and_help_load_no_torch() -> None:
    script = (
        "import sys\nfrom training.step3_ppo.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    for text in ("--ppo.kl_coef", "Weight of the per-token KL penalty", "type: float, default: 0.05"):
        assert text in " ".join(done.stdout.split())
    options = set(re.findall(r"^  (--[\w.+]+)", done.stdout, re.MULTILINE))
    assert options == {"--config", *(f"--{key}" for key in dotted_keys(PPOConfig))}


def test_plan_may_stand_bare_and_the_line_may_be_empty() -> None:
    assert with_bare_plan([]) == []
    assert with_bare_plan(["--plan"]) == ["--plan=true"]
    assert with_bare_plan(["--plan", "--seed", "1"]) == ["--plan=true", "--seed", "1"]
    assert with_bare_plan(["--plan", "false", "--seed", "1"]) == ["--plan", "false", "--seed", "1"]


def test_help_shows_the_defaults_that_a_choice_brings(capsys: pytest.CaptureFixture[str]) -> None:
    for line, coefficient in (["--help"], "0.05"), (["--algorithm", "grpo", "--help"], "0.04"), (["--help"], "0.05"):
        with pytest.raises(SystemExit):
            parse_config(PPOConfig, line)
        told = " ".join(capsys.readouterr().out.split())
        assert f"reference (N+ details). (type: float, default: {coefficient})" in told


def test_what_a_choice_brings_lies_between_a_demo_and_the_user(tmp_path: Path) -> None:
    demo, mine = tmp_path / "demo.yaml", tmp_path / "mine.yaml"
    demo.write_text("ppo: {ppo: {kl_coef: 0.5, lam: 0.7}, rollout: {samples_per_prompt: 3}}")
    mine.write_text("ppo: {algorithm: grpo, rollout: {samples_per_prompt: 4}}")
    config = parse_config(PipelineConfig, ["--config", str(mine)], defaults=demo).ppo
    assert (config.ppo.kl_coef, config.ppo.lam, config.rollout.samples_per_prompt) == (0.04, 0.7, 4)
