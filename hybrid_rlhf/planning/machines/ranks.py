"""Processes that measure together, and the clock that they measure with."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from tqdm import tqdm

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.liveness.launcher import STARTED_BY, stop_with_launcher

_LIMIT_SECONDS = 600.0
"""Time of one call, after which ranks are taken to hang; on a machine without other work a call takes a minute."""
_PRELOADED = "hybrid_rlhf.planning.machines.layers"
"""Imported once by the server that processes are forked from."""


def median_seconds(call: Callable[[], object], *, least_seconds: float = 0.03) -> float:
    """Median seconds of a call, of at least three after a first one."""
    call()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < least_seconds:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def run_on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """function(world, *arguments) on each rank of a new process group on this host; what each returns.

    Raises:
        UserError: when a rank fails, or takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    results: dict[int, Any] = {}
    processes = []
    waiting: dict[Connection, int] = {}
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        described = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {name: str(value) for name, value in described.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environment[STARTED_BY] = str(os.getpid())
        process = context.Process(target=_enter, args=(theirs, environment, function, arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        waiting[ours] = rank
    deadline = time.monotonic() + _LIMIT_SECONDS
    try:
        while waiting:
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = " ".join(map(str, waiting.values()))
                raise UserError(
                    f"calibrate measures for {_LIMIT_SECONDS:.0f} s at most, ranks {late} take longer: try --quick true"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    results[rank] = connection.recv()
                except EOFError as error:
                    rule = f"calibrate needs all ranks, rank {rank} of {ranks} ended"
                    raise UserError(f"{rule}: see its error above, or give fewer --ranks") from error
    finally:
        for process in processes:
            process.join(timeout=5.0 if len(results) == ranks else 0.0)
            process.kill()
    return [results[rank] for rank in range(ranks)]


def _enter(out: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    """Be a rank."""
    os.environ.update(environment)
    stop_with_launcher()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)  # as launchers start several ranks on a host
    tqdm.set_lock(threading.RLock())  # its own lock, of processes, is reported as leaked when a rank leaves by _exit
    from hybrid_rlhf.runtime.world import init_world

    world = init_world(timeout_seconds=_LIMIT_SECONDS)
    torch.set_num_threads(1)
    out.send(function(world, *arguments))
    if torch.distributed.is_initialized():  # a run closes its process group
        world.barrier()
    os._exit(0)  # libraries' threads may abort a process that ends while they run


def synchronize() -> None:
    """Wait for what a GPU has been given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
