"""Agreement of ranks on what they do next, where functions run in turn on each (engines/adapters/rendezvous.py).

The functions use one process group, so all ranks must run the same function when they enter a collective. Before each
collective of a function, and at each of its stops, where it waits or ends, the ranks meet: they compare function and
place, in a group that nothing else uses. If one of them reports a failure there, the function ends on all ranks, in
place of a collective that would wait forever, or pair with one of another function.

Why all ranks run the same functions in the same order, whatever their threads do: only one function runs at a time, and
it hands over only at a stop, where all ranks meet. So they hand over together, or the function ends on all. The next
function depends on those that have not ended and on what each waits for, which the meetings have compared, and on sizes
of which all ranks take the largest.
"""

from __future__ import annotations

import datetime
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.world import World


class OtherRankError(Exception):
    """An unexpected error of another rank."""


class RankAgreement:
    """Meetings of the ranks."""

    def __init__(self, world: World, *, timeout_seconds: float = 1800.0) -> None:
        """Create the group; every rank calls.

        Args:
            world: all ranks.
            timeout_seconds: longest wait for another rank.
        """
        group = None
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        self._world = replace(world, group=group, device=torch.device("cpu"), before_collective=None)
        self._ended: set[str] = set()
        """Functions, by the name of their thread, that a meeting has ended."""

    def meet(self, place: str, failure: Exception | None = None) -> None:
        """Wait until all ranks are at the same place of the function that runs in this thread; every rank calls.

        Args:
            place: where the function is, the same on all ranks.
            failure: the error with which it has ended here.

        Raises:
            UserError: if it has ended on other ranks with a user's error, and not here.
            OtherRankError: if it has ended on other ranks with another error, and not here.
            RuntimeError: if the ranks are at different places; or in later meetings, which other ranks do not join.
        """
        function = threading.current_thread().name
        if self._world.size == 1 or (failure is not None and function in self._ended):
            return
        if function in self._ended:
            raise RuntimeError(f"{function} has ended on other ranks, and meets them no more")
        place = f"{function}: {place}"
        code = zlib.crc32(place.encode())
        flags = torch.tensor([int(failure is not None), code, -code])
        fails, largest, negated_smallest = self._world.all_reduce(flags, dist.ReduceOp.MAX).tolist()
        if fails or largest != -negated_smallest:
            self._ended.add(function)
            self._raise_for(place, failure)

    def largest(self, sizes: Sequence[int]) -> list[int]:
        """The largest of each size over the ranks; every rank calls, with as many."""
        return self._world.all_reduce(torch.tensor(sizes), dist.ReduceOp.MAX).tolist()

    def _raise_for(self, place: str, failure: Exception | None) -> None:
        """Raise the error of another rank, or that of different places, unless this rank has one of its own."""
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        user_text = str(failure) if isinstance(failure, UserError) else None
        of_ranks = self._world.all_gather_objects((place, text, user_text))
        if failure is not None:
            return
        for rank, (_, text, user_text) in enumerate(of_ranks):
            if user_text is not None:
                raise UserError(user_text)
            if text is not None:
                raise OtherRankError(f"rank {rank} has failed, {text}")
        places = ", ".join(f"rank {rank} at {place}" for rank, (place, _, _) in enumerate(of_ranks))
        raise RuntimeError(f"all ranks run the same functions in the same order, got {places}")
