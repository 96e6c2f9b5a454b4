"""Run a function on several gloo ranks and give what each returns."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing


def run_ranks(function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """function(world, *arguments) on each rank of a fresh process group, in processes of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_enter, args=(function, ranks, port, str(folder), arguments), nprocs=ranks)
    return [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(ranks)]


def _enter(
    rank: int, function: Callable[..., Any], ranks: int, port: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    from hybrid_rlhf.runtime.world import close_world, init_world

    result = function(init_world(timeout_seconds=120), *arguments)
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    close_world()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' C++ threads may abort a process that ends while they run
