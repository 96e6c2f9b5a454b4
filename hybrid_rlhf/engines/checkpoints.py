"""Checkpoints to resume from: what the engines hold, tensors of the loop, the loop's state and the random states.

Each rank writes its own files, at once or beside training; when all have, rank 0 writes the manifest and renames the
folder. No collective is needed while files are written.
"""

from __future__ import annotations

import errno
import json
import logging
import platform
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import CheckpointConfig
from hybrid_rlhf.configs.whole_files import write_whole
from hybrid_rlhf.engines.fragment_files import HostCopies
from hybrid_rlhf.engines.training_state import TrainingState
from hybrid_rlhf.runtime.checkpoint_folder import (
    CHECKPOINTS,
    checkpoint_name,
    read_manifest,
    remove_unkept,
    write_manifest,
)
from hybrid_rlhf.runtime.disk import full_disk_named
from hybrid_rlhf.runtime.durable import checksum, flush
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.random_states import random_states, restore_random_states
from hybrid_rlhf.runtime.world import World

_LIBRARIES = ("hybrid_rlhf", "torch", "deepspeed", "transformers", "peft")
logger = logging.getLogger(LOGGER_NAME)
_LOOP_FILE = "loop.safetensors"
_WRITERS = 2
"""Threads of a rank that write."""


@dataclass(frozen=True)
class LoopState:
    """What a loop needs to go on, the same on every rank."""

    step: int
    """Optimizer updates or rollouts done."""
    content: Mapping[str, Any]
    """JSON: data position, KL controller, ..."""
    update: int | None = None
    """Updates done from the rollout of the next step, where that is half used."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Rollouts that are there: the half-used one, and those of steps to come."""


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self, run_folder: Path, states: Mapping[str, TrainingState], world: World, config: CheckpointConfig):
        """Take where, what by role, who, and which are kept."""
        self._run_folder, self._states, self._world, self._config = run_folder, states, world, config
        self._copies = {role: HostCopies() for role in states}
        self._writing: _Writing | None = None

    def save(
        self, loop: LoopState, *, figures: Mapping[str, float] | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        """Write checkpoints/step_N, then remove what need not be kept; every rank must call.

        With train.save_async this returns once all is copied to host memory, and `poll` or `finish` make it whole.

        Args:
            loop: its state.
            figures: metrics of the step, for the best to be told.
            config: of the run, by dotted key.

        Raises:
            OSError: on every rank, when this checkpoint or the one before it could not be written.
        """
        self.finish()
        place = self._run_folder / CHECKPOINTS / checkpoint_name(loop.step, loop.update)
        if self._world.broadcast_object(place.exists()):
            return  # the one that the run goes on from, asked for again before anything was done
        beside = place.with_name(f"{place.name}.partial")
        if self._world.is_main:
            shutil.rmtree(beside, ignore_errors=True)  # left by a save that was cut off; the name is ours
        self._world.barrier()
        tensors = {role: self._taken(role, state) for role, state in self._states.items()}
        named = {f"{role}_{self._world.rank:05}.safetensors": part for role, part in tensors.items() if part}
        if self._world.is_main and loop.tensors:
            # safetensors takes no views, and a rollout's tensors may be views of each other
            copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in loop.tensors.items()}
            named[_LOOP_FILE] = copies
        manifest = {
            "step": loop.step,
            "update": loop.update,
            "world_size": self._world.size,
            "engines": {role: state.numbers() for role, state in self._states.items()},
            "loop": dict(loop.content),
            "figures": dict(figures or {}),
            "config": dict(config or {}),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
        }
        states = {_random_name(self._world.rank): random_states(self._world.device)}
        self._writing = _Writing(beside, named, states, manifest, self._run_folder)
        if self._config.save_async:
            self._writing.start()
        else:
            self._writing.run()
            self.finish()

    def poll(self) -> None:
        """Between two steps: make whole what all ranks have written by now; every rank must call.

        Raises:
            OSError: on every rank, when one could not write.
        """
        if self._writing is None:
            return
        done = torch.tensor(float(self._writing.is_done), device=self._world.device)
        if self._world.all_reduce(done, dist.ReduceOp.MIN).item():
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written, and make it whole; every rank must call.

        Raises:
            OSError: on every rank, when one could not write.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        told = self._world.all_gather_objects(writing.outcome())
        failure = next((outcome for outcome in told if isinstance(outcome, OSError)), None)
        if failure is None and self._world.is_main:
            files = {name: entry for outcome in told if isinstance(outcome, dict) for name, entry in outcome.items()}
            failure = _failure_of(lambda: self._commit(writing, files), self._run_folder)
        failure = self._world.broadcast_object(failure)
        if failure is not None:
            if self._world.is_main:
                shutil.rmtree(writing.beside, ignore_errors=True)
            raise failure

    def _taken(self, role: str, state: TrainingState) -> dict[str, Tensor]:
        """This rank's tensors of a role on the host: copies only where training goes on meanwhile."""
        if self._config.save_async:
            return self._copies[role].take(state.tensors())
        return {name: tensor.detach().cpu() for name, tensor in state.tensors()}

    def _commit(self, writing: _Writing, files: Mapping[str, Any]) -> None:
        unseen = next((name for name in files if not (writing.beside / name).is_file()), None)
        if unseen is not None:
            raise OSError(
                errno.ENOENT, "output_dir must be a folder that all ranks share", str(writing.beside / unseen)
            )
        write_manifest(writing.beside, {**writing.manifest, "files": files})
        writing.beside.rename(writing.beside.with_suffix(""))
        flush(writing.beside.parent)
        try:
            remove_unkept(self._run_folder, self._config)
        except OSError as error:  # what is left over costs room, not the run
            logger.warning("old checkpoints cannot be removed (%s)", error)


