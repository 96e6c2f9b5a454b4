"""The report at the end of train.py shows texts as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.ppo import PPOConfig, TrainedRoleConfig
from inference import compare

ODD = "[x] [/INST] :smile:"


class Engine:
    """Answers nothing, to as many prompts as there are."""

    opened, closed = 0, 0

    @classmethod
    def from_pretrained(cls, path: str, **_: Any) -> Engine:
        assert cls.opened == cls.closed, "the memory of the one before is given back first"
        cls.opened += 1
        return cls()

    def close(self) -> None:
        Engine.closed += 1

    def generate(self, prompts: list[list[int]], sampling: Any) -> list[list[Any]]:
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
    monkeypatch.setattr(compare, "held_out_prompts", lambda step: [prompt])
    monkeypatch.setattr(compare, "GenerationEngine", Engine)
    monkeypatch.setattr(compare, "_tokenizer", lambda step, world: Tokenizer())
    last = PPOConfig(actor=TrainedRoleConfig(path="SFT"), output_dir=str(tmp_path))
    compare.report(base_model=base, folders={"ppo": str(tmp_path)}, last=last)
    assert Engine.opened == Engine.closed
    said = capsys.readouterr().out
    assert f"say {ODD}" in said and f"--system 'be {ODD}'" in said
    columns = ["base", "SFT", "PPO"] if base else ["start", "PPO"]
    assert said.count(f"says {ODD}") == len(columns) and all(f" {name} " in said for name in columns)
