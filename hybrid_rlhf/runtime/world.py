"""The rank and device of this process, the collectives that the library uses, and groups of some ranks.

Ranks come from torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), which the DeepSpeed
launcher sets too. Without them the process is a single rank.

A group is created once, by all ranks in the same order, and kept by its ranks. Libraries that use torch's default group
(DeepSpeed, transformers) run inside `World.as_default`, where the default group is that of the model's ranks, so that
their collectives do not wait for other ranks. A collective of a larger World raises there.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.host_memory import keep_freed_memory
from hybrid_rlhf.runtime.openmp import threads_per_rank

T = TypeVar("T")

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of torch's allocator: the name in all versions, and the newer one."""
_OWN_ALLOCATOR_SETTING = "HYBRID_RLHF_ALLOCATOR"
"""Variable with the setting of torch's allocator that this library has chosen, here or in a parent process."""
_SLICE_BYTES = 2**27
"""Bytes of `World.exchange` on the device at a time, in each direction."""
_SOLO_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "",
    "HYBRID_RLHF_SOLO": "",
}
"""The variables that a launcher would set for a single rank; DeepSpeed reads them too. The last one has the id of the
process that set them, and the port."""


@dataclass(frozen=True)
class World:
    """Ranks that compute together. All higher layers take a World and never use torch's default group."""

    rank: int
    """Rank of this process among them; -1 if it is none of them."""
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = field(default=())
    """Their ranks in the run; empty for all."""

    @property
    def is_main(self) -> bool:
        """True if this rank logs and writes for all ranks."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True if this rank is the first of its host."""
        return self.local_rank == 0

    @property
    def has_several_hosts(self) -> bool:
        """True if other hosts have ranks too; ask the World of all ranks of a run."""
        return self.size > self.local_size

    @property
    def name(self) -> str:
        """Name of this rank in messages: `rank 3`, on several hosts `rank 3 (HOST)`."""
        return f"rank {self.rank}" + f" ({socket.gethostname()})" * self.has_several_hosts

    @property
    def is_member(self) -> bool:
        """True if this process is one of the ranks."""
        return self.rank >= 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks in the run."""
        return self.ranks or tuple(range(self.size))

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self._is_single():
            dist.barrier(group=self.group)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a tensor over the ranks in place, and return it."""
        if not self._is_single():
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of a tensor in host memory. Every rank calls."""
        return self.all_reduce(tensor.to(self.device, copy=True)).cpu()

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """Overwrite a tensor by that of one of the ranks, and return it."""
        if not self._is_single():
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, which have the same shape, stacked by rank: [ranks, ...]."""
        if self._is_single():
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send part r of a tensor [ranks, ...] to rank r; returns the parts received, [ranks, ...] by sender."""
        if self._is_single():
            return tensor
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes | bytearray]:
        """Send parts[r] to rank r; returns the parts received, by sender. Every rank calls.

        They pass through the device in slices: it holds at most `_SLICE_BYTES` of those sent and as many of those
        received.
        """
        if self._is_single():
            return list(parts)
        lengths = torch.tensor([len(part) for part in parts], device=self.device)
        sizes = self.all_gather(lengths).tolist()
        received: list[bytes | bytearray] = [bytearray() for _ in parts]
        step = _SLICE_BYTES // self.size
        for start in range(0, max(max(of_rank) for of_rank in sizes), step):
            sent = [np.frombuffer(part, np.uint8)[start : start + step] for part in parts]
            counts = [len(range(start, min(of_rank[self.rank], start + step))) for of_rank in sizes]
            leaving = torch.from_numpy(np.concatenate(sent)).to(self.device)
            arrived = self.exchange_rows(leaving, sent=[len(part) for part in sent], received=counts).cpu()
            for whole, part in zip(received, arrived.split(counts), strict=True):
                whole += memoryview(part.numpy())
        return received

    def exchange_rows(self, rows: torch.Tensor, *, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the first sent[0] of some rows [N, ...] to rank 0, the next sent[1] to rank 1, and so on; returns the
        rows received, by sender: received[r] from rank r."""
        if self._is_single():
            return rows
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result

    def all_gather_objects(self, item: T) -> list[T]:
        """The picklable items of all ranks, by rank; for small data such as counts, file names and completions."""
        if self._is_single():
            return [item]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, item, group=self.group)
        return gathered

    def merge_dicts(self, item: dict[str, T]) -> dict[str, T]:
        """The entries of all ranks in one dict, picklable and small; for equal keys the last rank's."""
        return {name: value for of_rank in self.all_gather_objects(item) for name, value in of_rank.items()}

    def broadcast_object(self, item: T, *, source: int = 0) -> T:
        """The picklable item of one rank, by default the first."""
        if self._is_single():
            return item
        box = [item]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        return box[0]

    def split(self, size: int, *, own: bool = False) -> World:
        """The group of `size` consecutive ranks that contains this rank; every rank of the run calls, unless
        `create_groups` has created the groups.

        Args:
            size: size of each group.
            own: true for groups that nothing else uses, for the collectives of a thread besides the main one.

        Raises:
            ValueError: if the number of ranks is not a multiple of `size`.
        """
        mine = replace(self, rank=-1, size=size, group=None, ranks=())
        if size == 1 < self.size:  # without a group
            return replace(mine, rank=0, ranks=(self.members[self.rank],)) if self.is_member else mine
        for ranks in self.consecutive(size):
            part = self.part(ranks, own=own)
            mine = part if part.is_member else mine
        return mine

    def consecutive(self, size: int) -> list[tuple[int, ...]]:
        """The ranks in groups of `size`.

        Raises:
            ValueError: if the number of ranks is not a multiple of `size`.
        """
        if self.size % size:
            raise ValueError(f"the number of ranks must be a multiple of the group size {size}, got {self.size}")
        ranks = self.members
        return [ranks[first : first + size] for first in range(0, self.size, size)]

    def part(self, ranks: Sequence[int], *, own: bool = False) -> World:
        """Some of the ranks, by their numbers in the run; every rank of the run calls, unless `create_groups` has
        created the group. See `split` for `own`."""
        chosen = tuple(ranks)
        if chosen == self.members and not own:
            return self
        group = _group_of(chosen, own=own)
        mine = chosen.index(dist.get_rank()) if group is not None else -1
        return replace(self, rank=mine, size=len(chosen), group=group, ranks=chosen)

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Context in which torch's default group is that of these ranks, in all threads; no effect for all ranks."""
        whole = distributed_c10d._get_default_group() if self.group is not None else None
        if self.group is whole:
            yield
            return
        outer = getattr(_inside, "world", None)
        _inside.world = self
        distributed_c10d._update_default_pg(self.group)
        try:
            yield
        finally:
            distributed_c10d._update_default_pg(whole)
            _inside.world = outer

    def _is_single(self) -> bool:
        """True for a single rank, whose collectives do nothing; RuntimeError if a collective could wait forever."""
        if not self.is_member:
            raise RuntimeError(f"a collective of ranks {list(self.members)} runs on a rank that is none of them")
        inside: World | None = getattr(_inside, "world", None)
        if inside is not None and not set(self.members) <= set(inside.members):
            raise RuntimeError(
                f"a collective of ranks {list(self.members)} runs inside a model on ranks {list(inside.members)}"
            )
        return self.size == 1


