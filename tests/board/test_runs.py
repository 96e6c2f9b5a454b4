"""The list of runs, whatever is in their folders, curves, and what changes during training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from hybrid_rlhf.board.events import POLL_SECONDS, EventHub, Watcher
from hybrid_rlhf.board.runs.folders import RunFolders, run_id
from hybrid_rlhf.board.runs.metrics import MetricsFile
from hybrid_rlhf.board.runs.summary import printed_text
from hybrid_rlhf.runtime.files.folder_lock import LOCK_FILE, FolderLock
from tests.support.board import (
    ServedBoard,
    append_metrics,
    append_rows,
    hold_lock,
    sample_rows,
    served_board,
    summary_of,
    workspace_of,
    write_run,
)
from tests.support.clock import wait_until
from tests.support.errors import user_error


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "output"
    write_run(folder / "good", steps=3, samples=2, train={"max_steps": 5})
    write_run(folder / "deep" / "er" / "grpo", steps=1, algorithm={"name": "grpo"}, rollout={"sampling": {"n": 4}})
    finished = write_run(folder / "finished", steps=2)
    (finished / "finished.json").write_text('{"models": ["actor"]}\n')
    write_run(folder / "unborn")
    cut = write_run(folder / "cut", steps=2)
    (cut / "metrics.jsonl").write_bytes((cut / "metrics.jsonl").read_bytes() + b'{"step": 3, "time_sec')
    noise = write_run(folder / "noise", steps=1)
    (noise / "metrics.jsonl").write_bytes(os.urandom(5000) + b"\n")
    (noise / "samples.jsonl").write_bytes(os.urandom(5000) + b'\n{"step": 1}\n[]\n')
    bad = write_run(folder / "bad_config", steps=1)
    (bad / "config.yaml").write_text("a: [1\nb: }")
    foreign = folder / "foreign"
    foreign.mkdir()
    (foreign / "config.yaml").write_text("learning_rate: 1\nname: other\n")
    (foreign / "metrics.jsonl").write_text('{"step": 4, "loss": 2.5}\n')
    linked = write_run(folder / "linked", steps=1)
    (linked / "metrics.jsonl").unlink()
    (linked / "metrics.jsonl").symlink_to("/etc/passwd")
    pipe = write_run(folder / "pipe", steps=1)
    (pipe / "metrics.jsonl").unlink()
    os.mkfifo(pipe / "metrics.jsonl")
    (folder / "secret.txt").write_text("not for the board")
    return folder


@pytest.fixture(scope="module")
def board(runs: Path) -> Iterator[ServedBoard]:
    with served_board(runs) as served:
        yield served


def test_every_folder_is_listed_with_its_state_and_what_is_wrong(board: ServedBoard) -> None:
    listed = {run["name"]: run for run in board.get("/api/runs")}
    states = {name: run["state"] for name, run in listed.items()}
    assert states == {
        "good": "stopped",
        "deep/er/grpo": "stopped",
        "finished": "finished",
        "unborn": "broken",
        "cut": "stopped",
        "noise": "broken",
        "bad_config": "broken",
        "foreign": "foreign",
        "linked": "broken",
        "pipe": "broken",
    }
    assert all((run["problem"] is None) == (run["state"] in ("stopped", "finished")) for run in listed.values())
    good = listed["good"]
    assert (good["step"], good["total_steps"], good["command"], good["algorithm"]) == (3, 5, "rl", "ppo")
    assert (good["seed"], good["model"], good["has_samples"], good["has_tokens"]) == (1, "some/model", True, False)
    assert listed["deep/er/grpo"]["algorithm"] == "grpo"
    assert listed["finished"]["total_steps"] == 2
    assert listed["cut"]["step"] == 2


def test_a_run_that_an_error_ended_says_so_until_it_goes_on(tmp_path: Path) -> None:
    """It was shown as stopped."""
    log = write_run(tmp_path / "run", steps=2) / "log.txt"
    with served_board(tmp_path) as board:
        for line, state in (("error: KeyError: 'x' (a.py:1 f)", "broken"), ("sft 3/5", "stopped")):
            with log.open("a") as file:
                file.write(f"2026-01-01 00:00:00 {line}\n")
            (run,) = board.get("/api/runs")
            assert (run["state"], run["problem"]) == (state, line if state == "broken" else None)


def test_no_folder_is_an_internal_error(board: ServedBoard) -> None:
    for run in board.get("/api/runs"):
        for path in ("", "/timeline", "/samples", "/prompts", "/signals", "/samples/1/0"):
            answer = board.ask(f"/api/runs/{run['id']}{path}")
            assert answer.status_code < 500 or "regular" in answer.json()["error"], (run["name"], path, answer.text)
        answer = board.ask("/api/metrics", run=run["id"], name="objective/kl")
        assert answer.status_code == 200 and "root:" not in answer.text


def test_links_are_reported_as_not_followed(tmp_path: Path) -> None:
    """Linked runs were left out in silence, and for linked samples `samples_every` was said to be 0."""
    root = tmp_path / "output"
    elsewhere = write_run(tmp_path / "elsewhere" / "far", steps=1, samples=2)
    run = write_run(root / "near", steps=1)
    (root / "linked").symlink_to(elsewhere)
    (root / "latest").symlink_to(run)  # it is shown under its own name
    (root / "gone").symlink_to(tmp_path / "nothing")
    (run / "samples.jsonl").symlink_to(elsewhere / "samples.jsonl")
    metrics = write_run(root / "other") / "metrics.jsonl"
    metrics.symlink_to(elsewhere / "metrics.jsonl")
    workspace = workspace_of(root)
    assert workspace.folders.linked() == [root / "linked"]
    near, other = workspace.folders.all()
    summary = workspace.summaries.summary(near)
    assert not summary["has_samples"] and "samples.jsonl is a link" in summary["samples_problem"]
    with user_error("samples.jsonl is a link"):
        workspace.samples(near)
    assert "metrics.jsonl is a link" in workspace.summaries.summary(other)["problem"]


def test_a_run_has_its_settings_metrics_and_files(board: ServedBoard) -> None:
    run = board.get(f"/api/runs/{board.run('good')['id']}")
    assert run["config"]["algorithm"]["name"] == "ppo"
    assert "objective/kl" in run["metric_names"] and "time_seconds" not in run["metric_names"]
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl"} <= set(run["files"])


def test_curves_are_of_the_runs_that_were_asked_for(board: ServedBoard) -> None:
    good, other = board.run("good")["id"], board.run("finished")["id"]
    found = board.get("/api/metrics", run=[good, other], name=["objective/kl", "missing"])
    assert found[good] == {
        "step": [1, 2, 3],
        "time_seconds": [5.5, 11.0, 16.5],
        "values": {"objective/kl": [0.1, 0.2, pytest.approx(0.3)]},
    }
    assert found[other]["step"] == [1, 2]
    later = board.get("/api/metrics", run=good, name="objective/kl", after=2)
    assert later[good]["step"] == [3]


def test_the_timeline_has_the_parts_of_a_step(board: ServedBoard) -> None:
    found = board.get(f"/api/runs/{board.run('good')['id']}/timeline", **{"from": 2, "to": 3})
    assert found == {
        "steps": [2, 3],
        "phases": {"generation": [2.0, 2.0], "training": [3.0, 3.0]},
        "memory": {"peak": [1.5, 1.5]},
    }


def test_a_thinned_out_curve_keeps_its_peaks(tmp_path: Path) -> None:
    values = np.sin(np.arange(5000) / 50.0)
    values[1234], values[4321], values[77] = 50.0, -40.0, np.nan
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, value in enumerate(values):
            shown = None if np.isnan(value) else value
            file.write(json.dumps({"step": step, "time_seconds": step, "x": shown}) + "\n")
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.update()
    found = metrics.series(["x"], after=None, points=100)
    curve = found["values"]["x"]
    assert len(curve) == len(found["step"]) == 100 and found["step"] == sorted(found["step"])
    assert max(curve) == 50.0 and min(curve) == -40.0 and None not in curve
    assert found["step"][0] == 0 and found["step"][-1] == 4999


def test_metrics_are_read_on_and_again_after_a_resume(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        append_metrics(tmp_path, step)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for _ in range(2):
        metrics.update()
        assert metrics.series([], after=None, points=10)["step"] == [1, 2, 3]
    append_metrics(tmp_path, 4, late=1.0)
    metrics.update()
    assert metrics.series(["late"], after=None, points=10)["values"]["late"] == [None, None, None, 1.0]
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "beside").write_bytes(b"".join(lines[:2]))
    os.replace(tmp_path / "beside", tmp_path / "metrics.jsonl")
    append_metrics(tmp_path, 3)
    metrics.update()
    assert metrics.series([], after=None, points=10)["step"] == [1, 2, 3] and metrics.problem is None


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_ended_by_sigkill_is_killed_with_the_time_of_its_last_line(tmp_path: Path, steps: int) -> None:
    """It was shown as stopped, like one that was stopped on purpose."""
    folder = write_run(tmp_path / "live", steps=steps)
    with hold_lock(folder):
        pass  # it is killed
    found = summary_of(tmp_path)
    assert (found["state"], found["step"]) == ("killed", steps)
    if steps:
        last = (folder / "metrics.jsonl").stat().st_mtime
        written = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(last))
        assert found["updated_seconds"] == last and f"its last line is from {written}" in found["problem"]
    else:
        assert "no line of metrics" in found["problem"]


def test_a_silent_run_of_another_host_is_not_running(tmp_path: Path) -> None:
    """Its process cannot be looked for; the files say whether it goes on."""
    folder = write_run(tmp_path / "live", steps=1)
    (folder / ".lock").write_text("17 elsewhere 1234\n")
    assert summary_of(tmp_path)["state"] == "running"
    hour_ago = time.time() - 3600
    for name in ("metrics.jsonl", "config.yaml"):
        os.utime(folder / name, (hour_ago, hour_ago))
    assert summary_of(tmp_path)["state"] == "killed"


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Names and contents of the events of a stream."""
    name = ""
    for line in lines:
        kind, _, content = line.partition(": ")
        if kind == "event":
            name = content
        elif kind == "data":
            yield name, json.loads(content)


