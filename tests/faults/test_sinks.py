"""Sinks that fail never end a run: disks that are full or broken, TensorBoard, a console that is gone."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rlhf.runtime import lines as lines_module
from hybrid_rlhf.runtime.lines import LineFile, drop_lines_past, read_lines
from hybrid_rlhf.runtime.metrics import MetricsWriter, StepDisplay, read_metrics
from hybrid_rlhf.runtime.samples import SampleLog
from train import _tee

ROW = {"prompt": [{"role": "user", "content": "q"}], "completion": "é\ud800", "score": 1.0, "kl": 0.5}


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel takes no byte past this size: the write before it is a short one, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps(file: Path) -> list[int]:
    """Of the lines of a file, all of which must be whole."""
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_lines_wait_for_the_disk_and_are_written_once_in_order(tmp_path: Path, log_lines: list[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"loss": 1.0})
    with files_of_at_most(file.stat().st_size + 10):
        for step in (2, 3, 4):
            writer.write(step, {"loss": 1.0})
            writer.flush()
        assert steps(file) == [1], "and no half line"
    writer.write(5, {"loss": 1.0})
    assert steps(file) == [1, 2, 3, 4, 5]
    writer.close()
    assert [line for line in log_lines if "cannot be written (File too large)" in line] == log_lines[:1]
    assert log_lines[1:] == [f"{file} is written again"]


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("call", ["write", "open", "fsync"])
def test_any_fault_of_the_disk_is_told_once(
    fault: int, call: str, tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, samples = MetricsWriter(tmp_path, tensorboard=False), SampleLog(tmp_path, every=1, enabled=True)

    def fail(*words: Any) -> None:
        raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as patch:
        patch.setattr(lines_module, "os", SimpleNamespace(**{**vars(os), call: fail}))
        for step in (1, 2):
            writer.write(step, {"loss": 1.0})
            writer.flush()
            samples.write(step, lambda: [ROW])
    told = [line for line in log_lines if os.strerror(fault) in line]
    assert len(told) == (1 if call == "fsync" else 2), "once a file, and samples are not flushed"
    writer.write(3, {"loss": 1.0})
    samples.write(3, lambda: [ROW])
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == steps(tmp_path / "samples.jsonl") == [1, 2, 3]


def test_a_run_that_ends_while_the_disk_fails_says_what_is_lacking(tmp_path: Path, log_lines: list[str]) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with files_of_at_most(0):
        writer.write(1, {"loss": 1.0})
        writer.close()
    assert log_lines[-1].endswith("lacks its last 1 lines, which could not be written")


def test_what_waits_is_bounded(tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MOST_WAITING_BYTES", 100)
    file = LineFile(tmp_path / "x.jsonl")
    with files_of_at_most(0):
        for step in range(20):
            file.append([{"step": step}])
    file.append([{"step": 20}])
    assert steps(tmp_path / "x.jsonl") == list(range(14, 21))
    assert "14 lines of it are lost" in log_lines[-1]


def test_a_file_that_is_removed_is_begun_anew(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "x.jsonl")
    file.append([{"step": 1}])
    (tmp_path / "x.jsonl").unlink()
    file.append([{"step": 2}])
    assert steps(tmp_path / "x.jsonl") == [2]


def test_figures_that_are_not_finite_are_strict_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, {"loss": math.nan, "norm": math.inf, "lr": 0.5})
    writer.close()

    def refuse(word: str) -> None:
        raise ValueError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None and line["norm"] is None and line["lr"] == 0.5
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # its thread's own last words
def test_tensorboard_that_fails_is_left(tmp_path: Path, log_lines: list[str]) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=True)
    events = writer._events
    with files_of_at_most(0):
        writer.write(1, {"loss": 1.0})
        with pytest.raises(OSError):
            events.flush()
        writer.write(2, {"loss": 1.0})
    writer.write(3, {"loss": 1.0})
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert sum("TensorBoard events are written no more" in line for line in log_lines) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tensorboard").write_text("in the way")
    MetricsWriter(tmp_path / "other", tensorboard=True).write(1, {"loss": 1.0})
    assert steps(tmp_path / "other" / "metrics.jsonl") == [1]
    assert sum("TensorBoard events are written no more" in line for line in log_lines) == 2


def test_a_resumed_run_doubles_no_step(tmp_path: Path) -> None:
    samples = SampleLog(tmp_path, every=1, enabled=True)
    for step in (1, 2, 3):
        samples.write(step, lambda: [ROW, ROW])
    file = tmp_path / "samples.jsonl"
    with file.open("ab") as end:
        end.write('{"step": 4, "completion": "é'.encode()[:-1])
    again = SampleLog(tmp_path, every=1, enabled=True)
    again.resume(2)
    for step in (3, 4):
        again.write(step, lambda: [ROW])
    assert steps(file) == [1, 1, 2, 2, 3, 4]
    SampleLog(tmp_path, every=1, enabled=False).resume(0)
    assert len(steps(file)) == 6, "only the main rank touches it"
    before = file.stat().st_mtime_ns
    drop_lines_past(file, 4)
    assert file.stat().st_mtime_ns == before, "nothing to drop, nothing written"
    with files_of_at_most(0), pytest.raises(OSError):
        drop_lines_past(file, 1)
    assert len(read_lines(file)) == 6 and not file.with_name("samples.jsonl.partial").exists()


def run(code: str, folder: Path, *, read: int | None = None, stdout: Any = subprocess.PIPE) -> tuple[int, str]:
    """Run code; with `read`, its console goes away after so many lines. The exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    if process.stdout is not None:
        for _ in range(read or 0):
            process.stdout.readline()
        process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    return process.wait(60), said


LOOP = """
import sys, time
from pathlib import Path
import torch
from hybrid_rlhf.runtime.logs import setup_logging
from hybrid_rlhf.runtime.metrics import MetricsWriter, StepDisplay
from hybrid_rlhf.runtime.world import solo_world
folder = Path(sys.argv[1])
setup_logging(solo_world(torch.device("cpu")), file=folder / "log.txt")
writer = MetricsWriter(folder, tensorboard=False)
with StepDisplay("sft", total_steps=20) as display:
    for step in range(1, 21):
        writer.write(step, {"loss": 1.0})
        display.show(step, {"loss": 1.0})
        time.sleep(0.02)
writer.close()
print("done")
"""


def test_a_console_that_is_gone_ends_no_run(tmp_path: Path) -> None:
    code, said = run(LOOP, tmp_path, read=1)
    assert (code, said) == (0, "")
    text = (tmp_path / "log.txt").read_text()
    assert text.count("the console is gone (Broken pipe): the run goes on without it") == 1
    assert "sft 20/20" in text and steps(tmp_path / "metrics.jsonl") == list(range(1, 21))


def test_a_console_and_a_log_on_a_full_disk_end_no_run(tmp_path: Path) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with open("/dev/full", "w") as full:
        code, said = run(LOOP, tmp_path, stdout=full)
    assert code == 0 and "Traceback" not in said
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 21))


def test_a_progress_bar_on_a_terminal_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def flush(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Gone())
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
        with os.fdopen(writer, "w") as gone:
            monkeypatch.setattr(sys, "stdout", gone)
            assert _tee(step, log) == (7, ["line 0\n", "line 1\n", "line 2\n"])
    assert (tmp_path / "log.txt").read_text() == "line 0\nline 1\nline 2\n"
