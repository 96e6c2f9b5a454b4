"""What each rank was doing when a phase took too long, and which rank the others wait for.

A rank whose main thread is inside torch.distributed (or deepspeed's cover of it) waits; one that is not keeps the
others waiting. Where collectives run on a GPU or behind a handle, Python's frames do not show it: then the ranks that
have started the fewest are the late ones.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

_COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/deepspeed/comm/")
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<")
_PLUMBING = tuple(f"{_PACKAGE}/runtime/{name}.py" for name in ("world", "timers", "watchdog", "lateness"))
_OUTSIDE = " (not in a collective)"
_LONGEST = 200
"""Characters of a name in a report."""


@dataclass(frozen=True)
class Report:
    """What a rank is doing."""

    rank: int
    phase: str
    seconds: float
    """Since the phase began."""
    place: str
    """The innermost line that is no library's: `file.py:12 function`."""
    collective: str | None
    """What torch.distributed is asked for, if it is."""
    started: int
    """Collectives started so far by all ranks together."""

    @property
    def doing(self) -> str:
        """Where the rank is, in words."""
        if self.collective is None:
            return f"at {self.place}{_OUTSIDE}"
        return f"in {self.collective}, called at {self.place}"

    def __str__(self) -> str:
        return f"in {self.phase} since {self.seconds:.0f} s, {self.doing}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def report(rank: int, phase: str, seconds: float) -> Report:
    """Look at this process's main thread."""
    threads = sys._current_frames()
    frames = _stack(threads[threading.main_thread().ident or 0])
    place = _place(frames)
    if frames[0].f_code.co_filename == threading.__file__:  # it waits for a thread: what does that do?
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        stacks = [_stack(threads[thread.ident or 0]) for thread in others if thread.ident in threads]
        # The newest thread that runs code of ours or of the user's; this one, the watchdog, does not count.
        busy = [stack for stack in stacks if not _is_watchdog(stack) and any(_is_own(frame) for frame in stack)]
        place = _place(busy[-1]) if busy else place
    return Report(rank, phase[:_LONGEST], round(seconds, 1), place[:_LONGEST], _collective(frames), _started())


def verdict(reports: Sequence[Report], *, silent: Collection[int] = ()) -> str:
    """Who is late and who waits, in one line.

    Args:
        reports: of the ranks that answered, at least one.
        silent: ranks that did not answer.
    """
    late = [] if silent else _late(reports)
    parts = [f"{_ranks(ranks)} {_verb(ranks, 'is', 'are')} late: {text}" for text, ranks in _grouped(late, str)]
    if silent:
        answer = _verb(silent, "gives", "give")
        parts = [f"{_ranks(silent)} {answer} no answer (stopped, or in C code that holds the interpreter)"]
    elif not late:
        alike = len({one.doing for one in reports}) == 1
        parts = [f"all ranks wait in {'a collective that does not end' if alike else 'collectives that differ'}"]
    waiting = [one for one in reports if one not in late]
    for text, ranks in _grouped(waiting, lambda one: one.doing.removesuffix(_OUTSIDE)):
        parts.append(f"{_ranks(ranks)} {_verb(ranks, 'waits', 'wait')}{' for it' * bool(late or silent)} {text}")
    return "; ".join(parts)


def _late(reports: Sequence[Report]) -> list[Report]:
    """The ranks that keep the others waiting; none where all are in collectives."""
    outside = [one for one in reports if one.collective is None]
    fewest = min((one.started for one in outside), default=0)
    return [one for one in outside if one.started == fewest]


def _grouped(reports: Iterable[Report], text: Callable[[Report], str]) -> Iterable[tuple[str, list[int]]]:
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for one in reports:
        groups[text(one)].append(one.rank)
    return groups.items()


def _verb(ranks: Collection[int], one: str, more: str) -> str:
    return one if len(ranks) == 1 else more


def _ranks(ranks: Collection[int]) -> str:
    """`rank 3`, or `ranks 0-5, 7`."""
    ordered, runs = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ordered) > 1)} {text}"


def _stack(frame: FrameType | None) -> list[FrameType]:
    """A thread's frames, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _place(frames: Sequence[FrameType]) -> str:
    own = [frame for frame in frames if _is_own(frame)]
    frame = own[0] if own else frames[0]
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_own(frame: FrameType) -> bool:
    """Whether a frame is of this project or of the user, and says something."""
    file = frame.f_code.co_filename
    return file not in _PLUMBING and (file.startswith(_PACKAGE) or not file.startswith(_LIBRARIES))


def _is_watchdog(stack: Sequence[FrameType]) -> bool:
    return any(frame.f_code.co_filename == __file__ for frame in stack)


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
