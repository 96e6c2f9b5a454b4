"""Programs that attack the sandbox, in each isolation that works here; limits are small: a failure is harmless."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.runtime.sandbox import local
from hybrid_rlhf.runtime.sandbox.docker import DockerSandbox
from hybrid_rlhf.runtime.sandbox.local import Isolation, LocalSandbox, outermost
from hybrid_rlhf.runtime.sandbox.process import SandboxResult
from tests.support.clock import wait_until
from tests.support.errors import user_error
from tests.support.sandboxes import IN_NAMESPACES, PYTHON, SMALL, processes_of, sandbox_of

pytestmark = pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")


class InContainers:
    """Runs each program in a container that stays, as a command of its own."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox, self.isolation, self._temporary = sandbox, sandbox.isolation, sandbox._temporary

    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, str] | None = None, timeout_seconds: float = 8.0
    ) -> SandboxResult:
        container = self._sandbox.open()
        try:
            container._config = replace(container._config, timeout_seconds=timeout_seconds)
            container.write({**(files or {}), "program": program})
            return container.run(f"exec {PYTHON} -s program", stdin=stdin)
        finally:
            container.close()


@pytest.fixture(
    params=[
        *((isolation, False) for isolation in Isolation),
        *((isolation, True) for isolation in IN_NAMESPACES[:2]),
        pytest.param((Isolation.USER_NAMESPACE, True), marks=pytest.mark.slow),
    ],
    ids=lambda param: param[0].name.lower() + ("_stays" if param[1] else ""),
)
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LocalSandbox | InContainers:
    """A sandbox of each isolation, and its containers that stay."""
    isolation, stays = request.param
    found = sandbox_of(isolation, monkeypatch)
    return InContainers(found) if stays else found


def test_a_program_reads_its_input_and_files(sandbox: LocalSandbox) -> None:
    program = "import sys, b.helper\nprint(open('/dev/stdin').read(), open('a.txt').read(), b.helper.x)\nsys.exit(3)"
    result = sandbox.run(program, stdin="in é", files={"a.txt": "file", "b/helper.py": "x = 7"})
    assert (result.exit_status, result.stdout) == (3, "in é file 7\n")
    assert not (result.timed_out or result.truncated or result.memory_exceeded)
    assert result.failure == "exit status 3"
    assert sandbox.run("pass").failure is None
    if isinstance(sandbox, LocalSandbox):
        with user_error("files of a program are in its folder, got '../x'"):
            sandbox.run("", files={"../x": ""})


