"""Failing sinks never end a run: full or failing disks, TensorBoard, a closed console."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hybrid_rlhf.cli.train import CommandEnd, tee
from hybrid_rlhf.runtime.files import json_lines as lines_module
from hybrid_rlhf.runtime.files.json_lines import JsonLinesFile, drop_lines_after, read_lines
from hybrid_rlhf.runtime.observability.display import StepDisplay
from hybrid_rlhf.runtime.observability.metrics import MetricsWriter, read_metrics
from hybrid_rlhf.runtime.observability.samples import SampleLog
from tests.support.faults import files_of_at_most

ROW = {"prompt": [{"role": "user", "content": "q"}], "completion": "é\ud800", "score": 1.0, "kl": 0.5}


def steps(file: Path) -> list[int]:
    """The steps of the lines of a file, all of which must be complete."""
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_pending_lines_are_written_once_and_in_order(tmp_path: Path, log_lines: list[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": 1.0})
    with files_of_at_most(file.stat().st_size + 10):
        for step in (2, 3, 4):
            writer.write(step, {"loss": 1.0})
            writer.flush()
        assert steps(file) == [1], "no partial line"
    writer.write(5, {"loss": 1.0})
    assert steps(file) == [1, 2, 3, 4, 5]
    writer.close()
    file.write_text(file.read_text().replace('"time_seconds": 0', '"time_seconds": 100') + '{"step": 6, "cut o')
    again = MetricsWriter(tmp_path, resumed_step=3)
    again.write(4, {"loss": 2.0})
    assert steps(file) == [1, 2, 3, 4] and read_metrics(tmp_path)[-1]["time_seconds"] >= 100
    assert [line for line in log_lines if "cannot be written (File too large)" in line] == log_lines[:1]
    assert log_lines[1:] == [f"{file} can be written again"]


def test_each_disk_error_is_logged_once(tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    writer, samples = MetricsWriter(tmp_path), SampleLog(tmp_path, enabled=True)
    files = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    for file in files:
        file.mkdir()
    for step in (1, 2):
        writer.write(step, {"loss": 1.0})
        samples.write(step, [ROW])
    assert [line for line in log_lines if "Is a directory" in line] == [line for line in log_lines if "jsonl" in line]
    assert sum("Is a directory" in line for line in log_lines) == 2, "once per file"
    for file in files:
        file.rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "broken")))
        for step in (3, 4):
            writer.write(step, {"loss": 1.0})
            writer.flush()
            samples.write(step, [ROW])
    assert sum("cannot be flushed to disk (broken): a crash may lose lines" in line for line in log_lines) == 1
    writer.close()
    assert steps(files[0]) == steps(files[1]) == [1, 2, 3, 4]


def test_lines_missing_at_the_end_are_logged(tmp_path: Path, log_lines: list[str]) -> None:
    writer = MetricsWriter(tmp_path)
    with files_of_at_most(0):
        writer.write(1, {"loss": 1.0})
        writer.close()
    assert log_lines[-1].endswith("lacks its last 1 lines, which could not be written")


def test_pending_lines_are_bounded(tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_PENDING_BYTES", 100)
    file = JsonLinesFile(tmp_path / "x.jsonl")
    with files_of_at_most(0):
        for step in range(20):
            file.append([{"step": step}])
    file.append([{"step": 20}])
    assert steps(tmp_path / "x.jsonl") == list(range(14, 21))
    assert "14 lines are lost" in log_lines[-1]


def test_a_removed_file_is_created_again(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path / "x.jsonl")
    file.append([{"step": 1}])
    (tmp_path / "x.jsonl").unlink()
    file.append([{"step": 2}])
    assert steps(tmp_path / "x.jsonl") == [2]


def test_nonfinite_values_are_strict_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, sinks=["tensorboard"])
    writer.write(1, {"loss": math.nan, "norm": math.inf, "lr": 0.5})
    writer.close()

    def refuse(word: str) -> None:
        raise ValueError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None and line["norm"] is None and line["lr"] == 0.5
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # no traceback of its thread
def test_a_run_continues_without_failing_tensorboard(tmp_path: Path, log_lines: list[str]) -> None:
    writer = MetricsWriter(tmp_path, sinks=["tensorboard"])
    writer.write(1, {"loss": 1.0})
    with files_of_at_most(0):
        writer._sinks[0].close("finished")  # it waits until the events are on the disk
    for step in (2, 3):
        writer.write(step, {"loss": 1.0})
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert sum("TensorBoard is no" in line for line in log_lines) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tensorboard").write_text("not a folder")
    writer = MetricsWriter(tmp_path / "other", sinks=["tensorboard"])
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert steps(tmp_path / "other" / "metrics.jsonl") == [1]
    assert sum("TensorBoard is not written" in line for line in log_lines[1:]) == 1


def test_a_resumed_run_repeats_no_step(tmp_path: Path) -> None:
    samples = SampleLog(tmp_path, enabled=True)
    for step in (1, 2, 3):
        samples.write(step, [ROW, ROW])
    file = tmp_path / "samples.jsonl"
    with file.open("ab") as end:
        end.write('{"step": 4, "completion": "é'.encode()[:-1])
    again = SampleLog(tmp_path, enabled=True)
    again.resume(2)
    for step in (3, 4):
        again.write(step, [ROW])
    assert steps(file) == [1, 1, 2, 2, 3, 4]
    other = SampleLog(tmp_path, enabled=False)
    other.resume(0)
    other.write(5, [ROW])
    assert len(steps(file)) == 6, "only the main rank changes it"
    before = file.stat().st_mtime_ns
    drop_lines_after(file, 4)
    assert file.stat().st_mtime_ns == before, "nothing to drop, nothing written"
    with files_of_at_most(0), pytest.raises(OSError):
        drop_lines_after(file, 1)
    assert len(read_lines(file)) == 6 and not file.with_name("samples.jsonl.partial").exists()


def run(code: str, folder: Path, *, read: int | None = None, stdout: Any = subprocess.PIPE) -> tuple[int, str]:
    """Run code; with `read`, close its stdout after this many lines. Returns the exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    if process.stdout is not None:
        for _ in range(read or 0):
            process.stdout.readline()
        process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    return process.wait(60), errors


