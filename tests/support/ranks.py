"""Run a function, or the main of a step, on several gloo ranks.

Ranks are forked from a server that has imported everything and computed nothing: a process costs a tenth of a second
instead of the eight that the imports take, and starts as clean as one of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

COLLECTIVE_SECONDS = 300
_LIMIT_SECONDS = 900
_PORTS_OF_WORKER = 1596
_FIRST_PORT = 20_000 + _PORTS_OF_WORKER * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8)
_START = random.SystemRandom().randrange(_PORTS_OF_WORKER)  # another one where several tests run on a machine
_PORTS = itertools.cycle(_FIRST_PORT + (_START + place) % _PORTS_OF_WORKER for place in range(_PORTS_OF_WORKER))
_RESERVED: deque[socket.socket] = deque()
"""Names of the ports that were chosen last."""
_RESERVED_AT_ONCE = 256
FORKSERVER = get_context("forkserver")
_PRELOADED = [
    "hybrid_rlhf.rl.build",
    "hybrid_rlhf.supervised.build",
    # Imported late, or by the test modules of functions that ranks run: a quarter of a short rank's processor time.
    "peft",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by ZeRO, with the tables of torch.compile
    "setuptools",
    "distutils.ccompiler",  # after setuptools, which provides it
    "hypothesis",
    "pytest",
    "transformers.models.llama.modeling_llama",
    "tests.support.frozen",
]
# A library that asks for a GPU when it is imported, as bitsandbytes does, makes CUDA unusable in forked processes.
FORKSERVER.set_forkserver_preload([] if torch.cuda.is_available() else _PRELOADED)


def run_ranks(
    function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, start_method: str = "forkserver"
) -> list[Any]:
    """function(world, *arguments) on each rank of a fresh process group; what each returns.

    What is read when a process starts, as malloc's settings, needs start_method "spawn".
    """
    folder.mkdir(parents=True, exist_ok=True)
    _start(_call, ranks, start_method, function, str(folder), arguments)
    return [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(ranks)]


def run_apart(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in a process of its own, which may fork: this one may have mapped more than the machine has."""
    process = FORKSERVER.Process(target=function, args=arguments)
    process.start()
    process.join(_LIMIT_SECONDS)
    assert process.exitcode == 0


def run_main(module: str, ranks: int, line: Sequence[str]) -> None:
    """The main of a step as torchrun would start it; fails where a rank does."""
    run_mains(module, ranks, [line])


def run_mains(module: str, ranks: int, lines: Sequence[Sequence[str]]) -> None:
    """Mains of several runs, one after the other in the same processes, each in a process group of its own."""
    ports = free_ports(len(lines))
    _start(_mains, ranks, "forkserver", module, [list(line) for line in lines], ports, runs=len(lines))


def environment(ranks: int) -> dict[str, str]:
    """The variables that torchrun sets for all ranks of a new process group on this host."""
    return {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "OMP_NUM_THREADS": "1",
    }


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections: a run may begin minutes after its port was chosen. Each worker
    of the tests has ports of its own, and takes one after the other; other tests on this machine do not take them
    meanwhile."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            taken = _reserved(port)
            probe.bind(("127.0.0.1", port))
            _RESERVED.append(taken)
            ports.append(port)
    while len(_RESERVED) > _RESERVED_AT_ONCE:
        _RESERVED.popleft().close()
    return ports


def _reserved(port: int) -> socket.socket:
    """What has the port's name among those that Linux keeps beside the file system; OSError if another process does."""
    name = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        name.bind(f"\0hybrid_rlhf_tests_{port}")
    return name


def _start(target: Callable[..., None], ranks: int, start_method: str, *arguments: Any, runs: int = 1) -> None:
    started = multiprocessing.start_processes(
        enter, args=(environment(ranks), target, arguments), nprocs=ranks, start_method=start_method, join=False
    )
    limit = _LIMIT_SECONDS * runs
    deadline = time.monotonic() + limit
    while not started.join(timeout=1.0):  # whether all have ended; raises where one failed
        if time.monotonic() > deadline:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"ranks were not done within {limit} s")


def enter(rank: int, environment: Mapping[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Be a rank: target(rank, *arguments), and the end of the process."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    code = 0
    try:
        target(rank, *arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # libraries' C++ threads may abort a process that ends while they run


def _call(rank: int, function: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    from hybrid_rlhf.runtime.world import close_world, init_world

    result = function(init_world(timeout_seconds=COLLECTIVE_SECONDS), *arguments)
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    close_world()


def _mains(rank: int, module: str, lines: Sequence[Sequence[str]], ports: Sequence[int]) -> None:
    main = import_module(module).main
    for line, port in zip(lines, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # the store of the last run may still listen at its own
        main(line)
