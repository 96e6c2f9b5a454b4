"""Asynchronous messages between pairs of ranks.

Collectives do not fit: most pairs of ranks exchange nothing, and the sizes differ between pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from hybrid_rlhf.runtime.world import World


class Exchange:
    """Messages in flight; their tensors must not change before `wait` has returned."""

    def __init__(self, world: World, *, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Start to send and to receive contiguous tensors.

        Messages from one rank to another arrive in the order in which both ranks start them, and must have the same
        size on both.

        Args:
            world: the ranks, which the keys of the messages refer to.
            sends: tensors to send, by the rank that receives them.
            receives: tensors to fill, by the rank that sends them.
        """
        self._tensors = [*sends.values(), *receives.values()]
        operations = [
            dist.P2POp(kind, messages[peer], group=world.group, group_peer=peer)
            for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer in sorted(messages)
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait until all messages have arrived.

        Raises:
            RuntimeError: when another rank has died, or the time limit of a collective has passed.
        """
        for work in self._works:
            work.wait()
        self._works = []
        self._tensors = []
