"""The console script `hybrid-rlhf COMMAND`: one subcommand per module of this package.

Only the module of the chosen command is imported, so that `--help` and `--version` need no torch. `--json` belongs to
every command: it is taken out of the line here, and `runtime/output.py` prints results and errors accordingly.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from hybrid_rlhf import __version__
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rules import nearest
from hybrid_rlhf.runtime.command_line import user_errors
from hybrid_rlhf.runtime.output import JSON_OPTION, json_output, print_result

PROGRAM = "hybrid-rlhf"
COMMANDS = {
    "demo": ("demo", "Run all steps at small size on an embedded model and embedded data"),
    "train": ("train", "Run several steps on one model and one data set: sft,reward,rl or sft,preference"),
    "sft": ("sft", "Run supervised fine-tuning or distillation"),
    "reward": ("reward", "Train a reward model"),
    "preference": ("preference", "Train on preferences without a reward model: DPO, KTO, ORPO, ..."),
    "rl": ("rl", "Train with reinforcement learning: PPO, GRPO, RLOO, ..."),
    "data": ("data.subcommands", "Check, convert, split and blend data files"),
    "chat": ("saved_models.chat", "Chat with a saved model, or two models side by side, in the terminal"),
    "generate": ("saved_models.generate", "Complete the prompts of a file"),
    "serve": ("saved_models.serve", "Serve a saved model over HTTP with OpenAI's API"),
    "evaluate": ("saved_models.evaluate", "Evaluate a saved model: perplexity, accuracy, win rate, pass@k, lm-eval"),
    "export": ("saved_models.export", "Export a model: merged adapters, another dtype, GGUF"),
    "push": ("saved_models.push", "Upload a saved model to the Hugging Face hub"),
    "board": ("runs.board", "Show runs in a browser: curves, rollouts, preferences, chat, start and stop"),
    "replay": ("runs.replay", "Regenerate samples of an RL run, branch from them, or score other completions"),
    "plan": (
        "machine.plan",
        "Estimate the memory of each phase of `train` and the fastest placement; loads no weights",
    ),
    "calibrate": ("machine.calibrate", "Measure this machine for the time predictions of `plan`"),
    "env": ("machine.env", "Print versions, devices and optional packages, and problems with them"),
    "completion": ("machine.completion", "Print a shell completion script for bash, zsh or fish"),
}
"""Subcommands: the module below this package that has a function `main`, and a line of help."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that the first argument names."""
    words = list(sys.argv[1:] if argv is None else argv)
    with json_output() if JSON_OPTION in words else contextlib.nullcontext():
        _run([word for word in words if word != JSON_OPTION])


def _run(words: list[str]) -> None:
    with user_errors():
        if not words or words[0] in ("-h", "--help"):
            about = {name: text for name, (_, text) in COMMANDS.items()}
            print_result({"command": PROGRAM, "subcommands": about}, _help(about))
            return
        name, *rest = words
        if name == "--version":
            print_result({"version": __version__}, f"{PROGRAM} {__version__}")
            return
        module, _ = COMMANDS[chosen_name(name, COMMANDS, PROGRAM)]
        import_module(f"hybrid_rlhf.cli.{module}").main(rest, prog=f"{PROGRAM} {name}")


def chosen_name(word: str, names: Iterable[str], prog: str) -> str:
    """A word of the line, if it is one of the names.

    Raises:
        UserError: with the nearest name, if it is not.
    """
    known = list(names)
    if word not in known:
        found = nearest(word, known)
        near = "" if found is None else f"the nearest is {found}; "
        raise UserError(f"unknown command {word!r}: {near}{prog} --help lists all")
    return word


def usage(prog: str, about: Mapping[str, str], *, what: str) -> str:
    """The usage of a command with others below it, with a line for each."""
    width = max(map(len, about))
    return "\n".join(
        [
            f"usage: {prog} {what} [--config FILE.yaml] [--KEY VALUE ...]",
            "",
            *(f"  {name:{width}}  {text}" for name, text in about.items()),
            "",
            f"`{prog} {what} --help` lists the keys with their types, units and defaults.",
        ]
    )


def _help(about: Mapping[str, str]) -> str:
    width = max(map(len, about))
    return "\n".join(
        [
            usage(PROGRAM, about, what="COMMAND"),
            "",
            "options:",
            f"  {'--version':{width}}  Print the version",
            f"  {JSON_OPTION:{width}}  Every command: print results and errors as JSON, everything else to stderr",
        ]
    )


if __name__ == "__main__":
    main()
