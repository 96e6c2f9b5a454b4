"""Reports the activity of each rank when a phase takes too long, and the rank that the others wait for.

A rank whose main thread is inside torch.distributed (or DeepSpeed's wrapper of it) waits; one whose main thread is
elsewhere keeps the others waiting. Where collectives run on a GPU or asynchronously, Python's frames do not show them:
then the stalled ranks are those that have started the fewest collectives.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch.distributed as dist

from hybrid_rlhf.configs.sections.placement import in_words

_COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/deepspeed/comm/")
_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<")
_WRAPPERS = tuple(f"{_PACKAGE}/runtime/{name}.py" for name in ("world", "observability/timers"))
"""Files whose frames do not show what a rank is doing."""
_OUTSIDE = " (not in a collective)"


@dataclass(frozen=True)
class RankReport:
    """Activity of one rank."""

    rank: int
    phase: str
    seconds: float
    """Duration of the phase so far."""
    place: str
    """The innermost line of code outside of libraries: `file.py:12 function`."""
    collective: str | None
    """The function of torch.distributed that is running, if any."""
    started: int
    """Number of collectives over all ranks that this rank has started."""

    @property
    def doing(self) -> str:
        """The activity of the rank as text."""
        if self.collective is None:
            return f"at {self.place}{_OUTSIDE}"
        return f"in {self.collective}, called at {self.place}"

    def __str__(self) -> str:
        return f"in {self.phase} since {self.seconds:.0f} s, {self.doing}"


def report_rank(rank: int, phase: str, seconds: float) -> RankReport:
    """Inspect the main thread of this process; the watchdog's thread calls."""
    stacks = {thread: [frame for frame, _ in walk_stack(top)] for thread, top in sys._current_frames().items()}
    main = threading.main_thread()
    frames = doing = stacks[main.ident or 0]
    if frames[0].f_code.co_filename == threading.__file__:  # it waits for another thread: report that thread
        others = [thread for thread in threading.enumerate() if thread not in (main, threading.current_thread())]
        # The newest thread that runs code of this project or of the user.
        busy = [stack for thread in others if any(map(_is_own, stack := stacks.get(thread.ident or 0, [])))]
        doing = busy[-1] if busy else frames
    frame = next(filter(_is_own, doing), doing[0])
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
    return RankReport(rank, phase, seconds, place, _collective(frames), _started())


def diagnose(reports: Sequence[RankReport], *, silent: Collection[int] = (), hosts: Mapping[int, str]) -> str:
    """One line that names the stalled ranks and the ranks that wait for them.

    Args:
        reports: reports of the ranks that responded, at least one.
        silent: ranks that did not respond.
        hosts: the host of each rank; the stalled ranks are named with theirs if there are several.
    """
    several = len({*hosts.values()}) > 1

    def on(ranks: Collection[int]) -> str:
        return f" ({', '.join(sorted({hosts[rank] for rank in ranks}))})" if several else ""

    stalled = [] if silent else _stalled(reports)
    parts = [f"{_who(ranks, 'is', 'are', on(ranks))} stalled: {text}" for text, ranks in _grouped(stalled, str)]
    if silent:
        who = _who(silent, "does", "do", on(silent))
        parts = [f"{who} not respond (stopped, or in C code that holds the interpreter lock)"]
    elif not stalled:
        same = len({report.doing for report in reports}) == 1
        parts = [f"all ranks wait in {'one collective that does not end' if same else 'different collectives'}"]
    waiting = [report for report in reports if report not in stalled]
    for text, ranks in _grouped(waiting, lambda report: report.doing.removesuffix(_OUTSIDE)):
        parts.append(f"{_who(ranks, 'waits', 'wait')}{' for it' * bool(stalled or silent)} {text}")
    return "; ".join(parts)


def _stalled(reports: Sequence[RankReport]) -> list[RankReport]:
    """The ranks that keep the others waiting; [] if all are in collectives."""
    outside = [report for report in reports if report.collective is None]
    fewest = min((report.started for report in outside), default=0)
    return [report for report in outside if report.started == fewest]


def _grouped(reports: Iterable[RankReport], text: Callable[[RankReport], str]) -> Iterable[tuple[str, list[int]]]:
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for report in reports:
        groups[text(report)].append(report.rank)
    return groups.items()


def _who(ranks: Collection[int], singular: str, plural: str, hosts: str = "") -> str:
    """`rank 3 waits`, or `ranks 0-5, 7 (HOST) wait`."""
    number, verb = ("", singular) if len(ranks) == 1 else ("s", plural)
    return f"rank{number} {in_words(sorted(ranks)).replace(',', ', ')}{hosts} {verb}"


def _is_own(frame: FrameType) -> bool:
    """Return True if a frame shows what the rank does: code of this project or of the user, except wrappers."""
    file = frame.f_code.co_filename
    return file not in _WRAPPERS and (file.startswith(_PACKAGE) or not file.startswith(_LIBRARIES))


def _collective(frames: Sequence[FrameType]) -> str | None:
    """The outermost function of torch.distributed in a stack, or else of deepspeed.comm."""
    for part in _COLLECTIVES:
        names = [frame.f_code.co_name for frame in frames if part in frame.f_code.co_filename]
        if names:
            return names[-1]
    return None


def _started() -> int:
    if not dist.is_initialized():
        return 0
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups if group.size() == dist.get_world_size())
