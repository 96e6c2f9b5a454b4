"""The state of a run folder and its problems; no content of a folder is an error of the board."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hybrid_rlhf.board.runs.folders import BOARD_CONFIG, RunFolder
from hybrid_rlhf.board.runs.marks import read_marks
from hybrid_rlhf.board.runs.reading import (
    file_problem,
    file_size,
    finite,
    last_line,
    number,
    read_run_config,
)
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import STEPS
from hybrid_rlhf.runtime.files.folder_lock import LOCK_FILE, LockOwner
from hybrid_rlhf.runtime.files.names import CONFIG_FILE, FINISHED_FILE, LOG_FILE, METRICS_FILE, SAMPLES_FILE
from hybrid_rlhf.runtime.files.reading import open_regular

COMMANDS = {name: STEPS[name] for name in ("rl", "sft", "reward", "preference")}
"""The config of each training command."""
BOARD_LOG = "board.log"
"""Output of a run that the board started."""
_WRITTEN = (METRICS_FILE, CONFIG_FILE, LOG_FILE, BOARD_LOG)
"""The newest of them tells when a run was last alive."""
_SERVICE = "train-server"
"""The command of a training server, whose folder is shown as that of a run, but cannot be started by the board."""
_PRINTED_BYTES = 10_000
"""Size of the shown end of the output."""
_ERROR_LINE = re.compile(r"[-\d]+ [:\d]+ (error: .*)")
"""The last line of the log of a run that an error has ended."""
_FEWEST_KEYS = 5
"""Smallest number of top-level keys that a config shares with its command's config."""
_LAST_VALUES = (
    "objective/scores",
    "objective/kl",
    "completions/mean_length",
    "sft/loss",
    "reward/loss",
    "preference/loss",
    "eval/loss",
    "eval/accuracy",
)
"""Metrics whose last values the list of runs shows, if a run has them."""
_SILENT_SECONDS = 600.0
"""Time without a new line after which a run on another host counts as stopped, as its process cannot be checked."""
ContentT = TypeVar("ContentT")


class RunSummaries:
    """Summaries of runs; a config is read again when its file changes."""

    def __init__(self) -> None:
        self.is_starting: Callable[[str], bool] = lambda run_id: False
        """Returns true while a process that the board started for a run is alive, which may not hold its folder yet."""
        self._known: dict[Path, tuple[Any, tuple[Any, str | None]]] = {}
        """Contents and problems of files, with what shows that a file has changed."""

    def config(self, run: RunFolder) -> tuple[dict[str, Any], str | None]:
        """The settings of a run, and the reason if they cannot be read."""
        file = run.folder / CONFIG_FILE
        if file_size(file) < 0 and file_size(run.folder / BOARD_CONFIG) >= 0:
            file = run.folder / BOARD_CONFIG
        try:
            return self._read(file, _config_of)
        except OSError as error:
            return {}, f"{CONFIG_FILE} cannot be read ({error.strerror})"

    def summary(self, run: RunFolder) -> dict[str, Any]:
        """A row of the list of runs, as specified in docs/board.md."""
        config, problem = self.config(run)
        command = command_of(config)
        serves = problem is None and _is_service(config)
        is_foreign = problem is None and command is None and not serves
        if is_foreign:
            problem = f"{CONFIG_FILE} is not of a run of hybrid-rlhf"
        line, metrics_problem = self._last_line(run)
        step, values = (None, {}) if line is None else (int(line["step"]), line)
        problem = problem or metrics_problem
        has_ended = file_size(run.folder / FINISHED_FILE) >= 0
        owner = None if has_ended else lock_owner(run.folder)
        if is_foreign:
            state = "foreign"
        elif self.is_starting(run.id) or is_held(run.folder, owner) or _beats_elsewhere(run.folder, owner):
            state = "running"
            problem = None if step is None else problem
        elif owner is not None:
            state = "killed"
            problem = self._logged_error(run) or _death(run.folder, owner)
        else:
            error = None if has_ended else self._logged_error(run)
            state = "broken" if error or problem else "finished" if has_ended else "stopped"
            if state == "broken":
                printed = _printed_error(run.folder)
                is_newer = (_changed(run.folder / BOARD_LOG) or 0.0) > (_changed(run.folder / LOG_FILE) or 0.0)
                problem = (printed or error if is_newer else error or printed) or problem
        most = _text_or_number(config, "train", "max_steps")
        return {
            "id": run.id,
            "name": run.name,
            "title": read_marks(run.folder).get("title"),
            "folder": str(run.folder),
            "state": state,
            "problem": problem,
            "step": step or 0,
            "last": {name: finite(number(values[name])) for name in _LAST_VALUES if name in values},
            "total_steps": most if isinstance(most, int) and most > 0 else step if has_ended else None,
            "command": command,
            "algorithm": _SERVICE if serves else _text_or_number(config, "algorithm", "name"),
            "model": _text_or_number(config, "path") if serves else _text_or_number(config, "model", "path"),
            "seed": _text_or_number(config, "seed"),
            "started_seconds": _changed(run.folder / CONFIG_FILE),
            "updated_seconds": max(_changed(run.folder / name) or 0.0 for name in _WRITTEN) or None,
            "step_seconds": finite(number(values.get("time/step_seconds"))),
            "has_samples": file_size(run.folder / SAMPLES_FILE) > 0,
            "samples_problem": file_problem(run.folder / SAMPLES_FILE),
            "has_tokens": next((run.folder / "tokens").glob("step_*.safetensors"), None) is not None,
        }

    def _last_line(self, run: RunFolder) -> tuple[dict[str, Any] | None, str | None]:
        """The last line of the metrics, or their problem; read again when the file changes."""
        file = run.folder / METRICS_FILE
        if file_size(file) < 0:
            return None, file_problem(file) or f"{METRICS_FILE} is missing: the run ended before its first step"
        try:
            return self._read(file, _line_of)
        except OSError as error:
            return None, f"{METRICS_FILE} cannot be read ({error.strerror})"

    def _logged_error(self, run: RunFolder) -> str | None:
        """The error that ended a run; read again when its log changes."""
        try:
            return self._read(run.folder / LOG_FILE, _error_of)[1]
        except OSError:
            return None

    def _read(self, file: Path, read: Callable[[Path], tuple[ContentT, str | None]]) -> tuple[ContentT, str | None]:
        status = file.lstat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = self._known.get(file)
        if known is None or known[0] != stamp:
            self._known[file] = known = (stamp, read(file))
        return known[1]


