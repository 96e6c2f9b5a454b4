"""The environment of a run: versions, device, git revision."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess  # asks git for the revision  # nosec B404
from importlib.metadata import PackageNotFoundError, version

import torch

_LIBRARIES = ("hybrid_rlhf", "torch", "deepspeed", "transformers", "peft", "datasets", "triton")
_GIT_SECONDS = 5.0


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and the installed libraries; a checkout need not be installed."""
    installed = {name: text for name in _LIBRARIES if (text := installed_version(name)) is not None}
    return {"python": platform.python_version(), **installed}


def device_name(device: torch.device) -> str:
    """Name such as `NVIDIA H200`; the processor's architecture without a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def git_revision() -> str | None:
    """The commit of the working directory, with `-dirty` if files differ from it; None outside of a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    try:
        done = subprocess.run(  # a list of arguments, no shell  # nosec B603
            [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
