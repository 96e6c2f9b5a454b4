"""Compares the installation with the package's requirements: versions, optional packages, devices.

Requirements come from the metadata of the installed package (setup.cfg). A required package that is missing or has
another version is a fault; so is an optional one of another version. A missing optional package is no fault: the
commands that need it name it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement

from hybrid_rlhf.runtime.environment import installed_version
from hybrid_rlhf.runtime.world import World, default_device, solo_world

PACKAGE = "hybrid_rlhf"
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")
_LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""For each major version of CUDA, the oldest driver on which its builds run (NVIDIA's table of minor version
compatibility)."""


@dataclass(frozen=True)
class Fault:
    """A fault of the installation."""

    problem: str
    fix: str
    """A command, or an instruction."""


@dataclass(frozen=True)
class PackageState:
    """A required or optional package, and its installed version."""

    name: str
    required: str
    """Accepted versions, such as ">=2.6"; empty accepts any."""
    installed: str | None
    """None if it is not installed."""
    extra: str | None = None
    """The extra that it belongs to; None if it is always required."""
    fits: bool = True
    """True if the installed version is accepted."""

    def fault(self) -> Fault | None:
        """The fault of the package; None if there is none."""
        if self.fits and (self.installed is not None or self.extra is not None):
            return None
        state = "it is not installed" if self.installed is None else f"{self.installed} is installed"
        return Fault(f"{self.name}{self.required} is required, {state}", f"pip install '{self.name}{self.required}'")


@dataclass
class Installation:
    """This machine and its installed packages."""

    versions: dict[str, str]
    packages: list[PackageState]
    extras: dict[str, list[str]]
    """Packages that each extra lacks."""
    processor: dict[str, Any]
    devices: list[dict[str, Any]]
    faults: list[Fault] = field(default_factory=list)
    device: str = ""
    """The device of a run, in words."""


def inspect_installation() -> Installation:
    """Inspect this installation; starts nothing and measures nothing."""
    versions = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    faults: list[Fault] = []
    try:
        this_package = distribution(PACKAGE)
        packages = required_packages(this_package.requires or [])
        extras = this_package.metadata.get_all("Provides-Extra") or []
    except PackageNotFoundError:
        packages = []
        extras = []
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
        installed = installed_version(requirement.name)
        fits = installed is None or requirement.specifier.contains(installed, prereleases=True)
        states.append(PackageState(requirement.name, str(requirement.specifier), installed, name, fits))
    return states


def cuda_versions() -> dict[str, str]:
    """Versions of CUDA, cuDNN, NCCL and the driver, where present."""
    version_of = {}
    if torch.version.cuda is not None:
        version_of["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        if torch.backends.cudnn.is_available():
            version_of["cudnn"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            version_of["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = re.search(r"\s(\d+\.\d[\d.]*)\s", _DRIVER.read_text()) if _DRIVER.is_file() else None
    if driver is not None:
        version_of["driver"] = driver[1]
    return version_of


def _devices() -> list[dict[str, Any]]:
    """Name, memory and compute capability of each GPU."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append({"name": properties.name, "memory_gib": properties.total_memory / 2**30, "capability": capability})
    return gpus


def _processor() -> dict[str, Any]:
    """Instruction set that torch uses, number of cores and memory of the host."""
    return {
        "machine": platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "free_memory_gib": psutil.virtual_memory().available / 2**30,
    }


def device_line(world: World) -> tuple[str, list[Fault]]:
    """The device of a run in words, and its faults: a GPU that it cannot use, or cannot compile kernels for."""
    faults = [fault for fault in (missing_gpu(),) if fault is not None] or _triton_faults()
    if world.device.type == "cpu":
        what = f"device: CPU, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        gpu = "this machine has an NVIDIA device" if faults else "this machine has no NVIDIA device"
        return f"{what}; {gpu}", faults
    device = torch.cuda.get_device_properties(world.device)
    several = f", one for each of {world.size} ranks" if world.size > 1 else ""
    return f"device: {device.name}, {device.total_memory / 2**30:.0f} GiB{several}", faults


def missing_gpu() -> Fault | None:
    """Why torch finds no GPU on a machine with an NVIDIA device; None if there is none, or torch finds it."""
    nodes = any(_DEVICES.glob("nvidia[0-9]*"))
    driver = cuda_versions().get("driver")
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
    """What Triton lacks to compile kernels for the GPU: it builds a Python extension in C."""
    if not torch.cuda.is_available():
        return []
    faults = []
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        faults.append(Fault("Triton needs a C compiler, PATH has none", "apt-get install gcc, or set CC"))
    if not header.is_file():
        version = ".".join(platform.python_version_tuple()[:2])
        faults.append(Fault(f"Triton needs Python.h, {header} is missing", f"apt-get install python{version}-dev"))
    return faults
