"""What is installed here, next to what the package asks for: versions, optional packages, devices.

Requirements are those of the installed package's metadata, which setup.cfg becomes. A required package that is missing
or has another version is a fault; so is an optional one of another version. Optional packages that are missing are no
fault: their commands name them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement

from hybrid_rlhf.runtime.world import World, default_device, solo_world

PACKAGE = "hybrid_rlhf"
_DRIVER, _DEVICES = Path("/proc/driver/nvidia/version"), Path("/dev")
_LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""For each major version of CUDA, the oldest driver on which its builds run (NVIDIA's table of minor version
compatibility)."""


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
    device: str = ""
    """What a run computes on."""


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
    device, found_faults = device_line(solo_world(default_device()))
    return Installation(versions, packages, missing, _processor(), devices, [*faults, *found_faults], device)


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


def device_line(world: World) -> tuple[str, list[Fault]]:
    """What a run computes on, and what is wrong with it: a GPU that it cannot use, or cannot compile kernels for."""
    faults = [fault for fault in (missing_gpu(),) if fault is not None] or _triton_faults()
    if world.device.type == "cpu":
        what = f"device: CPU, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        gpu = "this machine has an NVIDIA device" if faults else "this machine has no NVIDIA device"
        return f"{what}; {gpu}", faults
    device = torch.cuda.get_device_properties(world.device)
    several = f", one for each of {world.size} ranks" if world.size > 1 else ""
    return f"device: {device.name}, {device.total_memory / 2**30:.0f} GiB{several}", faults


def missing_gpu() -> Fault | None:
    """Why torch finds no GPU on a machine that has an NVIDIA device; none: it has none, or torch finds it."""
    nodes, driver = any(_DEVICES.glob("nvidia[0-9]*")), cuda_versions().get("driver")
    if torch.cuda.is_available() or not (nodes or driver or shutil.which("nvidia-smi")):
        return None
    if torch.version.cuda is None:
        return Fault(
            f"this machine has an NVIDIA device, torch {torch.__version__} is built without CUDA",
            "install the build for CUDA that https://pytorch.org names",
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Fault("CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    needed = _LEAST_DRIVERS.get(torch.version.cuda.partition(".")[0], 0)
    if driver is not None and int(driver.partition(".")[0]) < needed:
        return Fault(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) needs driver {needed} or newer, this machine has "
            f"{driver}",
            "update the driver, or install the build of torch for an older CUDA that https://pytorch.org names",
        )
    if driver is not None and not nodes:
        return Fault(
            f"the driver {driver} is loaded, /dev/nvidia* is missing",
            "give the container its GPUs, for example docker run --gpus all",
        )
    return Fault(
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU with driver {driver or 'unknown'}",
        "see whether nvidia-smi lists it, and restart the machine after an update of the driver",
    )


def _triton_faults() -> list[Fault]:
    """What is missing for Triton to compile kernels for a GPU that torch finds: it builds a Python extension in C."""
    if not torch.cuda.is_available():
        return []
    faults, header = [], Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        faults.append(Fault("Triton needs a C compiler, PATH has none", "apt-get install gcc, or set CC"))
    if not header.is_file():
        version = ".".join(platform.python_version_tuple()[:2])
        faults.append(Fault(f"Triton needs Python.h, {header} is missing", f"apt-get install python{version}-dev"))
    return faults