LOOP = """
import sys, time
from pathlib import Path
import torch
from hybrid_rlhf.runtime.observability.display import StepDisplay
from hybrid_rlhf.runtime.observability.logs import setup_logging
from hybrid_rlhf.runtime.observability.metrics import MetricsWriter
from hybrid_rlhf.runtime.world import solo_world
folder = Path(sys.argv[1])
setup_logging(solo_world(torch.device("cpu")), file=folder / "log.txt")
writer = MetricsWriter(folder)
with StepDisplay("sft", total_steps=20) as display:
    for step in range(1, 21):
        writer.write(step, {"loss": 1.0})
        display.show(step, {"loss": 1.0})
        time.sleep(0.02)
writer.close()
print("done")
"""


def test_a_closed_console_ends_no_run(tmp_path: Path) -> None:
    code, errors = run(LOOP, tmp_path, read=1)
    assert (code, errors) == (0, "")
    text = (tmp_path / "log.txt").read_text()
    assert text.count("the console cannot be written (Broken pipe): ") == 1
    assert all(f"sft {step}/20" in text for step in range(1, 21)), "also the line that the console refused"
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 21))


def test_a_console_and_a_log_on_a_full_disk_end_no_run(tmp_path: Path) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with open("/dev/full", "w") as full:
        code, errors = run(LOOP, tmp_path, stdout=full)
    assert code == 0 and "Traceback" not in errors
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 21))


def test_a_progress_bar_on_a_closed_terminal_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def flush(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Closed())
    shown: Sequence[int] = range(1, 4)
    with StepDisplay("sft", total_steps=3) as display:
        for step in shown:
            display.show(step, {"loss": 1.0})
    assert display._progress is None


def test_a_pipeline_outlives_its_console_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = [sys.executable, "-c", "for i in range(3): print('line', i)\nraise SystemExit(7)"]
    for log in (tmp_path / "log.txt", tmp_path / "full.txt"):
        if log.name == "full.txt":
            log.symlink_to("/dev/full")
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as closed:
            monkeypatch.setattr(sys, "stdout", closed)
            assert tee(step, log, os.environ) == CommandEnd(7, ["line 0\n", "line 1\n", "line 2\n"])
    assert (tmp_path / "log.txt").read_text() == "line 0\nline 1\nline 2\n"