def test_a_board_tells_of_new_metrics_samples_and_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "output" / "live", steps=1)
    found: dict[str, Any] = {}
    with (
        served_board(tmp_path / "output") as board,
        httpx2.stream("GET", f"{board.url}/api/events", timeout=60) as stream,
    ):
        told = events(stream.iter_lines())
        for new in ("new", "newer"):  # when it tells of the second it has looked at all runs, so it sees what is added
            shutil.copytree(folder, tmp_path / new).rename(tmp_path / "output" / new)
            next(name for name, _ in told if name == "runs")
        assert board.run("newer")["step"] == 1
        append_metrics(folder, 2)
        append_rows(folder, sample_rows(2, 3))
        while not {"metrics", "samples"} <= found.keys():
            name, content = next(told)
            found.setdefault(name, content)
        metrics = found["metrics"]
        assert isinstance(metrics["step"], int) and metrics["values"]["objective/scores"] == 0.2
        assert (metrics["step"], metrics["run"]) == (2, board.run("live")["id"])
        assert found["samples"]["step"] == 2 and POLL_SECONDS < 2
        page = board.get(f"/api/runs/{metrics['run']}/samples", sort="score", order="desc")
        assert [row["index"] for row in page["rows"]] == [2, 1, 0]


def test_the_end_of_a_process_is_told_though_its_lock_ended_before(tmp_path: Path) -> None:
    run = write_run(tmp_path / "output" / "one", steps=1)
    alive = {run_id(run)}
    watcher = Watcher(RunFolders([tmp_path / "output"]), EventHub(), lambda: False, lambda name: name in alive)
    assert not watcher._look_for_states(False) and not watcher._look_for_states(False)
    alive.clear()
    assert watcher._look_for_states(False) and not watcher._look_for_states(False)


