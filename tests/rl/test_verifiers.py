"""Environments of the library verifiers, loaded as they are: `pip install 'hybrid_rlhf[verifiers]'`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.programs import client_of
from tests.support.rl import chat_row
from tests.support.steps import read_rows

vf = pytest.importorskip("verifiers")
if not hasattr(vf, "MultiTurnEnv"):
    pytest.skip("verifiers 0.4 has no load_environment", allow_module_level=True)

from hybrid_rlhf.rl.environments import verifiers_hub as hub  # noqa: E402 - it needs the library

GAME = """
import datasets
import verifiers as vf


class Numbered(vf.MultiTurnEnv):
    @vf.stop
    async def over(self, state):
        return len(state["trajectory"]) >= state["info"]["turns"]

    async def env_response(self, messages, state, **more):
        if state["info"].get("broken"):
            raise vf.ToolError("the tool is gone")
        return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]


async def summed(state, **more):
    return float(sum(range(1, len(state["trajectory"]) + 1)))


async def best_of_group(completions, **more):
    return [0.0 for _ in completions]


def load_environment(turns=(3, 1, 3), together=False):
    texts = ("a", "bcd", "ef")
    rows = [{"question": text, "answer": text, "info": {"turns": count}} for text, count in zip(texts, turns)]
    rubric = vf.Rubric(funcs=[best_of_group if together else summed])
    return Numbered(dataset=datasets.Dataset.from_list(rows), rubric=rubric)
"""


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an environment whose package is installed."""
    (tmp_path / "numbered_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)
    return "numbered-game"


def play_by_hand(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """The same by the client of OpenAI alone."""
    messages, turns = list(row["prompt"]), row["info"]["turns"]
    with client_of(base_url, api_key) as client:
        for turn in range(1, turns + 1):
            (choice,) = client.chat.completions.create(model=model, messages=messages).choices
            messages.append({"role": "assistant", "content": choice.message.content})
            messages.append({"role": "user", "content": f"turn {turn}"})
    return float(sum(range(1, turns + 1)))


def prompts_of(file: Path) -> list[dict[str, Any]]:
    rows = read_rows(file)
    return [chat_row(row.pop("prompt")[0]["content"], **row) for row in rows]


def test_an_environment_of_verifiers_is_a_program(
    world: World, build_program: Any, game: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows and its rollout as they are: tokens, masks and rewards are those of a program without it."""
    hub.main([game, str(tmp_path / "rows.jsonl"), "3"])
    assert "3 rows in" in capsys.readouterr().out
    rows = read_rows(tmp_path / "rows.jsonl")
    assert rows[1]["prompt"] == [{"role": "user", "content": "bcd"}] and rows[1]["info"] == {"turns": 1}
    assert rows[2]["verifiers"] == {"name": game, "settings": {}} and rows[2]["example_id"] == 2
    prompts = prompts_of(tmp_path / "rows.jsonl")
    settings: dict[str, Any] = {"max_turns": 3, "max_turn_tokens": 12}
    found, expected = (
        build_program(program, **settings).sampler.sample(prompts, step=1) for program in (hub.play, play_by_hand)
    )
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.response_mask.tolist() == expected.response_mask.tolist()
    metrics = episode_metrics(found, world)
    assert metrics == episode_metrics(expected, world)
    assert metrics["environment/sequences"] == 1.0
    assert metrics["environment/reward"] == pytest.approx((6 + 1 + 6) / 3)
    assert "Processing" not in capsys.readouterr().err, "a bar of each episode"


@pytest.mark.parametrize(
    ("settings", "info", "reason"),
    [
        ({}, {"turns": 3, "broken": True}, "verifiers: .*the tool is gone"),
        ({"turns": 3}, {"turns": 1}, "numbered-game with .* fails"),
    ],
)
def test_an_error_of_the_environment_is_no_reward(
    build_program: Any, game: str, settings: dict[str, Any], info: dict[str, Any], reason: str
) -> None:
    """verifiers catches the errors of a rollout, and gives 0."""
    prompts = [chat_row("a", info=info, answer="a", verifiers={"name": game, "settings": settings})]
    with user_error(f"verifiers_hub:play failed in 2 of 2 episodes: .*{reason}"):
        build_program(hub.play, max_turns=3).sampler.sample(prompts, step=1)


def test_signals_stay_those_of_the_run(game: str) -> None:
    """Its constructor sets handlers that end the process: the run would not save at SIGTERM."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    hub.load(game, json.dumps({"turns": [1, 1, 1]}))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_mistakes_are_told_in_a_line(game: str, tmp_path: Path) -> None:
    with user_error("no_such_environment with {} fails .*ModuleNotFoundError"):
        hub.load("no_such_environment", "{}")
    with user_error("must score each rollout alone, numbered-game has rewards of groups"):
        hub.load(game, json.dumps({"together": True}))
    (tmp_path / "rows.jsonl").write_text("")
    for words, rule in (
        ([game], "the line must be NAME FILE.jsonl"),
        ([game, "x.jsonl", "many"], "the line must be NAME FILE.jsonl"),
        ([game, str(tmp_path / "rows.jsonl")], "the file must not exist"),
    ):
        with user_error(rule):
            hub.main(words)
