"""The one exception for what a user can mend.

Why here: every floor above may raise it; every entry point turns it into one line on stderr and exit code 2.
A message says the rule, the value received and the fix. Anything else that is raised is a bug of ours.
"""


class UserError(Exception):
    """A mistake in a config, a data file, a model folder or a command line."""


class RankError(UserError):
    """What the user can mend but this rank alone may have met, a full disk or memory: each that meets it says so."""
