"""Talk to a saved model in the terminal: `python inference/chat.py output/step3_ppo/actor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.configs.cli import parse_config, user_errors
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ChatConfig, SamplingConfig
from hybrid_rlhf.configs.values import check_values

if TYPE_CHECKING:
    from hybrid_rlhf.generation.chat import Conversation

HELP = """\
/clear            forget what was said
/system [TEXT]    set the system prompt, or drop it; forgets what was said
/set KEY VALUE    change a number of sampling: temperature, max_new_tokens, ...; /set shows all
/save FILE        write the conversation as JSON
/help             this
/quit             leave (also Ctrl-D); Ctrl-C stops an answer"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, talk; torch is imported only after parsing."""
    with user_errors():
        words = list(sys.argv[1:] if argv is None else argv)
        config = parse_config(ChatConfig, words, positional="path")
        from hybrid_rlhf.data.chat import encode_prompt
        from hybrid_rlhf.generation.chat import Conversation
        from inference.loading import load_engine

        engine, tokenizer = load_engine(config)
        conversation = Conversation(
            engine, tokenizer, lambda messages: encode_prompt(messages, tokenizer), system=config.system
        )
        Session(conversation, config.sampling).run()


class Session:
    """Reads lines, obeys those that begin with a slash, and passes the others on."""

    def __init__(self, conversation: Conversation, sampling: SamplingConfig) -> None:
        self._conversation = conversation
        self._sampling = sampling

    def run(self) -> None:
        """Until /quit or the end of the input."""
        print("Type a message; /help lists the commands, /quit leaves.")
        while True:
            try:
                line = input("\nyou> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)

    def _answer(self, text: str) -> None:
        from inference.loading import sampling_params

        print("model> ", end="", flush=True)
        try:
            for piece in self._conversation.say(text, sampling_params(self._sampling)):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except UserError as error:  # too long, or against the template: what was said before stays
            print(f"\nerror: {error}", end="")
        print()

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        commands: dict[str, Any] = {
            "/clear": self._clear, "/system": self._system, "/set": self._set, "/save": self._save,
            "/help": lambda _: print(HELP),
        }  # fmt: skip
        if command not in commands:
            print(f"no command {command}: /help lists them")
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
        known = {name: value for name, value in values.items() if not isinstance(value, list)}
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
            raise UserError(f"/save cannot write {file} ({error.strerror}): choose another place") from error
        print(f"saved {file}")


if __name__ == "__main__":
    main()
