"""The card of a trained model, from the card of the model that it began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.loop.model_card import model_card
from hybrid_rlhf.loop.setup import open_step
from hybrid_rlhf.models.pretrained.cards import read_card_metadata
from tests.support.runs import sft_config


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        ("datasets:\n- b/two\n- a/one", {"datasets": ["a/one", "b/two"]}),
        ("datasets:\n- {name: squad}\n- 7\n- squad", {"datasets": ["squad"]}),
        ("base_model: a/one", {"base_model": "a/one"}),
        ("base_model:\n- a/one\n- b/two", {"base_model": ["a/one", "b/two"]}),
        ("date: 2024-99-99", {}),
    ],
)
def test_any_card_of_the_base_may_be_read(parent: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{parent}\n---\n")
    config = replace(sft_config(tmp_path / "run"), model=ModelConfig(path=str(tmp_path)))
    with open_step(config) as run:
        run.at_end.clear()
        card = model_card(run, "", generates=True)
    (run.folder / "README.md").write_text(card)
    metadata = read_card_metadata(run.folder)
    assert {key: metadata[key] for key in ("base_model", "datasets") if key in metadata} == expected
    base = expected.get("base_model", [])
    names = ", ".join(f"`{name}`" for name in ([base] if isinstance(base, str) else base))
    assert f"trained from {names or 'a local model'} by" in card
