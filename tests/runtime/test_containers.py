"""Containers that stay: what stays in them, what ends a command, and that nothing outlives them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.runtime.sandbox.container import Container, ContainerEnded
from hybrid_rlhf.runtime.sandbox.docker import DockerSandbox
from hybrid_rlhf.runtime.sandbox.local import Isolation
from tests.support.clock import wait_until
from tests.support.errors import user_error
from tests.support.sandboxes import IN_NAMESPACES, PYTHON, SMALL, processes_of, sandbox_of

pytestmark = pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
LIMITS = SMALL | {"output_bytes": 400}
FAKE = f"""#!{sys.executable}
# The client of Docker or podman, whose containers are those of this machine's sandbox: it records the words of each
# call, `run` opens a container, `exec` enters it with the words that are stored for it, and `rm` ends `run`.
import json, os, signal, sys
from pathlib import Path
here = Path(__file__).parent
with open(here / "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
verb, words = sys.argv[1], sys.argv[2:]
if verb == "run" and "--volume" in words:  # the probe of DockerSandbox, of an empty program
    sys.exit(0)
if verb == "run":
    sys.path.insert(0, {str(Path(__file__).parents[2])!r})
    from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
    from hybrid_rlhf.runtime.sandbox.local import LocalSandbox
    container = LocalSandbox(SandboxConfig(**{LIMITS!r}, command=({PYTHON!r}, "-s"))).open()
    file = here / words[words.index("--name") + 1]
    file.write_text(json.dumps([container._run.keywords["env"], list(container._enter), os.getpid()]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    try:
        sys.stdin.read()
    finally:
        container.close()
        file.unlink()
elif verb == "exec":
    env, enter, _ = json.loads((here / words[1]).read_text())
    os.execvpe(enter[0], [*enter, *words[2:]], env)
elif verb == "rm":
    file = here / words[1]
    if file.exists():
        os.kill(json.loads(file.read_text())[2], signal.SIGTERM)
"""


def client_of(folder: Path, name: str = "docker") -> Path:
    """The stand-in for a client."""
    client = folder / name
    client.write_text(FAKE)
    client.chmod(0o755)
    return client


KINDS = [*IN_NAMESPACES[:2], pytest.param(Isolation.USER_NAMESPACE, marks=pytest.mark.slow), "podman"]


@pytest.fixture(params=KINDS, ids=lambda kind: getattr(kind, "name", kind).lower())
def container(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Container]:
    """A container of each kind."""
    sandbox: Any
    if isinstance(request.param, Isolation):
        sandbox = sandbox_of(request.param, monkeypatch, **LIMITS)
    else:
        client = str(client_of(tmp_path, request.param))
        sandbox = DockerSandbox(SandboxConfig(kind="docker", image="debian", client=client, **LIMITS))
    opened = sandbox.open()
    yield opened
    opened.close()


def test_the_state_of_a_shell_stays(container: Container) -> None:
    container.write({"in/a file": "é"})
    for command, output, failure in (
        ("x=5; cd in; f() { echo $x; }; sleep 60 & echo $! >pid", "", None),
        ("f; pwd; cat 'a file'; kill -0 $(cat pid) && cat", "5\n/tmp/in\né", None),  # its standard input is empty
        ("exec >file; echo hidden", "", None),
        ("cat file; echo error >&2; false", "hidden\nerror\n", "exit status 1"),
        ("(", "bash: eval: line", "exit status 2"),
        ("printf 'no\\xff'", "no�", None),
    ):
        with ThreadPoolExecutor(1) as thread:  # as calls of an environment: its end must not end the shell
            result = thread.submit(container.shell, command).result()
        assert result.stdout.startswith(output) and (result.stdout == output or command == "("), command
        assert result.failure == failure
    assert container.read("in/a file") == "é"
    with pytest.raises(OSError, match="cat -- absent fails in a container: exit status 1: cat: absent: No such file"):
        container.read("absent")


def test_long_output_lacks_its_middle(container: Container) -> None:
    result = container.shell("echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert result.truncated and result.stdout.startswith("first\nxxx") and result.stdout.endswith("xxx\nlast\n")
    assert "bytes left out]\n" in result.stdout and len(result.stdout) < 600
    assert not container.shell("head -c 400 /dev/zero | tr '\\0' x").truncated


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        ("while :; do :; done", "it took longer than its time limit"),
        ("setsid sleep 60 & kill -STOP $$", "it took longer than its time limit"),
        ("echo said; exit 3", "exit status 3"),
        ("kill -KILL $$", "exit status"),
    ],
)
def test_a_command_that_hangs_or_ends_the_shell_leaves_files_and_no_process(
    container: Container, command: str, failure: str
) -> None:
    container.shell("echo kept >file; x=5")
    config = container._config
    container._config = replace(config, timeout_seconds=2.0)
    begin = time.monotonic()
    result = container.shell(f"setsid sleep 60 & {command}")
    container._config = config  # what follows may take longer on a slow machine
    assert result.failure is not None and result.failure.startswith(failure)
    assert time.monotonic() - begin < 50 and ("said" not in command or result.stdout == "said\n")
    assert container.shell("cat file; echo $x; ps -o stat= -C sleep | grep -vc Z").stdout == "kept\n\n0\n"


def test_a_command_cannot_end_its_container(container: Container) -> None:
    """Process 1 waits for the end of its run."""
    container.shell("for signal in $(seq 64); do kill -$signal 1 -1; done 2>/dev/null")
    assert container.shell("echo here").stdout == "here\n"


def test_a_snapshot_is_the_files_of_another_container(container: Container) -> None:
    container.shell("mkdir -p a/b; echo text >a/b/.file; ln -s b a/link; chmod 700 a")
    stored = container.snapshot()
    container.shell("rm -r a; echo new >new")
    container.restore(stored)
    assert container.shell("cat a/link/.file new; stat -c %a a").stdout == "text\nnew\n700\n"


def test_nothing_outlives_a_container(container: Container) -> None:
    mark = f"left_{os.getpid()}_{time.monotonic_ns()}"
    container.shell(f"setsid {PYTHON} -c 'import time; time.sleep(60)' {mark} & disown; echo secret >/tmp/secret")
    wait_until(lambda: bool(processes_of(mark)))
    container.close()
    assert not processes_of(mark)
    with pytest.raises(ContainerEnded):
        container.shell("cat /tmp/secret")
        container.kill()
    container.close()


@pytest.mark.faults
@pytest.mark.parametrize("isolation", IN_NAMESPACES, ids=lambda isolation: isolation.name.lower())
def test_a_container_dies_with_a_run_that_is_killed(isolation: Isolation, tmp_path: Path) -> None:
    """Also where the thread that opened it has ended before, and its first process is stopped."""
    mark = f"orphan_{os.getpid()}_{time.monotonic_ns()}"
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, threading, time\nfrom hybrid_rlhf.configs.sections.sandbox import SandboxConfig\n"
        "from hybrid_rlhf.runtime.sandbox import local\n"
        f"local._candidates = lambda: [local.Isolation.{isolation.name}]\n"
        "sandbox, opened = local.LocalSandbox(SandboxConfig(timeout_seconds=60)), []\n"
        "thread = threading.Thread(target=lambda: opened.append(sandbox.open()))\nthread.start()\nthread.join()\n"
        f"opened[0].shell(\"setsid {PYTHON} -c 'import time; time.sleep(60)' {mark} & kill -STOP 1\")\n"
        "print(opened[0].shell('echo ready').stdout, flush=True)\ntime.sleep(60)\n"
    )
    run = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    wait_until(lambda: bool(processes_of(mark)))
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not processes_of(mark))


def test_a_shell_needs_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them its processes are found by their user or not at all."""
    sandbox = sandbox_of(Isolation.OTHER_USER, monkeypatch)
    with user_error("a shell that stays needs namespaces, here programs have other_user: install bubblewrap"):
        sandbox.open()


def test_a_container_of_docker_has_the_limits_of_a_program(tmp_path: Path) -> None:
    """The words of its command line; the stand-in acts by this machine's sandbox."""
    import json

    client = client_of(tmp_path)
    sandbox = DockerSandbox(SandboxConfig(kind="docker", image="debian:12", client=str(client), **LIMITS))
    opened = sandbox.open()
    assert opened.shell("echo hello").stdout == "hello\n"
    opened.close()
    *_, run, execute, removed = map(json.loads, (tmp_path / "calls").read_text().splitlines())
    name = run[run.index("--name") + 1]
    assert [*run[:3], run[-6:-3]] == ["run", "--rm", "--interactive", ["debian:12", "bash", "--norc"]]
    for words in (
        *("--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--user 65534:65534"),
        *("--memory 268435456 --memory-swap 268435456", "--pids-limit 8", "--ulimit fsize=10737418"),
        "--tmpfs /tmp:rw,exec,nosuid,nodev,size=10737418,mode=1777",
    ):
        assert words in " ".join(run), words
    assert "--init" not in run, "bash is process 1, which no command can end"
    assert execute == ["exec", "--interactive", name, "bash", "--norc", "--noprofile"]
    assert removed == ["rm", "--force", name]
