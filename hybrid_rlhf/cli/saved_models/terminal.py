"""The view of `chat` on a terminal: an editor of several lines with history and completion, replies as Markdown.

Two models reply side by side, one token each in turn. The input history is stored in the user's state folder, readable
by the user only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import termios
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import NestedCompleter, PathCompleter
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import user_path

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which a model could send commands to the terminal, except tab and newline."""
_TAKE_MODELS = ("/compare", "/score")
_TAKE_FILES = ("/save", "/image")


class Terminal:
    """View on a terminal."""

    def __init__(self, commands: Sequence[str], *, settings: Sequence[str]) -> None:
        """Open the history.

        Args:
            commands: commands to complete, each with its slash.
            settings: names to complete after /set.
        """
        self._console = Console()
        choices: dict[str, object] = dict.fromkeys(commands)
        choices |= {name: PathCompleter(only_directories=True) for name in _TAKE_MODELS}
        choices |= {name: PathCompleter() for name in _TAKE_FILES}
        choices["/set"] = dict.fromkeys(settings)
        self._prompt: PromptSession[str] = PromptSession(
            history=self._history(),
            completer=NestedCompleter.from_nested_dict(choices),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=_continuation,
        )

    def read(self) -> str:
        """Read several lines: Enter sends; Alt-Enter, or Enter after a backslash, begins a line. Ctrl-C clears them; on
        an empty line it is asked for twice, which raises KeyboardInterrupt."""
        prompt = FormattedText([("", "\n"), ("bold", "you> ")])
        try:
            return self._prompt.prompt(prompt).strip()
        except KeyboardInterrupt:
            self.show("press Ctrl-C again, or Ctrl-D, to quit; /save FILE keeps the conversation")
            return self._prompt.prompt(prompt).strip()

    def show(self, text: str) -> None:
        """Print a line, without control characters."""
        self._console.print(Text(_CONTROL.sub("", text)))

    def show_replies(self, replies: Mapping[str, Generator[str, None, None]]) -> None:
        """Show all replies at once: the end of a long one while it grows, at last the whole."""
        texts = dict.fromkeys(replies, "")
        notes = dict.fromkeys(replies, "")
        pending = dict(replies)
        try:
            with (
                _quiet_keyboard(),
                _first_interrupt_noted() as interrupted,
                Live(console=self._console, refresh_per_second=10, transient=True) as live,
            ):
                while pending:
                    if interrupted:
                        raise KeyboardInterrupt
                    for name, pieces in list(pending.items()):
                        try:
                            texts[name] += _CONTROL.sub("", next(pieces))
                        except StopIteration:
                            del pending[name]
                        except UserError as error:
                            notes[name] = f"error: {error}"
                            del pending[name]
                    live.update(_Tail(_side_by_side(texts, notes)))
        except KeyboardInterrupt:
            for name, pieces in pending.items():
                pieces.close()  # keeps the text so far in the conversation
                notes[name] = "[stopped]"
        self._console.print(_side_by_side(texts, notes))

    def _history(self) -> History:
        """The file of earlier input, created if it is missing."""
        file = user_path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "hybrid_rlhf" / "chat_history"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            os.fchmod(descriptor, 0o600)
            os.close(descriptor)
        except OSError as error:
            self.show(f"no history is kept: {file} cannot be written ({error.strerror})")
            return InMemoryHistory()
        return FileHistory(str(file))


@contextlib.contextmanager
def _first_interrupt_noted() -> Iterator[list[int]]:
    """Context with a list to which the first Ctrl-C appends instead of raising, as an exception may be lost in a
    callback or a destructor; a second Ctrl-C raises, to end long calls."""
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet_keyboard() -> Iterator[None]:
    """Context in which the terminal shows no keys, and Ctrl-C discards no output: either would move the live reply."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = before.copy()
    quiet[3] = (before[3] | termios.NOFLSH) & ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


class _Tail:
    """The end of something, as much as fits on the screen."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._whole, options, pad=False)[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def _side_by_side(texts: Mapping[str, str], notes: Mapping[str, str]) -> RenderableType:
    """Replies with their notes; several replies in columns under the models' names."""
    shown = [
        Group(Markdown(text), *([Text(notes[name], style="red")] if notes[name] else []))
        for name, text in texts.items()
    ]
    if len(shown) == 1:
        return shown[0]
    columns = [Column(Text(name), ratio=1) for name in texts]
    table = Table(*columns, expand=True, box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_row(*shown)
    return table


def _continuation(width: int, line: int, wraps: int) -> str:
    """What stands before a line that continues the input: nothing before the rest of a long one."""
    return " " * width if wraps else "...> "


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
