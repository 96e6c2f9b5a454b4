"""Runs that ask a judge and a teacher behind URLs, killed at any moment: they end as if they had not been."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from tests.support.ahead import rollout_line
from tests.support.faults import Point, run_step
from tests.support.judges import JudgeServer, judge_server, ranks_by
from tests.support.servers import json_server
from tests.support.steps import run_outputs, write_lines
from tests.support.tiny import tiny_tokenizer

COSTS = ("requests", "cached", "tokens")
"""Metrics of what this process has asked, which knows the verdicts of an earlier one."""


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with judge_server(ranks_by(lambda text: len(set(text)))) as server:
        yield server


@pytest.fixture
def teacher() -> Iterator[str]:
    tokenizer = tiny_tokenizer()

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        content = json.loads(body) if body else {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        if path == "/tokenize":
            return 200, {"tokens": tokenizer(content["prompt"], add_special_tokens=False)["input_ids"]}
        likely = [
            {str(token): {"logprob": -1.0 - token % 7}, "9": {"logprob": -0.5}, "8": {"logprob": -1.5}}
            for token in content["prompt"][1:]
        ]
        return 200, {"choices": [{"prompt_logprobs": [None, *likely]}]}

    with json_server(answer) as url:
        yield url


@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "code"),
    [
        (Point("hybrid_rlhf.rl.rewards.judge:JudgeReward.score", 2, 1, "after"), -signal.SIGKILL),
        (Point("hybrid_rlhf.rl.rollouts.served_teacher:ServedTeacher.__call__", 2, 0), -signal.SIGKILL),
        (
            Point("hybrid_rlhf.rl.rollouts.served_teacher:ServedTeacher.__call__", 4, 1, "after", signal.SIGTERM),
            STOPPED_EXIT_CODE,
        ),
    ],
    ids=str,
)
def test_a_killed_run_asks_again_and_learns_the_same(
    point: Point, code: int, judge: JudgeServer, teacher: str, model_folder: Path, tmp_path: Path
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", ({"prompt": f"{number}"} for number in range(24)))
    settings = "--algorithm grpo --rollout.sampling.n 2 --teacher.loss reverse --teacher.top_k 2"
    components = ("--reward.components", f"[{{judge: {{url: {judge.url}, mode: rank_group}}}}]")

    def run(output: str, *more: str, armed: Point | None = None) -> list[int]:
        line = rollout_line(tmp_path / output, model_folder, rows, settings, f"--teacher.url {teacher}")
        return run_step("hybrid_rlhf.cli.rl", 2, [*line, *components, *more], armed)

    assert run("whole") == [0, 0]
    assert code in run("out", armed=point), "the point is never reached"
    assert run("out", "--resume", "auto") == [0, 0]
    found, expected = (_without_costs(run_outputs(tmp_path / name)) for name in ("out", "whole"))
    assert found == expected


def _without_costs(outputs: dict[str, Any]) -> dict[str, Any]:
    lines = [{name: value for name, value in line.items() if not name.endswith(COSTS)} for line in outputs["metrics"]]
    return outputs | {"metrics": lines}
