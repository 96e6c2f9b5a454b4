"""A Slurm cluster on hosts of tests/support/hosts.py: a controller on the first one, and a slurmd on each."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.clock import wait_until
from tests.support.hosts import HOST_ENVIRONMENT, Host, Network

_CONFIG = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
MpiDefault=none
KillWait=5
MinJobAge=3600
SlurmdParameters=config_overrides
"""
_NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=1 RealMemory=2000 Gres=gpu:1 State=UNKNOWN\n"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")


_MUNGE_FILES = {
    "key-file": "key",
    "socket": "sock",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


class Slurm:
    """A controller and its nodes."""

    def __init__(self, network: Network, folder: Path) -> None:
        folder.mkdir()
        for name in ("state", *(f"spool_{host.name}" for host in network.hosts)):
            (folder / name).mkdir()
        self.head = network.hosts[0]
        self.environment = {**HOST_ENVIRONMENT, "SLURM_CONF": str(folder / "slurm.conf")}
        config = _CONFIG.format(controller=self.head.name, address=self.head.address, folder=folder)
        nodes = [_NODE.format(name=host.name, address=host.address) for host in network.hosts]
        partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP\n"
        (folder / "slurm.conf").write_text(config + "".join(nodes) + partition)
        (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        munge = [f"--{name}={folder}/munge.{end}" for name, end in _MUNGE_FILES.items()]
        self._daemons: list[subprocess.Popen[str]] = []
        self._start(self.head, "munged", "--foreground", "--force", *munge, log=folder / "munged.out")
        wait_until(lambda: (folder / "munge.sock").exists(), "munged")
        self._start(self.head, "slurmctld", "-D", log=folder / "slurmctld.out")
        for host in network.hosts:
            self._start(host, "slurmd", "-D", "-N", host.name, log=folder / f"slurmd_{host.name}.out")
        wait_until(lambda: self.say("sinfo", "-h", "-o", "%T").split() == ["idle"], "idle nodes")

    def say(self, *line: str) -> str:
        """What a command of Slurm says on the first host."""
        return self.head.run(line, env=self.environment).stdout

    def submit(self, *line: str, **variables: str) -> str:
        """Submit a batch script; the id of the job."""
        settings = {"env": {**self.environment, **variables}}
        done = self.head.run(["sbatch", "--parsable", *line], **settings)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip().splitlines()[-1]

    def state(self, job: str) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self.say("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def end_of(self, job: str, *, seconds: float) -> dict[str, str]:
        """The state of a job once it has ended."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)).get("JobState") not in _ENDED:
            assert time.monotonic() < deadline, f"job {job} has not ended within {seconds:g} s: {state}"
            time.sleep(1.0)
        return state

    def close(self) -> None:
        """End the daemons; what they started ends with their hosts."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def _start(self, host: Host, program: str, *words: str, log: Path) -> None:
        settings: dict[str, Any] = {"env": self.environment, "stdout": log.open("w")}
        self._daemons.append(host.start([f"/usr/sbin/{program}", *words], **settings))


@contextlib.contextmanager
def slurm(network: Network, folder: Path) -> Iterator[Slurm]:
    """A cluster for a block."""
    made = Slurm(network, folder)
    try:
        yield made
    finally:
        made.close()
