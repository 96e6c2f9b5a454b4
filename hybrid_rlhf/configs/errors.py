"""The exception for errors that a user can fix.

Any module may raise it, and every command turns it into one line on stderr and exit code 2. A message states the rule,
the value received and the fix. Any other exception is a bug of this project.
"""

_LONGEST = 1000
_SHOWN = 400


class UserError(Exception):
    """An error in a config, a data file, a model folder or a command line.

    The message is always one line: control characters are escaped, and the middle of long messages is
    omitted.
    """

    def __init__(self, message: str) -> None:
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(text if len(text) <= _LONGEST else f"{text[:_SHOWN]}...{text[-_SHOWN:]}")


class RankError(UserError):
    """An error that may concern only this rank, such as a full disk; every rank that raises it reports it."""