def _config_of(file: Path) -> tuple[dict[str, Any], str | None]:
    try:
        return read_run_config(file), None
    except OSError as error:
        return {}, f"{CONFIG_FILE}: {error.strerror}"
    except UserError as error:
        return {}, str(error)


def _line_of(file: Path) -> tuple[dict[str, Any] | None, str | None]:
    line = last_line(file)
    return line, f"{METRICS_FILE} has no complete last line with a step" if line is None else None


def command_of(config: dict[str, Any]) -> str | None:
    """The command that a config belongs to, by its keys; None if it belongs to none."""
    fields = {name: {field.name for field in dataclasses.fields(kind)} for name, kind in COMMANDS.items()}
    keys = set(map(str, config))
    name = max(fields, key=lambda name: len(keys & fields[name]) - len(keys - fields[name]))
    return name if len(keys & fields[name]) >= _FEWEST_KEYS else None


def _is_service(config: dict[str, Any]) -> bool:
    """Return True for the settings of a training server."""
    return {"path", "output_dir", "api_keys", "micro_batch_tokens"} <= config.keys()


def lock_owner(folder: Path) -> LockOwner | None:
    """The process in the lock file of a run, alive or not; None if the run has released the lock."""
    try:
        with open_regular(folder / LOCK_FILE) as file:
            return LockOwner.read(file.read(1000).decode(errors="replace"))
    except OSError:
        return None


def is_held(folder: Path, owner: LockOwner | None) -> bool:
    """Return True if the owner of a lock is alive on this host; also if its open files are not readable for this user.

    The lock itself is not acquired, as a run that starts at that moment would be refused.
    """
    if owner is None or not owner.is_alive():
        return False
    try:
        return owner.has_open(folder)
    except PermissionError:
        return True
    except OSError:
        return False


def holding_process(run: RunFolder) -> psutil.Process | None:
    """The process of this host that holds the lock of a run, verified by start time and inode; None if there is none.

    The process is identified before the verification, and psutil refuses to signal a later process with the same id.

    Raises:
        UserError: if a process may hold the lock, but its open files cannot be read.
    """
    owner = lock_owner(run.folder)
    if owner is None or owner.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(owner.pid)
        return process if owner.is_alive() and owner.has_open(run.folder) else None
    except PermissionError:
        raise UserError(
            f"a run is stopped by its process, which must be seen to hold {LOCK_FILE}, the open files of process "
            f"{owner.pid} of {run.name} cannot be read: stop it as the user who started it"
        ) from None
    except (OSError, psutil.Error):
        return None


def printed_text(folder: Path) -> tuple[str | None, str | None]:
    """The end of a run's output as a terminal shows it, and its file: that of the board's process, or else the log."""
    found = ((_end_of(folder / name), name) for name in (BOARD_LOG, LOG_FILE))
    return next((text_and_name for text_and_name in found if text_and_name[0] is not None), (None, None))


def _end_of(path: Path) -> str | None:
    """The end of a text file, as a terminal shows it; None without one."""
    try:
        with open_regular(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - _PRINTED_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    if start:
        first, _, rest = text.partition("\n")
        text = rest or first  # a progress bar may be longer than the part that is read
    return "\n".join(line.removesuffix("\r").rpartition("\r")[2] for line in text.split("\n"))


def _printed_error(folder: Path) -> str | None:
    """The error that ended a run that the board started; None without one."""
    lines = (_end_of(folder / BOARD_LOG) or "").splitlines()
    return next((line[:1000] for line in reversed(lines) if line.startswith("error: ")), None)


def _error_of(log: Path) -> tuple[None, str | None]:
    """The error in the last line of a log."""
    lines = (_end_of(log) or "").splitlines()
    error = _ERROR_LINE.fullmatch(lines[-1]) if lines else None
    return None, None if error is None else error[1][:1000]


def _beats_elsewhere(folder: Path, owner: LockOwner | None) -> bool:
    """Return True if a run on another host has written something recently."""
    if owner is None or owner.host == socket.gethostname():
        return False
    written = max(_changed(folder / name) or 0.0 for name in (METRICS_FILE, CONFIG_FILE))
    return time.time() - written < _SILENT_SECONDS


def _death(folder: Path, owner: LockOwner) -> str:
    """A description of a run whose process is gone without releasing its lock."""
    written = _changed(folder / METRICS_FILE)
    last = time.strftime("its last line is from %Y-%m-%d %H:%M:%S %z", time.localtime(written))
    return (
        f"process {owner.pid} on {owner.host} is gone (SIGKILL, out of memory, a crash), "
        f"{last if written else 'it has written no line of metrics'}"
    )


def _changed(file: Path) -> float | None:
    """Time of the last change of a file, in seconds since 1970; None if it does not exist."""
    try:
        return file.lstat().st_mtime
    except OSError:
        return None


def _text_or_number(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, str | int) and not isinstance(config, bool) else None
