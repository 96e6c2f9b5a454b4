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
from hybrid_rlhf.configs.errors import UserError
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


MISTAKES = [
    (["--optimiser.lr", "1"], r"unknown option --optimiser.lr: the nearest is optimizer.lr"),
    (["--lr", "1"], r"unknown option --lr: the nearest is optimizer.lr"),
    (["--train.batch_size", "1"], r"the nearest is train\.\w*batch_size"),
    (["--optimizer.lr", "fast"], r"optimizer.lr.*float.*fast"),
    (["--model.dtype", "fp8"], r"model.dtype.*bfloat16.*fp8"),
    (["--zero.stage", "4"], r"zero.stage.*4"),
    (["--optimizer.lr", "-1"], r"optimizer.lr must be 0 or more, got -1.0"),
    (["--zero.offload_optimizer", "true"], r"needs zero.stage 1 or more, got 0"),
    (["--data.split", "[1, 2]"], r"data.split must be three shares"),
    (["--seed"], r"--seed needs a value"),
    (["seed=3"], r"options start with --, got 'seed=3'"),
    (["--config", "absent.yaml"], r"absent.yaml does not exist"),
    (["--model.gradient_checkpointing", "--optimizer.lr", "1"], r"--model.gradient_checkpointing needs a value"),
    (["--train.max_steps", "none"], r"train.max_steps must be int or null, got none"),
    (["--optimizer.betas", "[0.9, 1.0]"], r"optimizer.betas must be in \[0, 1\), got \(0.9, 1.0\)"),
    (["--optimizer", "{lrr: 1}"], r"unknown key optimizer.lrr: the nearest is optimizer.lr"),
    (["--data.sources", "[a, {path: b, weigth: 2}]"], r"unknown key weigth in an item of data.sources.*is weight"),
    (["--data.sources", "[{path: a, weight: x}]"], r"data.sources must be list\[str or DataSource\].*'weight': 'x'"),
    (["--data.sources", "[{path: a, weight: -1}]"], r"error: weight of a must be above 0, got -1.0: leave"),
    (["--data.sources", "[{weight: 1}]"], r"an item of data.sources needs path, got {'weight': 1}"),
    (["--data.sources", "[5]"], r"data.sources must be list\[str or DataSource\], got 5"),
    (["--data.sources", "[a, b"], r"--data.sources:1: not YAML"),
]


@pytest.mark.parametrize(("line", "rule"), MISTAKES)
def test_a_mistake_on_the_line_is_one_line(line: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, user_errors():
        parse_config(SFTConfig, line)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert re.search(rule, err), err


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("optimizer:\n  lrr: 1\n", r"c\.yaml: unknown key optimizer.lrr: the nearest is optimizer.lr"),
        ("optimiser:\n  lr: 1\n", r"c\.yaml: unknown key optimiser"),
        ("seed: 1\n  x: [\n", r"c\.yaml:2: not YAML"),
        ("seed: 1\noptimizer: {lr: 1, lr: 2}\n", r"c\.yaml:2: a key is given once, lr is repeated: keep one"),
        ("- seed\n", r"a config is a mapping of keys, got a list"),
        ("seed: many\n", r"seed must be int, got many"),
        ("optimizer:\n", r"c\.yaml: optimizer must be a mapping of keys, got None"),
        ("optimizer: 5\n", r"c\.yaml: optimizer must be a mapping of keys, got 5"),
        ("data: {sources: [{path: a, weigth: 2}]}\n", r"c\.yaml: unknown key weigth in an item of data.sources"),
        ("data: {sources: [{path: a, weight: -1}]}\n", r"^weight of a must be above 0, got -1.0: leave"),
    ],
)
def test_a_mistake_in_a_file_names_it(text: str, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rule) as caught:
        parse_config(SFTConfig, ["--config", str(file)])
    assert "\n" not in str(caught.value)


def test_ppo_rules() -> None:
    with pytest.raises(UserError, match="ptx_coef 1.0 needs pretraining text"):
        parse_config(PPOConfig, ["--ppo.ptx_coef", "1"])
    with pytest.raises(UserError, match="gamma must be in"):
        parse_config(PPOConfig, ["--ppo.gamma", "2"])
    with pytest.raises(UserError, match="--steps takes sft, reward and ppo, comma-separated, got 'sft,dpo'"):
        parse_config(PipelineConfig, ["--steps", "sft,dpo"])
    with pytest.raises(UserError, match="launcher.hostfile must name a file, absent does not exist"):
        parse_config(PipelineConfig, ["--launcher.hostfile", "absent"])
    assert parse_config(PipelineConfig, ["--steps", "ppo, sft"]).step_names == ["sft", "ppo"]


def test_a_full_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, user_errors():
        raise OSError(errno.ENOSPC, "No space left on device", "/out/model")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: no space left on the device of /out/model: free some and resume\n"
    with pytest.raises(PermissionError), user_errors():
        raise PermissionError("a bug of ours is no user's mistake")


def test_ppo_has_few_keys() -> None:
    assert len(dotted_keys(PPOConfig)) <= 115


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
