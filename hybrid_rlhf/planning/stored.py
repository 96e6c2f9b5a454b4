"""The file of a measured machine: one per machine, number of ranks, and versions of the libraries that are timed."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.planning.calibration import available_cores
from hybrid_rlhf.planning.machine import Machine
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.reading import cache_folder
from hybrid_rlhf.runtime.product_backend import processor_fields

_FOLDER = "machines"


def machine_key(ranks: int) -> dict[str, object]:
    """The conditions under which measurements are valid."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    cpu = processor_fields().get("model name") or platform.processor() or platform.machine()
    return {
        "host": platform.node(),
        "device": gpu or cpu,
        "cores": available_cores(),
        "ranks": ranks,
        **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
    }


def machine_path(ranks: int, cache_dir: str | None = None) -> Path:
    """The file of the measurements by a number of ranks."""
    digest = hashlib.sha256(json.dumps(machine_key(ranks), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder(cache_dir) / _FOLDER / f"{digest}.json"


def save_machine(machine: Machine, ranks: int, cache_dir: str | None = None) -> Path:
    """Write the measurements of this machine atomically."""
    path = machine_path(ranks, cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"key": machine_key(ranks), "machine": asdict(machine)}
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return path


def load_machine(cache_dir: str | None = None, *, ranks: int | None = None) -> Machine | None:
    """The measurements of this machine with these versions, by a number of ranks or by the most; None: there are none.

    Raises:
        UserError: when a file is damaged.
    """
    contents = map(_content, sorted((cache_folder(cache_dir) / _FOLDER).glob("*.json")))
    mine = {key["ranks"]: machine for key, machine in contents if key == machine_key(key["ranks"])}
    return mine.get(max(mine, default=None) if ranks is None else ranks)


def own_machine(cache_dir: str | None, device: torch.device) -> Machine | None:
    """The measurements of this machine in the cache folder of a run, or else in the default one; None if there are none
    for this type of device."""
    machine = load_machine(cache_dir) or load_machine()
    return machine if machine is not None and machine.type == device.type else None


def _content(path: Path) -> tuple[dict[str, Any], Machine]:
    """The key of a file, and its machine."""
    try:
        content = json.loads(path.read_text())
        machine = Machine(**content["machine"])
        int(content["key"]["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} must hold the measurements of a machine, it is damaged ({error!r}): remove it, or run "
            "hybrid-rlhf calibrate --renew true"
        ) from error
    return content["key"], machine
