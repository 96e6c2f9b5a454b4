"""`hybrid-rlhf chat MODEL [MODEL2]`: chat with a saved model, or with two side by side, in the terminal.

A view reads and shows text: `JSONView` with --json, `PlainView` if input or output is not a terminal, otherwise
`terminal.py`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ChatConfig
from hybrid_rlhf.configs.parsing.values import check_values, is_text
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.reading import user_path
from hybrid_rlhf.runtime.observability.logs import LOADING_LIBRARIES, logger
from hybrid_rlhf.runtime.output import print_document, wants_json

if TYPE_CHECKING:
    from hybrid_rlhf.generation.chat import ChatSession
    from hybrid_rlhf.serving.saved_scorer import SavedScorer

HELP = """\
/clear            clear the conversation
/image FILE       add an image to the next message
/system [TEXT]    set or remove the system prompt; clears the conversation
/set KEY VALUE    change a sampling parameter: temperature, max_new_tokens, ...; /set lists them
/retry            reply again, with other random numbers
/compare [MODEL]  let a second model answer the same messages; without a model: no longer
/score [MODEL]    score the last replies by a reward model, the last one named
/save FILE        write the conversation as JSON
/help             list the commands
/quit             quit (also Ctrl-D); Ctrl-C stops a reply, or clears the line"""
Replies = Mapping[str, Generator[str, None, None]]
"""Pieces of each model's reply, by its name."""


class ChatView(Protocol):
    """Reads the user's input, and shows the output."""

    def read(self) -> str:
        """Return a message or command; raise EOFError at the end of the input."""

    def show(self, text: str) -> None:
        """Show a line of the program."""

    def show_replies(self, replies: Replies) -> None:
        """Show replies as they arrive. Ctrl-C ends them; an error is shown."""


class PlainView:
    """View on plain lines of text."""

    def read(self) -> str:
        """Read a line after a prompt."""
        return input("\nyou> ").strip()

    def show(self, text: str) -> None:
        """Print a line."""
        print(text)

    def show_replies(self, replies: Replies) -> None:
        """Print the replies one after the other, each as it arrives."""
        for name, pieces in replies.items():
            print(f"{name}> ", end="", flush=True)
            try:
                for piece in pieces:
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                pieces.close()  # keeps the text so far in the conversation
                print(" [stopped]", end="")
            except UserError as error:  # too long, or refused by the chat template: the conversation continues
                print(f"\nerror: {error}", end="")
            print()


class JSONView:
    """View that prints JSON events."""

    def read(self) -> str:
        """Read a line of standard input: a message or a command."""
        return input().strip()

    def show(self, text: str) -> None:
        """Print an event with a line of the program."""
        if text:
            print_document({"event": "notice", "text": text})

    def show_replies(self, replies: Replies) -> None:
        """Print the pieces as they arrive, then each complete reply, or its error."""
        for name, pieces in replies.items():
            said = ""
            stopped = False
            try:
                for piece in pieces:
                    said += piece
                    print_document({"event": "piece", "model": name, "text": piece})
            except KeyboardInterrupt:
                pieces.close()  # keeps the text so far in the conversation
                stopped = True
            except UserError as error:
                print_document({"event": "refusal", "model": name, "text": str(error)})
                continue
            print_document({"event": "reply", "model": name, "text": said.strip(), "stopped": stopped})


@command(ChatConfig, positional=("path", "compare"))
def main(config: ChatConfig) -> None:
    """Load the model and chat."""
    logger.info(LOADING_LIBRARIES)
    from hybrid_rlhf.cli.saved_models.loading import find_model, load_engine, load_scorer, with_image_files
    from hybrid_rlhf.data.chat.messages import Message
    from hybrid_rlhf.generation.batching.images import PromptImages
    from hybrid_rlhf.generation.chat import ChatSession
    from hybrid_rlhf.generation.image_loading import PromptEncoder

    def load(name: str | None = None) -> ChatSession:
        engine, tokenizer = load_engine(config, name=name)
        encoder = PromptEncoder(tokenizer, engine.image_reader, max_pixels=config.max_image_pixels)

        def encode(messages: list[Message]) -> tuple[list[int], PromptImages | None]:
            return encoder.conversation(with_image_files(messages))

        return ChatSession(engine, tokenizer, encode, system=config.system)

    session = Session(
        load(),
        config.sampling,
        view=_view(),
        load=load,
        load_scorer=lambda name: load_scorer(find_model(config, name), max_image_pixels=config.max_image_pixels),
    )
    for name in config.image:
        session.attach(name)
    if config.compare is not None:
        session.compare(config.compare)
    session.run()
    if wants_json():
        print_document(session.content())


def _view() -> ChatView:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused, and the next one read
    if wants_json():
        return JSONView()
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return PlainView()
    from hybrid_rlhf.cli.saved_models.terminal import Terminal

    return Terminal(tuple(line.split()[0] for line in HELP.splitlines()), settings=tuple(_settings(SamplingParams())))


