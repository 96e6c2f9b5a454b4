"""Training runs and their checkpoints on disk, with which a killed server restarts.

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
import math
import os
import re
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.atomic import restore_folders, whole_folder, write_whole
from hybrid_rlhf.runtime.files.disk import FULL_ERRNOS, disk_errors_translated
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
"""Number of sessions, sampling sessions, runs and checkpoints of a key: they stay in memory."""
_BLOCK_BYTES = 4096
"""What the smallest file takes on disk."""


class DiskFull(Exception):
    """There is no room for what a request makes; its client can make some."""


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Context that raises DiskFull where the disk of a folder is full."""
    try:
        with disk_errors_translated(folder):
            yield
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise
        raise DiskFull("the disk of the server is full: delete checkpoints") from error


@contextlib.contextmanager
def folder_named(folder: Path, name: str) -> Iterator[None]:
    """Context whose errors have a name in place of a folder of the server, which clients do not learn."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(f"{folder}/", "").replace(str(folder), name)) from error


class UnknownObject(Exception):
    """A request names an object that does not exist, or that another key owns."""


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


class Usage:
    """What each key has on disk: sessions, sampling sessions, runs and checkpoints."""

    def __init__(self, most_bytes: float) -> None:
        """Take the largest number of bytes of a key."""
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._sizes: dict[str, tuple[str | None, int]] = {}
        self._counts = Counter[str | None]()
        self.bytes = Counter[str | None]()
        """Bytes of each key."""

    def set(self, name: str, tenant: str | None, size: int) -> None:
        """Count an object of a key, in place of what has its name; 0 bytes: it is there no longer."""
        with self._lock:
            owner, before = self._sizes.pop(name, (tenant, 0))
            self.bytes[owner] -= before
            self._counts[owner] -= before > 0
            if size:
                self._sizes[name] = (tenant, size)
                self.bytes[tenant] += size
                self._counts[tenant] += 1

    def require_room(self, tenant: str | None, name: str, size: int) -> None:
        """Raise UserError when a key may not have an object of this name and size."""
        before = self._sizes.get(name, (tenant, 0))[1]
        stored = self.bytes[tenant] - before + size
        count = self._counts[tenant] + (before == 0)
        if stored > self._most_bytes or count > MOST_RECORDS:
            raise UserError(
                f"key {tenant} may have {self._most_bytes} bytes (max_stored_gib) and {MOST_RECORDS} sessions, "
                f"sampling sessions, runs and checkpoints, with this one it would have {stored} bytes and {count}: "
                "delete checkpoints, set ttl_seconds, or wait until old sessions end, seven days after their last "
                "request"
            )


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _run_bytes(content: int) -> int:
    """Bytes of a run on disk, without its checkpoints: its folder and its file."""
    return _BLOCK_BYTES + _on_disk(content)


def _folder_bytes(folder: Path) -> int:
    """Bytes of the files of a folder on disk."""
    return _BLOCK_BYTES + sum(_on_disk(file.stat().st_size) for file in folder.iterdir())


class Records(dict[str, JsonObject]):
    """Objects by id, each in a file of a folder, whose time is that of its last use."""

    def __init__(self, folder: Path, usage: Usage) -> None:
        """Read what is there, and take what counts it."""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__({file.stem: _object(file) for file in folder.glob("*.json")})
        self._folder = folder
        self._usage = usage
        for name, record in self.items():
            usage.set(str(self._file(name)), record["tenant"], _on_disk(len(json.dumps(record))))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def write(self, name: str, **record: Any) -> None:
        """Write an object.

        Raises:
            UserError: for a new one, when its key has too much.
        """
        file = self._file(name)
        content = json.dumps(record)
        size = _on_disk(len(content))
        if name not in self:
            self._usage.require_room(record["tenant"], str(file), size)
        with _room(self._folder):
            write_whole(file, content)
        self[name] = record
        self._usage.set(str(file), record["tenant"], size)

    def age(self, name: str) -> float:
        """Seconds since an object was written or touched, also by an earlier server."""
        return max(0.0, time.time() - self._file(name).stat().st_mtime)

    def touch(self, name: str) -> None:
        """Use an object."""
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it
            os.utime(self._file(name))

    def delete(self, name: str) -> None:
        """Forget an object."""
        self.pop(name, None)
        self._file(name).unlink(missing_ok=True)  # else somebody has removed it
        self._usage.set(str(self._file(name)), None, 0)


class Store:
    """The folder of a server. Checkpoints are written and deleted on one thread; the others call from any."""

    def __init__(self, folder: Path, most_bytes: float = math.inf) -> None:
        """Read what is there, and remove what a killed server has not finished.

        Args:
            folder: of the server.
            most_bytes: largest number of bytes of a key.
        """
        self._runs_folder = folder / "runs"
        self._runs_folder.mkdir(parents=True, exist_ok=True)
        restore_folders(self._runs_folder, "*/*/")
        self.usage = Usage(most_bytes)
        self.runs: dict[str, Run] = {}
        """Runs by id."""
        self.sessions = Records(folder / "sessions", self.usage)
        """tenant, metadata and finished of sessions by id."""
        self.samplers = Records(folder / "samplers", self.usage)
        """tenant and path (None: the base model) of sampling sessions by id."""
        self._checkpoints: defaultdict[str, dict[str, Checkpoint]] = defaultdict(dict)
        """Checkpoints by run and path."""
        for file in self._runs_folder.glob("*/run.json"):
            self._add_run(Run(**_object(file)), file.stat().st_size)
        for meta in self._runs_folder.glob(f"*/*/*/{META_FILE}"):
            self.add(Checkpoint(**_object(meta), folder=meta.parent))
        for run_id in [*self.runs]:  # of a server that was killed between the end of a session and that of its runs
            self._delete_unused(run_id)

    def write_run(self, run: Run) -> None:
        """Write a run, and know it.

        Raises:
            UserError: for a new one, when its key has too much.
        """
        folder = self._runs_folder / run.run_id
        content = json.dumps(dataclasses.asdict(run))
        if run.run_id not in self.runs:
            self.require_run(run)
        with _room(self._runs_folder):
            folder.mkdir(exist_ok=True)
            write_whole(folder / "run.json", content)
            flush(self._runs_folder)
        self._add_run(run, len(content))

    def require_run(self, run: Run) -> None:
        """Raise UserError when a key may not have a new run."""
        self.usage.require_room(run.tenant, run.run_id, _run_bytes(len(json.dumps(run.metadata))))

    def _add_run(self, run: Run, size: int) -> None:
        self.runs[run.run_id] = run
        self.usage.set(run.run_id, run.tenant, _run_bytes(size))

    def write_sampler(self, sampler_id: str, tenant: str, path: str | None) -> None:
        """Write a sampling session; None: it samples the base model.

        Raises:
            UserError: when it has other weights, or its key has too much.
        """
        record = {"tenant": tenant, "path": path}
        if self.samplers.get(sampler_id, record) != record:
            raise UserError(f"a sampling session keeps its weights, {sampler_id} has others: number it anew")
        self.samplers.write(sampler_id, **record)

    def write_checkpoint(self, checkpoint: Checkpoint, save: Callable[[Path], None], *, overwrite: bool) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: what is known of it before; its size is counted here.
            save: writes the files into a folder that it makes.
            overwrite: replace one of this name, which its owner asks for.

        Raises:
            UserError: when another command wrote one of this name, or its key has too much.
        """
        self.usage.require_room(checkpoint.tenant, checkpoint.path, 0)  # before it is written
        replaced = self._of_path(checkpoint.path)
        # a client sends a command again that a killed server had not answered
        if replaced is not None and not overwrite and replaced.seq != checkpoint.seq:
            raise UserError(f"a checkpoint never changes, {checkpoint.path} exists: give another name, or overwrite")
        folder = self._runs_folder / checkpoint.run_id / checkpoint.kind / checkpoint.name
        with _room(self._runs_folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(folder) as beside:
                save(beside)
                checkpoint.size_bytes = sum(file.stat().st_size for file in beside.iterdir())
                write_whole(beside / META_FILE, _content(checkpoint))
                self.usage.require_room(checkpoint.tenant, checkpoint.path, _folder_bytes(beside))
        checkpoint.folder = folder
        self.add(checkpoint)
        unnamed = [saved for saved in self.checkpoints(run_id=checkpoint.run_id) if saved.unnamed]
        for saved in unnamed[:-KEPT_SAMPLERS]:
            self.delete(saved)

    def add(self, checkpoint: Checkpoint) -> None:
        """Know a checkpoint whose folder is there."""
        self._checkpoints[checkpoint.run_id][checkpoint.path] = checkpoint
        if checkpoint.tenant is not None:
            self.usage.set(checkpoint.path, checkpoint.tenant, _folder_bytes(checkpoint.folder))

    def _of_path(self, path: str) -> Checkpoint | None:
        return self._checkpoints.get(path.split("/")[2], {}).get(path)

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
        del self._checkpoints[checkpoint.run_id][checkpoint.path]
        self.usage.set(checkpoint.path, None, 0)
        sampler = checkpoint.sampler
        if checkpoint.unnamed and sampler is not None and sampler in self.samplers:
            self.samplers.delete(sampler)
        shutil.rmtree(gone, ignore_errors=True)  # else the next start removes it
        self._delete_unused(checkpoint.run_id)

    def set_ttl(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        """Set the time after which a checkpoint is deleted; None: never. Raises as `delete`."""
        self._require_present(checkpoint)
        checkpoint.expires = None if seconds is None else time.time() + seconds
        with _room(checkpoint.folder):
            write_whole(checkpoint.folder / META_FILE, _content(checkpoint))

    def _require_present(self, checkpoint: Checkpoint) -> None:
        if self._of_path(checkpoint.path) is not checkpoint:
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
        """Delete a run without a session and a checkpoint: nobody can continue it."""
        run = self.runs.get(run_id)
        if (run is None or run.session_id not in self.sessions) and not self.checkpoints(run_id=run_id):
            self.runs.pop(run_id, None)
            self._checkpoints.pop(run_id, None)
            shutil.rmtree(self._runs_folder / run_id, ignore_errors=True)
            self.usage.set(run_id, None, 0)

    def runs_of(self, session_id: str) -> list[str]:
        """Ids of the runs of a session."""
        return [run.run_id for run in list(self.runs.values()) if run.session_id == session_id]

    def samplers_of(self, session_id: str) -> list[str]:
        """Ids of its sampling sessions."""
        return [sampler for sampler in list(self.samplers) if sampler.startswith(f"{session_id}:sample:")]

    def checkpoints(self, tenant: str | None = None, run_id: str | None = None) -> list[Checkpoint]:
        """Checkpoints of a key, of a run, or all, oldest first."""
        runs = list(self._checkpoints.values()) if run_id is None else [self._checkpoints.get(run_id, {})]
        saved = [checkpoint for of_run in runs for checkpoint in list(of_run.values())]
        chosen = [checkpoint for checkpoint in saved if tenant in (None, checkpoint.tenant)]
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
        checkpoint = self._of_path(path)
        if checkpoint is None or checkpoint.tenant not in (None, tenant):
            raise UnknownObject(f"there is no checkpoint {path}: it was deleted, has expired, or is of another key")
        return checkpoint

    def of_command(self, run_id: str, seq: int) -> Checkpoint | None:
        """The checkpoint that a command of a run wrote, if it wrote one."""
        return next((saved for saved in self.checkpoints(run_id=run_id) if saved.seq == seq), None)


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
