"""Ranks on two hosts, started in each way of docs/quickstart_cluster.md, train as two ranks on one host do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.host_runs import Training, slurm_line
from tests.support.hosts import LOCAL, NAMES, Network, network, why_no_hosts
from tests.support.runs import ROOT
from tests.support.slurm import slurm
from tests.support.steps import run_outputs

pytestmark = pytest.mark.hosts
PLACES = "hosts: node1 (ranks 0), node2 (ranks 1)"


def test_a_hostfile(hosts: Network, training: Training, tmp_path: Path) -> None:
    """DeepSpeed's launcher over pdsh and ssh; nothing else runs it with more than one host."""
    done = hosts["node1"].run(training.line(tmp_path, "--launcher.hostfile", str(hosts.hostfile())))
    assert done.returncode == 0, done.stdout
    assert PLACES in (tmp_path / "step1_sft" / "log.txt").read_text()
    assert run_outputs(tmp_path / "step1_sft") == training.outputs


@pytest.mark.faults
def test_torchrun_with_a_rendezvous(hosts: Network, training: Training, tmp_path: Path) -> None:
    """The rendezvous gives the ranks to the hosts in any order."""
    meeting = "--nnodes 2 --nproc-per-node 1 --rdzv-id 7 --rdzv-backend c10d --rdzv-endpoint node1:29500".split()
    step = ["-m", "hybrid_rlhf.cli.sft", "--config", str(training.config), "--output_dir", str(tmp_path)]
    started = [host.start([sys.executable, "-m", "torch.distributed.run", *meeting, *step]) for host in hosts.hosts]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    places = (PLACES, "hosts: node2 (ranks 0), node1 (ranks 1)")
    assert any(place in text for place in places for text in said), said
    assert run_outputs(tmp_path) == training.outputs


@pytest.mark.faults
def test_the_script_for_torchrun(hosts: Network, training: Training, tmp_path: Path) -> None:
    line = [str(ROOT / "recipes" / "cluster" / "torchrun.sh"), "node1", "sft", str(training.config)]
    started = [
        host.start(["env", f"NODE_RANK={place}", "GPUS=1", *line, "--output_dir", str(tmp_path)])
        for place, host in enumerate(hosts.hosts)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert run_outputs(tmp_path) == training.outputs


@pytest.mark.faults
def test_sbatch(hosts: Network, training: Training, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with slurm(hosts, tmp_path / "slurm") as cluster:
        job = cluster.submit(*slurm_line(training, output, tmp_path / "job.out"), GPUS="1")
        end = cluster.end_of(job, seconds=300)
    said = (tmp_path / "job.out").read_text()
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "0"), said
    assert PLACES in said
    assert run_outputs(output) == training.outputs


def test_a_folder_that_is_not_shared_is_refused(hosts: Network, training: Training) -> None:
    """Each rank would write its part of a checkpoint to its own host, and no run could resume."""
    output = LOCAL / "run"
    meeting = "--nnodes 2 --nproc-per-node 1 --master-addr node1 --master-port 29500".split()
    step = ["-m", "hybrid_rlhf.cli.sft", "--config", str(training.config), "--output_dir", str(output)]
    started = [
        host.start([sys.executable, "-m", "torch.distributed.run", *meeting, "--node-rank", str(place), *step])
        for place, host in enumerate(hosts.hosts)
    ]
    said = "".join(process.communicate(timeout=300)[0] for process in started)
    rule = f"error: output_dir must be on a file system that all hosts share, {output} on node2 is another folder than "
    assert rule in said, said
    assert said.count("error: output_dir must") == 2, "once on each host"
    kept = hosts["node1"].run(["ls", "-A", str(output)]).stdout.split()
    assert kept == [".lock"], kept


@pytest.mark.faults
def test_a_pipeline_in_a_folder_that_is_not_shared_is_refused(hosts: Network, training: Training) -> None:
    """The other host could not read the settings of the step, and rank 0 would wait for it."""
    done = hosts["node1"].run(training.line(LOCAL / "all", "--launcher.hostfile", str(hosts.hostfile())))
    assert done.returncode == 2
    rule = "error: all hosts need the same software and output_dir at the same paths, on a file system that they share"
    assert done.stdout.splitlines()[-1].startswith(f"{rule}: node2 does not have {LOCAL}/all/logs/step1_sft.yaml")


@pytest.mark.faults
def test_a_host_that_ssh_does_not_reach_is_named(hosts: Network, training: Training, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1\nnode9 slots=1\n")
    done = hosts["node1"].run(training.line(tmp_path / "all", "--launcher.hostfile", str(hostfile)))
    assert done.returncode == 2
    rule = "error: launcher.hostfile needs ssh without a password to every host, node9 does not answer ("
    assert done.stdout.splitlines()[-1].startswith(rule), done.stdout


@pytest.mark.faults
def test_a_users_mistake_on_hosts_is_one_line_and_exit_code_2(
    hosts: Network, training: Training, tmp_path: Path
) -> None:
    """pdsh puts the host before the line."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 40 + '{"prompt": \n')
    more = ["--launcher.hostfile", str(hosts.hostfile()), "--launcher.restarts", "2", "--sft.data.sources", f"[{rows}]"]
    done = hosts["node1"].run(training.line(tmp_path / "all", *more))
    assert done.returncode == 2, done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"error: step sft: {rows}:41: a line must be JSON")
    assert "restart" not in done.stdout


@pytest.mark.faults
def test_three_hosts(training: Training, tmp_path: Path) -> None:
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    with network(tmp_path / "hosts", NAMES) as three:
        more = ["--launcher.hostfile", str(three.hostfile(names=NAMES)), "--sft.zero.stage", "3"]
        more += ["--sft.train.max_steps", "4", "--sft.train.global_batch_size", "6"]
        done = three["node1"].run(training.line(tmp_path / "all", *more))
        assert done.returncode == 0, done.stdout
        said = (tmp_path / "all" / "step1_sft" / "log.txt").read_text()
        assert "hosts: node1 (ranks 0), node2 (ranks 1), node3 (ranks 2)" in said
