"""Model cards: metadata that the hub reads, and a user's card that stays."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.models.pretrained.cards import may_write_card, read_card_metadata, render_card
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.world import solo_world
from tests.support.tiny import tiny_model, tiny_tokenizer


def save(folder: Path, card: str | None) -> str | None:
    """Save a model with a card; the folder's card after that."""
    lm, world = tiny_model(), solo_world(torch.device("cpu"))
    save_model(folder, full_tensors(lm, world), lm=lm, tokenizer=tiny_tokenizer(), world=world, card=card)
    file = folder / "README.md"
    return file.read_text() if file.exists() else None


def test_a_later_save_replaces_its_own_card_and_no_other(tmp_path: Path) -> None:
    first, second = render_card({"license": "mit"}, "# One"), render_card({"license": "mit"}, "# Two")
    assert save(tmp_path, None) is None
    assert save(tmp_path, first) == first
    assert save(tmp_path, second) == second
    changed = second.replace("# Two", "# Two, and what I found")
    (tmp_path / "README.md").write_text(changed)
    assert not may_write_card(tmp_path) and save(tmp_path, first) == changed
    (tmp_path / "README.md").write_text("# Mine")
    assert save(tmp_path, first) == "# Mine"


def test_metadata_is_read_back_and_what_is_not_known_left_out(tmp_path: Path) -> None:
    given = {"base_model": "me/base", "license": None, "datasets": [], "tags": ["a: b", "ü"]}
    (tmp_path / "README.md").write_text(render_card(given, "# Title"))
    assert read_card_metadata(tmp_path) == {"base_model": "me/base", "tags": ["a: b", "ü"]}
    for card in ("# No metadata", "---\n[not: closed\n---\n", "---\n- a list\n---\n", ""):
        (tmp_path / "README.md").write_text(card)
        assert read_card_metadata(tmp_path) == {}
    assert read_card_metadata(tmp_path / "absent") == {}
    assert yaml.safe_load(render_card({"tags": ["x"]}, "text").split("---")[1]) == {"tags": ["x"]}
