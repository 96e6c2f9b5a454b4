"""The run folders below the folders of the board.

A client names a run by an id that is a hash of its path; a path is never built from input of a client.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.names import CHECKPOINTS, CONFIG_FILE, METRICS_FILE

BOARD_CONFIG = "board.yaml"
"""Settings of a run that the board started; the first file in its folder."""
_DEEPEST = 6
_MOST_RUNS = 5000
_LONGEST_SHOWN = 200
_NOT_ENTERED = {CHECKPOINTS, "tensorboard", "tokens", "stacks", "nonfinite", "profile", "logs"}
"""Folders of a run that contain no other runs."""


class UnknownRun(UserError):
    """There is no run or model with this id."""


@dataclass(frozen=True)
class RunFolder:
    """One folder that has the files of a run."""

    id: str
    name: str
    """Path below the board's folder."""
    folder: Path


class RunFolders:
    """All runs below some folders; `scan` updates them, also while other threads read."""

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
        self._models: set[Path] = set()
        self._links: set[Path] = set()
        self.scan()

    def scan(self) -> bool:
        """Look for runs and models; return True if they have changed."""
        runs = dict[str, RunFolder]()
        models = set[Path]()
        links = set[Path]()
        for root in self.roots:
            for folder, names, linked in _folders(root):
                links.update(linked)
                if {CONFIG_FILE, METRICS_FILE, BOARD_CONFIG} & names and len(runs) < _MOST_RUNS:
                    run = RunFolder(run_id(folder), self.name_of(folder), folder)
                    runs.setdefault(run.id, run)
                if "config.json" in names and any(file.endswith(".safetensors") for file in names):
                    models.add(folder)
        changed = runs.keys() != self._runs.keys() or links != self._links
        self._runs = runs
        self._models = models
        self._links = links
        return changed

    def all(self) -> list[RunFolder]:
        """The runs, by name."""
        return sorted(self._runs.values(), key=lambda run: (run.name, run.id))

    def get(self, run_id: str) -> RunFolder:
        """The run with an id.

        Raises:
            UnknownRun: if there is no such run.
        """
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownRun(f"run must be an id of /api/runs, got {run_id[:40]!r}: reload the list")
        return run

    def models(self) -> list[Path]:
        """Folders below the board's folders that have a model's config and weights."""
        return sorted(self._models)

    def linked(self) -> list[Path]:
        """Links to folders that are not below the board's; links are not followed, so their runs are not shown."""
        return [
            link for link in sorted(self._links) if not any(link.resolve().is_relative_to(root) for root in self.roots)
        ]

    def name_of(self, folder: Path) -> str:
        """A folder as a path below the board's folder."""
        root = next(root for root in self.roots if folder.is_relative_to(root))
        return str(folder.relative_to(root)) if folder != root else root.name

    def make(self, path: str) -> Path:
        """Create a folder below the board's folders, or accept an empty one; see `place` for the path.

        Raises:
            UserError: if it lies outside, has files, or cannot be created.
        """
        return self._new(path, makes=True)

    def require_new(self, path: str) -> None:
        """Raise UserError for a folder that `make` refuses."""
        self._new(path, makes=False)

    def _new(self, path: str, *, makes: bool) -> Path:
        shown = path if len(path) <= _LONGEST_SHOWN else f"{path[:_LONGEST_SHOWN]}... ({len(path)} characters)"
        try:
            new_folder = self.place(path)
            if new_folder is None:
                raise UserError(f"output_dir must lie in {self.roots[0]}, got {shown}: choose another")
            if new_folder.exists() and any(new_folder.iterdir()):
                raise UserError(f"output_dir must be new, {shown} has files: choose another")
            if makes:
                new_folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"output_dir must be a folder that can be made, got {shown!r} ({reason}): choose another"
            ) from None
        return new_folder

    def place(self, path: str) -> Path | None:
        """Resolve a path below the board's folders, from the working folder or else from the first; None if outside.

        Raises:
            OSError, ValueError, RuntimeError: if it is not a path.
        """
        for start in (Path.cwd(), self.roots[0]):
            resolved = (start / path).resolve()
            if any(resolved != root and resolved.is_relative_to(root) for root in self.roots):
                return resolved
        return None

    def unused(self, name: str) -> Path:
        """A folder with this name, or with a number appended, that does not exist in the first of the board's
        folders."""
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(folder for folder in map(self.roots[0].joinpath, names) if not folder.exists())

    def shown(self, folder: Path) -> str:
        """A folder in the form that `place` reads: relative to the working folder if it lies there."""
        here = Path.cwd()
        return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def run_id(folder: Path) -> str:
    """The id of a run folder, the same in each start of the board."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def _folders(root: Path) -> Iterator[tuple[Path, set[str], list[Path]]]:
    """Folders with the names of their files and their links to folders; hidden and unreadable ones are skipped."""
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        names = set[str]()
        links = list[Path]()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth < _DEEPEST and entry.name not in _NOT_ENTERED and not entry.name.startswith("."):
                    waiting.append((folder / entry.name, depth + 1))
            elif os.path.isdir(entry):  # a link
                links.append(folder / entry.name)
            else:
                names.add(entry.name)
        yield folder, names, links
