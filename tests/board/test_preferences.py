"""Judgements: blind pairs, what is stored, agreement with the scores, and the data of a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hybrid_rlhf.board.workspace import BoardWorkspace
from tests.support.board import ServedBoard, sample_rows, served_board, workspace_of, write_run
from tests.support.steps import read_rows


@pytest.fixture
def board(tmp_path: Path) -> Iterator[ServedBoard]:
    write_run(tmp_path / "output" / "one", steps=2, samples=8)
    with served_board(tmp_path / "output") as served:
        yield served


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BoardWorkspace:
    """The state of a board without its server."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_run(tmp_path / "output" / "none", steps=1)
    write_run(tmp_path / "output" / "one", steps=2, samples=8)
    write_run(tmp_path / "output" / "two", steps=1, samples=8, seed=2)
    return workspace_of(tmp_path / "output")


SCORES = {row["completion"]: row["score"] for step in (1, 2) for row in sample_rows(step, 8)}


def test_pairs_are_blind_and_judged_once(board: ServedBoard, tmp_path: Path) -> None:
    run = board.run("one")["id"]
    pair = board.get("/api/preferences/next", run=run)
    assert set(pair) == {"pair", "prompt", "left", "right"} and pair["left"] != pair["right"]
    body = {"pair": pair["pair"], "choice": "right", "who": "ada"}
    assert board.post("/api/preferences", body).json() == {"count": 1}
    again = board.post("/api/preferences", body)
    assert again.status_code == 400 and "not judged yet" in again.json()["error"]
    assert board.get("/api/preferences/summary")["by"] == {"ada": 1}
    (row,) = read_rows(tmp_path / "output" / "preferences.jsonl")
    assert (row["chosen"], row["rejected"], row["tie"]) == (pair["right"], pair["left"], False)
    assert (row["who"], row["choice"], row["prompt"]) == ("ada", "right", pair["prompt"])
    assert [side["score"] for side in row["shown"]] == [SCORES[pair["left"]], SCORES[pair["right"]]]
    assert row["shown"][0]["run"] == str(tmp_path / "output" / "one")


def test_judgements_compare_with_the_scores(workspace: BoardWorkspace, tmp_path: Path) -> None:
    _, one, _ = map(workspace.samples, workspace.folders.all())
    preferences = workspace.preferences
    seen = set()
    sides = set()
    for number in range(12):
        pair = preferences.next([one])
        better = "left" if SCORES[pair["left"]] > SCORES[pair["right"]] else "right"
        sides.add(better)
        worse = {"left": "right", "right": "left"}[better]
        choice = "equal" if number == 0 else better if number < 9 else worse
        seen.add(frozenset((pair["left"], pair["right"])))
        preferences.judge(pair["pair"], choice, "ada" if number % 2 else "bo")
    assert len(seen) == 12 and sides == {"left", "right"}
    tie, *others = preferences.read()
    assert tie["tie"] and len(tie["responses"]) == 2 and not {"chosen", "rejected"} & tie.keys()
    assert all({"chosen", "rejected"} <= row.keys() for row in others)
    summary = preferences.summary()
    assert summary["count"] == 12 and summary["by"] == {"ada": 6, "bo": 6}
    assert summary["agreement"] == pytest.approx(8 / 11)
    assert summary["pairs_file"] == str(tmp_path / "output" / "preferences.jsonl")


def test_two_runs_give_one_side_each(workspace: BoardWorkspace) -> None:
    none, one, two = map(workspace.samples, workspace.folders.all())
    preferences = workspace.preferences
    for _ in range(5):
        preferences.judge(preferences.next([one, two])["pair"], "left", "ada")
    assert all({Path(side["run"]).name for side in row["shown"]} == {"one", "two"} for row in preferences.read())
    assert preferences.next([none]) == {"pair": None}


@pytest.mark.faults
def test_a_reward_model_is_trained_on_the_pairs(board: ServedBoard, tmp_path: Path, model_folder: Path) -> None:
    body = {"model": str(model_folder), "output_dir": "preferred"}
    nothing = board.post("/api/preferences/train", body)
    assert nothing.status_code == 400 and "judge some first" in nothing.json()["error"]
    assert not (tmp_path / "output" / "preferred").exists()
    run = board.run("one")["id"]
    for number in range(6):
        pair = board.get("/api/preferences/next", run=run)
        choice = "equal" if number == 0 else "left"
        board.post("/api/preferences", {"pair": pair["pair"], "choice": choice, "who": "ada"})
    started = board.post("/api/preferences/train", body)
    assert started.status_code == 200, started.text
    folder = tmp_path / "output" / "preferred"
    rows = read_rows(folder / "pairs.jsonl")
    assert len(rows) == 5 and set(rows[0]) == {"prompt", "chosen", "rejected"}
    settings = yaml.safe_load((folder / "board.yaml").read_text())
    assert settings["data"]["sources"] == [str(folder / "pairs.jsonl")] and settings["output_dir"] == str(folder)
    assert settings["train"]["global_batch_size"] == 2  # half of the pairs
    trained = board.wait("preferred", lambda run: run["state"] != "running")
    assert (trained["id"], trained["state"], trained["command"]) == (started.json()["run"], "finished", "reward"), (
        trained
    )
    assert (folder / "finished.json").exists()
    twice = board.post("/api/preferences/train", body)
    assert twice.status_code == 400 and "must be new" in twice.json()["error"]
