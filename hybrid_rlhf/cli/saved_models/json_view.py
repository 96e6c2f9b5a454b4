"""The view of `chat --json`: reads lines of text and prints events as JSON, for programs."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.output import print_document


class JSONView:
    """View that prints JSON events."""

    def read(self) -> str:
        """Read a line of standard input: a message or a command."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.strip()

    def show(self, text: str) -> None:
        """Print an event with a line of the program."""
        if text:
            print_document({"event": "notice", "text": text})

    def show_replies(self, replies: Mapping[str, Generator[str, None, None]]) -> None:
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
