"""The shell of an episode: what the actor observes, what rewards it, and that an episode leaves nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid_rlhf.rl.environments.shell import Shell
from hybrid_rlhf.rl.environments.tools import UNREADABLE
from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.sandbox import local
from hybrid_rlhf.runtime.sandbox.container import STAY
from hybrid_rlhf.runtime.world import World
from tests.support.ahead import rollout_line
from tests.support.clock import wait_until
from tests.support.errors import user_error
from tests.support.faults import Point, run_step
from tests.support.programs import SAMPLING, environment_parts
from tests.support.rl import chat_row
from tests.support.steps import run_outputs, write_lines
from tests.support.tiny import tiny_tokenizer

SANDBOX = {"timeout_seconds": 20.0, "disk_gib": 0.01, "processes": 12}
TASK: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "Fix add.sh."}],
    "files": {"src/add.sh": "echo $(($1 - $2))\n"},
    "tests": 'test "$(bash src/add.sh 2 3)" = 5 && bash check.sh',
    "test_files": {"check.sh": 'test "$(bash src/add.sh 4 4)" = 8\n'},
}


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


@pytest.fixture
def started() -> Iterator[Callable[..., Shell]]:
    """A function that starts an episode of a task."""
    shells: list[Shell] = []

    def start(*, seconds: float = 20.0, **columns: Any) -> Shell:
        sandbox = SANDBOX | {"timeout_seconds": seconds}
        setup = "mkdir made && echo ready >made/file"
        shells.append(Shell(sandbox=sandbox, setup=setup, pool=1, tests="test -e made/file"))
        assert shells[-1].reset(TASK | columns) == TASK["prompt"]
        return shells[-1]

    yield start
    for shell in shells:
        shell.close()


def test_an_episode_is_rewarded_by_its_tests(started: Callable[..., Shell]) -> None:
    """Commands of one turn run in order; files of the tests are not there before."""
    shell = started()
    assert shell.step(call("cat made/file; ls; cd src")) == ("ready\nmade\nsrc", 0.0, False)
    told = shell.step(f"<think>{call('exit')}</think>" + call("sed -i s/-/+/ add.sh") + call("pwd; ls ../check.sh"))
    assert told.observation is not None and told.observation.startswith("[no output]\n/tmp/src\nls: cannot access")
    assert told.observation.endswith("[exit status 2]")
    assert shell.step("<tool_call>ls</tool_call>") == (UNREADABLE, 0.0, False)
    assert shell.step("Done.") == (None, 1.0, True)
    assert started().step("Done.") == (None, 0.0, True)
    assert started(tests=None).step("Done.") == (None, 1.0, True), "by those of the option"
    shell = started()
    shell.step(call("sed -i s/-/+/ src/add.sh"))
    assert shell.truncated() == 1.0 and started().truncated() == 0.0, "at max_turns, too"


@pytest.mark.parametrize(
    "attack",
    [
        "bash() { true; }; test() { true; }; export -f bash test; export BASH_ENV=/tmp/x; echo exit >x",
        "ln -s /dev/null check.sh; sed -i s/-/+/ src/add.sh; echo '[ $1 = 2 ] && echo 5' >src/add.sh",
        "mkdir check.sh; chmod 555 .",
        "(while :; do echo true >check.sh; done) & echo 'echo 5' >src/add.sh",
        "head -c 20000000 /dev/zero >full; echo 'echo 5' >src/add.sh",
    ],
)
def test_the_actor_cannot_change_the_tests(started: Callable[..., Shell], attack: str) -> None:
    """By functions of its shell, by links in the place of their files, by a process that goes on, by a full disk."""
    shell = started()
    shell.step(call(attack))
    assert shell.step("Done.") == (None, 0.0, True)


def test_what_ends_an_episode_is_told(started: Callable[..., Shell]) -> None:
    shell = started(seconds=2.0)
    assert shell.step(call("sleep 60")) == ("[it took longer than its time limit]", 0.0, False)
    assert shell.step(call("echo here")).observation == "here"
    assert shell._container is not None
    shell._container._remove()
    shell._container._process.wait(60)  # all processes have ended
    assert shell.truncated() == 0.0
    observation, reward, done = shell.step(call("echo here"))
    assert (reward, done) == (0.0, True) and "the container of a shell has ended" in str(observation)


def test_episodes_share_nothing(started: Callable[..., Shell]) -> None:
    first, second = started(), started()
    first.step(call("echo secret >/tmp/secret; sleep 61 &"))
    assert second.step(call("cat /tmp/secret; ps -C sleep -o args=")).observation == (
        "cat: /tmp/secret: No such file or directory\n[exit status 1]"
    )
    assert second.step(call("ls made")).observation == "file", "what setup made is in every container"


def test_a_run_trains_on_shells_and_leaves_none(world: World, paths: dict[str, str]) -> None:
    """Templates without tools have them in the prompt; every episode ends with its container, also one that fails."""
    sandbox = SANDBOX | {"timeout_seconds": 21.0}
    settings = {"sampling": replace(SAMPLING, max_prompt_tokens=500), "options": {"sandbox": sandbox, "pool": 0}}
    parts = environment_parts(world, paths["actor"], Shell, max_turns=2, **settings)
    before = _own_containers()  # a pool of another test has some
    rows = [chat_row("a", **{name: TASK[name] for name in ("files", "tests")}), chat_row("b", files={"/no/file": ""})]
    with user_error("Shell failed in 2 of 4 episodes: it raised OSError: .* fails in a container: exit status 1"):
        parts.sampler.sample(rows, step=1)
    rollout = parts.sampler.sample(rows[:1], step=1)
    assert episode_metrics(rollout, world)["environment/turns"] >= 1
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(rollout.input_ids[0])
    assert '"name": "shell"' in text and "<tool_call>" in text
    assert _own_containers() <= before


TYPED = """
from hybrid_rlhf.rl.environments.shell import Shell

