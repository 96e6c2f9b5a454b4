"""Settings of `hybrid-rlhf env` and `hybrid-rlhf completion`."""

from __future__ import annotations

from typing import Literal

from hybrid_rlhf.configs.sections.rules import Settings, require

Shell = Literal["", "bash", "zsh", "fish"]


class EnvConfig(Settings):
    """Versions, devices and optional packages of this installation, and problems with it; exit code 1 if there is a
    problem."""


class CompletionConfig(Settings):
    """Print a script that completes commands, keys and values in a shell."""

    shell: Shell = ""
    """bash, zsh or fish."""

    def _check(self) -> None:
        require(self.shell, "completion must name a shell, got none: give bash, zsh or fish")
