"""Completion scripts, run by the shells themselves where they are installed."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import struct
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

import pexpect.fdpexpect
import pytest
import shtab

from hybrid_rlhf.cli import main as script
from hybrid_rlhf.cli.machine.completion import completion_parser
from hybrid_rlhf.configs.inference import ChatConfig
from hybrid_rlhf.configs.parsing.listing import every_key
from tests.support.runs import ENVIRONMENT, ROOT

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_hybrid_rlhf
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C (string join " " -- $argv[2..-1])'
RUNS = {"bash": ["bash", "--norc", "-c", BASH, "bash"], "fish": ["fish", "--no-config", "-c", FISH]}
ZSH = "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; zstyle '*' verbose no; bindkey '^I' list-choices"
Complete = Callable[..., list[str]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file per shell."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "fish", "zsh"):
        name = "_hybrid_rlhf" if shell == "zsh" else f"completion.{shell}"
        (folder / name).write_text(shtab.complete(completion_parser(), shell))
    return folder


@pytest.fixture(params=["bash", "fish", "zsh"])
def complete(request: pytest.FixtureRequest, scripts: Path) -> Complete:
    """What a shell offers for the last word of a line."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")

    def run(*words: str) -> list[str]:
        if shell == "zsh":
            return listed_by_zsh(scripts, " ".join([script.PROGRAM, *words]))
        line = [*RUNS[shell], str(scripts / f"completion.{shell}"), script.PROGRAM, *words]
        done = subprocess.run(line, capture_output=True, text=True, cwd=scripts, timeout=60)
        assert done.stderr == "", done.stderr
        return [line.split("\t")[0] for line in done.stdout.splitlines() if line]

    return run


def listed_by_zsh(folder: Path, line: str) -> list[str]:
    """What zsh lists after a line; it completes on a terminal only."""
    typed, shown = pty.openpty()
    fcntl.ioctl(shown, termios.TIOCSWINSZ, struct.pack("HHHH", 400, 400, 0, 0))
    settings = {**ENVIRONMENT, "TERM": "dumb"}
    # not pexpect.spawn: it forks, which a worker that maps more than the machine has cannot
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], cwd=folder, env=settings, stdin=shown, stdout=shown, stderr=shown, start_new_session=True
    )
    os.close(shown)
    terminal = pexpect.fdpexpect.fdspawn(typed, encoding="utf-8", timeout=60)
    terminal.sendline(f"{ZSH}; PS1='re''ady> '")
    terminal.expect_exact("ready> ")
    terminal.send(f"{line}\t")
    terminal.expect([r"\r\n(.*)\r\nready> ", "\x07"])
    found = terminal.match.group(1).split() if terminal.match_index == 0 else []
    terminal.close()
    shell.kill()
    shell.wait()
    return found


def test_commands_and_subcommands(complete: Complete) -> None:
    assert {"data", "demo"} <= set(complete("d")) and "sft" not in complete("d")
    assert set(script.COMMANDS) <= set(complete(""))
    assert {"check", "convert", "split", "blend"} <= set(complete("data", ""))
    assert complete("data", "con") == ["convert"]


def test_keys_of_every_algorithm(complete: Complete) -> None:
    assert complete("rl", "--rollout.prompts_per") == ["--rollout.prompts_per_step"]
    assert "--algorithm.name" in complete("rl", "--algorithm.")
    assert len(complete("train", "--rl.algorithm.")) > len(complete("train", "--rl.algorithm.c")) > 0
    assert complete("data", "convert", "--ranked") == ["--ranked_as"]


def test_values(complete: Complete) -> None:
    assert complete("sft", "--model.dtype", "b") == ["bfloat16"]
    assert set(complete("generate", "m", "--trust_remote_code", "")) == {"true", "false"}
    assert "grpo" in complete("rl", "--algorithm.name", "g") and "grpo" in complete("rl", "--algorithm", "g")
    assert "hh" in complete("data", "convert", "rows.jsonl", "--format", "h")
    assert complete("completion", "z") == ["zsh"]


def test_a_key_without_choices_takes_files(complete: Complete) -> None:
    found = complete("generate", "--input", "")
    assert {"completion.bash", "completion.fish", "_hybrid_rlhf"} <= set(found)
    assert not [word for word in found if word.startswith("--")]


def test_keys_that_a_section_does_not_read_are_left_out() -> None:
    assert "sampling.max_new_tokens" in every_key(ChatConfig) and "sampling.n" not in every_key(ChatConfig)


def test_the_page_has_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in script.COMMANDS:
        assert f"`{name}" in page, name
