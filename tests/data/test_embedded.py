"""The embedded pairs: a preference that a reward model can learn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rlhf.data.rows.embedded import SYSTEM_PROMPT, write_demo_data
from hybrid_rlhf.data.rows.formats import read_preference_row, read_prompt_row, read_sft_row
from tests.support.errors import user_error


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    pytest.importorskip("chatterbot_corpus")
    file = write_demo_data(tmp_path / "new" / "demo", seed=0)
    assert file == tmp_path / "new" / "demo" / "pairs.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_rows_depend_on_the_seed_alone(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert len(rows) > 800
    first = (tmp_path / "new" / "demo" / "pairs.jsonl").read_text()
    assert write_demo_data(tmp_path / "a", seed=0).read_text() == first
    assert write_demo_data(tmp_path / "b", seed=1).read_text() != first


def test_rows_serve_all_three_steps(rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows, start=1):
        assert set(row) == {"prompt", "chosen", "rejected", "score"}
        assert row["score"] == len(row["chosen"].split())
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["prompt"][0]["content"] == SYSTEM_PROMPT
        place = f"pairs.jsonl:{number}"
        answer = [{"role": "assistant", "content": row["chosen"]}]
        assert read_sft_row(place, row).messages == row["prompt"] + answer
        assert read_preference_row(place, row).completions[0] == answer
        assert read_prompt_row(place, row).messages == row["prompt"]


def test_a_rejected_answer_belongs_to_another_question(rows: list[dict[str, Any]]) -> None:
    pairs = {(row["prompt"][1]["content"], row["chosen"]) for row in rows}
    assert len(pairs) == len(rows), "every pair once"
    answers = {answer for _, answer in pairs}
    for row in rows:
        assert row["rejected"] in answers and row["rejected"] != row["chosen"]
        assert all("\n" not in text and text.strip() for text in (row["chosen"], row["rejected"]))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (None, SimpleNamespace(submodule_search_locations=None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with user_error("chatterbot-corpus, which is not installed: run `make demo`"):
            write_demo_data(tmp_path, seed=0)
