"""Ranks that hang, die or fail: which rank the error names, which files remain, and how soon all ranks end."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.command_line import user_errors
from hybrid_rlhf.runtime.liveness import heartbeats
from hybrid_rlhf.runtime.liveness import watchdog as watchdog_module
from hybrid_rlhf.runtime.liveness.heartbeats import HeartbeatChannel
from hybrid_rlhf.runtime.liveness.stall_report import RankReport, diagnose
from hybrid_rlhf.runtime.liveness.watchdog import EXIT_CODE, Watchdog
from hybrid_rlhf.runtime.world import World, close_world, init_world, solo_world
from tests.support.clock import wait_until
from tests.support.ranks import enter, environment, run_ranks
from tests.support.runs import run_python

LIMIT_SECONDS = 2.5
Work = Callable[[World, Watchdog], None]


class Job:
    """Ranks of one process group, each with a watchdog and its stderr in a file."""

    def __init__(self, folder: Path, work: Work, ranks: int, limit_seconds: float) -> None:
        self.folder = folder
        variables = environment(ranks)
        context = get_context("forkserver")
        self.processes: list[BaseProcess] = [
            context.Process(
                target=enter, args=(rank, variables, _rank, (str(folder), work, limit_seconds)), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def wait_for(self, name: str) -> None:
        """Wait until every rank has created a file with this name."""
        wait_until(lambda: len(list(self.folder.glob(f"{name}_*"))) == len(self.processes))

    def codes(self, *, of: list[int] | None = None, within_seconds: float) -> list[int | None]:
        """Exit codes of these ranks, by default all; None for one that has not ended in time."""
        deadline = time.monotonic() + within_seconds
        chosen = [self.processes[rank] for rank in range(len(self.processes)) if of is None or rank in of]
        for process in chosen:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in chosen]

    def stderr(self, rank: int) -> str:
        return (self.folder / f"stderr_{rank}").read_text()

    def stacks(self, rank: int) -> str:
        return (self.folder / "stacks" / f"rank_{rank:05}.txt").read_text()


def _rank(rank: int, folder: str, work: Work, limit_seconds: float) -> None:
    stderr = os.open(f"{folder}/stderr_{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(stderr, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    with user_errors():
        world = init_world(timeout_seconds=300)
        try:
            with Watchdog(world, Path(folder), limit_seconds=limit_seconds) as watchdog:
                watchdog.begin_step(12)
                watchdog.enter_phase("scoring")
                work(world, watchdog)
        finally:
            close_world()


def ready(world: World) -> None:
    (Path(f"/proc/{os.getpid()}/fd/2").resolve().parent / f"ready_{world.rank}").touch()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def start_job(work: Work, ranks: int = 2, limit_seconds: float = LIMIT_SECONDS, name: str = "job") -> Job:
        (tmp_path / name).mkdir()
        jobs.append(Job(tmp_path / name, work, ranks, limit_seconds))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for process in job.processes:
            process.kill()


def line_of(function: Callable[..., Any], text: str) -> str:
    """`file.py:12 function` of a line in a function."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"{Path(__file__).name}:{number} {function.__name__}"


def slow_reward() -> None:
    time.sleep(600)


def one_stalls(world: World, watchdog: Watchdog) -> None:
    ready(world)
    if world.rank == 1:
        slow_reward()
    world.all_reduce(torch.ones(1))


def test_a_stalled_rank_is_named_with_its_line(start: Start) -> None:
    job = start(one_stalls, ranks=3)
    job.wait_for("ready")
    assert job.codes(within_seconds=60) == [EXIT_CODE] * 3
    stalled, waits = line_of(slow_reward, "sleep"), line_of(one_stalls, "all_reduce")
    (error,) = [line for line in job.stderr(0).splitlines() if line.startswith("error: ")]
    assert error.startswith("error: rank 1 is stalled: in scoring of step 12 since ")
    assert f" s, at {stalled} (not in a collective); ranks 0, 2 wait for it in all_reduce, called at {waits}; " in error
    assert f"stacks of all ranks: {job.folder}/stacks/; " in error and "raise faults.phase_timeout_seconds" in error
    assert "error: " not in job.stderr(1) + job.stderr(2)
    for rank in range(3):
        assert f"rank {rank}: in scoring of step 12 since" in job.stderr(rank)
        assert ("slow_reward" if rank == 1 else "all_reduce") in job.stacks(rank)
        assert "watchdog.py" in job.stacks(rank), "all threads"
        assert "Traceback" not in job.stderr(rank)


def a_thread_stalls(world: World, watchdog: Watchdog) -> None:
    if world.rank == 1:
        thread = threading.Thread(target=slow_reward, daemon=True)
        thread.start()
        thread.join()
    world.barrier()


def test_the_line_of_a_thread_is_named_if_the_main_thread_waits_for_it(start: Start) -> None:
    job = start(a_thread_stalls)
    assert job.codes(within_seconds=60) == [EXIT_CODE] * 2
    assert f"at {line_of(slow_reward, 'sleep')} (not in a collective); rank 0 waits for it in barrier" in job.stderr(0)


