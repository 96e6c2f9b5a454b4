"""Ctrl-C, which a terminal sends to every process in the foreground, and SIGTERM: a run saves and stops, other
commands stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hybrid_rlhf.cli.saved_models import loading
from hybrid_rlhf.cli.saved_models.chat import Session
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.runtime.command_line import INTERRUPTED_EXIT_CODE
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from tests.support.commands import CommandLine
from tests.support.marks import faults, slow
from tests.support.runs import ENVIRONMENT, pipeline_line, run_python, sft_line, start_until

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def signalled(line: list[str], number: int = signal.SIGINT) -> tuple[int, str]:
    """The exit code and output of a run that gets a signal after its first step; SIGINT from its terminal."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    # A job of a script ignores it, and so does what it starts. No preexec_fn: a large worker cannot fork.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start_until(line, "sft 1/", start_new_session=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said = process.communicate(timeout=600)[0]
    return process.returncode, said


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.faults
def test_a_pipeline_saves_and_resumes(
    number: int, processes: int, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    line = pipeline_line(output, model_folder, pair_rows)
    line += f"--steps sft --launcher.num_processes {processes} --sft.train.max_steps 30 --sft.train.epochs 40".split()
    code, said = signalled(line, number)
    assert code == STOPPED_EXIT_CODE and ("Traceback" in said) == (processes > 1), said[-3000:]
    assert ("stopping after this step; a second Ctrl-C ends at once" in said) == (number == signal.SIGINT)
    assert "stopped by a signal after writing checkpoints/step_" in said and "run the same command to resume" in said
    assert "OMP_NUM_THREADS" not in said, "a banner of torchrun, which chooses one thread where none is chosen"
    again = run_python([*line, "--sft.logging.every", "2"])
    assert again.returncode == 0 and "resumes from" in again.stdout, again.stderr[-3000:]
    assert (output / "step1_sft" / "finished.json").exists()


@pytest.mark.parametrize("launcher", [slow([]), faults(TORCHRUN)])
def test_a_step_without_a_pipeline_saves(
    launcher: list[str], model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    line = sft_line(tmp_path / "run", model_folder, pair_rows, "--train.max_steps 30 --train.epochs 40")
    code, said = signalled([*launcher, *line])
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
@pytest.mark.parametrize("line", ["chat {model}", "generate {model} --input {rows} --output {out}"])
def test_another_command_stops_in_one_line(
    line: str, model_folder: Path, pair_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(loading, "load_engine", _interrupt)
    ended = cli(line.format(model=model_folder, rows=pair_rows, out=tmp_path / "out.jsonl"))
    assert ended.code == INTERRUPTED_EXIT_CODE == 130 and ended.err.endswith("\nstopped\n")


@pytest.mark.usefixtures("_keyboard")
def test_a_chat_continues_when_a_command_is_interrupted() -> None:
    view = Mock(**{"read.side_effect": ["/score MODEL", "/help", EOFError]})
    Session(None, SamplingParams(), view=view, load=_interrupt, load_scorer=_interrupt).run()  # type: ignore[arg-type]
    shown = [call.args[0] for call in view.show.call_args_list]
    assert shown[1] == "stopped" and shown[2].startswith("/clear")
    view.show_replies.assert_not_called()