class Session:
    """Reads lines: one that begins with a slash is a command, any other a message to the models."""

    def __init__(
        self,
        conversation: ChatSession,
        sampling: SamplingParams,
        *,
        view: ChatView,
        load: Callable[[str], ChatSession],
        load_scorer: Callable[[str], SavedScorer],
    ) -> None:
        """Take the conversation with the first model.

        Args:
            conversation: conversation with the first model.
            sampling: sampling parameters of the replies.
            view: reads and shows text.
            load: starts a conversation with another model, for /compare.
            load_scorer: loads a reward model, for /score.
        """
        self._first = conversation
        self._others: dict[str, ChatSession] = {}
        self._sampling = sampling
        self._view = view
        self._load = load
        self._load_scorer = load_scorer
        self._images: list[str] = []
        """Files that go with the next message."""
        self._scorer: SavedScorer | None = None
        self._retries = 0

    @property
    def _conversations(self) -> dict[str, ChatSession]:
        return {"model": self._first, **self._others}

    def run(self) -> None:
        """Read lines until /quit or the end of the input."""
        self._view.show("Type a message; /help lists the commands, /quit quits.")
        while True:
            try:
                line = self._view.read()
            except (EOFError, KeyboardInterrupt):
                self._view.show("")
                return
            if line == "/quit":
                return
            if not is_text(line):
                self._view.show_replies({name: _refused(line) for name in self._conversations})
            elif line.startswith("/"):
                self._execute(line)
            elif line:
                self._retries = 0
                images, self._images = self._images, []
                self._view.show_replies(
                    {name: talk.say(line, self._sampling, images=images) for name, talk in self._conversations.items()}
                )

    def content(self) -> dict[str, Any]:
        """The messages so far, and with a second model also those of its conversation."""
        compared = {name: talk.transcript() for name, talk in self._others.items()}
        return {"messages": self._first.transcript()} | ({"compared": compared} if compared else {})

    def compare(self, name: str) -> None:
        """Let a second model, which receives the conversation so far, answer too; "" ends the comparison."""
        for talk in self._others.values():
            talk.close()
        self._others = {}
        if not name:
            self._view.show("one model answers")
            return
        talk = self._load(name)
        talk.system = self._first.system
        talk.messages = list(self._first.messages)
        path = Path(name)
        label = "/".join(path.parts[-2:]) if path.name in ("actor", "actor_ema") else path.name
        self._others = {label if label != "model" else "second model": talk}
        self._view.show(f"{name} answers too")

    def _execute(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        commands: dict[str, Any] = {
            "/clear": self._clear,
            "/image": self.attach,
            "/system": self._system,
            "/set": self._set,
            "/retry": self._retry,
            "/compare": self.compare,
            "/score": self._score,
            "/save": self._save,
            "/help": lambda _: self._view.show(HELP),
        }
        if command not in commands:
            self._view.show(f"unknown command {command}: /help lists the commands")
            return
        try:
            commands[command](rest.strip())
        except UserError as error:
            self._view.show(f"error: {error}")
        except KeyboardInterrupt:  # while a model is loaded or scores
            self._view.show("stopped")

    def attach(self, name: str) -> None:
        """Add an image to the next message.

        Raises:
            UserError: if there is no such file.
        """
        if not name:
            raise UserError("/image needs a file, got none: write /image FILE")
        from hybrid_rlhf.cli.saved_models.loading import image_content

        image_content(name)
        self._images.append(name)
        self._view.show(f"{name} goes with the next message")

    def _clear(self, _: str) -> None:
        for talk in self._conversations.values():
            talk.clear()
        self._view.show("cleared")

    def _system(self, text: str) -> None:
        for talk in self._conversations.values():
            talk.system = text or None
            talk.clear()
        self._view.show(f"system prompt {'set' if text else 'removed'}, conversation cleared")

    def _retry(self, _: str) -> None:
        """Without a seed every reply has a new one; with a seed, retries use the seeds after it."""
        self._retries += 1
        seed = self._sampling.seed
        sampling = self._sampling if seed is None else replace(self._sampling, seed=seed + self._retries)
        self._view.show_replies({name: talk.again(sampling) for name, talk in self._conversations.items()})

    def _score(self, name: str) -> None:
        from hybrid_rlhf.cli.saved_models.loading import with_image_files
        from hybrid_rlhf.generation.image_loading import CONVERSATION, marked

        if name:
            self._scorer = self._load_scorer(name)
        if self._scorer is None:
            raise UserError("/score needs a reward model, got none: write /score FOLDER")
        for label, talk in self._conversations.items():
            if not talk.messages:
                raise UserError("/score needs a reply, got none: say something first")
            *prompt, reply = with_image_files(talk.transcript())
            read, sources = marked(prompt)
            images = self._scorer.read_images(CONVERSATION, sources)
            (scores,) = self._scorer.score([(read, reply["content"], None, images)])
            names = self._scorer.heads or ("score",)
            self._view.show(f"{label}: " + "  ".join(f"{n} {v:+.3f}" for n, v in zip(names, scores, strict=True)))

    def _set(self, rest: str) -> None:
        known = _settings(self._sampling)
        if not rest:
            self._view.show("  ".join(f"{name} {value}" for name, value in known.items()))
            return
        name, _, text = rest.partition(" ")
        if name not in known:
            raise UserError(f"/set takes {', '.join(known)}, got {name!r}: write for example /set temperature 0.5")
        change: dict[str, Any] = {name: text}
        sampling = replace(self._sampling, **change)
        check_values(sampling)
        self._sampling = sampling
        self._view.show(f"{name} {getattr(sampling, name)}")

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs a file, got none: write /save FILE.json")
        file = user_path(name)
        try:
            if file.exists():
                raise UserError(f"/save writes a new file, {file} exists: choose another name")
            write_whole(file, json.dumps(self.content(), ensure_ascii=False, indent=2))
        except OSError as error:
            raise UserError(f"/save cannot write {file} ({error.strerror}): choose another folder") from error
        self._view.show(f"saved {file}")


def _refused(line: str) -> Generator[str, None, None]:
    """The reply to a line that is not text."""
    raise UserError(f"a line must be text that UTF-8 can write, got {line[:80]!r}: write it again")
    yield


def _settings(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters that /set can change."""
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in values.items() if name != "n" and not isinstance(value, tuple | dict)}
