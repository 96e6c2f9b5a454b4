"""Ends a run that hangs or has lost a rank, and reports which rank is the cause; a thread on every rank.

Without it, a rank that waits for a dead or stuck rank blocks until the timeout of its collective, without a report of
the cause. The thread knows the current phase of its rank and reads the heartbeat channel. faulthandler's timer, a C
thread, ends the process if no Python thread can run any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.liveness.heartbeats import HeartbeatChannel
from hybrid_rlhf.runtime.liveness.stall_report import RankReport, diagnose, report_rank
from hybrid_rlhf.runtime.observability.sinks.sink import EndState
from hybrid_rlhf.runtime.world import World

STACKS = "stacks"
EXIT_CODE = 70
"""Exit code of a rank that ends because of another rank or of a phase over its time limit; EX_SOFTWARE of
sysexits.h."""
_POLL_SECONDS = 1.0
_REPORT_SECONDS = 5.0
"""Time for which rank 0 waits for the reports of the other ranks."""
_DIAGNOSIS_SECONDS = 8.0
"""Time for which the other ranks then wait for the diagnosis of rank 0."""
_MARGIN_SECONDS = 12.0
"""Time after the limit for which this thread may be unable to run before the C thread ends the process."""
_GRACE_SECONDS = 2.0
"""Time for which a rank continues after another has failed: it usually has the same error and reports it itself."""
_EXIT_NOTICE_SECONDS = 5.0
_ON_END_SECONDS = 10.0
"""Time for the report and the last message of a run that ends here."""


class Watchdog:
    """Watches this rank inside its `with` block.

    `beat` sets the current phase. A rank that leaves the block by an exception ends the other ranks too.
    """

    def __init__(self, world: World, folder: Path, *, limit_seconds: float) -> None:
        """Connect the ranks; every rank calls.

        Args:
            world: all ranks of the run.
            folder: run folder; stacks are written to its `stacks` folder.
            limit_seconds: longest duration of a phase; 0: unlimited.
        """
        self.step = 0
        """The current or next step of the loop, for the names of phases."""
        self.on_end: Callable[[EndState, str], object] | None = None
        """Called on rank 0, for a limited time, before this thread ends the process."""
        self._world = world
        self._limit = limit_seconds
        self._process = os.getpid()
        self._folder = folder / STACKS
        self._beat = ("start", time.monotonic())
        self._is_over = False
        self._error: BaseException | None = None
        self._stalled_since: float | None = None
        self._reports: dict[int, RankReport] = {}
        self._failure: tuple[float, str, int] | None = None
        """Time at which to end because another rank has failed, its error and the exit code."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (self._folder / f"rank_{world.rank:05}.txt").open("w")
        self._channel = HeartbeatChannel(world)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def phase(self) -> str:
        """Current phase of this rank, such as `generation of step 12`."""
        return self._beat[0]

    def beat(self, phase: str) -> None:
        """Begin a phase, or restart the time of the current one. Takes about a microsecond."""
        self._beat = (phase, time.monotonic())

    def enter_phase(self, name: str) -> None:
        """Begin a phase of the current step."""
        self.beat(f"{name} of step {self.step}")

    def begin_step(self, step: int) -> None:
        """Begin a step of the loop."""
        self.step = step
        self.beat(f"step {step}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the exit notice, with the error if there is one."""
        if os.getpid() != self._process:
            return  # in a forked child; the run continues
        self._error = error
        self._is_over = True
        self._channel.wake()
        self._thread.join()
        self._channel.close()
        self._stacks.close()
        file = Path(self._stacks.name)
        if not file.stat().st_size:
            file.unlink()
            with contextlib.suppress(OSError):  # other ranks have files there, or removed it first
                self._folder.rmdir()

    def _watch(self) -> None:
        try:
            while not self._is_over:
                self._poll()
            # A collective raises RuntimeError when another rank has died: wait for the notice of that death.
            until = time.monotonic() + 2 * _GRACE_SECONDS
            while isinstance(self._error, RuntimeError) and time.monotonic() < until and self._channel.peers:
                self._poll()
            self._send_exit_notice()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _send_exit_notice(self) -> None:
        error = self._error
        # all ranks stop together after SIGTERM
        if error is None or isinstance(error, SystemExit):
            self._channel.send({"exit": True})
            return
        is_users = isinstance(error, UserError)
        text = str(error) if is_users else f"{type(error).__name__}: {error}"
        reason = f"{self._world.name} stopped: {text[:2000]}"
        code = 2 if is_users else EXIT_CODE
        self._channel.send({"exit": True, "reason": reason, "code": code, "grace_seconds": _GRACE_SECONDS})
        # Only the first rank of a host prints a user's error: give rank 0 time to print that of another host.
        until = time.monotonic() + _EXIT_NOTICE_SECONDS
        while is_users and self._channel.peers and time.monotonic() < until:
            self._channel.receive(until - time.monotonic())

    def _poll(self) -> None:
        """Receive messages for a short time, then check the time limits."""
        if self._limit:
            faulthandler.dump_traceback_later(self._limit + _MARGIN_SECONDS, exit=True, file=self._stacks)
        for rank, message in self._channel.receive(_POLL_SECONDS):
            if message is None:
                who = f"rank {rank} ({self._channel.hosts[rank]})"
                self._end(f"{who} died in {self.phase}; resume from the last checkpoint with --resume auto")
            elif "stalled" in message:
                self._reports[rank] = RankReport(**message["stalled"])
            elif "reason" in message and self._failure is None:
                until = time.monotonic() + message["grace_seconds"]
                self._failure = (until, message["reason"], message["code"])
        now = time.monotonic()
        if self._failure is not None and now >= self._failure[0]:
            self._end(*self._failure[1:], reported=True)
        if self._reports or (self._limit and now - self._beat[1] > self._limit):
            self._report_stall()

    def _report_stall(self) -> None:
        """Report this rank's activity on stderr and to the other ranks; end the run when rank 0 has the reports of all
        ranks, or has waited long enough."""
        world = self._world
        if self._stalled_since is None:
            self._stalled_since = time.monotonic()
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            (phase, since) = self._beat
            mine = self._reports[world.rank] = report_rank(world.rank, phase, time.monotonic() - since)
            _write_stderr(f"{world.name}: {mine}")
            self._channel.send({"stalled": asdict(mine)})
        peers = self._channel.peers
        silent = {*peers} - self._reports.keys()
        waited_seconds = time.monotonic() - self._stalled_since
        limit_seconds, awaited = (_REPORT_SECONDS, silent) if world.is_main else (_DIAGNOSIS_SECONDS, peers)
        if waited_seconds > limit_seconds or not awaited:
            reports = [self._reports[rank] for rank in sorted(self._reports)]
            self._end(
                f"{diagnose(reports, silent=silent, hosts=self._channel.hosts)}; stacks of all ranks: {self._folder}/; "
                "raise faults.phase_timeout_seconds if this duration is expected"
            )

    def _end(self, text: str, code: int = EXIT_CODE, *, reported: bool = False) -> NoReturn:
        """Print the reason and end this process at once: its main thread may never return.

        The first rank of each host prints it. Rank 1 prints it too on the host of rank 0, which may be dead, unless
        the reason came from another rank.
        """
        world = self._world
        if world.is_local_main or (not reported and world.rank == world.local_rank == 1):
            _write_stderr(f"error: {text}")
        if world.is_main:
            self._channel.send({"exit": True, "reason": text, "code": code, "grace_seconds": 0})
            self._call_on_end(text)
        os._exit(code)

    def _call_on_end(self, text: str) -> None:
        """Call `on_end` in a separate thread, as it may wait for a lock that the main thread holds."""
        if self.on_end is not None:
            end_state: EndState = "failed" if self._stalled_since is None else "stalled"
            call = threading.Thread(target=self.on_end, args=(end_state, text), daemon=True)
            call.start()
            call.join(_ON_END_SECONDS)


def _write_stderr(line: str) -> None:
    os.write(2, f"{line}\n".encode())  # not through sys.stderr: the main thread may hold its lock


# A forked child does not inherit faulthandler's thread and would wait for it at exit; the next poll starts it again.
os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
