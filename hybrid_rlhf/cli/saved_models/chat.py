"""`hybrid-rlhf chat MODEL`: chat with a saved model in the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ChatConfig
from hybrid_rlhf.configs.parsing.command_line import parse_config, user_errors
from hybrid_rlhf.configs.parsing.values import check_values
from hybrid_rlhf.configs.sections.sampling import SamplingParams

if TYPE_CHECKING:
    from hybrid_rlhf.generation.chat import ChatSession

HELP = """\
/clear            clear the conversation
/system [TEXT]    set or remove the system prompt; clears the conversation
/set KEY VALUE    change a sampling parameter: temperature, max_new_tokens, ...; /set lists them
/save FILE        write the conversation as JSON
/help             list the commands
/quit             quit (also Ctrl-D); Ctrl-C stops a reply"""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Parse, load the model, chat; torch is imported after parsing."""
    with user_errors():
        words = list(sys.argv[1:] if argv is None else argv)
        config = parse_config(ChatConfig, words, prog=prog, positional="path")
        from hybrid_rlhf.cli.saved_models.loading import load_engine
        from hybrid_rlhf.data.chat.conversation import encode_prompt
        from hybrid_rlhf.generation.chat import ChatSession

        engine, tokenizer = load_engine(config)
        conversation = ChatSession(
            engine, tokenizer, lambda messages: encode_prompt(messages, tokenizer), system=config.system
        )
        Session(conversation, config.sampling).run()


class Session:
    """Reads lines: one that begins with a slash is a command, any other a message to the model."""

    def __init__(self, conversation: ChatSession, sampling: SamplingParams) -> None:
        self._conversation = conversation
        self._sampling = sampling

    def run(self) -> None:
        """Read lines until /quit or the end of the input."""
        print("Type a message; /help lists the commands, /quit quits.")
        while True:
            try:
                line = input("\nyou> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._execute(line)
            elif line:
                self._reply(line)

    def _reply(self, text: str) -> None:
        print("model> ", end="", flush=True)
        try:
            for piece in self._conversation.say(text, self._sampling):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except UserError as error:  # too long, or refused by the chat template: the conversation is kept
            print(f"\nerror: {error}", end="")
        print()

    def _execute(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        commands: dict[str, Any] = {
            "/clear": self._clear,
            "/system": self._system,
            "/set": self._set,
            "/save": self._save,
            "/help": lambda _: print(HELP),
        }
        if command not in commands:
            print(f"unknown command {command}: /help lists the commands")
            return
        try:
            commands[command](rest.strip())
        except UserError as error:
            print(f"error: {error}")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        print("cleared")

    def _system(self, text: str) -> None:
        self._conversation.system = text or None
        self._clear("")

    def _set(self, rest: str) -> None:
        values = {field.name: getattr(self._sampling, field.name) for field in fields(self._sampling)}
        known = {name: value for name, value in values.items() if name != "n" and not isinstance(value, tuple)}
        if not rest:
            print("  ".join(f"{name} {value}" for name, value in known.items()))
            return
        name, _, text = rest.partition(" ")
        if name not in known:
            raise UserError(f"/set takes {', '.join(known)}, got {name!r}: write for example /set temperature 0.5")
        number = float if isinstance(known[name], float) else int
        try:
            value: Any = number(text)
        except ValueError as error:
            raise UserError(f"{name} takes a number, got {text!r}: write for example /set {name} 1") from error
        sampling = replace(self._sampling, **{name: value})
        check_values(sampling)
        self._sampling = sampling
        print(f"{name} {value}")

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs a file, got none: write /save FILE.json")
        file = Path(os.path.expanduser(name))
        if file.exists():
            raise UserError(f"/save writes a new file, {file} exists: choose another name")
        beside = file.with_name(f"{file.name}.partial")
        try:
            beside.write_text(json.dumps({"messages": self._conversation.transcript()}, ensure_ascii=False, indent=2))
            os.replace(beside, file)
        except OSError as error:
            raise UserError(f"/save cannot write {file} ({error.strerror}): choose another folder") from error
        print(f"saved {file}")


if __name__ == "__main__":
    main()
