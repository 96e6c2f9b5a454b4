"""RL refuses a reward model without a score head, which would score at random."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli.rl import main
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.models.pretrained.loading import load_model
from tests.support.steps import step_line, write_rows

RULE = "a reward model must have a score head, {} has none: give one that a reward step saved"


def test_a_causal_lm_is_no_reward_model_of_rl(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = step_line("ppo", tmp_path / "run", model_folder, write_rows(tmp_path / "rows.jsonl"))
    with pytest.raises(SystemExit) as stopped:
        main([*line, "--reward.components", str(model_folder)])
    assert stopped.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said == [f"error: {RULE.format(model_folder)}"]


def test_the_name_of_a_scorer_is_no_head(model_folder: Path, tmp_path: Path) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(UserError) as refused:
        load_model(str(tmp_path), "scorer", config=ModelConfig(), dtype=torch.float32, heads=None)
    assert str(refused.value) == RULE.format(tmp_path)