_inside = threading.local()
"""The World whose `as_default` this thread has entered."""
_GROUPS: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup | None] = {}
"""Groups by their ranks and `own`; None if this process is not a member."""


def create_groups(parts: Iterable[Sequence[int]], *, own: bool = False) -> None:
    """Create the missing groups for parts of the ranks; see `split` for `own`. Every rank of the run calls, with the
    same parts."""
    for ranks in sorted({tuple(part) for part in parts}):
        _group_of(ranks, own=own)


def _group_of(ranks: tuple[int, ...], *, own: bool = False) -> dist.ProcessGroup | None:
    if (ranks, own) not in _GROUPS:
        is_whole = not own and len(ranks) == dist.get_world_size()
        group = dist.group.WORLD if is_whole else dist.new_group(list(ranks))
        _GROUPS[ranks, own] = None if group is dist.GroupMember.NON_GROUP_MEMBER else group
    return _GROUPS[ranks, own]


@contextlib.contextmanager
def shared_user_errors(world: World) -> Iterator[None]:
    """Raise a UserError of any rank on all of them; every rank enters the block.

    Raises:
        UserError: the first of those raised in the block, by rank.
    """
    failure = None
    try:
        yield
    except UserError as error:
        failure = str(error)
    failures = [text for text in world.all_gather_objects(failure) if text is not None]
    if failures:
        raise UserError(failures[0])


def run_once_per_host(world: World, make: Callable[[], str | None]) -> None:
    """Create a file on rank 0, then on the first rank of each host where it does not exist; every rank calls.

    Args:
        world: the ranks that wait for the file.
        make: creates the file unless it exists; returns the text of a user's error, or None.

    Raises:
        UserError: that error, on every rank.
    """
    with shared_user_errors(world):
        failure = world.broadcast_object(make() if world.is_main else None)
        if failure is None and world.is_local_main:
            failure = make()
        if failure is not None:
            raise UserError(failure)


