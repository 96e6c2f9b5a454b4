"""Checkpoints to resume from: states of the engines, tensors and state of the loop, and random states.

Each rank writes its files, either immediately or in a thread while training continues. When all ranks have finished,
rank 0 writes the manifest and renames the folder. No collective runs while files are written.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.training import CheckpointConfig
from hybrid_rlhf.engines.saved.fragments import HostCopies
from hybrid_rlhf.engines.saved.training_state import AnyState
from hybrid_rlhf.runtime.background import BackgroundCall
from hybrid_rlhf.runtime.environment import versions
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.checkpoint_folder import (
    CHECKPOINTS,
    checkpoint_name,
    prune_checkpoints,
    read_manifest,
    write_manifest,
)
from hybrid_rlhf.runtime.files.disk import disk_errors_translated
from hybrid_rlhf.runtime.files.durable import checksum, flush
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.random_states import random_states, restore_random_states
from hybrid_rlhf.runtime.world import World

T = TypeVar("T")
_WRITERS = 2
"""Number of writer threads per rank."""


@dataclass(frozen=True)
class LoopState:
    """State of a training loop, the same on every rank but for the tensors."""

    step: int
    """Number of completed steps: optimizer updates, or rollouts in RL."""
    content: Mapping[str, Any]
    """JSON values: data position, KL controller, ..."""
    update: int | None = None
    """Number of updates on the rollout of the next step, if the checkpoint is within that step."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's rows of rollouts that were sampled but not fully trained on."""
    shards: Sequence[Mapping[str, Tensor]] = ()
    """The tensors of each rank that wrote the checkpoint; read from its files when they are used."""


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self, run_folder: Path, states: Mapping[str, AnyState], world: World, config: CheckpointConfig):
        """Args: the run folder, the states by role, the ranks, and the rules for keeping checkpoints."""
        self._run_folder = run_folder
        self._states = states
        self._world = world
        self._config = config
        self._copies = {role: HostCopies() for role in states}
        self.pending: _Writing | None = None
        """The checkpoint that is being written."""

    def save(
        self, loop: LoopState, *, figures: Mapping[str, float] | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        """Write checkpoints/step_N, then remove checkpoints that need not be kept. Every rank must make this call.

        With train.save_async this returns when everything is copied to host memory; `poll` or `finish` completes the
        checkpoint.

        Args:
            loop: state of the loop.
            figures: metrics of the step, for the choice of the best checkpoint.
            config: config of the run, by dotted key.

        Raises:
            OSError: on every rank, when this checkpoint or the previous one could not be written.
        """
        self.finish()
        place = self._run_folder / CHECKPOINTS / checkpoint_name(loop.step, loop.update)
        if self._world.broadcast_object(place.exists()):
            return  # the checkpoint that the run resumed from, requested again before any step
        beside = place.with_name(f"{place.name}.partial")
        if self._world.is_main:
            shutil.rmtree(beside, ignore_errors=True)  # left by an interrupted save
        self._world.barrier()
        tensors = {role: self._tensors(role, state) for role, state in self._states.items()}
        named = {
            f"{role}_{self._states[role].world.rank:05}.safetensors": part for role, part in tensors.items() if part
        }
        if loop.tensors:
            # safetensors does not accept views, and tensors of a rollout may be views of each other
            copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in loop.tensors.items()}
            named[_loop_name(self._world.rank)] = copies
        manifest = {
            "step": loop.step,
            "update": loop.update,
            "world_size": self._world.size,
            "engines": self._numbers(),
            "loop": dict(loop.content),
            "figures": dict(figures or {}),
            "config": dict(config or {}),
            "versions": versions(),
        }
        states = {_random_name(self._world.rank): random_states(self._world.device)}
        write = partial(_outcome_of, partial(_write, beside, named, states), self._run_folder)
        self.pending = _Writing(beside, manifest, BackgroundCall(write, device=self._world.device))
        if not self._config.save_async:
            self.finish()

    def poll(self) -> None:
        """Complete the pending checkpoint if all ranks have written it. Every rank must make this call.

        Raises:
            OSError: on every rank, when a rank failed to write.
        """
        assert self.pending is not None
        done = torch.tensor(float(self.pending.call.has_ended()), device=self._world.device)
        if self._world.all_reduce(done, dist.ReduceOp.MIN).item():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and complete it. Every rank must make this call.

        Raises:
            OSError: on every rank, when a rank failed to write.
        """
        if self.pending is None:
            return
        writing = self.pending
        self.pending = None
        outcomes = self._world.all_gather_objects(writing.call.result())
        failure = next((outcome for outcome in outcomes if isinstance(outcome, OSError)), None)
        if failure is None and self._world.is_main:
            files = {
                name: entry for outcome in outcomes if isinstance(outcome, dict) for name, entry in outcome.items()
            }
            failure = _outcome_of(lambda: self._commit(writing, files), self._run_folder)
        failure = self._world.broadcast_object(failure)
        if failure is not None:
            if self._world.is_main:
                shutil.rmtree(writing.beside, ignore_errors=True)
            raise failure

    def _numbers(self) -> dict[str, Any]:
        """Return the numbers of each role, from its first rank."""
        numbers = self._world.merge_dicts(
            {role: state.numbers() for role, state in self._states.items() if state.world.is_main}
        )
        return {role: numbers[role] for role in self._states}

    def _tensors(self, role: str, state: AnyState) -> dict[str, Tensor]:
        """Return this rank's tensors of a role on the host; copies if training continues during the write."""
        if self._config.save_async:
            return self._copies[role].copy(state.tensors())
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
            prune_checkpoints(self._run_folder, self._config)
        except OSError as error:  # an extra checkpoint costs disk space, but must not end the run
            logger.warning("old checkpoints cannot be removed (%s)", error)