def test_the_list_shows_the_loss_of_training_and_when_the_run_last_wrote(tmp_path: Path) -> None:
    """A run of SFT had no last values between evaluations; one that failed at its start had no time."""
    folder = write_run(tmp_path / "run")
    append_metrics(folder, 2, **{"sft/loss": 1.25})
    os.utime(folder / "metrics.jsonl", (1000, 1000))
    os.utime(folder / "config.yaml", (900, 900))
    (folder / "log.txt").touch()
    os.utime(folder / "log.txt", (1100, 1100))
    found = summary_of(folder)
    assert found["last"]["sft/loss"] == 1.25 and found["step_seconds"] == 5.5 and found["updated_seconds"] == 1100


def test_files_of_a_run_are_pages_without_rights(tmp_path: Path) -> None:
    """A report is written by whoever may write to the folder: as a page of the board it could send its requests."""
    folder = write_run(tmp_path / "output" / "run", steps=1)
    (folder / "report.html").write_text("<script>parent</script>")
    (folder / "log.txt").symlink_to(folder / "config.yaml")
    with served_board(tmp_path / "output") as board:
        run = board.run("run")["id"]
        report = board.ask(f"/api/runs/{run}/files/report.html")
        assert report.headers["content-type"].startswith("text/html") and report.text == "<script>parent</script>"
        assert report.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
        config = board.ask(f"/api/runs/{run}/files/config.yaml")
        assert config.headers["content-type"].startswith("text/plain")
        assert board.ask(f"/api/runs/{run}/files/log.txt").status_code == 400
        refused = board.ask(f"/api/runs/{run}/files/.lock")
        assert refused.status_code == 400 and refused.json()["error"].startswith("file must be one of report.html")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("one\r\ntwo\n", "one\ntwo\n"),
        ("\r 10%\r 20%\nnext", " 20%\nnext"),
        ("\r 10%|" * 3000 + "\r 99%|", " 99%|"),
        ("\r 10%|" * 3000 + "\r 99%|\n", " 99%|"),
        ("x" * 10_000 + "\nlast", "last"),
    ],
)
def test_progress_bars_are_shown_as_in_a_terminal(tmp_path: Path, printed: str, shown: str) -> None:
    (tmp_path / "board.log").write_text(printed, newline="")
    assert printed_text(tmp_path) == (shown, "board.log")


