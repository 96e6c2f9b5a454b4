"""Title and notes that people give a run on the board, in a file of its folder; and the removal of a run.

The title does not rename the folder, so that paths in configs, reports and other runs stay valid.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.folder_lock import FolderLock
from hybrid_rlhf.runtime.files.reading import open_regular

MARKS_FILE = "notes.json"
_MOST_BYTES = 100_000


def read_marks(folder: Path) -> dict[str, str]:
    """The title and the notes of a run; {} if there are none, or the file cannot be read."""
    try:
        with open_regular(folder / MARKS_FILE) as file:
            content: Any = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key in ("title", "notes") if isinstance(value := content.get(key), str)}


def write_marks(run: RunFolder, *, title: str, notes: str) -> None:
    """Replace the title and the notes of a run; empty ones are removed."""
    marks = {key: value for key, value in (("title", title.strip()), ("notes", notes.strip())) if value}
    write_whole(run.folder / MARKS_FILE, json.dumps(marks, ensure_ascii=False) + "\n")


def delete_run(run: RunFolder, *, name: str) -> None:
    """Delete the folder of a run, with its models and checkpoints.

    Args:
        run: run that must not be running; its lock is held during the removal, so that it cannot be started.
        name: the run's name, typed by the user.

    Raises:
        UserError: if the name differs, the run is running, or the folder contains other runs or cannot be removed.
    """
    if name != run.name:
        raise UserError(f"a run is deleted by its name, {run.name}, got {name[:200]!r}: type its name")
    lock = FolderLock(run.folder)
    if (owner := lock.acquire()) is not None:
        raise UserError(f"a run that is deleted must not be running, {run.name} is locked by {owner}: stop it first")
    try:
        # Renamed to a hidden folder first, so that an interrupted removal leaves no incomplete run in the list.
        hidden = run.folder.with_name(f".deleted-{run.folder.name}-{run.id}")
        run.folder.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise UserError(f"{run.name} cannot be deleted ({error.strerror}): remove its folder by hand") from error
    finally:
        lock.release()