class Typed(Shell):
    def reset(self, row):
        self.turn = 0
        return super().reset(row)
    def step(self, text):
        self.turn += 1
        told = self._container.shell(f"echo {len(text)} >>said; wc -l <said; sleep 61 &")
        assert told.stdout == f"{self.turn}\\n", told
        return told.stdout, float(len(set(text)) - 8), self.turn == 2
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "code"),
    [
        (Point("hybrid_rlhf.runtime.sandbox.container:Container.shell", 9, 0), -signal.SIGKILL),
        (Point("hybrid_rlhf.runtime.sandbox.container:Container.close", 5, 1, "after"), -signal.SIGKILL),
        (Point("hybrid_rlhf.runtime.sandbox.local:LocalSandbox.open", 6, 0), -signal.SIGKILL),
        (
            Point("hybrid_rlhf.runtime.sandbox.container:Container.shell", 9, 0, "after", signal.SIGTERM),
            STOPPED_EXIT_CODE,
        ),
    ],
    ids=str,
)
def test_a_run_with_shells_that_is_killed_leaves_none_and_goes_on(
    point: Point, code: int, model_folder: Path, tmp_path: Path
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", ({"prompt": f"{number}"} for number in range(24)))
    (tmp_path / "typed.py").write_text(TYPED)
    settings = (
        f"--algorithm grpo --reward.components [] --environment.path {tmp_path}/typed.py:Typed "
        "--environment.max_turn_tokens 8 --environment.max_turns 2 --rollout.sampling.n 2 "
        "--rollout.sampling.max_new_tokens 64 --rollout.max_prompt_tokens 600"
    )

    def run(output: str, *more: str, armed: Point | None = None) -> list[int]:
        line = rollout_line(tmp_path / output, model_folder, rows, settings, *more)
        return run_step("hybrid_rlhf.cli.rl", 2, line, armed)

    before = len(_first_processes())
    assert run("whole") == [0, 0]
    assert code in run("out", armed=point), "the point is never reached"
    wait_until(lambda: len(_first_processes()) == before)
    assert run("out", "--resume auto") == [0, 0]
    assert run_outputs(tmp_path / "out") == run_outputs(tmp_path / "whole")
    wait_until(lambda: len(_first_processes()) == before)


def _first_processes() -> list[psutil.Process]:
    """Those of containers."""
    return [one for one in psutil.process_iter(["cmdline"]) if STAY[-1] in (one.info["cmdline"] or [])]


def _own_containers() -> set[int]:
    """Those that this process has started."""
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    return children.intersection(process.pid for process in _first_processes())


def test_mistakes_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with user_error("setup of a shell must succeed, 'no_such' fails .exit status 127: bash: line 1: no_such"):
        Shell(setup="no_such")
    (tmp_path / "pool.py").write_text("class Pool:\n    def __init__(self, config): pass\n    def run(self): pass\n")
    with user_error("a shell needs a sandbox with open.., .*pool.py:Pool has none"):
        Shell(sandbox={"kind": f"{tmp_path}/pool.py:Pool"})
    monkeypatch.setattr(local, "_MOUNT", "echo denied; exit 1\n")
    monkeypatch.setattr(local.LocalSandbox, "_choose", lambda self: (local.Isolation.NAMESPACES, ()))
    with user_error("a shell needs containers with bash, tar and base64 .*denied"):
        Shell(sandbox={"timeout_seconds": 9.5})
