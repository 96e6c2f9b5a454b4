"""Completion scripts, run by the shells themselves where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
import shtab

from hybrid_rlhf.cli import main as script
from hybrid_rlhf.cli.machine.completion import completion_parser, config_keys
from hybrid_rlhf.configs.inference import ChatConfig
from hybrid_rlhf.configs.parsing.listing import every_key
from tests.support.commands import command_helps
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
    settings: Any = {**ENVIRONMENT, "TERM": "dumb"}
    terminal = pexpect.spawn(
        "zsh", ["-f", "-i"], cwd=folder, env=settings, dimensions=(400, 400), encoding="utf-8", timeout=60
    )
    terminal.sendline(f"{ZSH}; PS1='re''ady> '")
    terminal.expect_exact("ready> ")
    terminal.send(f"{line}\t")
    terminal.expect([r"\r\n(.*)\r\nready> ", "\x07"])
    found = terminal.match.group(1).split() if terminal.match_index == 0 else []
    terminal.close(force=True)
    return found


def parsers(parser: ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ArgumentParser]]:
    """The parser of each command."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, (*words, name))


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


def test_every_command_has_the_keys_and_choices_of_its_config() -> None:
    completed = dict(parsers(completion_parser()))
    for words, document in command_helps():
        actions = completed[words]._option_string_actions
        keys = config_keys(document) if "config" in document else {}
        assert {key: list(actions[f"--{key}"].choices or []) for key in keys} == keys
        assert keys or "subcommands" in document or words == ("env",), words
    assert {(name,) for name in script.COMMANDS} | {("data", "check"), ("data", "blend")} <= set(completed)


def test_keys_that_a_section_does_not_read_are_left_out() -> None:
    assert "sampling.max_new_tokens" in every_key(ChatConfig) and "sampling.n" not in every_key(ChatConfig)


def test_documented_lines_name_commands_and_keys_that_exist() -> None:
    commands = dict(parsers(completion_parser()))
    pages = [(ROOT / name).read_text() for name in ("AGENTS.md", "docs/cli.md")]
    lines = [line for page in pages for line in re.findall(r"^ +\$? ?hybrid-rlhf ([^>#\n]*)", page, re.MULTILINE)]
    assert len(lines) > 12
    for line in lines:
        words = line.split()
        command = commands.get(tuple(words[:2])) or commands.get(tuple(words[:1])) or commands[()]
        known = {*command._option_string_actions, "--resume", "COMMAND"}
        keys = {word for word in words if word.startswith("--")} - {"--KEY", "--model.pth"}
        sections = {key.rpartition(".")[0] for key in known}
        assert keys <= known | sections, line


def test_the_page_has_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in script.COMMANDS:
        assert f"`{name}" in page, name
