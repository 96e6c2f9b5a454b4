"""Environments of the library verifiers, loaded as they are: `pip install 'hybrid_rlhf[verifiers]'`."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.programs import client_of
from tests.support.rl import chat_row
from tests.support.servers import json_server
from tests.support.steps import read_rows

pytest.importorskip("verifiers.v1")

from verifiers.v1.runtimes.subprocess import SubprocessRuntime  # noqa: E402

from hybrid_rlhf.rl.environments import verifiers_hub as hub  # noqa: E402 - it needs the library

GAME = """
import verifiers.v1 as vf


class Config(vf.TasksetConfig):
    texts: list[str] = ["a", "bcd", "ef"]


class Data(vf.TaskData):
    bonus: int
    broken: bool = False


class Counting(vf.Task[Data]):
    async def finalize(self, trace, runtime):
        if self.data.broken:
            raise vf.TaskError("the tool is gone")

    @vf.reward(weight=2.0)
    async def length(self, trace) -> float:
        return float(len(trace.last_reply) + self.data.bonus)


class Numbered(vf.Taskset[Counting, Config]):
    def load(self):
        for number, text in enumerate(self.config.texts):
            yield Counting(Data(prompt=text, bonus=number), self.config.task)


__all__ = ["Numbered"]
"""


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a taskset whose package is installed. Its harness runs by this interpreter, which has what uv would
    install for it from the network."""

    async def prepared(runtime: Any, script: str, *_: Any, **__: Any) -> list[str]:
        # A file of its own: another episode may be reading its script.
        with tempfile.NamedTemporaryFile("w", suffix=".py", dir=tmp_path, delete=False) as file:
            file.write(script)
        return [sys.executable, file.name]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepared)
    (tmp_path / "numbered_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)
    return "numbered-game"


def play_by_hand(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """The same by the client of OpenAI alone."""
    with client_of(base_url, api_key) as client:
        (choice,) = client.chat.completions.create(model=model, messages=row["prompt"]).choices
    return 2.0 * (len(choice.message.content) + row["verifiers"]["task"]["bonus"])


def prompts_of(file: Path) -> list[dict[str, Any]]:
    rows = read_rows(file)
    return [chat_row(row.pop("prompt")[0]["content"], **row) for row in rows]


def test_an_environment_of_verifiers_is_a_program(
    world: World, build_program: Any, game: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tasks and its rollout as they are: tokens, masks and rewards are those of a program without it. Handlers of
    signals stay those of the run, which saves at SIGTERM."""
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    hub.main([game, str(tmp_path / "rows.jsonl"), "2"])
    assert "2 rows in" in capsys.readouterr().out
    rows = read_rows(tmp_path / "rows.jsonl")
    assert rows[1]["prompt"] == [{"role": "user", "content": "bcd"}]
    assert rows[1]["verifiers"] == {"name": game, "settings": {}, "task": {"idx": 1, "prompt": "bcd", "bonus": 1}}
    prompts = prompts_of(tmp_path / "rows.jsonl")
    settings: dict[str, Any] = {"max_turns": 3, "max_turn_tokens": 12}
    found, expected = (
        build_program(program, **settings).sampler.sample(prompts, step=1) for program in (hub.play, play_by_hand)
    )
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.response_mask.tolist() == expected.response_mask.tolist()
    metrics = episode_metrics(found, world)
    assert metrics == episode_metrics(expected, world)
    assert metrics["environment/sequences"] == 1.0 and metrics["environment/reward"] > 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


def test_judges_and_rubrics_score(world: World, build_program: Any, game: str, tmp_path: Path) -> None:
    """Both of the library, at a model of their own."""
    (tmp_path / "rubric.json").write_text(json.dumps({"criteria": [{"name": "short", "text": "It is short."}]}))
    verdict = json.dumps({"verdicts": [{"name": "short", "reason": "It is.", "verdict": "yes"}]})

    def reply(method: str, path: str, body: bytes) -> tuple[int, Any]:
        message = {"role": "assistant", "content": verdict if path.startswith("/rubric") else "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        base = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return 200, {**base, "choices": [choice], "usage": usage}

    with json_server(reply) as url:
        judges = [
            {"id": "reference", "answer_field": "prompt", "weight": 100.0, "base_url": f"{url}/v1"},
            {"id": "rubric", "path": f"{tmp_path}/rubric.json", "weight": 1000.0, "base_url": f"{url}/rubric/v1"},
        ]
        settings = {"taskset": {"task": {"judges": judges}}}
        row = chat_row("a", verifiers={"name": game, "settings": settings, "task": {"prompt": "a", "bonus": 0}})
        rollout = build_program(hub.play, max_turns=3, max_turn_tokens=12).sampler.sample([row], step=1)
    reward = episode_metrics(rollout, world)["environment/reward"]
    assert 1100 < reward <= 1124, "both judges, and up to 12 characters"


def test_an_error_of_the_environment_is_no_reward(build_program: Any, game: str) -> None:
    """verifiers keeps the errors of a rollout, and gives 0."""
    task = {"prompt": "a", "bonus": 0, "broken": True}
    prompts = [chat_row("a", verifiers={"name": game, "settings": {}, "task": task})]
    with user_error("verifiers_hub:play failed in 2 of 2 episodes: .*verifiers: .*the tool is gone"):
        build_program(hub.play, max_turns=3).sampler.sample(prompts, step=1)
    several = {"name": game, "settings": {"id": "best-of-n"}, "task": {"prompt": "a", "bonus": 0}}
    with user_error("must have one agent that plays once, numbered-game has . rollouts in an episode"):
        build_program(hub.play, max_turns=8).sampler.sample([chat_row("a", verifiers=several)], step=1)


def test_mistakes_are_told_in_a_line(game: str, tmp_path: Path) -> None:
    with user_error("no-such-set with {} fails .*no_such_set"):
        hub.load("no-such-set", {})
    with user_error(r'numbered-game with {"taskset": {"texts": 3}} fails'):
        hub.load(game, {"taskset": {"texts": 3}})
    (tmp_path / "rows.jsonl").write_text("")
    for words, rule in (
        ([game], "the line must be NAME FILE.jsonl"),
        ([game, "x.jsonl", "many"], "the line must be NAME FILE.jsonl"),
        ([game, str(tmp_path / "rows.jsonl")], "the file must not exist"),
    ):
        with user_error(rule):
            hub.main(words)
