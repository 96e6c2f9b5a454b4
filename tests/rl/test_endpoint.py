"""The address at which programs ask the actor, and programs that the run does not start."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import EndpointConfig
from hybrid_rlhf.rl.environments import build_runner
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.programs import PROMPTS, SAMPLING, client_of, play_numbered
from tests.support.ranks import free_ports, run_main
from tests.support.runs import rl_line
from tests.support.steps import write_rows
from tests.support.tiny import tiny_tokenizer

ASKED: list[tuple[str, str]] = []
"""Address and key of each episode."""


def ask_once(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    ASKED.append((base_url, api_key))
    with client_of(base_url, api_key) as client:
        client.chat.completions.create(model=model, messages=row["prompt"], max_tokens=3)
    return 1.0


def play_outside(url: str, headers: dict[str, str], ended: threading.Event, statuses: set[tuple[str, int]]) -> None:
    """A program that takes episodes until the test ends, and tries again where nobody answers."""
    with httpx2.Client(headers=headers, timeout=60) as client:
        while not ended.wait(0.02):
            try:
                taken = client.post(f"{url}/episodes", json={})
                statuses.add(("take", taken.status_code))
                if taken.status_code != 200:
                    continue
                told, key = taken.json(), headers["Authorization"].removeprefix("Bearer ")
                reward = play_numbered(told["base_url"], key, told["model"], told["row"], **told["options"])
                for name, report in (("wrong", "much"), ("first", reward), ("again", reward)):
                    answer = client.post(told["reward_url"], json={"reward": report})
                    statuses.add((name, answer.status_code))
                statuses.add(("late", client.get(f"{told['base_url']}/models").status_code))
            except httpx2.TransportError:
                continue  # between two rollouts


def test_programs_outside_of_the_run_learn_the_same(
    build_program: Any, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setenv("PLAY_KEY", "a-key")
    settings: dict[str, Any] = {"max_turns": 3, "max_turn_tokens": 12, "options": {"stop": ["x"]}}
    expected = build_program(play_numbered, **settings).sampler.sample(PROMPTS, step=1)
    sampling = replace(SAMPLING, endpoint=EndpointConfig(api_key="${PLAY_KEY}"))
    parts = build_program(None, sampling=sampling, **settings)
    (url,) = re.findall(r"ask the actor at (http://127\.0\.0\.1:\d+) while", " ".join(log_lines))
    ended, statuses = threading.Event(), set[tuple[str, int]]()
    given = url, {"Authorization": "Bearer a-key"}, ended, statuses
    programs = [threading.Thread(target=play_outside, args=given) for _ in range(3)]
    for program in programs:
        program.start()
    try:
        for _ in range(2):  # on the same address
            found = parts.sampler.sample(PROMPTS, step=1)
            for name in ("input_ids", "response_mask", "stopped", "samples", "turn_rewards"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), name
    finally:
        ended.set()
        for program in programs:
            program.join()
    wanted = {("take", 200), ("wrong", 400), ("first", 200), ("again", 404), ("late", 404)}
    assert wanted <= statuses <= {*wanted, ("take", 204)}
    alone = build_program(None, sampling=sampling, timeout_seconds=0.5)
    with user_error(r"rollout.endpoint failed in 6 of 6 episodes: it took longer than 0.5 s"):
        alone.sampler.sample(PROMPTS, step=1)


def test_the_address_of_programs_is_that_of_the_config(
    world: World, build_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY_KEY", "a-key")
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        sampling = replace(SAMPLING, endpoint=EndpointConfig(port=port, api_key="${PLAY_KEY}"))
        with user_error(f"got 127.0.0.1:{port} .*in use"):
            build_program(ask_once, sampling=sampling)
    ASKED.clear()
    build_program(ask_once, sampling=sampling).sampler.sample(PROMPTS, step=1)
    assert len(ASKED) == 6
    assert all(url.startswith(f"http://127.0.0.1:{port}/episodes/") and key == "a-key" for url, key in ASKED)
    monkeypatch.delenv("PLAY_KEY")
    with user_error(r"rollout.endpoint.api_key: .* PLAY_KEY is not set"):
        build_program(ask_once, sampling=sampling)
    with user_error("to each rank of a host, got 65535 and 2 ranks: choose a lower one"):
        build_runner(
            EnvironmentConfig(program=f"{__name__}:ask_once"),
            rollout=replace(SAMPLING, endpoint=EndpointConfig(port=65535)),
            tokenizer=tiny_tokenizer(),
            world=replace(world, local_size=2),
        )


@pytest.mark.slow
def test_only_ranks_that_sample_have_an_address(tmp_path: Path, model_folder: Path) -> None:
    """A run whose first port, of the rank that trains, is another's."""
    port = next(port for port, following in itertools.pairwise(free_ports(9)) if following == port + 1)
    with socket.create_server(("127.0.0.1", port)):
        more = f"--algorithm grpo --environment.program {__name__}:ask_once --logging.sinks []".split()
        more += f"--placement separation --rollout.endpoint.port {port} --rollout.sampling.n 2".split()
        rows = write_rows(tmp_path / "rows.jsonl")
        _, *line = rl_line(tmp_path / "out", model_folder, rows, *more)
        run_main("hybrid_rlhf.cli.rl", 2, line)
    (urls,) = re.findall(r"ask the actor at (.+) while a rollout", (tmp_path / "out" / "log.txt").read_text())
    assert urls == f"http://127.0.0.1:{port + 1}"
