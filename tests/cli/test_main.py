"""The console script: it finds a command, passes its arguments on, and imports nothing more than it needs."""

from __future__ import annotations

import pytest

import hybrid_rlhf
from hybrid_rlhf.cli.main import COMMANDS
from tests.support.commands import CommandLine
from tests.support.runs import run_python


def test_help_lists_the_commands(cli: CommandLine) -> None:
    for line in ("", "-h", "--help"):
        out = cli(line).out
        assert all(f"\n  {name} " in out for name in (*COMMANDS, "--version"))
    assert cli("--version").out == f"hybrid-rlhf {hybrid_rlhf.__version__}\n"


@pytest.mark.parametrize(("wrong", "nearest"), [("trian", "train"), ("--sft", "sft")])
def test_a_wrong_command_names_the_nearest(wrong: str, nearest: str, cli: CommandLine) -> None:
    assert cli.refused(wrong).startswith(f"error: unknown command '{wrong}': the nearest is {nearest};")


HELP = """
import sys
from hybrid_rlhf.cli.main import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as stop:
        assert stop.code == 0, command
    assert not {"pydantic", "torch", "transformers", "deepspeed", "datasets"} & set(sys.modules), command
"""


def test_the_help_of_a_command_loads_neither_pydantic_nor_torch_and_shows_its_name() -> None:
    done = run_python(["-c", HELP])
    assert done.returncode == 0, done.stderr
    words = {"data": " SUBCOMMAND", "chat": " [PATH] [COMPARE]", "push": " [PATH] [REPO]", "completion": " [SHELL]"}
    words |= {"board": " [FOLDERS]", "port": " [SOURCE]"}
    words |= dict.fromkeys(("generate", "serve", "train-server", "evaluate", "export", "replay"), " [PATH]")
    for command in COMMANDS:
        assert f"usage: hybrid-rlhf {command}{words.get(command, '')} [--config FILE.yaml]" in done.stdout
