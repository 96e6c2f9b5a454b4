"""Completion scripts, run by the shells themselves where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main as script
from hybrid_rlhf.cli.machine.completion import completed_commands
from hybrid_rlhf.cli.machine.scripts import SCRIPTS
from hybrid_rlhf.configs.inference import ChatConfig
from hybrid_rlhf.configs.parsing.listing import every_key
from hybrid_rlhf.configs.rl import RLConfig
from tests.support.runs import ROOT

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_hybrid_rlhf
printf '%s\\n' "${COMPREPLY[@]}"
"""
# Outside of a completion, zsh has no compadd: this one prints what it would add, filtered as zsh filters.
ZSH = """
compdef() { :; }
compadd() { shift; for word in "$@"; do [[ $word == "${words[CURRENT]}"* ]] && print -r -- $word; done; }
_files() { print -r -- FILES; }
source "$1"; shift
words=("$@"); CURRENT=$#
_hybrid_rlhf
"""
FISH = 'source $argv[1]; complete -C (string join " " -- $argv[2..-1])'
RUNS = {
    "bash": ["bash", "--norc", "-c", BASH, "bash"],
    "zsh": ["zsh", "-f", "-c", ZSH, "zsh"],
    "fish": ["fish", "--no-config", "-c", FISH],
}
Complete = Callable[..., list[str]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file per shell."""
    folder = tmp_path_factory.mktemp("scripts")
    commands = list(completed_commands())
    files = {}
    for shell, make in SCRIPTS.items():
        files[shell] = folder / f"completion.{shell}"
        files[shell].write_text(make(script.PROGRAM, commands))
    return files


@pytest.fixture(params=SCRIPTS)
def complete(request: pytest.FixtureRequest, scripts: dict[str, Path]) -> Complete:
    """What a shell offers for the last word of a line."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")

    def run(*words: str) -> list[str]:
        line = [*RUNS[shell], str(scripts[shell]), script.PROGRAM, *words]
        done = subprocess.run(line, capture_output=True, text=True, cwd=scripts[shell].parent, timeout=60)
        assert done.stderr == "", done.stderr
        return [line.split("\t")[0] for line in done.stdout.splitlines() if line]

    return run


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


def test_a_key_without_choices_takes_files(complete: Complete, request: pytest.FixtureRequest) -> None:
    """bash then uses its own completion of file names."""
    found = complete("generate", "--input", "")
    assert not [word for word in found if word.startswith("--")]
    if request.node.callspec.params["complete"] == "fish":
        assert "completion.fish" in found
    elif request.node.callspec.params["complete"] == "zsh":
        assert found == ["FILES"]


def test_every_command_is_listed_with_the_keys_of_its_config() -> None:
    commands = {command.path: command for command in completed_commands()}
    assert {*script.COMMANDS, "", "data check", "data blend"} <= set(commands)
    assert commands["rl"].keys == every_key(RLConfig)
    for path, command in commands.items():
        assert command.keys or command.subcommands or path == "env", path


def test_keys_that_a_section_does_not_read_are_left_out() -> None:
    assert "sampling.max_new_tokens" in every_key(ChatConfig) and "sampling.n" not in every_key(ChatConfig)


def test_documented_lines_name_commands_and_keys_that_exist() -> None:
    commands = {command.words: command for command in completed_commands()}
    pages = [(ROOT / name).read_text() for name in ("AGENTS.md", "docs/cli.md")]
    lines = [line for page in pages for line in re.findall(r"^ +\$? ?hybrid-rlhf ([^>#\n]*)", page, re.MULTILINE)]
    assert len(lines) > 12
    for line in lines:
        words = line.split()
        command = commands.get(tuple(words[:2])) or commands.get(tuple(words[:1])) or commands[()]
        known = {*command.following(), "--resume", "COMMAND"}
        keys = {word for word in words if word.startswith("--")} - {"--KEY", "--model.pth"}
        sections = {key.rpartition(".")[0] for key in known}
        assert keys <= known | sections, line


def test_the_page_has_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in script.COMMANDS:
        assert f"`{name}" in page, name
