"""The one exception for what a user can mend.

Why here: every floor above may raise it; every entry point turns it into one line on stderr and exit code 2.
A message says the rule, the value received and the fix. Anything else that is raised is a bug of ours.
"""

_LONGEST, _SHOWN = 1000, 400


class UserError(Exception):
    """A mistake in a config, a data file, a model folder or a command line.

    It is one line whatever the user's values are: control characters are spelt out, and the middle of what no one
    would read is left out.
    """

    def __init__(self, message: str) -> None:
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(text if len(text) <= _LONGEST else f"{text[:_SHOWN]}...{text[-_SHOWN:]}")


class RankError(UserError):
    """What the user can mend but this rank alone may have met, a full disk or memory: each that meets it says so."""
