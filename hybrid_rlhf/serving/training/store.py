"""Training runs and their checkpoints on disk: what a killed server comes back with.

    runs/RUN/run.json                              who owns it, its adapter, and which saved state it continues from
    runs/RUN/weights/NAME/                         a PEFT folder with the optimizer's state
    runs/RUN/sampler_weights/NAME/                 a PEFT folder
    runs/RUN/external_weights/NAME/                a Hugging Face folder of the merged model
    sessions/SESSION.json                          who owns it
    samplers/SAMPLER.json                          the weights that a sampling session has

A checkpoint is written beside, with its checkpoint.json, and renamed: it is whole or not there, and never changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.atomic import restore_folders, whole_folder, write_whole
from hybrid_rlhf.runtime.files.durable import flush
from hybrid_rlhf.runtime.files.reading import stored_object
from hybrid_rlhf.runtime.observability.logs import logger

Kind = Literal["weights", "sampler_weights", "external_weights"]
JsonObject = dict[str, Any]
KINDS: dict[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The client's names of the kinds of checkpoints, by their part of a path."""
META_FILE = "checkpoint.json"
_PATH = re.compile(r"tinker://([\w.:-]+)/(weights|sampler_weights|external_weights)/([\w.-]+)")
_NAME = re.compile(r"\w[\w.-]{0,127}", re.ASCII)  # a file's name has at most 255 bytes
KEPT_SAMPLERS = 8
"""Number of unnamed sampler checkpoints of a run that are kept."""


MOST_RECORDS = 2**14
"""Number of sessions, sampling sessions and runs of a key: they stay in memory, and in a file each."""


class UnknownObject(Exception):
    """A request names something that is not there, or that another key owns."""


@dataclass
class Run:
    """One adapter in training."""

    run_id: str
    tenant: str
    """Name of the key that owns it."""
    session_id: str
    rank: int = 0
    targets: list[str] = field(default_factory=list)
    """Kinds of layers with an adapter: attn, mlp."""
    seed: int = 0
    created: float = field(default_factory=time.time)
    """Seconds since 1970."""
    initial_path: str | None = None
    """Checkpoint that it began with; None: a new adapter."""
    initial_optimizer: bool = False
    """True if it began with the optimizer's state too."""
    saved_path: str | None = None
    """Newest saved state; None: none since it began."""
    saved_seq: int = 0
    """Last command after which the state was the saved one."""
    last_request: float = 0.0
    metadata: JsonObject = field(default_factory=dict)


@dataclass
class Checkpoint:
    """One saved state."""

    run_id: str
    kind: Kind
    name: str
    tenant: str | None
    """Name of the key that owns it; None: all keys may read it."""
    rank: int
    seq: int
    """Command that wrote it."""
    created: float = field(default_factory=time.time)
    """Seconds since 1970."""
    size_bytes: int = 0
    expires: float | None = None
    unnamed: bool = False
    """True for the weights of one sampling session."""
    sampler: str | None = None
    """That sampling session."""
    metadata: dict[str, str] = field(default_factory=dict)
    folder: Path = field(default=Path(), compare=False)
    """Where it is; not in its file."""

    @property
    def path(self) -> str:
        """The path that clients name it by."""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


class Records(dict[str, JsonObject]):
    """Objects by id, each in a file of a folder, whose time is that of its last use."""

    def __init__(self, folder: Path) -> None:
        """Read what is there."""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__({file.stem: _object(file) for file in folder.glob("*.json")})
        self._folder = folder

    def write(self, name: str, **record: Any) -> None:
        """Write an object."""
        write_whole(self._folder / f"{name}.json", json.dumps(record))
        self[name] = record

    def age(self, name: str) -> float:
        """Seconds since an object was written or touched, also by an earlier server."""
        return max(0.0, time.time() - (self._folder / f"{name}.json").stat().st_mtime)

    def touch(self, name: str) -> None:
        """Use an object."""
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it
            os.utime(self._folder / f"{name}.json")

    def delete(self, name: str) -> None:
        """Forget an object."""
        self.pop(name, None)
        (self._folder / f"{name}.json").unlink(missing_ok=True)  # else somebody has removed it


