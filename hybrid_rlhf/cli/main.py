"""The console script `hybrid-rlhf COMMAND`: one subcommand per module of this package.

Only the module of the chosen command is imported, so that `--help` and `--version` need no torch. Every command has
`--json`: this module removes it from the words, and `runtime/output.py` prints results and errors accordingly.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from hybrid_rlhf import __version__
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.help import wrapped
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
    "port": ("porting.port", "Write a run of TRL, OpenRLHF, verl, LLaMA-Factory or axolotl as a configuration"),
    "data": ("data", "Check, convert, split and blend data files"),
    "chat": ("saved_models.chat", "Chat with a saved model, or two models side by side, in the terminal"),
    "generate": ("saved_models.generate", "Complete the prompts of a file"),
    "serve": ("saved_models.serve", "Serve a saved model over HTTP with OpenAI's API"),
    "train-server": ("saved_models.train_server", "Train and sample adapters of a model over HTTP, with Tinker's API"),
    "evaluate": ("saved_models.evaluate", "Evaluate a saved model: perplexity, accuracy, win rate, pass@k"),
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
"""Commands: the module of this package with the function `main`, or a key of `SUBCOMMANDS`; and a line of help."""
SUBCOMMANDS = {
    "data": {
        "check": ("data.check", "Read a source as a step would: columns, lengths, loss masks and all problems"),
        "convert": ("data.convert", "Convert HH-RLHF, ShareGPT, Alpaca, OpenAssistant, ... into rows of every step"),
        "split": ("data.split", "Split rows into files that share no prompt"),
        "blend": ("data.blend", "Mix several sources in given shares: a.jsonl=0.7 b.jsonl=0.3"),
    }
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first words name."""
    words = list(sys.argv[1:] if argv is None else argv)
    with json_output() if JSON_OPTION in words else contextlib.nullcontext(), user_errors():
        words = [word for word in words if word != JSON_OPTION]
        if words[:1] == ["--version"]:
            print_result({"version": __version__}, f"{PROGRAM} {__version__}")
        else:
            _run(words, COMMANDS, PROGRAM)


def _run(words: list[str], commands: Mapping[str, tuple[str, str]], prog: str) -> None:
    if not words or words[0] in ("-h", "--help", "--help-all"):
        about = {name: text for name, (_, text) in commands.items()}
        print_result({"command": prog, "subcommands": about}, _usage(prog, about))
        return
    name, *rest = words
    if name not in commands:
        nearest_name = nearest(name, commands)
        near = "" if nearest_name is None else f"the nearest is {nearest_name}; "
        raise UserError(f"unknown command {name!r}: {near}{prog} --help lists all")
    module, _ = commands[name]
    prog = f"{prog} {name}"
    if module in SUBCOMMANDS:
        _run(rest, SUBCOMMANDS[module], prog)
    else:
        import_module(f"hybrid_rlhf.cli.{module}").main(rest, prog=prog)


def _usage(prog: str, about: Mapping[str, str]) -> str:
    """The usage of the program or of a command with subcommands, with a line for each."""
    what = "COMMAND" if prog == PROGRAM else "SUBCOMMAND"
    width = max(map(len, about))
    rest = " " * (width + 4)

    def entries(texts: Mapping[str, str]) -> list[str]:
        return [line for name, text in texts.items() for line in wrapped(text, f"  {name:{width}}  ", rest)]

    lines = [
        f"usage: {prog} {what} [--config FILE.yaml] [--KEY VALUE ...]",
        "",
        *entries(about),
        "",
        f"`{prog} {what} --help` lists the keys with their types, units and defaults.",
    ]
    if prog == PROGRAM:
        lines += [
            "",
            "options:",
            *entries(
                {
                    "--version": "Print the version",
                    JSON_OPTION: "Every command: print results and errors as JSON, everything else to stderr",
                }
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
