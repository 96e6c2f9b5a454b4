"""Hosts on one machine: each has its own network, host name, processes and node-local folder, as a machine has.

A host is a set of Linux namespaces with an sshd; a bridge in a namespace of its own connects the hosts, over cables
whose delay and rate can be set (delay_line.py). All hosts see the file system of the machine, which is their shared
one, but `/run`, `LOCAL` and `/etc/hosts` are their own. Nothing outside the namespaces changes; everything ends with
pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.clock import wait_until
from tests.support.runs import ENVIRONMENT, ROOT

NAMES = ("node1", "node2", "node3")
LOCAL = Path("/mnt")
"""A folder that each host has for itself."""
PROGRAMS = ("ip", "nsenter", "unshare", "setpriv", "ssh", "sshd", "pdsh", "slurmctld", "slurmd", "munged")
_NETWORK = "10.77.0"
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
HOST_ENVIRONMENT = {
    **{name: value for name, value in ENVIRONMENT.items() if not name.startswith(("PYTEST", "SLURM"))},
    "PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}:{_SBIN}",
    "DS_ACCELERATOR": "cpu",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of all processes on hosts, also of those that ssh starts."""
_OVER_SSH = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HYBRID_RLHF_PRODUCTS", "DS_ACCELERATOR", "TOKENIZERS_PARALLELISM")


