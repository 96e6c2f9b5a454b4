"""`hybrid-rlhf chat` on a terminal: a pseudo-terminal, typed into key by key."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import stat
import struct
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pexpect
import pexpect.fdpexpect
import pytest
import torch

from hybrid_rlhf.cli.main import main
from tests.support.ranks import FORKSERVER
from tests.support.tiny import save_tiny, tiny_model, tiny_scorer

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")
_PROMPT = "\x1b[?2004h"
"""What prompt_toolkit writes when it begins to read: pastes are to be marked."""
Start = Callable[..., pexpect.fdpexpect.fdspawn]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and a reward model."""
    folder = tmp_path_factory.mktemp("saved")
    for seed, name in enumerate(("one", "two")):
        save_tiny(folder / name, tiny_model(seed))
    save_tiny(folder / "reward", tiny_scorer())
    return folder


def chat(terminal: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Be a process whose terminal is the one of this name, and chat."""
    os.setsid()
    file = os.open(terminal, os.O_RDWR)  # the terminal of the new session
    for descriptor in range(3):
        os.dup2(file, descriptor)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    os.environ.update(environment)
    torch.set_num_threads(1)
    main(["chat", *words])


@pytest.fixture
def start(folders: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts the command in a terminal of 100 columns."""
    running = []

    def started(*words: str) -> pexpect.fdpexpect.fdspawn:
        settings = {
            "TERM": "xterm",
            "XDG_STATE_HOME": str(tmp_path),
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "OMP_NUM_THREADS": "1",
        }
        typed, shown = pty.openpty()
        fcntl.ioctl(shown, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        more = ("--sampling.max_new_tokens", "8", "--sampling.seed", "1")
        process = FORKSERVER.Process(target=chat, args=(os.ttyname(shown), [*words, *more], settings))
        process.start()
        running.append(process)
        terminal = pexpect.fdpexpect.fdspawn(typed, encoding="utf-8", timeout=120)
        terminal.expect_exact(_PROMPT)
        os.close(shown)  # the end of the process is the end of what is shown
        return terminal

    yield started
    for process in running:
        process.kill()
        process.join()


def said(terminal: pexpect.fdpexpect.fdspawn, text: str) -> str:
    """Type a line and Enter; what appears before the next prompt, without its colours."""
    terminal.send(f"{text}\r")
    terminal.expect_exact(_PROMPT)
    return _ESCAPES.sub("", terminal.before)


def saved(terminal: pexpect.fdpexpect.fdspawn, file: Path) -> dict[str, list[dict[str, str]]]:
    """The conversation so far, by /save."""
    assert "saved" in said(terminal, f"/save {file}")
    content: dict[str, list[dict[str, str]]] = json.loads(file.read_text())
    return content


def test_lines_history_retry_and_scores(start: Start, folders: Path, tmp_path: Path) -> None:
    terminal = start(str(folders / "one"))
    said(terminal, "first\\\rsecond")
    terminal.send("third\x1b\rfourth\r")  # Alt-Enter
    terminal.expect_exact(_PROMPT)
    before = saved(terminal, tmp_path / "a.json")["messages"]
    assert [m["content"] for m in before[::2]] == ["first\nsecond", "third\nfourth"]
    said(terminal, "/retry")
    after = saved(terminal, tmp_path / "b.json")["messages"]
    assert after[:-1] == before[:-1] and after[-1] != before[-1]
    assert re.search(r"model: score [+-]\d\.\d{3}", said(terminal, f"/score {folders / 'reward'}"))
    assert "error: a reward model must have a score head" in said(terminal, f"/score {folders / 'two'}")
    assert "temperature 0.0" in said(terminal, "/set temperature 0")
    terminal.send("/quit\r")
    terminal.expect(pexpect.EOF)
    history = tmp_path / "hybrid_rlhf" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+first\n+second\n" in history.read_text() and "+/retry\n" in history.read_text()


def test_two_models_answer_side_by_side(start: Start, folders: Path, tmp_path: Path) -> None:
    terminal = start(str(folders / "one"), str(folders / "two"))
    shown = said(terminal, "hello")
    assert re.search(r"^\s*model\s+two\s*$", shown, re.MULTILINE)
    both = saved(terminal, tmp_path / "a.json")
    assert both["messages"][0] == both["compared"]["two"][0] == {"role": "user", "content": "hello"}
    assert both["messages"][1] != both["compared"]["two"][1]
    assert "one model answers" in said(terminal, "/compare")
    assert "compared" not in saved(terminal, tmp_path / "b.json")
    assert "absent/x/y is none" in said(terminal, "/compare absent/x/y")


def test_commands_are_completed_and_ctrl_c_stops_a_reply(start: Start, folders: Path, tmp_path: Path) -> None:
    terminal = start(str(folders / "one"))
    terminal.send("/set max_n")
    terminal.expect_exact("max_new_tokens")  # in the menu
    terminal.send("\t")
    terminal.expect_exact("ew_tokens")
    assert "max_new_tokens 100000" in said(terminal, " 100000")
    said(terminal, "/set min_new_tokens 100000")
    terminal.send("hello\r")
    terminal.expect_exact("\x1b[?2004l")  # the prompt has ended
    terminal.expect_exact("\x1b[2K")  # the reply has begun, and is shown again with more text
    terminal.send("\x03")  # Ctrl-C
    terminal.expect_exact("[stopped]")
    terminal.expect_exact(_PROMPT)
    messages = saved(terminal, tmp_path / "a.json")["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"]
    said(terminal, "/set min_new_tokens 0")
    said(terminal, "/set max_new_tokens 4")
    terminal.send("half a mess\x03")  # Ctrl-C clears the line
    said(terminal, "whole")
    assert saved(terminal, tmp_path / "b.json")["messages"][2]["content"] == "whole"
    terminal.send("\x03")
    terminal.expect_exact("press Ctrl-C again, or Ctrl-D, to quit")
    terminal.expect_exact(_PROMPT)  # the next prompt reads keys
    terminal.send("\x03")
    terminal.expect(pexpect.EOF)


def test_ctrl_d_ends_the_chat(start: Start, folders: Path) -> None:
    terminal = start(str(folders / "one"))
    terminal.send("\x04")
    terminal.expect(pexpect.EOF)
