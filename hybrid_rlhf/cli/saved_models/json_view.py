"""The view of `chat --json`: lines of text in, events of JSON out, for programs that hold a conversation."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.output import print_document


class JSONView:
    """See ChatView."""

    def read(self) -> str:
        """See ChatView: a line of standard input is a message or a command."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.strip()

    def show(self, text: str) -> None:
        """See ChatView."""
        if text:
            print_document({"event": "notice", "text": text})

    def show_replies(self, replies: Mapping[str, Generator[str, None, None]]) -> None:
        """See ChatView: pieces as they come, then each reply as a whole, or why there is none."""
        for name, pieces in replies.items():
            said, stopped = "", False
            try:
                for piece in pieces:
                    said += piece
                    print_document({"event": "piece", "model": name, "text": piece})
            except KeyboardInterrupt:
                pieces.close()  # keeps what was said
                stopped = True
            except UserError as error:
                print_document({"event": "refusal", "model": name, "text": str(error)})
                continue
            print_document({"event": "reply", "model": name, "text": said.strip(), "stopped": stopped})