@dataclass(frozen=True)
class _Writing:
    """Files of one rank while a checkpoint is being written."""

    beside: Path
    manifest: Mapping[str, Any]
    call: BackgroundCall[dict[str, dict[str, int]] | OSError]
    """Writes the files; returns sizes and checksums by file, or the error."""


def _write(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """Write the files of this rank; returns their sizes and checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, content in texts.items():
        write_whole(folder / name, json.dumps(content))
        files[name] = _size_and_checksum(folder / name)
    # Overlap the checksum of one file with the writing of another.
    with ThreadPoolExecutor(_WRITERS) as pool:
        written = pool.map(lambda name: _write_tensors(folder / name, tensors[name]), tensors)
        return files | dict(zip(tensors, written, strict=True))


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    save_file(dict(tensors), file)
    flush(file)
    return _size_and_checksum(file)


def _size_and_checksum(file: Path) -> dict[str, int]:
    return {"bytes": file.stat().st_size, "crc32": checksum(file)}


def _outcome_of(write: Callable[[], T], run_folder: Path) -> T | OSError:
    """Run a write; returns its result, or its error as an OSError that can be sent to other ranks."""
    try:
        with disk_errors_translated(run_folder):
            return write()
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error), str(error.filename or run_folder))
    except Exception as error:  # noqa: BLE001 - a library's own error for a failed write, raised on every rank
        return OSError(None, f"a checkpoint cannot be written ({type(error).__name__}: {error})", str(run_folder))


def load_checkpoint(checkpoint: Path, *, states: Mapping[str, AnyState], world: World) -> LoopState:
    """Restore engines and random states on any number of ranks and in any ZeRO stage. Every rank must make this call.

    Random states are restored only on the same number of ranks.

    Args:
        checkpoint: folder of a complete checkpoint.
        states: states of the engines by role.
        world: the ranks of this run.

    Raises:
        UserError: when the checkpoint belongs to another model, or lacks a role.
    """
    manifest = read_manifest(checkpoint)
    for role, state in states.items():
        if role not in manifest["engines"]:
            raise UserError(
                f"a checkpoint must hold all models of the run, {checkpoint} has no {role}: resume with the models "
                "of its config.yaml, or set another output_dir"
            )
        state.restore(sorted(checkpoint.glob(f"{role}_*.safetensors")), manifest["engines"][role])
    if manifest["world_size"] == world.size:
        random = json.loads((checkpoint / _random_name(world.rank)).read_text())
        restore_random_states(random, world.device)
    if "loop.safetensors" in manifest["files"]:
        raise UserError(
            f"a checkpoint within a rollout resumes in the version that wrote it, got {checkpoint} of hybrid_rlhf "
            f"{manifest['versions'].get('hybrid_rlhf', 'unknown')}: resume from a checkpoint between two steps"
        )
    names = map(_loop_name, range(manifest["world_size"]))
    shards = [_StoredTensors(checkpoint / name) if name in manifest["files"] else {} for name in names]
    return LoopState(int(manifest["step"]), manifest["loop"], manifest["update"], shards=shards)


class _StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is used."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with safe_open(file, "pt") as tensors:
            self._names = tuple(tensors.keys())

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file, "pt") as tensors:
            return tensors.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _loop_name(rank: int) -> str:
    return f"loop_{rank:05}.safetensors"


def _random_name(rank: int) -> str:
    return f"random_{rank:05}.json"
