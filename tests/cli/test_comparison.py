"""The report at the end of train.py shows texts as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.cli.saved_models import comparison
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from tests.support.steps import write_lines

ODD = "[x] [/INST] :smile:"


class Engine:
    """Answers nothing, to as many prompts as there are."""

    opened, closed = 0, 0
    image_reader = None

    @classmethod
    def from_pretrained(cls, path: str, **_: Any) -> Engine:
        assert cls.opened == cls.closed, "the memory of the one before is given back first"
        cls.opened += 1
        return cls()

    def close(self) -> None:
        Engine.closed += 1

    def generate(self, prompts: list[list[int]], sampling: Any, **_: Any) -> list[list[Any]]:
        return [[type("Completion", (), {"token_ids": []})] for _ in prompts]


class Tokenizer:
    """Says the same of any tokens."""

    chat_template, eos_token, bos_token_id = None, "", None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return f"says {ODD}"


@pytest.mark.parametrize("base", ["BASE", None])
def test_brackets_are_no_markup(
    base: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompt = [{"role": "system", "content": f"be {ODD}"}, {"role": "user", "content": f"say {ODD}"}]
    monkeypatch.setattr(comparison, "held_out_prompts", lambda *_, **__: [(prompt, [])])
    monkeypatch.setattr(comparison, "GenerationEngine", Engine)
    monkeypatch.setattr(comparison, "_tokenizer", lambda step, world: Tokenizer())
    last = RLConfig(model=ModelConfig(path="SFT"), output_dir=str(tmp_path))
    comparison.report(base_model=base, folders={"rl": str(tmp_path)}, last=last)
    assert Engine.opened == Engine.closed
    said = capsys.readouterr().out
    assert f"say {ODD}" in said and f"--system 'be {ODD}'" in said
    columns = ["base", "SFT", "PPO"] if base else ["start", "PPO"]
    assert said.count(f"says {ODD}") == len(columns) and all(f" {name} " in said for name in columns)


@pytest.mark.parametrize(("spread", "shown"), [(0.0, False), (1e-8, False), (0.2, True)])
def test_a_change_in_deviations_needs_a_deviation(spread: float, shown: bool, tmp_path: Path) -> None:
    """A single held-out score has none: the change was divided by 1e-8."""
    values = ((0, -0.108), (9, -0.065))
    lines = [{"step": step, "eval/scores": score, "eval/scores_std": spread} for step, score in values]
    write_lines(tmp_path / "metrics.jsonl", lines)
    labels = [change.label.strip() for change in comparison.metric_changes({"rl": tmp_path}, label="PPO")]
    assert labels == ["PPO mean score"] + ["in standard deviations of the SFT scores"] * shown


@pytest.mark.parametrize(
    ("found", "checkout", "command"),
    [
        ("PREFIX/hybrid-rlhf", False, "hybrid-rlhf chat"),
        ("/elsewhere/hybrid-rlhf", False, "PREFIX/python -m hybrid_rlhf chat"),
        (None, False, "PREFIX/python -m hybrid_rlhf chat"),
        (None, True, "python inference/chat.py"),
    ],
)
def test_the_command_that_chats_is_one_that_this_environment_has(
    found: str | None, checkout: bool, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison.sys, "executable", "/prefix/bin/python")
    monkeypatch.setattr(comparison.shutil, "which", lambda _: found and found.replace("PREFIX", "/prefix/bin"))
    if checkout:
        (tmp_path / "inference").mkdir()
        (tmp_path / "inference" / "chat.py").touch()
    prompt = [{"role": "user", "content": "hi"}]
    assert comparison.chat_command(Path("out/actor"), prompt) == f"{command.replace('PREFIX', '/prefix/bin')} out/actor"
