"""Which process this is, on which device, and the collectives the project uses.

Source of the environment: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), which the DeepSpeed
launcher sets too. Without them the process is a world of one.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.host_memory import keep_freed_memory

T = TypeVar("T")

_SOLO_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "",
    "HYBRID_RLHF_SOLO": "",
}
"""What a launcher would have said of a single rank; deepspeed reads it too. The last says which process made it up."""


@dataclass(frozen=True)
class World:
    """The ranks that train together. Everything above takes a World and never asks torch for the default group."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this rank is the first on its host."""
        return self.local_rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a tensor over the ranks in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor of one shape, stacked by rank: [ranks, ...]."""
        if self.size == 1:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts)

    def split(self, size: int) -> World:
        """The group of `size` consecutive ranks that this rank is in; every rank must call.

        Raises:
            ValueError: when the ranks do not divide into such groups.
        """
        if self.size % size:
            raise ValueError(f"{self.size} ranks do not divide into groups of {size}")
        if size == self.size:
            return self
        mine = self
        for first in range(0, self.size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= self.rank < first + size:
                mine = World(self.rank - first, size, self.local_rank, self.local_size, self.device, group)
        return mine

    def all_gather_objects(self, item: T) -> list[T]:
        """Every rank's picklable item, by rank. For small things: counts, file names, completions."""
        if self.size == 1:
            return [item]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, item, group=self.group)
        return gathered

    def broadcast_object(self, item: T) -> T:
        """Rank 0's picklable item."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


@contextlib.contextmanager
def mistakes_shared(world: World) -> Iterator[None]:
    """Around what a user may have got wrong on one host alone; every rank enters.

    Raises:
        UserError: on every rank, the first of any's.
    """
    failure = None
    try:
        yield
    except UserError as error:
        failure = str(error)
    failures = [text for text in world.all_gather_objects(failure) if text is not None]
    if failures:
        raise UserError(failures[0])


def once_a_host(world: World, make: Callable[[], str | None]) -> None:
    """Have a file made by one rank, and by one of each host that does not see it; every rank calls.

    Args:
        world: who waits until it is there.
        make: makes it unless it is there; the text of the user's mistake if there is one.

    Raises:
        UserError: on every rank, that mistake.
    """
    with mistakes_shared(world):
        failure = world.broadcast_object(make() if world.is_main else None)
        if failure is None and world.is_local_main:
            failure = make()
        if failure is not None:
            raise UserError(failure)


def init_world(*, timeout_seconds: float = 1800.0) -> World:
    """Join the process group that the launcher describes, or make one of a single rank.

    Args:
        timeout_seconds: how long a collective may wait before the job ends.
    """
    if "RANK" not in os.environ:
        os.environ.update(_SOLO_ENVIRONMENT, MASTER_PORT=str(_free_port()), HYBRID_RLHF_SOLO=str(os.getpid()))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", size)))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        choose_kernels(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        # Ranks that share a host share its cores; torch would give each of them all.
        if "OMP_NUM_THREADS" not in os.environ or local_size > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
            **(_store_of_attempt(rank, size, timeout) if restarts() and local_size == size else {}),
            device_id=device if device.type == "cuda" else None,
        )
    return World(rank, size, local_rank, local_size, device, dist.group.WORLD)


def restarts() -> int:
    """How often torchrun has started this process again. Agents of several hosts count each for itself."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _store_of_attempt(rank: int, size: int, timeout: datetime.timedelta) -> dict[str, Any]:
    """Where restarted ranks meet: torchrun's store still holds the addresses of the dead (pytorch issue 135712)."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return {"store": dist.PrefixStore(f"attempt_{restarts()}", store), "rank": rank, "world_size": size}


def choose_kernels(device: torch.device) -> None:
    """Keep torch's attention away from cuDNN on a GPU.

    From cuDNN 9.15 on torch prefers it on Hopper, and it builds a plan for every new shape of rows, of which training
    and prefill have a new one each time (0.4 s forward and 0.6 s backward on a B200, FunASR issue 3704).
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def solo_world(device: torch.device) -> World:
    """A world of one without a process group, for what runs beside training: generation, chat."""
    choose_kernels(device)
    return World(rank=0, size=1, local_rank=0, local_size=1, device=device)


def default_device() -> torch.device:
    """The device of a process that runs alone: the first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """What models compute in unless told: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Closable(Protocol):
    """What has something to release."""

    def close(self) -> None:
        """Release it; a second call does nothing."""


_CLOSED_FIRST: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_with_world(resource: Closable) -> None:
    """Have `close_world` close a resource before it leaves the process group, if it is still there by then.

    NCCL waits for the captured graphs that hold its kernels before it ends (2.26 and later), and their owner may be in
    a reference cycle that is collected too late.
    """
    _CLOSED_FIRST.add(resource)


def close_world() -> None:
    """Leave the process group, and forget the environment if it was ours: a child process must not join it."""
    try:
        for resource in list(_CLOSED_FIRST):
            resource.close()
    finally:
        _CLOSED_FIRST.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("HYBRID_RLHF_SOLO") == str(os.getpid()):
        for name in _SOLO_ENVIRONMENT:
            os.environ.pop(name, None)


def seed_all(seed: int, *, deterministic: bool = False) -> None:
    """Seed python, numpy and torch alike on every rank: models must start equal.

    Sampling and data order take their own streams from the seed and do not depend on this one.

    Args:
        seed: of all.
        deterministic: only kernels that give the same bits each time; torch raises where an operation has none.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        # It would write all memory twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
