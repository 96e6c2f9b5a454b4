"""The checkpoints of a run on disk: existing ones, complete ones, and those to keep.

A checkpoint is a folder step_N, or step_N_update_M for one saved after M updates on the rollout of step N + 1. It is
complete if its manifest is unaltered and every file has the size and checksum in the manifest. Folders with other
names are never changed.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.sections.training import CheckpointConfig
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.durable import checksum, flush
from hybrid_rlhf.runtime.files.names import CHECKPOINTS, MANIFEST
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

FORMAT = 1
_NAME = re.compile(r"step_(\d+)(?:_update_(\d+))?")
_PARTIAL_NAME = re.compile(_NAME.pattern + r"\.partial")


class BrokenCheckpoint(Exception):
    """A checkpoint is not complete; the message gives the reason."""


def checkpoint_name(step: int, update: int | None = None) -> str:
    """Folder name of the checkpoint after a step, or after some updates on the rollout of the next step."""
    return f"step_{step}" if update is None else f"step_{step}_update_{update}"


def checkpoint_paths(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, oldest first."""
    return sorted(
        (path for path in (run_folder / CHECKPOINTS).glob("step_*") if _NAME.fullmatch(path.name)), key=_position
    )


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, after all other files: it completes a checkpoint."""
    text = json.dumps({"format": FORMAT, **content}, indent=1)
    write_whole(
        checkpoint / MANIFEST, json.dumps({"crc32": zlib.crc32(text.encode()), "content": json.loads(text)}, indent=1)
    )
    flush(checkpoint)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The content that `write_manifest` wrote.

    Raises:
        BrokenCheckpoint: if the manifest is missing or altered.
    """
    try:
        stored = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        content: dict[str, Any] = stored["content"]
        is_unaltered = zlib.crc32(json.dumps(content, indent=1).encode()) == stored["crc32"]
        stored_format = content["format"]
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{MANIFEST} is missing: the checkpoint was not written completely") from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BrokenCheckpoint(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    if not is_unaltered:
        raise BrokenCheckpoint(f"{MANIFEST} is corrupt (its checksum differs)")
    if stored_format != FORMAT:
        raise BrokenCheckpoint(f"its format is {stored_format}, this version reads {FORMAT}")
    return content


def find_fault(checkpoint: Path, world: World) -> str | None:
    """Why a checkpoint cannot be used, or None. Every rank calls, and verifies its share of the files."""
    try:
        files = dict(read_manifest(checkpoint)["files"]) if world.is_main else {}
        fault = None
    except BrokenCheckpoint as error:
        files = {}
        fault = str(error)
    fault, files = world.broadcast_object((fault, files))
    if fault is None:
        mine = sorted(files)[world.rank :: world.size]
        faults = world.all_gather_objects([_file_fault(checkpoint / name, files[name]) for name in mine])
        fault = next((text for texts in faults for text in texts if text is not None), None)
    return fault


def newest_complete(run_folder: Path, world: World) -> Path | None:
    """The newest complete checkpoint; logs why newer ones are skipped. Every rank calls."""
    for path in world.broadcast_object(checkpoint_paths(run_folder)[::-1]):
        fault = find_fault(path, world)
        if fault is None:
            return path
        if world.is_main:
            logger.warning("resume skips %s: %s", path, fault)
    return None


def newest_valid(run_folder: Path, *, before: float = math.inf) -> Path | None:
    """The newest checkpoint with a valid manifest; with `before`, of those from which a run resumes before the rollout
    of that step; None without one."""
    for path in checkpoint_paths(run_folder)[::-1]:
        with contextlib.suppress(BrokenCheckpoint):
            if first_rollout(path) <= before and read_manifest(path):
                return path
    return None


def first_rollout(checkpoint: Path) -> int:
    """The first step whose rollout a run samples that resumes from a checkpoint."""
    step, update = _position(checkpoint)
    return step + 1 + (update >= 0)  # a checkpoint within a step contains its rollout


def rename_superseded(run_folder: Path, checkpoint: Path | None) -> None:
    """Rename the checkpoints newer than the one that a run resumes from: the run will not reproduce them."""
    for path in checkpoint_paths(run_folder):
        if checkpoint is None or _position(path) > _position(checkpoint):
            number = 1
            while (aside := path.with_name(f"{path.name}.superseded_{number}")).exists():
                number += 1
            path.rename(aside)
            logger.info("%s is superseded: renamed to %s", path.name, aside.name)


def prune_checkpoints(run_folder: Path, config: CheckpointConfig) -> None:
    """Remove partial checkpoints and those that no rule keeps; call it once the newest is complete."""
    metrics = {}
    for path in checkpoint_paths(run_folder):
        try:
            metrics[path] = read_manifest(path)["figures"]
        except BrokenCheckpoint:
            continue
    to_keep = checkpoints_to_keep(metrics, config)
    for path in metrics:
        if path not in to_keep:
            path.rename(path.with_name(f"{path.name}.partial"))  # an interrupted removal must not look complete
    for path in (run_folder / CHECKPOINTS).glob("step_*.partial"):
        if _PARTIAL_NAME.fullmatch(path.name):
            shutil.rmtree(path)


def checkpoints_to_keep(metrics: Mapping[Path, Mapping[str, float]], config: CheckpointConfig) -> set[Path]:
    """The checkpoints to keep, given complete ones and the metrics of their steps."""
    paths = sorted(metrics, key=_position)
    to_keep = set(paths[-config.keep_last :])
    if config.keep_every:
        ends = [path for path in paths if _position(path)[1] < 0]
        to_keep |= {path for path in ends if _position(path)[0] % config.keep_every == 0}
    if config.best_metric is not None:
        sign, name = config.best_metric
        measured = [path for path in paths if math.isfinite(metrics[path].get(name, math.nan))]
        if measured:
            to_keep.add(max(measured, key=lambda path: sign * metrics[path][name]))
    return to_keep


def _position(path: Path) -> tuple[int, int]:
    """Step and update in the name of a checkpoint; update -1 for one saved at the end of a step."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), -1 if match[2] is None else int(match[2])) if match else (-1, -1)


def _file_fault(file: Path, expected: Mapping[str, int]) -> str | None:
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{file.name} has {size} bytes instead of {expected['bytes']}"
        if checksum(file) != expected["crc32"]:
            return f"{file.name} is corrupt (its checksum differs)"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return None
