"""Starts, stops and resumes runs, as commands of this package.

A run is a separate process group that outlives the board. Its settings (`board.yaml`), its number of processes
(`board.json`) and its output (`board.log`) are in its folder.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess  # for types  # nosec B404
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hybrid_rlhf.board.processes.commands import command_line, start_process
from hybrid_rlhf.board.processes.form import config_type, read_form
from hybrid_rlhf.board.runs.folders import BOARD_CONFIG, RunFolder, RunFolders, run_id
from hybrid_rlhf.board.runs.summary import BOARD_LOG, RunSummaries, holding_process
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import config_tree
from hybrid_rlhf.runtime.command_line import save_config
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.names import CHECKPOINTS, CONFIG_FILE, MANIFEST
from hybrid_rlhf.runtime.files.reading import open_regular
from hybrid_rlhf.runtime.openmp import shared_cores

_LAUNCH = "board.json"
"""File with the number of processes of a run that the board started."""


class Training:
    """Starts and stops runs."""

    def __init__(self, folders: RunFolders, summaries: RunSummaries) -> None:
        """Take the board's folders and the states of runs."""
        self._folders = folders
        self._summaries = summaries
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        summaries.is_starting = self.is_alive

    def start(self, command: str, values: Mapping[str, Any], folder: Path | None = None) -> str:
        """Start a run and return its id.

        Args:
            command: a training command.
            values: of its form. Without an output_dir, see `unused_folder`.
            folder: of the run, which has its data already; None: a new one, output_dir.

        Raises:
            UserError: for a wrong value, or an output_dir that is outside of the board's folders or not empty.
        """
        form = read_form(command, {"output_dir": str(folder or self.unused_folder(command)), **values})
        with self._lock:
            folder = folder or self._folders.make(form.config.output_dir)
            settings = folder / BOARD_CONFIG
            save_config(dataclasses.replace(form.config, output_dir=str(folder)), settings)
            return self._launch(folder, command_line(command, settings), form.processes)

    def unused_folder(self, command: str) -> Path:
        """A folder for a run without output_dir: in the first of the board's folders, with the command's default
        name."""
        default = config_tree(config_type(command)).all_keys()["output_dir"].default
        return self._folders.unused(Path(default).name)

    def stop(self, run: RunFolder) -> None:
        """Ask a run to save and stop.

        Raises:
            UserError: if it does not run, runs on another host, belongs to another user, or if its process cannot be
                verified.
        """
        state = self._summaries.summary(run)["state"]
        if state != "running":
            raise UserError(f"{run.name} does not run, it is {state}: only a running run can be stopped")
        process = holding_process(run)
        try:
            if process is not None:
                process.terminate()
            elif self.is_alive(run.id):
                self._processes[run.id].terminate()
            else:
                raise UserError(f"a run is stopped on its machine, {run.name} does not run here: stop it there")
        except psutil.AccessDenied:
            raise UserError(f"{run.name} cannot be stopped by this user: ask the user who started it") from None
        except psutil.NoSuchProcess:
            return  # it has ended in the meantime

    def resume(self, run: RunFolder) -> None:
        """Resume a run from its last complete checkpoint, or from the start without one, on the same number of
        processes.

        Raises:
            UserError: if it is running, has finished, or is not a run of this package.
        """
        with self._lock:
            summary = self._summaries.summary(run)
            if summary["command"] is None:
                raise UserError(f"a training run can be resumed, {run.name} is none: start it with its own command")
            if summary["state"] not in ("stopped", "killed", "broken"):
                raise UserError(f"a run can be resumed after it was stopped, {run.name} is {summary['state']}")
            settings = run.folder / CONFIG_FILE
            if not settings.exists():
                settings = run.folder / BOARD_CONFIG
            words = ("--resume", "auto", "--output_dir", str(run.folder))
            self._launch(run.folder, command_line(summary["command"], settings, *words), world_size(run.folder))

    def is_alive(self, run_id: str) -> bool:
        """Return True while a process that this board started for a run is alive."""
        process = self._processes.get(run_id)
        return process is not None and process.poll() is None

    def _launch(self, folder: Path, command: list[str], processes: int) -> str:
        write_whole(folder / _LAUNCH, json.dumps({"num_processes": processes}))
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command = [sys.executable, *launcher, *command[1:]]
        with (folder / BOARD_LOG).open("ab") as log:
            process = start_process(
                command, shared_cores(processes), stdout=log, stderr=subprocess.STDOUT, cwd=Path.cwd()
            )
        name = run_id(folder)
        self._processes[name] = process
        self._folders.scan()
        return name


def world_size(folder: Path) -> int:
    """Number of ranks of the newest checkpoint, or else of the board's start of the run; 1 if neither is known."""
    manifests = sorted((folder / CHECKPOINTS).glob(f"step_*/{MANIFEST}"), key=lambda file: file.stat().st_mtime)
    counts = [_value(file, "content", "world_size") for file in manifests[-1:]]
    counts.append(_value(folder / _LAUNCH, "num_processes"))
    return next((ranks for ranks in counts if isinstance(ranks, int) and 1 <= ranks <= 1024), 1)


def _value(file: Path, *keys: str) -> Any:
    """A value in a JSON file; None if it cannot be read, as the run itself reports a broken checkpoint."""
    try:
        with open_regular(file) as opened:
            value = json.load(opened)
        for key in keys:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value
