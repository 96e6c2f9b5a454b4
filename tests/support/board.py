"""Run folders as runs leave them, and a board over them in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from hybrid_rlhf.board.chat import Chats
from hybrid_rlhf.board.runs.folders import RunFolders
from hybrid_rlhf.board.runs.summary import RunSummaries
from hybrid_rlhf.board.workspace import BoardWorkspace
from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.configs.parsing.building import build_config
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import save_config
from tests.support.clock import wait_until
from tests.support.runs import ENVIRONMENT, ROOT

POST = {"X-Board": "1"}
WORDS = "river stone cloud lantern harvest window copper meadow signal garden".split()


@dataclass
class ServedBoard:
    """A board and how to ask it."""

    process: subprocess.Popen[str]
    url: str
    client: httpx2.Client

    def get(self, path: str, **query: Any) -> Any:
        """The content of an answer, which must be good."""
        answer = self.ask(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, path: str, **query: Any) -> httpx2.Response:
        """An answer, whatever it is."""
        return self.client.get(path, params=query)

    def post(self, path: str, content: Any, headers: Mapping[str, str] = POST) -> httpx2.Response:
        """The answer to a POST."""
        return self.client.post(path, json=content, headers=dict(headers))

    def wait(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The row of a run in the list once the condition holds; an assertion fails after many minutes."""
        wait_until(lambda: holds(self.run(name)), f"a state of {name}", seconds=900)
        return self.run(name)

    def run(self, name: str) -> dict[str, Any]:
        """The row of a run in the list."""
        (found,) = [run for run in self.get("/api/runs") if run["name"] == name]
        return dict(found)


@contextlib.contextmanager
def served_board(*folders: Path, words: Sequence[str] = ()) -> Iterator[ServedBoard]:
    """A board over folders, stopped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hybrid_rlhf", "board", *map(str, folders), "--port", "0", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        started = re.fullmatch(r"board of \d+ runs on (http://\S+:\d+)/\S*\n", process.stdout.readline())
        assert started is not None
        with httpx2.Client(base_url=started[1], timeout=300) as client:
            yield ServedBoard(process, started[1], client)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


def summary_of(folder: Path) -> dict[str, Any]:
    """The row of the only run in a folder, without a board."""
    return RunSummaries().summary(*RunFolders([folder]).all())


def workspace_of(folder: Path) -> BoardWorkspace:
    """The state of a board over a folder, without its server; a chat would fail the test."""
    return BoardWorkspace(BoardConfig(folders=[str(folder)]), Chats(pytest.fail, pytest.fail))


def write_run(folder: Path, *, steps: int = 0, samples: int = 0, seed: int = 1, **settings: Any) -> Path:
    """The folder of an RL run with so many steps and samples per step, none of which was trained."""
    folder.mkdir(parents=True)
    layer = {"seed": seed, "output_dir": str(folder), "model": {"path": "some/model"}, **settings}
    save_config(build_config(RLConfig, [Layer(layer)]), folder / "config.yaml")
    for step in range(1, steps + 1):
        append_metrics(folder, step)
        append_rows(folder, sample_rows(step, samples))
    return folder


def append_metrics(folder: Path, step: int, **more: float | None) -> None:
    """A line of metrics.jsonl."""
    values = {"objective/scores": step / 10, "objective/kl": 0.1 * step, "time/generation_seconds": 2.0}
    values |= {"time/training_seconds": 3.0, "time/step_seconds": 5.5, "memory/peak_gib": 1.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time_seconds": 5.5 * step, **values, **more}) + "\n")


def append_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Lines of samples.jsonl."""
    if rows:
        with (folder / "samples.jsonl").open("ab") as file:
            file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def sample_rows(step: int, count: int, *, group: int = 4) -> list[dict[str, Any]]:
    """Samples of a step, in groups of the same prompt; scores rise with the index and fall with the step."""
    return [
        {
            "step": step,
            "prompt": [{"role": "user", "content": f"Say {WORDS[index // group % len(WORDS)]}"}],
            "completion": f"{WORDS[(index + step) % len(WORDS)]} number {index} of step {step}",
            "score": index - 0.5 * step,
            "kl": 0.01 * index,
            "weight_versions": [[step - 1, 5 + index]],
            "index": index,
            "group": index // group,
            "prompt_row": index // group,
            "length": 5 + index,
            "stopped": index % 3 > 0,
            "components": {"model": float(index), "length": -0.5 * step},
            "advantage": 0.1 * index,
        }
        for index in range(count)
    ]


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of a folder, as a run does, and releases it on SIGTERM; killed at the end."""
    code = f"""
import signal, sys, time
from pathlib import Path
from hybrid_rlhf.runtime.files.folder_lock import FolderLock
lock = FolderLock(Path({str(folder)!r}))
assert lock.acquire() is None
signal.signal(signal.SIGTERM, lambda *_: (lock.release(), sys.exit(143)))
print("held", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ), cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def length_reward(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """A reward function: the number of words."""
    return [float(len(completion.split())) for completion in completions]
