"""The checkpoints of a run on disk: which there are, which are whole, which to keep.

A checkpoint is a folder step_N, or step_N_update_M where the rollout of step N + 1 was cut off after M updates. It is
whole when its manifest is there, as it was written, and every file has the size and checksum that the manifest says.
Folders of other names are never touched.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.sections import CheckpointConfig
from hybrid_rlhf.configs.whole_files import write_whole
from hybrid_rlhf.runtime.durable import checksum, flush
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d+)(?:_update_(\d+))?")
_BESIDE = re.compile(_NAME.pattern + r"\.partial")
logger = logging.getLogger(LOGGER_NAME)


class Broken(Exception):
    """A checkpoint is not whole; says why."""


def checkpoint_name(step: int, update: int | None = None) -> str:
    """Of the checkpoint after a step, or after some updates from the rollout that follows it."""
    return f"step_{step}" if update is None else f"step_{step}_update_{update}"


def checkpoint_paths(run_folder: Path) -> list[Path]:
    """A run's checkpoints, whole or not, the oldest first."""
    return sorted(
        (path for path in (run_folder / CHECKPOINTS).glob("step_*") if _NAME.fullmatch(path.name)), key=_position
    )


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Write what makes a checkpoint whole; it comes last."""
    text = json.dumps({"format": FORMAT, **content}, indent=1)
    write_whole(
        checkpoint / MANIFEST, json.dumps({"crc32": zlib.crc32(text.encode()), "content": json.loads(text)}, indent=1)
    )
    flush(checkpoint)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What `write_manifest` wrote.

    Raises:
        Broken: when it is not there, or not as it was written.
    """
    try:
        told = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        content: dict[str, Any] = told["content"]
        kept = zlib.crc32(json.dumps(content, indent=1).encode()) == told["crc32"]
        written = content["format"]
    except FileNotFoundError as error:
        raise Broken(f"it has no {MANIFEST}: its writing was cut off") from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Broken(f"its {MANIFEST} cannot be read ({type(error).__name__})") from error
    if not kept:
        raise Broken(f"its {MANIFEST} is not as it was written")
    if written != FORMAT:
        raise Broken(f"its format is {written}, this version reads {FORMAT}")
    return content


def find_fault(checkpoint: Path, world: World) -> str | None:
    """Why a checkpoint cannot be used, if so; every rank calls, and reads its share of the files."""
    try:
        files = dict(read_manifest(checkpoint)["files"]) if world.is_main else {}
        fault = None
    except Broken as error:
        files, fault = {}, str(error)
    fault, files = world.broadcast_object((fault, files))
    if fault is None:
        mine = sorted(files)[world.rank :: world.size]
        faults = world.all_gather_objects([_file_fault(checkpoint / name, files[name]) for name in mine])
        fault = next((text for texts in faults for text in texts if text is not None), None)
    return fault


def newest_whole(run_folder: Path, world: World) -> Path | None:
    """The newest checkpoint that is whole; says why it passes over the others. Every rank calls."""
    for path in world.broadcast_object(checkpoint_paths(run_folder)[::-1]):
        fault = find_fault(path, world)
        if fault is None:
            return path
        if world.is_main:
            logger.warning("resume passes over %s: %s", path, fault)
    return None


def set_aside_newer(run_folder: Path, checkpoint: Path | None) -> None:
    """Rename checkpoints past the one that a run goes on from: what comes of it is another story than theirs."""
    for path in checkpoint_paths(run_folder):
        if checkpoint is None or _position(path) > _position(checkpoint):
            number = 1
            while (aside := path.with_name(f"{path.name}.superseded_{number}")).exists():
                number += 1
            path.rename(aside)
            logger.info("%s is not gone on from: it is %s now", path.name, aside.name)


def remove_unkept(run_folder: Path, config: CheckpointConfig) -> None:
    """Remove what no rule keeps, and what was cut off; the newest is whole by now."""
    figures = {}
    for path in checkpoint_paths(run_folder):
        try:
            figures[path] = read_manifest(path)["figures"]
        except Broken:
            continue
    kept = kept_checkpoints(figures, config)
    for path in figures:
        if path not in kept:
            path.rename(path.with_name(f"{path.name}.partial"))  # so that one half removed never looks whole
    for path in (run_folder / CHECKPOINTS).glob("step_*.partial"):
        if _BESIDE.fullmatch(path.name):
            shutil.rmtree(path)


def kept_checkpoints(figures: Mapping[Path, Mapping[str, float]], config: CheckpointConfig) -> set[Path]:
    """Of whole checkpoints, by the metrics of their steps, those to keep."""
    paths = sorted(figures, key=_position)
    kept = set(paths[-config.keep_last :])
    if config.keep_every:
        ends = [path for path in paths if _position(path)[1] < 0]
        kept |= {path for path in ends if _position(path)[0] % config.keep_every == 0}
    if config.best_metric is not None:
        sign, name = config.best_metric
        told = [path for path in paths if math.isfinite(figures[path].get(name, math.nan))]
        if told:
            kept.add(max(told, key=lambda path: sign * figures[path][name]))
    return kept


def _position(path: Path) -> tuple[int, int]:
    """Step and update of a checkpoint by its name; update -1 after a whole step."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), -1 if match[2] is None else int(match[2])) if match else (-1, -1)


def _file_fault(file: Path, told: Mapping[str, int]) -> str | None:
    try:
        size = file.stat().st_size
        if size != told["bytes"]:
            return f"{file.name} has {size} bytes of {told['bytes']}"
        if checksum(file) != told["crc32"]:
            return f"{file.name} is not as it was written (its checksum differs)"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return None
