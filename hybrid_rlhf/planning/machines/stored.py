"""The file of measured curves: one per machine, number of ranks, and versions of the libraries that are timed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.planning.curves import MachineCurves
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.reading import cache_folder
from hybrid_rlhf.runtime.product_backend import processor_fields

FORMAT = 4
"""Format of the file; a file of another format is refused."""
_FIX = "remove it, or run hybrid-rlhf calibrate --renew true"


def machine_key(ranks: int) -> dict[str, object]:
    """What measured curves are valid for."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    cpu = processor_fields().get("model name") or platform.processor() or platform.machine()
    return {
        "format": FORMAT,
        "host": platform.node(),
        "device": gpu or cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "ranks": ranks,
        **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
    }


def curves_file(ranks: int, cache_dir: str | None = None) -> Path:
    """Where curves that so many ranks measured on this machine are."""
    digest = hashlib.sha256(json.dumps(machine_key(ranks), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder(cache_dir) / "curves" / f"{digest}.json"


def save_curves(curves: MachineCurves, ranks: int, cache_dir: str | None = None) -> Path:
    """Write the curves of this machine; the file is whole or not there."""
    path = curves_file(ranks, cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"key": machine_key(ranks), "curves": curves.to_json()}
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return path


def load_curves(cache_dir: str | None = None) -> MachineCurves | None:
    """The curves that the most ranks measured on this machine with these versions; none if there are none.

    Raises:
        UserError: when a file is damaged.
    """
    files = sorted((cache_folder(cache_dir) / "curves").glob("*.json"))
    mine = {int(key["ranks"]): path for path in files if not differences(key := stored_key(path))}
    return None if not mine else read_curves(mine[max(mine)])


def read_curves(path: Path) -> MachineCurves:
    """The curves of a file.

    Raises:
        UserError: when it is damaged, or is of another machine or other versions.
    """
    key, curves = _content(path)
    if other := differences(key):
        raise UserError(f"{path} must be measured here, it differs in {', '.join(other)}: {_FIX}")
    with _damage_refused(path):
        return MachineCurves.from_json(curves)


def stored_key(path: Path) -> dict[str, Any]:
    """What the curves of a file are valid for.

    Raises:
        UserError: when it is damaged.
    """
    return _content(path)[0]


def differences(key: dict[str, Any]) -> list[str]:
    """In what a key differs from this machine and its versions, whatever the number of ranks."""
    mine = machine_key(int(key.get("ranks", 0)))
    return [f"{name} ({key.get(name)} instead of {mine[name]})" for name in mine if key.get(name) != mine[name]]


@contextlib.contextmanager
def _damage_refused(path: Path) -> Iterator[None]:
    """Context in which what a damaged file raises is an error of the user's."""
    try:
        yield
    except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} must hold curves of a machine, it is damaged ({error!r}): {_FIX}") from error


def _content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The key of a file, and its curves."""
    with _damage_refused(path):
        content = json.loads(path.read_text())
        return {**content["key"]}, content["curves"]
