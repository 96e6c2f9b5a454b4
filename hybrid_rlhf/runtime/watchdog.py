"""Ends a run that hangs or has lost a rank, with words; a thread on every rank.

Without it a rank that waits for a dead or stuck one waits for as long as its collective may, and nothing says for whom.
The thread knows the phase that its rank is in, listens to the lifeline, and has the interpreter's own timer
(faulthandler, a C thread) end the process where no Python thread can run any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.lateness import Report, report, verdict
from hybrid_rlhf.runtime.lifeline import Lifeline, Message
from hybrid_rlhf.runtime.world import World

STACKS = "stacks"
EXIT_CODE = 70
"""Of a rank that ends for another's sake, or for a phase that is too long; EX_SOFTWARE of sysexits.h."""
_TICK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
"""How long rank 0 waits for the ranks to say what they are doing."""
_VERDICT_SECONDS = 8.0
"""How long the others then wait for what rank 0 makes of it."""
_MARGIN_SECONDS = 12.0
"""How long this thread may be without a turn, past the limit, until the C thread ends the process."""
_GRACE_SECONDS = 2.0
"""How long a rank may go on after another has failed: mostly it meets the same mistake and says so itself."""
_FAREWELL_SECONDS = 5.0


class Watchdog:
    """Watches this rank from `with` to its end.

    A phase is what `beat` last said. A rank that leaves the block by an exception ends the others too.
    """

    def __init__(self, world: World, folder: Path, *, limit_seconds: float) -> None:
        """Connect the ranks; every rank calls.

        Args:
            world: all ranks of the run.
            folder: of the run; stacks are written to its stacks folder.
            limit_seconds: longest phase; 0: any.
        """
        self.step = 0
        """The step of the loop that runs, or runs next; for the names of phases."""
        self._world, self._limit, self._process = world, limit_seconds, os.getpid()
        self._folder = folder / STACKS
        self._beat = ("start", time.monotonic())
        self._is_over = False
        self._error: BaseException | None = None
        self._late_since: float | None = None
        self._reports: dict[int, Report] = {}
        self._news: tuple[float, str, int] | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (self._folder / f"rank_{world.rank:05}.txt").open("w")
        self._lifeline = Lifeline(world)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def phase(self) -> str:
        """What this rank is at, as `generation of step 12`."""
        return self._beat[0]

    def beat(self, phase: str) -> None:
        """A new phase begins. About a microsecond."""
        self._beat = (phase, time.monotonic())

    def enter(self, name: str) -> None:
        """A new phase of the step that runs begins."""
        self.beat(f"{name} of step {self.step}")

    def begin(self, step: int) -> None:
        """The loop comes to a step."""
        self.step = step
        self.beat(f"step {step}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take leave of the others, with the error if there is one."""
        if os.getpid() != self._process:
            return  # a forked child that leaves the block; the run goes on
        self._error, self._is_over = error, True
        self._lifeline.wake()
        self._thread.join()
        self._lifeline.close()
        self._stacks.close()
        file = Path(self._stacks.name)
        if not file.stat().st_size:
            file.unlink()
            with contextlib.suppress(OSError):  # others have theirs there, or were quicker
                self._folder.rmdir()

    def _watch(self) -> None:
        try:
            while not self._is_over:
                self._turn()
            # A collective fails with a RuntimeError where another rank has died: its death is the news then.
            until = time.monotonic() + 2 * _GRACE_SECONDS
            while isinstance(self._error, RuntimeError) and time.monotonic() < until and self._lifeline.peers:
                self._turn()
            self._take_leave(self._error)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _take_leave(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, SystemExit):  # all ranks stop together, as SIGTERM asked
            self._lifeline.goodbye({})
            return
        code = 2 if isinstance(error, UserError) else EXIT_CODE
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self._lifeline.goodbye({"failed": text[:2000], "rank": self._world.rank, "code": code})
        # A user's mistake is told by the first rank of a host alone: time for rank 0 to tell that of another.
        until = time.monotonic() + _FAREWELL_SECONDS
        while code == 2 and self._lifeline.peers and time.monotonic() < until:
            self._lifeline.receive(until - time.monotonic())

    def _turn(self) -> None:
        """Listen for a while, then look at the time."""
        tick = min(_TICK_SECONDS, self._limit / 10) if self._limit else _TICK_SECONDS
        if self._limit:
            faulthandler.dump_traceback_later(self._limit + _MARGIN_SECONDS, exit=True, file=self._stacks)
        for rank, message in self._lifeline.receive(tick):
            if message is None:
                self._mourn(rank)
            else:
                self._hear(message)
        now = time.monotonic()
        if self._limit and now - self._beat[1] > self._limit:
            self._tell_what_it_does()
        if self._late_since is not None:
            self._judge(now - self._late_since)
        if self._news is not None and now > self._news[0]:
            self._end(*self._news[1:], told=True)

    def _hear(self, message: Message) -> None:
        if "verdict" in message:
            self._end(message["verdict"], message["code"], told=True)
        elif "late" in message:
            one = Report(**message["late"])
            self._reports[one.rank] = one
            self._tell_what_it_does()
        elif "failed" in message and self._news is None:
            text = f"rank {message['rank']} stopped: {message['failed']}"
            self._news = (time.monotonic() + _GRACE_SECONDS, text, message["code"])

    def _tell_what_it_does(self) -> None:
        """Write the stacks and say in a line what this rank does: to the user and to the other ranks; once."""
        if self._late_since is not None:
            return
        self._late_since = time.monotonic()
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        rank, (phase, since) = self._world.rank, self._beat
        mine = self._reports[rank] = report(rank, phase, time.monotonic() - since)
        _say(f"rank {rank}: {mine}")
        self._lifeline.send({"late": mine.to_json()})

    def _judge(self, waited_seconds: float) -> None:
        """End the run when rank 0 has heard from all, or enough time has passed."""
        is_main, peers = self._world.is_main, self._lifeline.peers
        silent = {*peers} - self._reports.keys()
        if waited_seconds > (_ANSWER_SECONDS if is_main else _VERDICT_SECONDS) or not (silent if is_main else peers):
            reports = [self._reports[rank] for rank in sorted(self._reports)]
            self._end(
                f"{verdict(reports, silent=silent)}; stacks of all ranks: {self._folder}/; "
                "raise faults.phase_timeout_seconds if that is normal"
            )

    def _mourn(self, rank: int) -> NoReturn:
        host = self._lifeline.hosts[rank]
        self._end(f"rank {rank} ({host}) died in {self.phase}; go on from the last checkpoint with --resume auto")

    def _end(self, text: str, code: int = EXIT_CODE, *, told: bool = False) -> NoReturn:
        """Say why, and end this process at once: its main thread may never come back.

        One rank a host speaks; where rank 0 cannot, the one after it does, unless another has told it why.
        """
        world = self._world
        if world.is_local_main or (not told and world.rank == world.local_rank == 1):
            _say(f"error: {text}")
        if world.is_main:
            self._lifeline.goodbye({"verdict": text, "code": code})
        os._exit(code)


def _say(line: str) -> None:
    os.write(2, f"{line}\n".encode())  # not by sys.stderr: the main thread may hold its lock


# A forked child has no copy of faulthandler's thread and would wait for it at its end; the next turn starts it again.
os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
