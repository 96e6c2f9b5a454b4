"""The run folders below the folders of the board.

A client names a run by an id that is a hash of its path; a path is never put together from what a client sends.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files.reading import read_json_object
from hybrid_rlhf.runtime.files.names import CHECKPOINTS, CONFIG_FILE, METRICS_FILE

BOARD_CONFIG = "board.yaml"
"""Settings of a run that the board started; it is the first file of its folder."""
_DEEPEST = 6
_MOST_RUNS = 5000
_NOT_ENTERED = {CHECKPOINTS, "tensorboard", "tokens", "stacks", "nonfinite", "profile", "samples.index", "logs"}
"""Folders of a run in which no other run lies."""


class UnknownRun(UserError):
    """There is no run or model of that id."""


@dataclass(frozen=True)
class RunFolder:
    """One folder that has the files of a run."""

    id: str
    name: str
    """Below the board's folder."""
    folder: Path


class RunFolders:
    """All runs below some folders, found again by `scan`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Take the board's folders.

        Raises:
            UserError: if one is missing.
        """
        for root in roots:
            if not root.is_dir():
                raise UserError(f"folders must be folders with runs, {root} is none: give for example output")
        self.roots = [root.resolve() for root in roots]
        self._runs: dict[str, RunFolder] = {}
        self._models: list[Path] = []
        self._lock = threading.Lock()
        self.scan()

    def scan(self) -> bool:
        """Look for runs and models; whether there are others than before."""
        runs, models = dict[str, RunFolder](), list[Path]()
        for root in self.roots:
            for folder, names in _folders(root):
                if {CONFIG_FILE, METRICS_FILE, BOARD_CONFIG} & names and len(runs) < _MOST_RUNS:
                    name = str(folder.relative_to(root)) if folder != root else root.name
                    run = RunFolder(run_id(folder), name, folder)
                    runs.setdefault(run.id, run)
                if "config.json" in names and any(file.endswith(".safetensors") for file in names):
                    models.append(folder)
        with self._lock:
            changed = runs.keys() != self._runs.keys()
            self._runs, self._models = runs, models
        return changed

    def all(self) -> list[RunFolder]:
        """The runs, by name."""
        with self._lock:
            return sorted(self._runs.values(), key=lambda run: (run.name, run.id))

    def get(self, run_id: str) -> RunFolder:
        """The run of an id.

        Raises:
            UnknownRun: if there is none.
        """
        with self._lock:
            run = self._runs.get(run_id)
        if run is None:
            raise UnknownRun(f"run must be an id of /api/runs, got {run_id[:40]!r}: reload the list")
        return run

    def models(self) -> list[Path]:
        """Saved causal LMs below the folders."""
        with self._lock:
            folders = sorted(dict.fromkeys(self._models))
        return [folder for folder in folders if _is_causal_lm(folder)]

    def inside(self, path: str) -> Path:
        """A path below the board's folders; one that is relative lies in the first.

        Raises:
            UserError: if it lies outside.
        """
        try:
            found = (self.roots[0] / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"output_dir must be a path, got {path[:80]!r} ({error}): choose another") from None
        if not any(found != root and found.is_relative_to(root) for root in self.roots):
            raise UserError(f"output_dir must lie in {self.roots[0]}, got {path[:200]}: choose another")
        return found


def run_id(folder: Path) -> str:
    """The id of a run folder, the same in each start of the board."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def _folders(root: Path) -> Iterator[tuple[Path, set[str]]]:
    """Folders with the names of their files, without links, hidden ones, and those that cannot be read."""
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        names = set()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth < _DEEPEST and entry.name not in _NOT_ENTERED and not entry.name.startswith("."):
                    waiting.append((folder / entry.name, depth + 1))
            else:
                names.add(entry.name)
        yield folder, names


def _is_causal_lm(folder: Path) -> bool:
    try:
        architectures = read_json_object(folder / "config.json", "config.json").get("architectures")
    except UserError:
        return False
    return isinstance(architectures, list) and any("CausalLM" in str(name) for name in architectures)
