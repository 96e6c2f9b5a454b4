"""Ctrl-C, which a terminal sends to every process in the foreground: a run saves and stops, other commands stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.cli.main import main
from hybrid_rlhf.cli.saved_models import loading
from hybrid_rlhf.cli.saved_models.chat import Session
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.runtime.command_line import INTERRUPTED_EXIT_CODE
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from tests.support.runs import pipeline_line, run_python, sft_line, start_until
from tests.support.steps import write_rows

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LONG = ["train.max_steps", "30"], ["train.epochs", "40"], ["train.global_batch_size", "4"], ["data.max_length", "64"]


def interrupted(line: list[str]) -> tuple[int, str]:
    """The exit code and output of a run whose terminal sends SIGINT after its first step."""
    process = start_until(
        line,
        "sft 1/",
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a job of a script ignores it
    )
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=120)[0]
    return process.returncode, said


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.faults)])
@pytest.mark.faults
def test_a_pipeline_saves_and_resumes(processes: int, model_folder: Path, tmp_path: Path) -> None:
    rows, output = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    line = [*pipeline_line(output, model_folder, rows), "--steps", "sft"]
    line += [word for key, value in LONG for word in (f"--sft.{key}", value)]
    line += ["--launcher.num_processes", str(processes)]
    code, said = interrupted(line)
    assert code == STOPPED_EXIT_CODE and ("Traceback" in said) == (processes > 1), said[-3000:]
    assert "stopping after this step; a second Ctrl-C ends at once" in said
    assert "stopped by a signal after writing checkpoints/step_" in said and "run the same command to resume" in said
    again = run_python(line)
    assert again.returncode == 0 and "resumes from" in again.stdout, again.stderr[-3000:]


@pytest.mark.parametrize(
    "launcher", [pytest.param([], marks=pytest.mark.slow), pytest.param(TORCHRUN, marks=pytest.mark.faults)]
)
def test_a_step_without_a_pipeline_saves(launcher: list[str], model_folder: Path, tmp_path: Path) -> None:
    line = sft_line(tmp_path / "run", model_folder, write_rows(tmp_path / "rows.jsonl"))
    code, said = interrupted([*launcher, *line, *(word for key, value in LONG for word in (f"--{key}", value))])
    assert code == (1 if launcher else STOPPED_EXIT_CODE), said[-3000:]
    assert "stopped by a signal after writing checkpoints/step_" in said
    assert said.count("stopping after this step") == 1
    assert (tmp_path / "run" / "checkpoints").exists()


def _interrupt(*arguments: Any, **settings: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def _keyboard() -> Any:
    """SIGINT as a program in a terminal has it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_keyboard")
@pytest.mark.parametrize("words", [["chat", "MODEL"], ["generate", "MODEL", "--input", "ROWS", "--output", "OUT"]])
def test_another_command_stops_in_one_line(
    words: list[str],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loading, "load_engine", _interrupt)
    rows = write_rows(tmp_path / "rows.jsonl")
    places = {"MODEL": str(model_folder), "ROWS": str(rows), "OUT": str(tmp_path / "out.jsonl")}
    with pytest.raises(SystemExit) as stopped:
        main([places.get(word, word) for word in words])
    assert stopped.value.code == INTERRUPTED_EXIT_CODE == 130
    assert capsys.readouterr().err == "stopped\n"


class _Lines:
    """A view of a chat that types lines."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.shown = [*lines], list[str]()

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def show(self, text: str) -> None:
        self.shown.append(text)

    def show_replies(self, replies: Any) -> None:
        raise AssertionError


@pytest.mark.usefixtures("_keyboard")
def test_a_chat_continues_when_a_command_is_interrupted() -> None:
    view = _Lines("/score MODEL", "/help")
    Session(None, SamplingParams(), view=view, load=_interrupt, load_scorer=_interrupt).run()  # type: ignore[arg-type]
    assert view.shown[1] == "stopped" and view.shown[2].startswith("/clear")