def init_world(*, timeout_seconds: float = 1800.0) -> World:
    """Join the process group that the launcher describes, or create one with a single rank.

    Args:
        timeout_seconds: time limit of a collective, also of groups that are created later.

    Raises:
        UserError: when the host has more ranks than GPUs.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    solo: dict[str, Any] = {}
    if not _has_launcher():
        # It listens at once: between the choice of a free port and its use, another process could take it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
        os.environ.update(
            _SOLO_ENVIRONMENT, MASTER_PORT=str(store.port), HYBRID_RLHF_SOLO=f"{os.getpid()}:{store.port}"
        )
        solo = {"store": store, "rank": 0, "world_size": 1}
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", size)))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"each rank needs its own GPU, got {local_size} ranks and {torch.cuda.device_count()} visible GPUs on "
                "this host: start fewer, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        device = torch.device("cuda", local_rank)
        prepare_device(device)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        # The ranks of a host share its cores; by default torch uses all of them in each rank.
        if "OMP_NUM_THREADS" not in os.environ or local_size > 1:
            torch.set_num_threads(threads_per_rank(local_size))
    # DeepSpeed creates groups without a time limit of their own; NCCL's default is ten minutes.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    if not dist.is_initialized():
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
            **(solo or (_store_after_restart(rank, size, timeout) if restart_count() and local_size == size else {})),
            device_id=device if device.type == "cuda" else None,
        )
    return World(rank, size, local_rank, local_size, device, dist.group.WORLD)


def restart_count() -> int:
    """Number of times that torchrun has restarted this process. Each host's agent counts its own restarts."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _store_after_restart(rank: int, size: int, timeout: datetime.timedelta) -> dict[str, Any]:
    """The rendezvous store of restarted ranks: torchrun's still has addresses of dead ranks (pytorch issue 135712)."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return {"store": dist.PrefixStore(f"attempt_{restart_count()}", store), "rank": rank, "world_size": size}


def prepare_device(device: torch.device) -> None:
    """Set how torch uses a GPU: expandable segments of memory, and attention without cuDNN.

    Training and generation alternate with tensors of different sizes: with segments of fixed sizes, neither can use the
    fragmented memory of the other. A setting of the user is kept; the setting has no effect after the first use of a
    GPU.

    With cuDNN 9.15 and later torch prefers its attention on Hopper. It builds an execution plan for every new input
    shape, and shapes change in every batch of training and prefill (0.4 s forward and 0.6 s backward on a B200, FunASR
    issue 3704).
    """
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        os.environ |= dict.fromkeys((_ALLOCATOR_SETTINGS[0], _OWN_ALLOCATOR_SETTING), "expandable_segments:True")
    torch.backends.cuda.enable_cudnn_sdp(False)


def without_own_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables except those that `prepare_device` has set, for a program that has an allocator of its
    own."""
    own = environment.get(_OWN_ALLOCATOR_SETTING)
    return {
        name: value
        for name, value in environment.items()
        if name != _OWN_ALLOCATOR_SETTING and not (name == _ALLOCATOR_SETTINGS[0] and value == own)
    }


def solo_world(device: torch.device) -> World:
    """A single rank without a process group, for programs that do not train: generation, chat."""
    prepare_device(device)
    return World(rank=0, size=1, local_rank=0, local_size=1, device=device)


def default_device() -> torch.device:
    """The device of a single process: the first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of models: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Closable(Protocol):
    """An owner of resources."""

    def close(self) -> None:
        """Release the resources; a second call does nothing."""


_CLOSED_FIRST: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_with_world(resource: Closable) -> None:
    """Make `close_world` close a resource, if it still exists, before it leaves the process group.

    NCCL 2.26 and later waits at shutdown for CUDA graphs that contain its kernels, and their owner may be in a
    reference cycle that is collected too late.
    """
    _CLOSED_FIRST.add(resource)


def close_world() -> None:
    """Leave the process group and remove the variables that `init_world` has set: a child process must not join it."""
    try:
        for resource in list(_CLOSED_FIRST):
            resource.close()
    finally:
        _CLOSED_FIRST.clear()
        _GROUPS.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("HYBRID_RLHF_SOLO", "").startswith(f"{os.getpid()}:"):
        for name in _SOLO_ENVIRONMENT:
            os.environ.pop(name, None)


def seed_all(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch with the same value on every rank: models must start equal.

    Sampling and data order derive their own generators from the seed and do not depend on these.

    Args:
        seed: the seed of all three.
        deterministic: use only deterministic kernels; torch raises for an operation that has none.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is initialised
        torch.use_deterministic_algorithms(True)
        # Filling would write all memory twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _has_launcher() -> bool:
    """Whether a launcher describes this process; not where a parent process, a single rank of its own, does."""
    owner, _, port = os.environ.get("HYBRID_RLHF_SOLO", "").partition(":")
    inherited = owner not in ("", str(os.getpid())) and port == os.environ.get("MASTER_PORT")
    return "RANK" in os.environ and not inherited