def test_a_title_and_notes_are_kept_in_the_folder(board: ServedBoard) -> None:
    path = f"/api/runs/{board.run('good')['id']}"
    assert board.post(f"{path}/marks", {"title": " Higher rate ", "notes": "diverged\nat 40"}).status_code == 200
    titled = board.get(path)
    assert (titled["name"], titled["title"], titled["notes"]) == ("good", "Higher rate", "diverged\nat 40")
    assert board.post(f"{path}/marks", {"title": "", "notes": ""}).status_code == 200
    assert board.get(path)["title"] is None and board.get(path)["notes"] == ""
    for wrong in ({"title": 3}, {"title": "x" * 201}, {"name": "x"}):
        assert board.post(f"{path}/marks", wrong).status_code == 400


def test_a_run_is_deleted_by_its_name_unless_it_is_running(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    write_run(folder / "gone", steps=1)
    kept = write_run(folder / "kept", steps=1)
    outer = write_run(folder / "outer", steps=1)
    write_run(outer / "inner", steps=1)
    with served_board(folder) as board:
        ids = {run["name"]: run["id"] for run in board.get("/api/runs")}

        def refusal(run: str, typed: str) -> str:
            answer = board.post(f"/api/runs/{ids[run]}/delete", {"name": typed})
            assert answer.status_code == 400 and (folder / run).is_dir()
            return str(answer.json()["error"])

        assert "type its name" in refusal("gone", "kept")
        assert "contains other runs (outer/inner)" in refusal("outer", "outer")
        lock = FolderLock(kept)
        assert lock.acquire() is None
        assert "must not be running" in refusal("kept", "kept")
        lock.release()
        (kept / LOCK_FILE).write_text("1 another.host 1\n")  # a file system may not share locks between hosts
        assert "must not be running" in refusal("kept", "kept")
        assert board.post(f"/api/runs/{ids['gone']}/delete", {"name": "gone"}).status_code == 200
        assert {run["name"] for run in board.get("/api/runs")} == {"kept", "outer", "outer/inner"}
        assert {path.name for path in folder.iterdir()} == {"kept", "outer"}


def test_only_the_plans_of_the_last_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all runs were, also of deleted ones."""
    for number in range(20):
        write_run(tmp_path / f"run_{number}")
    workspace = workspace_of(tmp_path)
    plan = {"memory": [{"phase": "training", "gib": 1.0, "fits": True}], "step_seconds": None}
    monkeypatch.setattr(workspace._run_estimates, "plan", lambda *_: plan)
    runs = workspace.folders.all()
    for run in runs:
        assert workspace.memory_plan(run) is None
    wait_until(lambda: workspace.memory_plan(runs[-1]) == {"training": 1.0})
    assert len(workspace._plans) == 16
    workspace.forget(runs[-1])
    assert len(workspace._plans) == 15
    workspace._planner.shutdown()


def test_the_estimate_of_a_form_does_not_end_the_plan_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run never had a plan then."""
    write_run(tmp_path / "run")
    workspace = workspace_of(tmp_path)
    (run,) = workspace.folders.all()
    started = []

    @contextlib.contextmanager
    def planned(*_: object) -> Iterator[subprocess.Popen[bytes]]:
        seconds = 0 if started else 1
        code = f"""
import time
time.sleep({seconds})
print('{{"memory": [{{"phase": "a", "total": 1073741824, "fits": true}}]}}')"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        yield process

    monkeypatch.setattr("hybrid_rlhf.board.processes.estimates.json_command", planned)
    assert workspace.memory_plan(run) is None
    wait_until(lambda: bool(started))
    assert workspace.estimates.of_form("sft", {"model.path": "m"})["problem"] is None
    wait_until(lambda: workspace.memory_plan(run) == {"a": 1.0})
    workspace._planner.shutdown()
