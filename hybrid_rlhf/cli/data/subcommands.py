"""`hybrid-rlhf data check|convert|split|blend`: the module of a subcommand has a function `run` of its config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hybrid_rlhf.cli.main import PROGRAM, chosen_name, usage
from hybrid_rlhf.configs.commands.data import BlendConfig, CheckConfig, ConvertConfig, SplitConfig
from hybrid_rlhf.runtime.command_line import parse_config, user_errors
from hybrid_rlhf.runtime.output import print_result

SUBCOMMANDS: dict[str, tuple[type[Any], str, str]] = {
    "check": (CheckConfig, "path", "Read a source as a step would: columns, lengths, loss masks and all problems"),
    "convert": (ConvertConfig, "path", "Convert HH-RLHF, ShareGPT, Alpaca, OpenAssistant, ... into rows of every step"),
    "split": (SplitConfig, "path", "Split rows into files that share no prompt"),
    "blend": (BlendConfig, "sources", "Mix several sources in given shares: a.jsonl=0.7 b.jsonl=0.3"),
}
"""The config, the key that the first words give, and a line of help."""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Run the subcommand that the first argument names."""
    prog = prog or f"{PROGRAM} data"
    words = list(sys.argv[1:] if argv is None else argv)
    with user_errors():
        if not words or words[0] in ("-h", "--help", "--help-all"):
            about = {name: text for name, (_, _, text) in SUBCOMMANDS.items()}
            print_result({"command": prog, "subcommands": about}, usage(prog, about, what="SUBCOMMAND"))
            return
        name = chosen_name(words[0], SUBCOMMANDS, prog)
        config_type, positional, _ = SUBCOMMANDS[name]
        config = parse_config(config_type, words[1:], prog=f"{prog} {name}", positional=positional)
        import_module(f"hybrid_rlhf.cli.data.{name}").run(config)


if __name__ == "__main__":
    main()
