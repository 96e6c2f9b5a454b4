"""Short commands with a result, one at a time, as each needs most of the machine.

A command prints JSON on the last line of its standard output: `{"error": ...}` or its result. The lines of its standard
error are its progress.
"""

from __future__ import annotations

import contextlib
import subprocess  # for types  # nosec B404
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from hybrid_rlhf.board.events import EventHub
from hybrid_rlhf.board.processes.commands import end_process, json_command, read_result
from hybrid_rlhf.configs.errors import UserError

_COMMAND = "replay"
"""Replays, branches and rescores: its settings say which."""
_MOST_KEPT = 200
_MOST_WAITING = 20
_LONGEST_RESULT = 64 * 2**20
_PROGRESS_SECONDS = 0.3


class UnknownJob(UserError):
    """There is no job with this id."""


@dataclass
class CommandJob:
    """A waiting, running or ended command."""

    settings: Mapping[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    state: str = "running"
    progress: str = "waiting"
    error: str | None = None
    result: Any = None
    ended: Future[None] = field(default_factory=Future)

    def shown(self) -> dict[str, Any]:
        """GET /api/jobs/JOB."""
        return {"state": self.state, "progress": self.progress, "error": self.error, "result": self.result}


class Jobs:
    """Runs commands one after the other."""

    def __init__(self, hub: EventHub) -> None:
        """Take the hub that publishes progress."""
        self._hub = hub
        self._jobs: OrderedDict[str, CommandJob] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="board-jobs")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self, settings: Mapping[str, Any]) -> CommandJob:
        """Queue a replay with its nested settings.

        Raises:
            UserError: if too many jobs wait.
        """
        job = CommandJob(settings)
        with self._lock:
            if self._closed or sum(queued.state == "running" for queued in self._jobs.values()) >= _MOST_WAITING:
                raise UserError(f"at most {_MOST_WAITING} jobs wait, these do: try again when some have ended")
            self._jobs[job.id] = job
            for ended in [queued.id for queued in self._jobs.values() if queued.state != "running"][:-_MOST_KEPT]:
                del self._jobs[ended]
            self._worker.submit(self._run, job)
        return job

    def get(self, job_id: str) -> CommandJob:
        """The job with an id.

        Raises:
            UnknownJob: if there is no job with this id.
        """
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            raise UnknownJob(f"job must be the id of a job of this board, got {job_id[:40]!r}: start it again")
        return job

    def close(self) -> None:
        """End the running command; waiting ones are not started."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            end_process(process)
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: CommandJob) -> None:
        try:
            job.result = self._result(job)
            job.state = "done"
        except UserError as error:
            job.state = "failed"
            job.error = str(error)
        except Exception as error:
            job.state = "failed"
            job.error = f"{_COMMAND} could not be run ({type(error).__name__}: {error})"
            raise
        finally:
            job.ended.set_result(None)
            self._publish(job)

    def _result(self, job: CommandJob) -> Any:
        with contextlib.ExitStack() as stack:
            with self._lock:
                if self._closed:
                    raise UserError("the board ends: start the job again")
                process = self._process = stack.enter_context(json_command(_COMMAND, job.settings))
            assert process.stdout is not None and process.stderr is not None
            progress = threading.Thread(target=self._follow, args=(job, process.stderr), daemon=True)
            progress.start()
            output = process.stdout.read(_LONGEST_RESULT)
            code = process.wait()
            progress.join(timeout=1)
        return read_result(output, f"{_COMMAND} ended with exit code {code} and no result: {job.progress}")

    def _follow(self, job: CommandJob, lines: BinaryIO) -> None:
        """Make the newest line of the command its progress."""
        published = 0.0
        for line in lines:
            if text := line.decode(errors="replace").strip():
                job.progress = text[:500]
            if time.monotonic() - published > _PROGRESS_SECONDS:
                published = time.monotonic()
                self._publish(job)

    def _publish(self, job: CommandJob) -> None:
        self._hub.publish("job", {"job": job.id, "state": job.state, "progress": job.progress})
