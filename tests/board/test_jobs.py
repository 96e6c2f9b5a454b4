"""Replay, branch and rescore from the board, on a run that was really made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.board import ServedBoard, served_board, write_run
from tests.support.clock import wait_until


def ended(board: ServedBoard, job: str) -> dict[str, Any]:
    """A job once it has ended."""
    wait_until(lambda: board.get(f"/api/jobs/{job}")["state"] != "running", f"the end of job {job}", seconds=900)
    return dict(board.get(f"/api/jobs/{job}"))


@pytest.mark.faults
def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    write_run(tmp_path / "output" / "run", steps=1, samples=2)
    with served_board(tmp_path / "output") as board:
        run = board.run("run")["id"]
        job = board.post(f"/api/runs/{run}/replay", {"step": 1, "index": 0}).json()["job"]
        failed = ended(board, job)
        assert failed["state"] == "failed" and failed["error"] and "\n" not in failed["error"], failed
        scored = board.post(f"/api/runs/{run}/rescore", {"step": 1, "index": 0, "completion": "other"})
        assert scored.status_code == 400 and list(scored.json()) == ["error"]
        missing = board.post(f"/api/runs/{run}/replay", {"step": 1, "index": 7})
        assert missing.status_code == 404
        board.post(f"/api/runs/{run}/replay", {"step": 1, "index": 1})  # the end of the board ends it


@pytest.mark.faults
def test_a_sample_is_replayed_branched_and_scored(trained_folder: Path) -> None:
    with served_board(trained_folder) as board:
        run = board.run("rl")["id"]
        sample = board.get(f"/api/runs/{run}/samples/1/1")
        assert sample["tokens"] is not None and "".join(sample["tokens"]["texts"])
        where = {"step": 1, "index": 1}
        scored = board.post(f"/api/runs/{run}/rescore", {**where, "completion": "four words are here"}).json()
        assert scored["score"] == 4.0 and scored["components"] == {"length": 4.0}, scored
        replayed = ended(board, board.post(f"/api/runs/{run}/replay", where).json()["job"])
        assert replayed["state"] == "done", replayed
        start = sample["tokens"]["prompt_length"]
        assert replayed["result"]["identical"]
        assert replayed["result"]["token_ids"] == sample["tokens"]["ids"][start:]
        body = {**where, "token": start, "text": None, "samples": 2}
        branched = ended(board, board.post(f"/api/runs/{run}/branch", body).json()["job"])
        assert branched["state"] == "done", branched
        assert len(branched["result"]["completions"]) == 2
