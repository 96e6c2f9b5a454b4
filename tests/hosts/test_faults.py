"""Ranks, hosts and links that fail: the run ends with a line that names the host, and a restart resumes it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clock import wait_until
from tests.support.host_runs import Training, slurm_line
from tests.support.hosts import Network, inside, kill_below
from tests.support.slurm import slurm
from tests.support.steps import run_outputs

pytestmark = [pytest.mark.hosts, pytest.mark.faults]
LIMIT_SECONDS = 90
"""Until the command has ended: 20 s until a silent connection fails, for the ranks as for ssh; then the launcher and
the reports, on a machine with other work."""
DIED = re.compile(r"^(?:node1: )?error: rank 1 \(node2\) died in .*step \d+; resume from the last checkpoint")


@pytest.fixture
def start(hosts: Network, training: Training, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `train` on both hosts, and returns when the run has its second checkpoint; its output goes to a file."""
    started = []

    def start(*more: str) -> subprocess.Popen[str]:
        line = training.line(tmp_path / "all", "--launcher.hostfile", str(hosts.hostfile()), *more)
        with (tmp_path / "said.txt").open("w") as said:
            process = hosts["node1"].start(line, stdout=said)
        started.append(process)
        folder = tmp_path / "all" / "step1_sft"
        wait_until(lambda: saved(folder, 8) or process.poll() is not None, "second checkpoint", seconds=400)
        assert process.poll() is None, (tmp_path / "said.txt").read_text()
        return process

    yield start
    for process in started:
        kill_below(process)
        process.wait()


def saved(folder: Path, step: int) -> bool:
    """Return True if a run has the checkpoint of a step."""
    return (folder / "checkpoints" / f"step_{step}" / "manifest.json").exists()


def test_a_killed_rank_is_named_and_its_restart_resumes(
    hosts: Network, training: Training, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("--launcher.restarts", "1")
    (rank,) = hosts["node2"].ranks()
    rank.kill()
    assert process.wait(timeout=240) == 0, (tmp_path / "said.txt").read_text()
    said = (tmp_path / "said.txt").read_text()
    assert [line for line in said.splitlines() if DIED.match(line)], said
    assert "== sft: restart 1 of 1" in said
    assert said.count("resumes from") == 1, "not from the beginning"
    assert run_outputs(tmp_path / "all" / "step1_sft") == training.outputs


def test_a_lost_host_is_named_and_resumes_when_it_is_back(
    hosts: Network, training: Training, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Its kernel says nothing: without ssh's own questions the launcher waits for ever."""
    process = start("--launcher.restarts", "1")
    hosts["node2"].lose_power()
    lost = time.monotonic()
    wait_until(lambda: "restart 1 of 1" in (tmp_path / "said.txt").read_text(), "restart")
    assert time.monotonic() - lost < LIMIT_SECONDS
    hosts.boot_again("node2")
    assert process.wait(timeout=240) == 0, (tmp_path / "said.txt").read_text()
    said = (tmp_path / "said.txt").read_text()
    assert [line for line in said.splitlines() if DIED.match(line)], said
    assert run_outputs(tmp_path / "all" / "step1_sft") == training.outputs


def test_a_cut_link_ends_the_run_and_its_ranks_on_both_sides(
    hosts: Network, training: Training, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start()
    hosts["node2"].cut()
    try:
        cut_at = time.monotonic()
        code = process.wait(timeout=LIMIT_SECONDS)
        print(f"ended after {time.monotonic() - cut_at:.0f} s")
        wait_until(lambda: not hosts["node2"].ranks(), "end of rank 1", seconds=30)
    finally:
        hosts["node2"].join()
    said = (tmp_path / "said.txt").read_text()
    assert code == 70, said
    assert [line for line in said.splitlines() if DIED.match(line)], said
    assert not hosts["node1"].ranks()
    again = training.line(tmp_path / "all", "--launcher.hostfile", str(hosts.hostfile()))
    done = hosts["node1"].run(again)
    assert done.returncode == 0, done.stdout
    assert run_outputs(tmp_path / "all" / "step1_sft") == training.outputs


def test_a_stop_of_the_command_saves_on_all_hosts(
    hosts: Network, training: Training, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """The ranks are not below the command, but below the sshd of their hosts."""
    process = start()
    inside(process).terminate()
    assert process.wait(timeout=60) == 143, (tmp_path / "said.txt").read_text()
    folder = tmp_path / "all" / "step1_sft"
    assert "stopped by a signal after writing checkpoints/step_" in (folder / "log.txt").read_text()
    again = training.line(tmp_path / "all", "--launcher.hostfile", str(hosts.hostfile()))
    done = hosts["node1"].run(again)
    assert done.returncode == 0, done.stdout
    assert run_outputs(folder) == training.outputs


def test_slurm_requeues_a_job_whose_rank_is_killed(hosts: Network, training: Training, tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "job.out"
    with slurm(hosts, tmp_path / "slurm") as cluster:
        job = cluster.submit(*slurm_line(training, output, log), GPUS="1")
        wait_until(lambda: saved(output, 8), "second checkpoint", seconds=400)
        (rank,) = hosts["node2"].ranks()
        rank.kill()
        end = cluster.end_of(job, seconds=300)
    said = log.read_text()
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), said
    assert "error: rank 1 (node2) died in " in said
    assert run_outputs(output) == training.outputs