def sleeps(world: World, watchdog: Watchdog) -> None:
    """No collective whose own error could end it."""
    ready(world)
    time.sleep(600)


def reduces(world: World, watchdog: Watchdog) -> None:
    ready(world)
    for _ in range(10**9):
        world.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("dead", "work"), [(0, sleeps), (1, reduces)])
def test_a_death_ends_the_others(start: Start, dead: int, work: Work) -> None:
    job = start(work, ranks=3, limit_seconds=600)
    job.wait_for("ready")
    began = time.monotonic()
    job.processes[dead].kill()
    others = [rank for rank in range(3) if rank != dead]
    assert job.codes(of=others, within_seconds=60) == [EXIT_CODE] * 2
    print(f"ended {time.monotonic() - began:.2f} s after the death")
    reporter = min(others)
    assert job.stderr(reporter).startswith(f"error: rank {dead} ({socket.gethostname()}) died in scoring of step 12; ")
    assert "".join(job.stderr(rank) for rank in others).count("\n") == 1


def holds_the_interpreter(world: World, watchdog: Watchdog) -> None:
    if world.rank == 1:
        ctypes.PyDLL(None).sleep(600)
    world.barrier()


def test_a_rank_that_does_not_respond_is_named(start: Start) -> None:
    frozen = [start(sleeps, name=f"frozen_{rank}") for rank in range(2)]
    holding = start(holds_the_interpreter)
    for rank, job in enumerate(frozen):
        job.wait_for("ready")
        os.kill(job.processes[rank].pid or 0, signal.SIGSTOP)
    why = "does not respond (stopped, or in C code that holds the interpreter lock); "
    for rank, job in enumerate(frozen):
        assert job.codes(of=[1 - rank], within_seconds=60) == [EXIT_CODE]
        assert f"error: rank {rank} {why}rank {1 - rank} waits for it at " in job.stderr(1 - rank)
        assert line_of(sleeps, "time.sleep") in job.stderr(1 - rank)
    assert holding.codes(within_seconds=60) == [EXIT_CODE, 1]
    assert f"error: rank 1 {why}rank 0 waits for it in barrier" in holding.stderr(0)
    assert "holds_the_interpreter" in holding.stacks(1), "written by faulthandler's C thread"


def one_has_a_user_error(world: World, watchdog: Watchdog) -> None:
    if world.rank == 1:
        raise UserError("rows.jsonl:7: not JSON: fix the line")
    world.barrier()


def all_have_a_user_error(world: World, watchdog: Watchdog) -> None:
    time.sleep(0.2 * world.rank)
    raise UserError("rows.jsonl:7: not JSON: fix the line")


def one_fails(world: World, watchdog: Watchdog) -> None:
    if world.rank == 1:
        raise ZeroDivisionError("a bug")
    world.barrier()


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (one_has_a_user_error, "error: rank 1 stopped: rows.jsonl:7: not JSON: fix the line\n"),
        (all_have_a_user_error, "error: rows.jsonl:7: not JSON: fix the line\n"),
    ],
)
def test_a_user_error_ends_all_ranks_and_is_printed_once(start: Start, work: Work, error: str) -> None:
    job = start(work, ranks=3, limit_seconds=600)
    assert job.codes(within_seconds=60) == [2, 2, 2]
    assert [job.stderr(rank) for rank in range(3)] == [error, "", ""]


def test_only_the_failing_rank_prints_a_traceback(start: Start) -> None:
    job = start(one_fails, ranks=3, limit_seconds=600)
    assert job.codes(within_seconds=60) == [EXIT_CODE, 1, EXIT_CODE]
    assert "Traceback" in job.stderr(1) and job.stderr(1).rstrip().endswith("ZeroDivisionError: a bug")
    assert job.stderr(0) == "error: rank 1 stopped: ZeroDivisionError: a bug\n" and job.stderr(2) == ""


def works(world: World, watchdog: Watchdog) -> None:
    ahead = 0.0
    watchdog_module.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)  # type: ignore[assignment]
    for step in range(1, 25):
        ahead += 100  # by which all steps last longer than the limit
        watchdog.begin_step(step)
        watchdog.enter_phase("training")
        world.all_reduce(torch.ones(1))
        time.sleep(0.1)
    if world.rank == 1:
        time.sleep(1.0)  # the others exit first


def test_a_successful_run_leaves_no_files(start: Start) -> None:
    job = start(works, ranks=3, limit_seconds=600)
    assert job.codes(within_seconds=60) == [0, 0, 0]
    assert [job.stderr(rank) for rank in range(3)] == ["", "", ""]
    assert not (job.folder / "stacks").exists()


def forks_a_child(world: World, watchdog: Watchdog) -> None:
    if world.rank == 1 and os.fork() == 0:
        time.sleep(120)
        os._exit(0)
    sleeps(world, watchdog)


def test_a_forked_child_does_not_hide_its_parents_death(start: Start) -> None:
    job = start(forks_a_child, limit_seconds=600)
    job.wait_for("ready")
    job.processes[1].kill()
    assert job.codes(of=[0], within_seconds=60) == [EXIT_CODE]