class Store:
    """The folder of a server. Checkpoints are written and deleted on one thread; the others call from any."""

    def __init__(self, folder: Path) -> None:
        """Read what is there, and remove what a killed server has not finished."""
        self._runs_folder = folder / "runs"
        self._runs_folder.mkdir(parents=True, exist_ok=True)
        restore_folders(self._runs_folder, "*/*/")
        runs = [Run(**_object(file)) for file in self._runs_folder.glob("*/run.json")]
        self.runs = {run.run_id: run for run in runs}
        """Runs by id."""
        self.sessions = Records(folder / "sessions")
        """tenant, metadata and finished of sessions by id."""
        self.samplers = Records(folder / "samplers")
        """tenant and path (None: the base model) of sampling sessions by id."""
        self._checkpoints: dict[str, Checkpoint] = {}
        for meta in self._runs_folder.glob(f"*/*/*/{META_FILE}"):
            self.add(Checkpoint(**_object(meta), folder=meta.parent))
        for run_id in [*self.runs]:  # of a server that was killed between the end of a session and that of its runs
            self._delete_unused(run_id)

    def require_record(self, tenant: str) -> None:
        """Raise UserError when a key may not have another session, sampling session or run."""
        owned = [
            sum(record["tenant"] == tenant for record in list(kind.values())) for kind in (self.sessions, self.samplers)
        ]
        count = sum(owned) + sum(run.tenant == tenant for run in list(self.runs.values()))
        if count >= MOST_RECORDS:
            raise UserError(
                f"key {tenant} has {count} sessions, sampling sessions and runs, at most {MOST_RECORDS}: wait until "
                "old ones end, seven days after their last request"
            )

    def write_run(self, run: Run) -> None:
        """Write a run, and know it."""
        folder = self._runs_folder / run.run_id
        folder.mkdir(exist_ok=True)
        write_whole(folder / "run.json", json.dumps(dataclasses.asdict(run)))
        flush(self._runs_folder)
        self.runs[run.run_id] = run

    def write_sampler(self, sampler_id: str, tenant: str, path: str | None) -> None:
        """Write a sampling session; None: it samples the base model.

        Raises:
            UserError: when it has other weights.
        """
        record = {"tenant": tenant, "path": path}
        if self.samplers.get(sampler_id, record) != record:
            raise UserError(f"a sampling session keeps its weights, {sampler_id} has others: number it anew")
        if sampler_id not in self.samplers:
            self.require_record(tenant)
        self.samplers.write(sampler_id, **record)

    def write_checkpoint(self, checkpoint: Checkpoint, save: Callable[[Path], None], *, overwrite: bool) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: what is known of it before; its size is counted here.
            save: writes the files into a folder that it makes.
            overwrite: replace one of this name, which its owner asks for.

        Raises:
            UserError: when another command wrote one of this name.
        """
        replaced = self._checkpoints.get(checkpoint.path)
        # a command that a killed server had not answered comes again
        if replaced is not None and not overwrite and replaced.seq != checkpoint.seq:
            raise UserError(f"a checkpoint never changes, {checkpoint.path} exists: give another name, or overwrite")
        folder = self._runs_folder / checkpoint.run_id / checkpoint.kind / checkpoint.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as beside:
            save(beside)
            checkpoint.size_bytes = sum(file.stat().st_size for file in beside.iterdir())
            write_whole(beside / META_FILE, _content(checkpoint))
        checkpoint.folder = folder
        self.add(checkpoint)
        unnamed = [saved for saved in self.checkpoints(run_id=checkpoint.run_id) if saved.unnamed]
        for saved in unnamed[:-KEPT_SAMPLERS]:
            self.delete(saved)

    def add(self, checkpoint: Checkpoint) -> None:
        """Know a checkpoint whose folder is there."""
        self._checkpoints[checkpoint.path] = checkpoint

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint: it is renamed first, so that no half of it is ever read.

        Raises:
            UnknownObject: when it was deleted or replaced meanwhile.
        """
        self._require_present(checkpoint)
        gone = checkpoint.folder.with_name(f".{checkpoint.name}.deleted.partial")
        shutil.rmtree(gone, ignore_errors=True)
        if checkpoint.folder.exists():  # else somebody has removed it
            checkpoint.folder.rename(gone)
        del self._checkpoints[checkpoint.path]
        sampler = checkpoint.sampler
        if checkpoint.unnamed and sampler is not None and sampler in self.samplers:
            self.samplers.delete(sampler)
        shutil.rmtree(gone, ignore_errors=True)  # else the next start removes it
        self._delete_unused(checkpoint.run_id)

    def set_ttl(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        """Set the time after which a checkpoint is deleted; None: never. Raises as `delete`."""
        self._require_present(checkpoint)
        checkpoint.expires = None if seconds is None else time.time() + seconds
        write_whole(checkpoint.folder / META_FILE, _content(checkpoint))

    def _require_present(self, checkpoint: Checkpoint) -> None:
        if self._checkpoints.get(checkpoint.path) is not checkpoint:
            raise UnknownObject(f"there is no checkpoint {checkpoint.path} any more: it was deleted or replaced")

    def expire(self) -> None:
        """Delete the checkpoints whose time is over."""
        for checkpoint in self.checkpoints():
            if checkpoint.expires is not None and checkpoint.expires < time.time():
                try:
                    self.delete(checkpoint)
                except OSError as error:
                    logger.warning("cannot delete the expired checkpoint %s: %s", checkpoint.path, error)

    def end_session(self, session_id: str) -> None:
        """Delete what only the clients of a session need: its sampling sessions with their unnamed weights, its runs
        without a checkpoint, and its record."""
        for sampler in self.samplers_of(session_id):
            self.samplers.delete(sampler)
        runs = self.runs_of(session_id)
        for run in runs:
            for checkpoint in self.checkpoints(run_id=run):
                if checkpoint.unnamed:
                    self.delete(checkpoint)
        self.sessions.delete(session_id)
        for run in runs:
            self._delete_unused(run)

    def _delete_unused(self, run_id: str) -> None:
        """Delete what is left of a run that nobody can continue, as it has no session and no checkpoint."""
        run = self.runs.get(run_id)
        if (run is None or run.session_id not in self.sessions) and not self.checkpoints(run_id=run_id):
            self.runs.pop(run_id, None)
            shutil.rmtree(self._runs_folder / run_id, ignore_errors=True)

    def runs_of(self, session_id: str) -> list[str]:
        """Ids of the runs of a session."""
        return [run.run_id for run in list(self.runs.values()) if run.session_id == session_id]

    def samplers_of(self, session_id: str) -> list[str]:
        """Ids of its sampling sessions."""
        return [sampler for sampler in list(self.samplers) if sampler.startswith(f"{session_id}:sample:")]

    def checkpoints(self, tenant: str | None = None, run_id: str | None = None) -> list[Checkpoint]:
        """Checkpoints of a key, of a run, or all, oldest first."""
        chosen = [
            checkpoint
            for checkpoint in list(self._checkpoints.values())
            if tenant in (None, checkpoint.tenant) and run_id in (None, checkpoint.run_id)
        ]
        return sorted(chosen, key=lambda checkpoint: checkpoint.created)

    def find(self, path: str, tenant: str) -> Checkpoint:
        """The checkpoint of a path.

        Raises:
            UserError: for a text that is no path.
            UnknownObject: when there is none that this key may read.
        """
        if _PATH.fullmatch(path) is None:
            raise UserError(
                f"a path is tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME, got {path[:200]!r}: give "
                "what a save has returned"
            )
        checkpoint = self._checkpoints.get(path)
        if checkpoint is None or checkpoint.tenant not in (None, tenant):
            raise UnknownObject(f"there is no checkpoint {path}: it was deleted, has expired, or is of another key")
        return checkpoint

    def of_command(self, run_id: str, seq: int) -> Checkpoint | None:
        """The checkpoint that a command of a run wrote, if it wrote one."""
        return next((saved for saved in self.checkpoints(run_id=run_id) if saved.seq == seq), None)

    def stored_bytes(self, tenant: str) -> int:
        """Bytes of the checkpoints of a key."""
        return sum(checkpoint.size_bytes for checkpoint in self.checkpoints(tenant))


def _content(checkpoint: Checkpoint) -> str:
    content = dataclasses.asdict(checkpoint)
    del content["folder"]
    return json.dumps(content)


def _object(file: Path) -> JsonObject:
    """The object of a file of a server.

    Raises:
        UserError: when it has another content.
    """
    content = stored_object(file)
    if not content:
        raise UserError(f"a server's folder has the files that it wrote, {file} was changed: delete its folder")
    return content


def checked_name(name: str) -> str:
    """A checkpoint's name.

    Raises:
        UserError: for a text that cannot be one.
    """
    if _NAME.fullmatch(name) is None:
        raise UserError(
            f"a checkpoint's name is 1 to 128 letters, digits, _, . and -, the first no . or -, got {name[:200]!r}: "
            "choose another"
        )
    return name
