"""What is installed here, next to what the package asks for: versions, optional packages, devices.

Requirements are those of the installed package's metadata, which setup.cfg becomes. A required package that is missing
or has another version is a fault; so is an optional one of another version. Optional packages that are missing are no
fault: their commands name them.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement

PACKAGE = "hybrid_rlhf"
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with the installation."""

    problem: str
    fix: str
    """A command, or what to do."""


@dataclass(frozen=True)
class PackageState:
    """A package that is required, or optional, and what is installed."""

    name: str
    required: str
    """Versions that fit, such as ">=2.6"; empty: any."""
    installed: str | None
    """None: it is not installed."""
    extra: str | None = None
    """The extra that it belongs to; None: it is always required."""
    fits: bool = True
    """Whether the installed version is one of those."""

    def fault(self) -> Fault | None:
        """What is wrong with it."""
        if self.fits and (self.installed is not None or self.extra is not None):
            return None
        found = "it is not installed" if self.installed is None else f"{self.installed} is installed"
        return Fault(f"{self.name}{self.required} is required, {found}", f"pip install '{self.name}{self.required}'")


@dataclass
class Installation:
    """This machine and what is installed on it."""

    versions: dict[str, str]
    packages: list[PackageState]
    extras: dict[str, list[str]]
    """Packages that each extra lacks."""
    processor: dict[str, Any]
    devices: list[dict[str, Any]]
    faults: list[Fault] = field(default_factory=list)


def inspect_installation() -> Installation:
    """Look at this installation; starts nothing and measures nothing."""
    versions = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    faults: list[Fault] = []
    try:
        found = distribution(PACKAGE)
        packages, extras = required_packages(found.requires or []), found.metadata.get_all("Provides-Extra") or []
    except PackageNotFoundError:
        packages, extras = [], []
        problem = f"{PACKAGE} runs from a folder and is not installed: its requirements are not checked"
        faults.append(Fault(problem, "pip install --editable . in that folder"))
    faults += [fault for package in packages if (fault := package.fault()) is not None]
    missing = {
        extra: [package.name for package in packages if package.extra == extra and package.installed is None]
        for extra in extras
    }
    versions |= cuda_versions()
    devices = _devices()
    if (hidden := _hidden_gpus(versions, devices)) is not None:
        faults.append(hidden)
    return Installation(versions, packages, missing, _processor(), devices, faults)


def required_packages(requirements: Sequence[str]) -> list[PackageState]:
    """The state of each package that a list of requirements names for this machine.

    Args:
        requirements: as in the metadata of a package: `torch>=2.6`, `uvicorn>=0.30; extra == "serve"`.
    """
    states = []
    for text in requirements:
        requirement = Requirement(text)
        extra = re.search(r"""extra\s*==\s*["']([\w.-]+)["']""", str(requirement.marker or ""))
        name = extra[1] if extra else None
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": name or ""}):
            continue
        installed = _version(requirement.name)
        fits = installed is None or requirement.specifier.contains(installed, prereleases=True)
        states.append(PackageState(requirement.name, str(requirement.specifier), installed, name, fits))
    return states


def _version(name: str) -> str | None:
    try:
        found: Distribution = distribution(name)
    except PackageNotFoundError:
        return None
    return found.version


def cuda_versions() -> dict[str, str]:
    """Versions of CUDA, cuDNN, NCCL and the driver, of those that there are."""
    found = {}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        if torch.backends.cudnn.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = re.search(r"\s(\d+\.\d[\d.]*)\s", _DRIVER.read_text()) if _DRIVER.is_file() else None
    if driver is not None:
        found["driver"] = driver[1]
    return found


def _devices() -> list[dict[str, Any]]:
    """Name, memory and compute capability of each GPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "memory_gib": properties.total_memory / 2**30, "capability": capability})
    return found


def _processor() -> dict[str, Any]:
    """Instruction set that torch uses, cores and memory of the host."""
    return {
        "machine": platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "free_memory_gib": psutil.virtual_memory().available / 2**30,
    }


def _hidden_gpus(versions: dict[str, str], devices: Sequence[Any]) -> Fault | None:
    """The reason why torch finds no GPU on a machine with the driver of one."""
    if devices or "driver" not in versions:
        return None
    if torch.version.cuda is None:
        return Fault(
            f"this machine has a GPU, torch {torch.__version__} is built without CUDA",
            "install the build for CUDA that https://pytorch.org names",
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Fault("CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    return Fault(
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU with driver {versions['driver']}",
        "update the driver, or install a torch for an older CUDA",
    )
