"""Judgements: blind pairs, what is stored, agreement with the scores, and the data of a reward model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rlhf.board.asked import ask_models
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from tests.support.board import ServedBoard, sample_rows, served_board, workspace_of, write_run
from tests.support.errors import user_error
from tests.support.steps import read_rows, write_lines


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
    assert set(pair) == {"pair", "prompt", "images", "left", "right"} and pair["left"] != pair["right"]
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


def test_the_newest_judgement_is_taken_back(workspace: BoardWorkspace) -> None:
    """A wrong key must not become training data; a line that another board has appended stays."""
    _, one, _ = map(workspace.samples, workspace.folders.all())
    preferences = workspace.preferences
    with user_error("undo takes back the newest judgement of this board, there is none"):
        preferences.undo()
    first = preferences.next([one])
    preferences.judge(first["pair"], "left", "ada")
    second = preferences.next([one])
    preferences.judge(second["pair"], "left", "ada")
    assert preferences.undo() == second and len(preferences.read()) == 1 and not preferences.summary()["can_undo"]
    with user_error("there is none"):
        preferences.undo()
    preferences.judge(second["pair"], "right", "ada")
    assert [row["choice"] for row in preferences.read()] == ["left", "right"]
    with preferences.file.open("a") as file:
        file.write(json.dumps(preferences.read()[0]) + "\n")
    with user_error("another board has appended"):
        preferences.undo()
    assert len(preferences.read()) == 3


def test_a_user_without_a_name_has_none(workspace: BoardWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with any user id, no page of judgements could be shown."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert workspace.preferences.summary()["user"] == ""


class Answers:
    """Models that answer with their path and the prompt's last word, or always the same."""

    def __init__(self, *, equal_to: str = "") -> None:
        self._equal_to = equal_to

    async def answers(self, paths: Sequence[str], messages: Any, *_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
        async def events() -> AsyncIterator[dict[str, Any]]:
            for number, path in enumerate(paths):
                word = messages[-1]["content"].split()[-1]
                for delta in ("same ", "") if word == self._equal_to else (f"{path} ", word):
                    yield {"model": number, "delta": delta}
                yield {"model": number, "done": True}

        return events()


def ask(workspace: BoardWorkspace, chats: Answers, file: Path) -> dict[str, Any]:
    asked = ask_models(workspace.preferences, chats, ["a", "b"], str(file), SamplingParams())  # type: ignore[arg-type]
    return asyncio.run(asked)


def test_two_models_answer_each_row_once(workspace: BoardWorkspace, tmp_path: Path) -> None:
    """Runs of SFT and DPO record no samples, and two runs rarely the same prompts."""
    file = write_lines(tmp_path / "rows.jsonl", [{"prompt": f"Say {n}", "answer": n} for n in range(3)])
    seen = set()
    for _ in range(2):
        pair = ask(workspace, Answers(equal_to="1"), file)
        assert set(pair) == {"pair", "prompt", "images", "left", "right"}
        word = pair["prompt"][-1]["content"].split()[-1]
        assert {pair["left"], pair["right"]} == {f"a {word}", f"b {word}"}
        workspace.preferences.judge(pair["pair"], "left", "ada")
        (*_, row) = workspace.preferences.read()
        assert row["columns"] == {"answer": int(word)} and row["prompts"] == str(file)
        assert row["chosen"] == pair["left"] == f"{row['shown'][0]['run']} {word}"
        seen.add(word)
    assert seen == {"0", "2"} and ask(workspace, Answers(equal_to="1"), file) == {"pair": None}
    assert ask(workspace, Answers(), file)["prompt"][-1]["content"] == "Say 1"
    other = write_lines(tmp_path / "other.jsonl", [{"prompt": "Say 0"}])
    assert ask(workspace, Answers(), other)["pair"] is not None


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