def why_no_hosts() -> str | None:
    """Why this machine cannot have hosts; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are Linux namespaces, which only root can make"
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{_SBIN}") is None]
    if missing:
        return f"tests/hosts/install.sh installs {', '.join(missing)}"
    made = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return None if made.returncode == 0 else f"namespaces are refused: {made.stderr.decode().strip()}"


_MEASURE_LINK = """
import sys
from pathlib import Path
from hybrid_rlhf.cli.machine.link import measure_network
measure_network(sys.argv[1], Path(sys.argv[2]))
"""


@dataclass
class Host:
    """One host."""

    name: str
    address: str
    process: subprocess.Popen[bytes]
    switch: int
    """Process id of the holder of the bridge."""

    @property
    def init(self) -> int:
        """Process id, on the machine, of the host's first process; its end ends all others."""
        return psutil.Process(self.process.pid).children()[0].pid

    def command(self, line: Sequence[str]) -> list[str]:
        """A command line that runs another one on this host."""
        spaces = ["nsenter", "--target", str(self.init), "--net", "--uts", "--mount", "--pid"]
        return [*spaces, f"--wdns={ROOT}", *line]

    def start(self, line: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """Start a command; standard error comes with its output."""
        return subprocess.Popen(
            self.command(line),
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
                "errors": "replace",
                "env": HOST_ENVIRONMENT,
                **settings,
            },
        )

    def run(self, line: Sequence[str], *, timeout: float = 300, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run a command; its standard error comes with its output."""
        with self.start(line, **settings) as process:
            try:
                output = process.communicate(timeout=timeout)[0]
            except subprocess.TimeoutExpired:
                kill_below(process)
                raise AssertionError(f"{shlex.join(line)} took {timeout} s:\n{process.communicate()[0]}") from None
        return subprocess.CompletedProcess(line, process.returncode, output, None)

    def ranks(self) -> list[psutil.Process]:
        """Processes of this host that are ranks of a run."""
        found = []
        for process in psutil.Process(self.init).children(recursive=True) + self._adopted():
            with contextlib.suppress(psutil.Error):
                if "RANK" in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return list({process.pid: process for process in found}.values())

    def _adopted(self) -> list[psutil.Process]:
        """Processes that `start` put on this host: they are in its namespaces, but not below its first process."""
        mine = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == mine:
                    found.append(process)
        return found

    def cut(self) -> None:
        """Take the link down: all packets are dropped, and connections are not closed."""
        self._port("down")

    def join(self) -> None:
        """Bring the link up again."""
        self._port("up")

    def _port(self, state: str) -> None:
        _must(["nsenter", "--target", str(self.switch), "--net", "ip", "link", "set", f"to_{self.name}", state])

    def lose_power(self) -> None:
        """End the host as a power failure does: take its link down, then kill all its processes."""
        self.cut()
        os.kill(self.init, signal.SIGKILL)
        self.process.wait()


class Network:
    """Hosts on a bridge."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self._names = list(names)
        self.hosts: list[Host] = []
        _write_settings(folder, self._names)
        self._switch = subprocess.Popen([*_dying_with_us(), "unshare", "--net", "sleep", "infinity"])
        wait_until(lambda: _namespace(self._switch.pid, "net") != _namespace(os.getpid(), "net"), "the bridge")
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._on_switch("ip", "link", "set", "bridge", "up")
        self.hosts = [self._boot(name) for name in self._names]

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @contextlib.contextmanager
    def long_cable(self, name: str, *, delay_ms: float, mbit: float) -> Iterator[None]:
        """Give a host a cable with a delay and a rate in each direction, for a block."""
        near, far = f"near_{name}", f"far_{name}"
        self._on_switch("ip", "link", "set", f"to_{name}", "nomaster")
        self._on_switch("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        self._on_switch("ip", "link", "set", near, "master", "bridge", "up")
        self._on_switch("ip", "link", "set", far, "up")
        line = [sys.executable, str(ROOT / "tests" / "support" / "delay_line.py"), f"to_{name}", far]
        switch = ["nsenter", "--target", str(self._switch.pid), "--net"]
        cable = subprocess.Popen([*_dying_with_us(), *switch, *line, str(delay_ms / 1000), str(mbit * 1e6)])
        try:
            wait_until(lambda: self._answers(name), f"the end of {name}'s cable")
            yield
        finally:
            cable.kill()
            cable.wait()
            self._on_switch("ip", "link", "delete", near)
            self._on_switch("ip", "link", "set", f"to_{name}", "master", "bridge")

    def boot_again(self, name: str) -> Host:
        """Start a host that has lost its power."""
        host = self._boot(name)
        self.hosts[self._names.index(name)] = host
        return host

    def close(self) -> None:
        """End all hosts."""
        for process in [host.process for host in self.hosts] + [self._switch]:
            process.kill()
            process.wait()

    def link(self, folder: Path) -> tuple[float, float]:
        """GB/s and microseconds between the hosts, measured as `calibrate --hostfile` does with a rank per host."""
        done = self.hosts[0].run([sys.executable, "-c", _MEASURE_LINK, str(self.hostfile()), str(folder)], timeout=600)
        assert done.returncode == 0, done.stdout
        rate, latency = json.loads((folder / "link.json").read_text())
        return rate, latency

    def hostfile(self, slots: int = 1, names: Sequence[str] = NAMES[:2]) -> Path:
        """A hostfile of these hosts."""
        file = self.folder / f"hostfile_{len(names)}"
        file.write_text("".join(f"{name} slots={slots}\n" for name in names))
        return file

    def _boot(self, name: str) -> Host:
        address = _address(self._names, name)
        spaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = ["bash", str(self.folder / "boot.sh"), name, str(self.folder)]
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [*_dying_with_us(), *spaces, *script], stdout=log, stderr=log, env=HOST_ENVIRONMENT, cwd=ROOT
        )
        wait_until(lambda: bool(psutil.Process(process.pid).children()), f"{name}'s first process")
        host = Host(name, address, process, self._switch.pid)
        port = ["ip", "link", "add", f"to_{name}", "type", "veth", "peer", "name", "eth0", "netns", str(host.init)]
        with contextlib.suppress(subprocess.CalledProcessError):  # the port of a host that lost its power
            self._on_switch("ip", "link", "delete", f"to_{name}", quiet=True)
        self._on_switch(*port)
        self._on_switch("ip", "link", "set", f"to_{name}", "master", "bridge", "up")
        wait_until(lambda: self._answers(name, by=host), f"sshd of {name}")
        return host

    def _answers(self, name: str, *, by: Host | None = None) -> bool:
        """Return True if a host answers ssh, by default that of the first host."""
        line = ["ssh", "-o", "ConnectTimeout=1", name, "true"]
        return (by or self.hosts[0]).run(line).returncode == 0

    def _on_switch(self, *line: str, quiet: bool = False) -> None:
        _must(["nsenter", "--target", str(self._switch.pid), "--net", *line], quiet=quiet)


@contextlib.contextmanager
def network(folder: Path, names: Sequence[str] = NAMES[:2]) -> Iterator[Network]:
    """Hosts for a block."""
    made = Network(folder, names)
    try:
        yield made
    finally:
        made.close()


def kill_below(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def inside(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that `Host.start` has started on the host."""
    return psutil.Process(process.pid).children()[0]


def _write_settings(folder: Path, names: Sequence[str]) -> None:
    """Files that the hosts mount over those of the machine, and what they run first."""
    folder.mkdir(parents=True, exist_ok=True)
    for key in ("user_key", "host_key"):
        _must(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)])
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    lines = ["127.0.0.1 localhost", *(f"{_address(names, name)} {name}" for name in names)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    variables = " ".join(f'"{name}={HOST_ENVIRONMENT[name]}"' for name in _OVER_SSH if name in HOST_ENVIRONMENT)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nStrictModes no\n"
        f"UsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 100\nSetEnv {variables}\n"
    )
    (folder / "boot.sh").write_text(_BOOT.format(addresses=_cases(names)))


_BOOT = """
set -eu
name=$1 folder=$2
case $name in {addresses} esac
hostname "$name"
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /mnt
mkdir /run/sshd
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
ip link set lo up
until ip address add "$address/24" dev eth0 2> /dev/null; do sleep 0.05; done
ip link set eth0 up
/usr/sbin/sshd -f "$folder/sshd_config"
while :; do sleep 1; done  # reaps what others leave behind
"""


def _cases(names: Sequence[str]) -> str:
    return " ".join(f"{name}) address={_address(names, name)};;" for name in names)


def _address(names: Sequence[str], name: str) -> str:
    return f"{_NETWORK}.{[*names].index(name) + 1}"


def _dying_with_us() -> list[str]:
    """The start of a command that ends when pytest does."""
    return ["setpriv", "--pdeathsig", "KILL"]


def _namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def _must(line: Sequence[str], *, quiet: bool = False) -> None:
    streams: Mapping[str, Any] = {"stderr": subprocess.DEVNULL} if quiet else {}
    subprocess.run(line, check=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:{_SBIN}"}, **streams)