@pytest.mark.slow
def test_a_forked_child_ends_normally(tmp_path: Path) -> None:
    script = (
        "import os, sys, time, torch\nfrom pathlib import Path\n"
        "from hybrid_rlhf.runtime.liveness.watchdog import Watchdog\nfrom hybrid_rlhf.runtime.world import solo_world\n"
        "with Watchdog(solo_world(torch.device('cpu')), Path(sys.argv[1]), limit_seconds=60):\n"
        "    time.sleep(0.5)\n    child = os.fork()\n    if child: print(os.waitpid(child, 0)[1])\n"
    )
    done = run_python(["-c", script, str(tmp_path)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_threads_and_descriptors_are_gone_after_a_run(tmp_path: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Watchdog(solo_world(torch.device("cpu")), tmp_path, limit_seconds=60) as watchdog:
        assert threading.active_count() == before[0] + 1 and watchdog.phase == "start"
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert list(tmp_path.iterdir()) == []


def hears_rank_1_alone(world: World, local_size: int) -> tuple[str, list[Any]]:
    """The address at which rank 0 listens, and what it hears; strangers connect before rank 1."""
    strangers: list[socket.socket] = []
    places: list[tuple[str, int]] = []

    def create_server(*where: Any, **settings: Any) -> socket.socket:
        listener = socket.create_server(*where, **settings)
        places.append(listener.getsockname())
        for content in (b"", b"x" * 100_000, b"\xff\x00 1 host\n", b"f" * 32 + (1).to_bytes(4, "big")):
            strangers.append(socket.create_connection(places[0], timeout=5))
            strangers[-1].sendall(content)
        return listener

    heartbeats.socket = SimpleNamespace(**vars(socket) | {"create_server": create_server})  # type: ignore[assignment]
    channel = HeartbeatChannel(replace(world, local_size=local_size))
    if not world.is_main:
        channel.send({"word": 1})
        channel.close()
        return "", []
    heard = [channel.receive(5), channel.peers, channel.receive(5)]
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(places[0])
    return places[0][0], heard


@pytest.mark.parametrize(("local_size", "bound"), [(2, "127.0.0.1"), (1, "0.0.0.0")], ids=["one host", "two"])
def test_connections_without_the_token_are_rejected(local_size: int, bound: str, tmp_path: Path) -> None:
    """Other hosts may know rank 0 by another address than it has itself."""
    first, _ = run_ranks(hears_rank_1_alone, 2, tmp_path, local_size)
    no_exit_notice = [(1, None)]
    assert first == (bound, [[(1, {"word": 1})], [1], no_exit_notice])


def test_a_vanished_host_is_known_within_25_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        opened = socket.create_connection(listener.getsockname())
    with (
        contextlib.closing(heartbeats._connection(opened)) as connection,
        socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as ours,
    ):
        asked = [ours.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in heartbeats._KEEP_ALIVE]
        idle_seconds, interval_seconds, tries, unanswered_ms = asked
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle_seconds + interval_seconds * tries < 25 and unanswered_ms < 25_000


def reported(rank: int, collective: str | None, started: int, place: str = "a.py:1 f") -> RankReport:
    return RankReport(rank, "training of step 3", 60.0, place, collective, started)


def test_diagnoses() -> None:
    stalled = "is stalled: in training of step 3 since 60 s, at b.py:2 g (not in a collective)"
    hosts = dict.fromkeys(range(8), "node1")
    handles = [reported(0, None, 9), reported(1, None, 8, "b.py:2 g"), reported(2, None, 9)]
    assert diagnose(handles, hosts=hosts) == f"rank 1 {stalled}; ranks 0, 2 wait for it at a.py:1 f"
    mixed = [reported(0, "barrier", 9), *handles[1:]]
    assert (
        diagnose(mixed, hosts=hosts)
        == f"rank 1 {stalled}; rank 0 waits for it in barrier, called at a.py:1 f; rank 2 waits for it at a.py:1 f"
    )
    all_outside = [reported(rank, None, 5) for rank in range(8)]
    assert diagnose(all_outside, hosts=hosts).startswith("ranks 0-7 are stalled: in training")
    stuck = diagnose([reported(rank, "barrier", 5) for rank in range(3)], hosts=hosts)
    assert stuck == "all ranks wait in one collective that does not end; ranks 0-2 wait in barrier, called at a.py:1 f"
    different = diagnose([reported(0, "barrier", 5), reported(1, "all_gather", 5)], hosts=hosts)
    assert different.startswith("all ranks wait in different collectives; rank 0 waits in barrier, called at a.py:1 f;")
    hosts = {0: "node1", 1: "node2", 2: "node2"}
    assert diagnose(mixed, hosts=hosts).startswith("rank 1 (node2) is stalled: in training of step 3 since 60 s, ")
    assert diagnose([reported(0, "barrier", 5)], silent=[2, 1], hosts=hosts).startswith("ranks 1-2 (node2) do not")