class _Writing:
    """One rank's files of a checkpoint that is being written."""

    def __init__(
        self,
        beside: Path,
        tensors: Mapping[str, Mapping[str, Tensor]],
        texts: Mapping[str, Mapping[str, Any]],
        manifest: Mapping[str, Any],
        run_folder: Path,
    ) -> None:
        self.beside, self.manifest = beside, manifest
        self._tensors, self._texts, self._run_folder = tensors, texts, run_folder
        self._files: dict[str, dict[str, int]] = {}
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Write beside training."""
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> dict[str, dict[str, int]] | OSError:
        """Sizes and checksums by file, or why there are none; waits."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._files if self._failure is None else self._failure

    def run(self) -> None:
        """Write now."""
        self._failure = _failure_of(self._write, self._run_folder)

    def _write(self) -> None:
        self.beside.mkdir(parents=True, exist_ok=True)
        for name, content in self._texts.items():
            write_whole(self.beside / name, json.dumps(content))
            self._files[name] = _size_and_checksum(self.beside / name)
        # One file's checksum is computed while the disk has another.
        with ThreadPoolExecutor(_WRITERS) as pool:
            self._files |= dict(zip(self._tensors, pool.map(self._write_tensors, self._tensors), strict=True))

    def _write_tensors(self, name: str) -> dict[str, int]:
        file = self.beside / name
        save_file(dict(self._tensors[name]), file)
        flush(file)
        return _size_and_checksum(file)


def _size_and_checksum(file: Path) -> dict[str, int]:
    return {"bytes": file.stat().st_size, "crc32": checksum(file)}


def _failure_of(write: Any, run_folder: Path) -> OSError | None:
    """What writing failed with, as an OSError that travels between ranks."""
    try:
        with full_disk_named(run_folder):
            write()
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error), str(error.filename or run_folder))
    except Exception as error:  # noqa: BLE001 - a library's own error for a write that failed; told on every rank
        return OSError(None, f"a checkpoint cannot be written ({type(error).__name__}: {error})", str(run_folder))
    return None


def load_checkpoint(checkpoint: Path, *, states: Mapping[str, TrainingState], world: World) -> LoopState:
    """Put engines and random states back, on as many ranks and in whichever ZeRO stage; every rank must call.

    Args:
        checkpoint: a whole one.
        states: by role; those of a role that has been given new weights only.
        world: the ranks now.

    Raises:
        UserError: when the checkpoint is of another model.
    """
    manifest = read_manifest(checkpoint)
    for role, state in states.items():
        if role not in manifest["engines"]:
            raise UserError(f"a run resumes with the models it had, {checkpoint} has no {role}: give another folder")
        state.restore(sorted(checkpoint.glob(f"{role}_*.safetensors")), manifest["engines"][role])
    if manifest["world_size"] == world.size:
        told = json.loads((checkpoint / _random_name(world.rank)).read_text())
        restore_random_states(told, world.device)
    tensors = load_file(checkpoint / _LOOP_FILE) if _LOOP_FILE in manifest["files"] else {}
    return LoopState(int(manifest["step"]), manifest["loop"], manifest["update"], tensors)


def _random_name(rank: int) -> str:
    return f"random_{rank:05}.json"
