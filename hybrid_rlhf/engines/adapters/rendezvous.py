"""Functions that run in turn, each in a thread of its own, and meet where they need something that is computed for
several at once.

Only one of them runs at a time, so the order of everything is the same in each start, and code that is not made for
threads works. A function runs until it waits for a call or ends; then the next one runs. Once all that have not ended
wait, the thread that has started them computes some of the calls, and these functions go on. On several ranks the same
functions run in the same order (runtime/agreement.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from hybrid_rlhf.runtime.agreement import RankAgreement


@dataclass(eq=False)
class Call:
    """What a function waits for."""

    function: str
    """Name of the function."""
    argument: Any
    result: Any = None
    error: BaseException | None = None
    """Raised in the function, in place of a result."""
    _answered: threading.Event = field(default_factory=threading.Event)


class Rendezvous:
    """Runs functions and computes what they wait for."""

    def __init__(self, agreement: RankAgreement) -> None:
        """Take the meetings of the ranks, each of which has the same functions."""
        self._agreement = agreement
        self._stops: SimpleQueue[Call | None] = SimpleQueue()
        """The call for which the running function has stopped; None: it has ended."""
        self._ends: dict[str, BaseException | None] = {}

    def wait(self, argument: Any, kind: str) -> Any:
        """The result of a call; called by a function, in its thread.

        Args:
            argument: what it needs, on this rank.
            kind: what it needs, in words that are the same on all ranks.

        Raises:
            Exception: that of the computation; or the error with which the function has ended on another rank.
        """
        self._agreement.meet(f"waits for {kind}")
        call = Call(threading.current_thread().name, argument)
        self._stops.put(call)
        call._answered.wait()
        if call.error is not None:
            raise call.error
        return call.result

    def run(
        self,
        functions: Mapping[str, Callable[[], None]],
        compute: Callable[[Sequence[Call]], Collection[Call]],
    ) -> dict[str, BaseException | None]:
        """Run functions to their ends.

        Args:
            functions: by the name of the thread.
            compute: answers some of the calls for which all functions that have not ended wait, in the order of
                the functions, and returns these; on all ranks those of the same functions. An exception of it is raised
                in all functions and here.

        Returns:
            the exception with which each function has ended, here or on another rank; None: it has returned.
        """
        waiting: dict[str, Call] = {}
        try:
            for name, function in functions.items():
                threading.Thread(target=self._run, args=(name, function), name=name, daemon=True).start()
                self._await_stop(waiting)
            while waiting:
                for call in compute([waiting[name] for name in functions if name in waiting]):
                    self._resume(waiting, call)
        except BaseException as error:
            while waiting:
                call = next(iter(waiting.values()))
                call.error = error
                self._resume(waiting, call)
            raise
        return {name: self._ends[name] for name in functions}

    def _run(self, name: str, function: Callable[[], None]) -> None:
        error = None
        try:
            function()
        except BaseException as raised:  # noqa: BLE001 - the caller of `run` decides
            error = raised
        failure = error if isinstance(error, Exception) else None
        try:
            self._agreement.meet("ends", failure)
        except Exception as raised:  # noqa: BLE001 - likewise
            error = failure or raised
        self._ends[name] = error
        self._stops.put(None)

    def _resume(self, waiting: dict[str, Call], call: Call) -> None:
        """Let a function go on, and wait until it stops."""
        del waiting[call.function]
        call._answered.set()
        self._await_stop(waiting)

    def _await_stop(self, waiting: dict[str, Call]) -> None:
        call = self._stops.get()
        if call is not None:
            waiting[call.function] = call
