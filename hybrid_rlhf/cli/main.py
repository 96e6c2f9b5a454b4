"""The console script `hybrid-rlhf COMMAND`: one subcommand per module of this package.

Only the module of the chosen command is imported, so that `--help` and `--version` need no torch.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from hybrid_rlhf import __version__
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.command_line import user_errors

PROGRAM = "hybrid-rlhf"
COMMANDS = {
    "demo": ("demo", "Run all steps at small size on an embedded model and embedded conversations"),
    "train": ("train", "Run several steps on one model and one data set: sft,reward,rl or sft,preference"),
    "sft": ("sft", "Run supervised fine-tuning or distillation"),
    "reward": ("reward", "Train a reward model"),
    "preference": ("preference", "Train on preferences without a reward model: DPO, KTO, ORPO, ..."),
    "rl": ("rl", "Train by reinforcement learning: PPO, GRPO, RLOO, ..."),
    "chat": ("saved_models.chat", "Chat with a saved model in the terminal"),
    "generate": ("saved_models.generate", "Complete the prompts of a file"),
    "serve": ("saved_models.serve", "Serve a saved model over HTTP with OpenAI's API"),
    "board": ("runs.board", "Show runs in a browser: curves, rollouts, preferences, chat, start and stop"),
    "plan": (
        "machine.plan",
        "Print the memory of each phase of `train` and the fastest placement; loads no weights",
    ),
    "calibrate": ("machine.calibrate", "Measure how fast this machine is, for the times of `plan`"),
}
"""Subcommands: the module below this package that has a function `main`, and a line of help."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that the first argument names."""
    words = list(sys.argv[1:] if argv is None else argv)
    with user_errors():
        if not words or words[0] in ("-h", "--help"):
            print(_help())
            return
        name, *rest = words
        if name == "--version":
            print(f"{PROGRAM} {__version__}")
            return
        if name not in COMMANDS:
            (nearest,) = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)
            raise UserError(f"unknown command {name!r}: the nearest is {nearest}; {PROGRAM} --help lists all")
        module, _ = COMMANDS[name]
        import_module(f"hybrid_rlhf.cli.{module}").main(rest, prog=f"{PROGRAM} {name}")


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [--config FILE.yaml] [--KEY VALUE ...]",
            "",
            "Supervised fine-tuning, reward models, preference losses and reinforcement learning of language models.",
            "",
            "commands:",
            *(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()),
            "",
            "options:",
            f"  {'--version':{width}}  Print the version",
            "",
            f"`{PROGRAM} COMMAND --help` lists the keys of a command with their types, units and defaults.",
        ]
    )


if __name__ == "__main__":
    main()