def test_a_program_may_open_its_input_at_once(
    sandbox: LocalSandbox | InContainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have the processor when it starts: its pipes became its user's after that, which it found denied."""

    class Late(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **settings: Any) -> None:
            super().__init__(*words, **settings)
            time.sleep(0.3)

    monkeypatch.setattr("hybrid_rlhf.runtime.sandbox.process.Popen", Late)
    result = sandbox.run("print(open('/dev/stdin').read())", stdin="in")
    assert result.stdout == "in\n", result.stderr


def test_the_runs_environment_and_descriptors_are_hidden(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of the hub and of trackers are in the environment of a run."""
    monkeypatch.setenv("HF_TOKEN", "hidden")
    result = sandbox.run("import os\nprint(dict(os.environ), sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    assert "hidden" not in result.stdout and result.stdout.endswith("[0, 1, 2]\n"), result.stderr


def test_endless_loops_and_sleepers_end_in_time(sandbox: LocalSandbox) -> None:
    """Also those that close their output, and several at once."""
    sleep = "import time; time.sleep(60)"
    programs = ["while True: pass", sleep, f"import os\nos.close(1)\nos.close(2)\n{sleep}"]
    begin = time.monotonic()
    with ThreadPoolExecutor(len(programs)) as pool:
        for result in pool.map(partial(sandbox.run, timeout_seconds=1.5), programs):
            assert result.timed_out and result.failure == "it took longer than its time limit"
    assert time.monotonic() - begin < 50, "they sleep for 60 seconds"


def test_memory_and_processor_time_are_limited(sandbox: LocalSandbox) -> None:
    """Threads use more time than passes. Several processes have several times the limit of memory: where that exhausts
    the host, they end before the run."""
    limit = sandbox.run("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))")
    assert limit.stdout == "(8, 9)\n"
    result = sandbox.run("x = bytearray(2 ** 29)")
    assert result.memory_exceeded and result.failure == "it needed more memory than its limit"
    assert sandbox.run("print(open('/proc/self/oom_score_adj').read())").stdout.strip() == "1000"


@pytest.mark.parametrize(("uid_map", "most"), [("0 0 4294967295\n", 2**31), ("0 100000 65536\n", 65536)])
def test_users_of_programs_are_new_ones(uid_map: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rootless container has few numbers; two programs of one user would end each other."""
    monkeypatch.setattr(Path, "read_text", lambda path: uid_map)
    users = local._free_users()
    assert len(users) > 1000 and most // 2 < users[0] < users[-1] < most
    monkeypatch.setattr(Path, "read_text", lambda path: "0 1000 1\n")
    assert not local._free_users(), "the only user would end the run with its programs"
    assert not {Isolation.NAMESPACES, Isolation.OTHER_USER} & set(local._candidates())
    monkeypatch.undo()
    sandbox = LocalSandbox(SandboxConfig(**SMALL))
    is_user = sandbox.isolation not in (Isolation.NAMESPACES, Isolation.OTHER_USER)
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(sandbox.run, ["import os; print(os.getuid())"] * 8))
    assert len({result.stdout for result in told}) == (1 if is_user else 8)


def test_an_old_kernel_counts_processes_of_the_whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit below the processes that this user has would fail every program."""
    for release, absent in (("5.4.0-150-generic", True), ("5.15.0", False), ("6.1.0-9-amd64", False)):
        monkeypatch.setattr(local.platform, "release", lambda release=release: release)
        assert ("its processes are not counted" in local._absent(Isolation.USER_NAMESPACE)) == absent
        assert local._absent(Isolation.NAMESPACES) == ()


def test_a_gigabyte_of_output_fills_neither_memory_nor_time(sandbox: LocalSandbox) -> None:
    program = "import os\nblock = b'x' * 65536\nfor _ in range(2 ** 14): os.write(1, block)\nos.write(2, b'end')"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = sandbox.run(program)
    assert result.truncated and len(result.stdout) == SandboxConfig.output_bytes and set(result.stdout) == {"x"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10
    assert result.timed_out or result.stderr == "end", "all of it is read, or its time ends"
    result = sandbox.run("import sys\nsys.stderr.write('x' * 2 ** 21)\nraise ValueError('the reason')")
    assert not result.truncated and result.failure == "exit status 1: ValueError: the reason"


def test_a_fork_bomb_is_bounded(sandbox: LocalSandbox) -> None:
    if sandbox.isolation is Isolation.LIMITS or (os.geteuid() == 0 and sandbox.isolation in IN_NAMESPACES[1:]):
        pytest.skip("root's processes are not counted")
    program = (
        "import os, time\nchildren = 0\ntry:\n    while children < 100:\n        if os.fork() == 0:\n"
        "            os.setsid()\n            time.sleep(60)\n            os._exit(0)\n        children += 1\n"
        "except BlockingIOError:\n    print(children)"
    )
    result = sandbox.run(program)
    assert 1 <= int(result.stdout) <= SMALL["processes"]


def test_nothing_of_a_program_is_left(sandbox: LocalSandbox) -> None:
    """Daemons leave the session and the process group of the program, and files its folder."""
    mark = f"left_{os.getpid()}_{time.monotonic_ns()}"
    program = (
        "import os, sys, time\nopen('left', 'w').write('x')\nif os.fork() == 0:\n    LEAVE\n"
        f"    os.execv('{PYTHON}', ['{PYTHON}', '-c', 'import time; time.sleep(60)', '{mark}'])\n"
        "time.sleep(0.3)\nprint('end')"
    )
    leave = "pass" if sandbox.isolation is Isolation.LIMITS else "os.setsid()"
    assert sandbox.run(program.replace("LEAVE", leave)).stdout == "end\n"
    wait_until(lambda: not processes_of(mark), "the end of a daemon", seconds=30)
    assert list(Path(sandbox._temporary.name).glob("run_*")) == []


def test_folders_deeper_than_pythons_recursion_are_removed(sandbox: LocalSandbox) -> None:
    """RecursionError would end the run, and leave the folder."""
    assert sandbox.run("import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')").succeeded
    assert list(Path(sandbox._temporary.name).glob("run_*")) == []


def test_files_outside_are_neither_written_nor_read(sandbox: LocalSandbox, tmp_path: Path) -> None:
    if sandbox.isolation is Isolation.LIMITS:
        pytest.skip("limits alone do not protect files")
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o600)
    target = tmp_path / "target"
    program = (
        "import os\n"
        f"for path in ({str(target)!r}, '/outside', '/usr/outside', '/etc/outside'):\n"
        "    try: open(path, 'w').write('x'); print('wrote', path)\n    except OSError: pass\n"
        f"try: print(open({str(secret)!r}).read())\nexcept OSError: print('hidden')\n"
        "open('inside', 'w').write('x')"
    )
    result = sandbox.run(program)
    assert result.succeeded and result.stdout == "hidden\n", (result.stdout, result.stderr)
    assert not target.exists() and not Path("/outside").exists()
    if sandbox.isolation in IN_NAMESPACES:
        shown = sandbox.run(
            "import os\nprint(os.path.exists('/home'), os.path.exists('/etc/passwd'), os.getpid() < 20)"
        )
        assert shown.stdout == "False False True\n"


def test_the_files_of_a_program_are_bounded(sandbox: LocalSandbox) -> None:
    program = (
        "total = 0\ntry:\n    for number in range(64):\n"
        "        total += open(str(number), 'wb').write(b'x' * 2 ** 20)\n"
        "except OSError: pass\nprint(total)"
    )
    if sandbox.isolation in IN_NAMESPACES:
        assert int(sandbox.run(program).stdout) <= SMALL["disk_gib"] * 2**30
    one = (
        "import os\nout = os.open('x', os.O_CREAT | os.O_WRONLY)\ntotal = 0\ntry:\n"
        "    while True: total += os.write(out, b'x' * 2 ** 20)\nexcept OSError: print(total)"
    )
    assert int(sandbox.run(one).stdout) <= SMALL["disk_gib"] * 2**30


def test_a_program_makes_no_user_namespace_and_no_system_v_memory(sandbox: LocalSandbox) -> None:
    """In the first it mounts file systems of any size; no limit of a process counts the second."""
    if sandbox.isolation not in IN_NAMESPACES:
        pytest.skip("this isolation lists files as not counted")
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600))"
    )
    namespace, *shared = sandbox.run(program).stdout.split()
    assert namespace == "-1"
    if sandbox.isolation is Isolation.NAMESPACES:  # others: from Linux 5.19 on, and not in bubblewrap
        assert shared == ["-1", "-1"]


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a server on this machine that accepts connections."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_there_is_no_network(sandbox: LocalSandbox, listener: int) -> None:
    program = (
        f"import socket\ntry: socket.create_connection(('127.0.0.1', {listener}), 1); print('connected')\n"
        "except OSError: print('none')"
    )
    has_network = "it has the network" in sandbox.isolation.absent
    assert sandbox.run(program).stdout == ("connected\n" if has_network else "none\n")


def test_privileges_do_not_come_back(sandbox: LocalSandbox) -> None:
    """With them a program of root would mount the disk again, or leave the root by chroot."""
    if sandbox.isolation is Isolation.LIMITS:
        pytest.skip("a program of this user has its privileges")
    status = sandbox.run("print(open('/proc/self/status').read())").stdout
    assert re.search(r"CapEff:\t0+\n", status) and re.search(r"CapBnd:\t0+\n", status) and "NoNewPrivs:\t1" in status


def test_a_program_dies_with_the_run(tmp_path: Path) -> None:
    """A run that is killed cannot kill its programs."""
    mark = f"orphan_{os.getpid()}_{time.monotonic_ns()}"
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\nfrom hybrid_rlhf.configs.sections.sandbox import SandboxConfig\n"
        "from hybrid_rlhf.runtime.sandbox.local import LocalSandbox\n"
        "sandbox = LocalSandbox(SandboxConfig(timeout_seconds=60))\nprint('ready', flush=True)\n"
        "sandbox.run(sys.argv[1])\n"
    )
    words = ["-c", "import time; time.sleep(50)", mark]
    program = f"import os, sys; os.execv(sys.executable, [sys.executable, *{words}])"
    run = subprocess.Popen(
        [sys.executable, str(script), program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"

    wait_until(lambda: bool(processes_of(mark)))
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not processes_of(mark))


def test_the_strongest_isolation_is_chosen_and_what_is_absent_is_told_once(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(local, "warn_once", local.warn_once.__wrapped__)  # of this test, whatever ran before
    monkeypatch.setattr(local, "_MOUNT", "echo denied >&2; exit 1\n")  # as in a container without privileges
    monkeypatch.setattr(local.shutil, "which", lambda name: None if name == "bwrap" else shutil_which(name))
    settings = SMALL | {"command": (PYTHON, "-s"), "limits_alone": os.geteuid() != 0}
    sandbox = LocalSandbox(SandboxConfig(**settings))
    assert sandbox.isolation in (Isolation.OTHER_USER, Isolation.LIMITS)
    (message,) = [text for text in log_lines if text.startswith("the sandbox of programs lacks protections here (")]
    assert "denied" in message
    assert all(absent in message for absent in sandbox.isolation.absent)
    with user_error("sandbox.strict needs all protections, here a program lacks some|programs of a model run in name"):
        LocalSandbox(SandboxConfig(**settings | {"strict": True, "limits_alone": False}))


@pytest.mark.parametrize("user", [0, 1000])
def test_programs_never_have_the_rights_of_root_and_those_of_a_user_only_if_accepted(
    user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that denies every isolation once ran a model's programs as root, after one warning."""
    monkeypatch.setattr(local, "_candidates", list)
    monkeypatch.setattr(local.os, "geteuid", lambda: user)
    hidden: list[bool] = []
    monkeypatch.setattr(local, "_hide_memory", lambda: hidden.append(True))
    rule = "programs of a model run in namespaces, as another user or in bubblewrap, none works here"
    with user_error(rule):
        LocalSandbox(SandboxConfig(**SMALL))
    accepted = SandboxConfig(**SMALL, limits_alone=True)
    if user == 0:
        with user_error(rule):
            LocalSandbox(accepted)
    else:
        assert LocalSandbox(accepted).isolation is Isolation.LIMITS
    assert bool(hidden) == (user != 0)


def test_programs_with_limits_alone_read_neither_memory_nor_environment_of_the_run() -> None:
    """Keys, and the expected outputs of pairs."""
    program = (
        "import os\nfor name in 'environ', 'maps', 'mem':\n"
        "    try: open(f'/proc/{os.getppid()}/{name}', 'rb').close()\n    except PermissionError: print('hidden')"
    )
    run = (
        "import subprocess, sys\nfrom hybrid_rlhf.runtime.sandbox.local import _hide_memory\n"
        f"if sys.argv[1] == 'hide': _hide_memory()\nsubprocess.run(['{PYTHON}', '-c', sys.argv[2]], check=True)"
    )
    drop = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()  # those of root read all
    for word, told in (("hide", "hidden\n" * 3), ("show", "")):
        words = [*drop, sys.executable, "-c", run, word, program]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == told


@pytest.mark.parametrize("isolation", IN_NAMESPACES, ids=lambda isolation: isolation.name.lower())
def test_a_virtual_environment_may_be_below_the_home_of_programs(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden by the file system that is mounted there, it once left root without an isolation."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        prefix = Path(name, "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
        link = Path(name, "python")
        link.symlink_to(prefix / "bin" / "python")
        monkeypatch.setattr(sys, "prefix", str(prefix))
        for executable in (prefix / "bin" / "python", link):  # the link as uv makes it in ~/.local/bin
            monkeypatch.setattr(sys, "executable", str(executable))
            sandbox = sandbox_of(isolation, monkeypatch, command=())
            told = sandbox.run("import sys\nopen('a', 'w').close()\nprint(sys.executable)")
            assert told.stdout == f"{executable}\n", told.failure
        denied = sandbox.run(f"open({str(prefix / 'left')!r}, 'w')")
        assert "Read-only file system" in denied.stderr or "Permission denied" in denied.stderr
    monkeypatch.undo()
    with user_error("sandbox.readable lists folders besides /tmp, the home of a program"):
        LocalSandbox(SandboxConfig(readable=("/tmp",)))


shutil_which = shutil.which


def test_an_interpreter_that_is_absent_is_a_users_mistake() -> None:
    with user_error("a sandbox must run no_such_interpreter, an empty program fails"):
        LocalSandbox(SandboxConfig(command=("no_such_interpreter",)))


@pytest.mark.parametrize("isolation", IN_NAMESPACES, ids=lambda isolation: isolation.name.lower())
def test_a_readable_folder_may_be_a_symbolic_link(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the folder of an environment that is on another disk."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # a program's /tmp is its own
        folder = Path(name)
        (folder / "disk").mkdir(mode=0o755)
        (folder / "disk" / "a.txt").write_text("text")
        (folder / "first").symlink_to("disk")
        (folder / "link").symlink_to("first")
        sandbox = sandbox_of(isolation, monkeypatch, readable=(str(folder / "link"),))
        result = sandbox.run(f"print(open({str(folder / 'link' / 'a.txt')!r}).read())")
        assert result.stdout == "text\n", result.failure


def test_paths_within_others_are_mounted_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "ab").mkdir()
    paths = [str(tmp_path / name) for name in ("a/b", "a", "ab", "absent", "a")]
    assert outermost(paths) == [tmp_path / "a", tmp_path / "ab"]


FAKE = """#!/bin/sh
# Docker's client, without a container: records the words, and runs the command of `run` on the volume.
printf '%s\\n' "$*" >> "$(dirname "$0")/calls"
[ "$1" = run ] || exit 0
while [ "$1" != sh ]; do case "$1" in --volume) files="${2%%:*}";; esac; shift; done
place="$(mktemp -d)"; cp -R "$files/." "$place"; cd "$place"; shift 4; "$@"
"""


def test_a_container_has_the_same_limits(tmp_path: Path) -> None:
    """The words of the command line; a container itself needs a daemon."""
    client = tmp_path / "docker"
    client.write_text(FAKE)
    client.chmod(0o755)
    sandbox = DockerSandbox(SandboxConfig(kind="docker", image="python:3.11", client=str(client), **SMALL))
    result = sandbox.run("print(input(), open('a').read())", stdin="in", files={"a": "file"})
    assert (result.exit_status, result.stdout) == (0, "in file\n")
    begin = time.monotonic()
    assert sandbox.run("import time; time.sleep(60)", timeout_seconds=1).timed_out and time.monotonic() - begin < 50
    assert sandbox.run("import os; os.kill(os.getpid(), 9)").memory_exceeded, "what the kernel does without memory"
    calls = (tmp_path / "calls").read_text().splitlines()
    for words in (
        "run --rm --interactive --name hybrid_rlhf_",
        *("--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--user 65534:65534"),
        *("--memory 268435456 --memory-swap 268435456", "--pids-limit 8", "--ulimit cpu=8", "--ulimit fsize=10737418"),
        *("--tmpfs /tmp:rw,exec,nosuid,nodev,size=10737418,mode=1777 --init", ":/files:ro python:3.11 sh -c"),
    ):
        assert words in calls[0], words
    names = re.findall(r"--name (\S+)", "\n".join(calls))
    assert [call for call in calls if call.startswith("rm ")] == [f"rm --force {name}" for name in names]
    with user_error("sandbox.client must be installed, no_docker is not"):
        DockerSandbox(SandboxConfig(kind="docker", image="x", client="no_docker"))


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"kind": "remote"}, "sandbox.kind is local, docker or a class as module:Class, got 'remote'"),
        ({"kind": "docker"}, "sandbox.image goes with sandbox.kind docker, got None with docker"),
        ({"image": "x"}, "sandbox.image goes with sandbox.kind docker, got x with local"),
        ({"kind": "docker", "image": "x", "strict": True}, "sandbox.strict is not read with sandbox.kind docker"),
        ({"strict": True, "limits_alone": True}, "sandbox.strict and sandbox.limits_alone contradict each other"),
        ({"options": {"a": 1}}, "sandbox.options is not read with sandbox.kind local"),
        ({"memory_gib": 0.0}, "memory_gib must be above 0"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], rule: str) -> None:
    with user_error(re.escape(rule)):
        SandboxConfig(**settings)
