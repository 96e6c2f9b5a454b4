"""Sends changes in the run folders to all pages as server-sent events.

Files are polled every half second, because the kernel sends no notifications for network file systems, where clusters
have their run folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from hybrid_rlhf.board.runs.folders import RunFolder, RunFolders
from hybrid_rlhf.board.runs.reading import file_size, finite, last_line, number
from hybrid_rlhf.board.runs.summary import is_held, lock_owner
from hybrid_rlhf.runtime.files.names import CONFIG_FILE, FINISHED_FILE, METRICS_FILE, SAMPLES_FILE
from hybrid_rlhf.runtime.observability.logs import logger

POLL_SECONDS = 0.5
_SCAN_SECONDS = 2.0
_ALIVE_SECONDS = 15.0
"""Time between two comments on a silent stream, so that proxies keep it open."""
_MOST_WAITING = 1000
"""Number of events that wait for a page; a page that does not read them is disconnected, and connects again."""


class EventHub:
    """Sends events from any thread to all streams."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def open(self) -> None:
        """Start; called on the event loop of the server."""
        self._loop = asyncio.get_running_loop()

    def publish(self, event: str, content: dict[str, Any]) -> None:
        """Send an event."""
        text = f"event: {event}\ndata: {json.dumps(content, allow_nan=False)}\n\n"
        if self._loop is not None and not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._send, text)

    def close(self) -> None:
        """End all streams; may be called from a signal handler."""
        self._closed = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._send, None)

    async def stream(self) -> AsyncIterator[str]:
        """The events of one page, until `close`."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield ": open\n\n"
            while not self._closed:
                try:
                    text = await asyncio.wait_for(queue.get(), _ALIVE_SECONDS)
                except TimeoutError:
                    text = ": alive\n\n"
                if text is None:
                    return
                yield text
        finally:
            self._queues.discard(queue)

    def _send(self, text: str | None) -> None:
        for queue in self._queues:
            queue.put_nowait(text if queue.qsize() < _MOST_WAITING else None)


class Watcher:
    """A thread that polls the files of all runs."""

    def __init__(
        self, folders: RunFolders, hub: EventHub, index_on: Callable[[], bool], is_alive: Callable[[str], bool]
    ) -> None:
        """Take the folders to watch.

        Args:
            folders: the runs.
            hub: hub that sends the events.
            index_on: indexes new samples for a short time, and returns true if there are more.
            is_alive: returns true while a process that the board started for a run is alive, which may be a moment
                longer than its lock is held.
        """
        self._folders = folders
        self._hub = hub
        self._index_on = index_on
        self._is_alive = is_alive
        self._sizes: dict[str, tuple[int, int]] = {}
        self._states: dict[str, tuple[bool, ...]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="board-watcher", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop to watch, and wait for the thread."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        scanned = 0.0
        while not self._ended.is_set():
            start = time.monotonic()
            has_more = False
            try:
                if start - scanned > _SCAN_SECONDS:
                    scanned = start
                    if self._look_for_states(self._folders.scan()):
                        self._hub.publish("runs", {})
                for run in self._folders.all():
                    self._look_at(run)
                has_more = self._index_on()
            except Exception:  # the board continues; the folders may be missing temporarily
                logger.exception("the board could not look at its folders")
            self._ended.wait(0.0 if has_more else max(0.0, POLL_SECONDS - (time.monotonic() - start)))

    def _look_at(self, run: RunFolder) -> None:
        """Publish the lines that were appended to a run's files."""
        before = self._sizes.get(run.id)
        now = (file_size(run.folder / METRICS_FILE), file_size(run.folder / SAMPLES_FILE))
        self._sizes[run.id] = now
        if before is None or before == now:
            return
        with contextlib.suppress(OSError):
            if before[0] != now[0] and (line := last_line(run.folder / METRICS_FILE)) is not None:
                values = {
                    name: finite(number(value)) for name, value in line.items() if isinstance(value, int | float | None)
                }
                del values["step"]
                self._hub.publish("metrics", {"run": run.id, "step": line["step"], "values": values})
            if before[1] != now[1] and (line := last_line(run.folder / SAMPLES_FILE)) is not None:
                self._hub.publish("samples", {"run": run.id, "step": line["step"]})

    def _look_for_states(self, changed: bool) -> bool:
        """Update the states of all runs; return True if one has started, stopped or ended, or if `changed` is true."""
        for run in self._folders.all():
            before = self._states.get(run.id)
            has_ended = file_size(run.folder / FINISHED_FILE) >= 0
            state = (
                has_ended,
                file_size(run.folder / CONFIG_FILE) >= 0,
                file_size(run.folder / METRICS_FILE) >= 0,
                not has_ended and is_held(run.folder, lock_owner(run.folder)),
                self._is_alive(run.id),
            )
            self._states[run.id] = state
            changed |= before is not None and before != state
        return changed
