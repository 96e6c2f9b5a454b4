"""Settings of `hybrid-rlhf env` and `hybrid-rlhf completion`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rlhf.configs.sections.rules import require

Shell = Literal["", "bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Versions, devices and optional packages of this installation, and problems with it; exit code 1 if there is a
    problem."""


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Print a script that completes commands, keys and values in a shell."""

    shell: Shell = ""
    """bash, zsh or fish."""

    def __post_init__(self) -> None:
        require(bool(self.shell), "completion must name a shell, got none: give bash, zsh or fish")
