"""Turns of the actor and of environments: what is learned from, what is not, who says that it is over, what fails."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import re
import shlex
import shutil
import textwrap
import threading
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.algorithms import GRPOConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import PenaltiesConfig
from hybrid_rlhf.configs.sections.environment import TOOL_CLASSES, EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.data.chat.template import render
from hybrid_rlhf.rl.environments import build_runner
from hybrid_rlhf.rl.environments.calculator import Calculator, compute
from hybrid_rlhf.rl.environments.calls import CallFailure, EnvironmentCalls
from hybrid_rlhf.rl.environments.environment import read_environment
from hybrid_rlhf.rl.environments.observations import ObservationEncoder
from hybrid_rlhf.rl.metrics import episode_metrics, rollout_metrics
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.rollouts.scoring import score_penalties
from hybrid_rlhf.rl.types import Episode, Rollout
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from hybrid_rlhf.runtime.sandbox import local
from hybrid_rlhf.runtime.world import World
from tests.support.ahead import rollout_line
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.messages import user
from tests.support.programs import ALGORITHM, SAMPLING, STOP
from tests.support.ranks import run_main, run_ranks
from tests.support.rl import chat_row, episode_parts, whole
from tests.support.routes import module_routes
from tests.support.runs import ROOT, run_python
from tests.support.steps import read_rows, run_outputs, write_lines
from tests.support.templates import FAMILIES, tokenizer_of
from tests.support.tiny import CHATML, tiny_tokenizer

CPU = torch.device("cpu")


SHORT: dict[str, Any] = {"max_turns": 3, "max_turn_tokens": 12}
PROMPTS = [chat_row("a", turns=3), chat_row("bcd", turns=1), chat_row("ef", turns=9)]


class Scripted:
    """Says how many bytes it was told, for as many turns as the row wants; each turn earns its number."""

    def __init__(self, *, opening: Any = None, stop_strings: Any = ()) -> None:
        self._opening, self._turn, self.stop_strings = opening, 0, stop_strings

    def reset(self, row: Mapping[str, Any]) -> Any:
        assert row["prompt"][0]["role"] == "user"
        self._turns = row["turns"]
        return self._opening

    def step(self, completion: str) -> tuple[str | None, float, bool]:
        self._turn += 1
        return f"{len(completion)}", float(self._turn), self._turn == self._turns


class Waiting(Scripted):
    """The same, in coroutines that share an event loop."""

    async def reset(self, row: Mapping[str, Any]) -> Any:
        self._loop = asyncio.get_running_loop()
        return super().reset(row)

    async def step(self, completion: str) -> tuple[str | None, float, bool]:
        assert asyncio.get_running_loop() is self._loop
        await asyncio.sleep(0.05)
        return super().step(completion)


def build_environment(
    world: World,
    path: str,
    kind: Any = Scripted,
    *,
    sampling: RolloutConfig = SAMPLING,
    algorithm: GRPOConfig = ALGORITHM,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> RLParts:
    """An actor with an environment and no other reward."""
    config = EnvironmentConfig(path=f"{kind.__module__}:{kind.__name__}", options=options or {}, **settings)
    return episode_parts(world, path, config, sampling=sampling, algorithm=algorithm, stop_token_ids=STOP)


@pytest.fixture
def build(world: World, paths: dict[str, str]) -> Any:
    """The same of the tiny actor."""
    return partial(build_environment, world, paths["actor"])


def turns_of(rollout: Rollout, place: int) -> list[list[int]]:
    """Positions of each turn of the actor."""
    runs: list[list[int]] = []
    for position in rollout.response_mask[place].nonzero().flatten().tolist():
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


class Uneven(Scripted):
    """The same, in calls that take their own time."""

    def step(self, completion: str) -> tuple[str | None, float, bool]:
        time.sleep(random.random() / 20)
        return super().step(completion)


def test_the_time_of_tools_changes_no_bit(build: Any) -> None:
    """Which turns are decoded together changes the last bits of log-probs, and a run would not resume bit for bit."""
    of_scripted, of_uneven = (build(kind).sampler for kind in (Scripted, Uneven))
    expected = of_scripted.sample(PROMPTS, step=1)
    found = of_uneven.sample(PROMPTS, step=1)
    for name in ("input_ids", "sampled_logprobs", "drawn_logprobs", "turn_rewards"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_stop_strings_end_a_turn_where_they_are_complete(build: Any) -> None:
    tokenizer, free = tiny_tokenizer(), build(max_turns=1, max_turn_tokens=12).sampler.sample(PROMPTS, step=1)
    said = [free.input_ids[place, turns_of(free, place)[0]].tolist() for place in range(6)]
    stop = tokenizer.decode(max(said, key=len))[3:5]  # what one of them says midway
    held = build(max_turns=2, max_turn_tokens=12, options={"stop_strings": [stop]})
    rollout = held.sampler.sample(PROMPTS, step=1)
    cut_short = 0
    for place, ids in enumerate(said):
        n = next((n for n in range(1, len(ids)) if stop in tokenizer.decode(ids[:n])), len(ids))
        is_cut = stop in tokenizer.decode(ids[:n])
        cut_short += n < len(ids)
        first, *more = turns_of(rollout, place)
        assert rollout.input_ids[place, first].tolist() == ids[:n]
        if more and is_cut:  # the environment appends the end of the turn: it was not sampled
            assert tokenizer.decode(rollout.input_ids[place, first[-1] + 1 : more[0][0]]).startswith("<|im_end|>")
        if place in (2, 3):  # of one turn
            assert rollout.stopped[place] == (is_cut or ids[n - 1] in STOP)
    assert cut_short


@pytest.mark.parametrize("kind", [Scripted, Waiting])
def test_an_episode_is_what_was_sampled_and_what_was_told(kind: Any, world: World, build: Any) -> None:
    rollout = build(kind, **SHORT).sampler.sample(PROMPTS, step=1)
    tokenizer = tiny_tokenizer()
    for place, wanted in enumerate((3, 3, 1, 1, 9, 9)):
        runs, ids = turns_of(rollout, place), rollout.input_ids[place].tolist()
        assert len(runs) == min(wanted, 3)
        assert ids[: runs[0][0]] == PROMPTS[place // 2]["input_ids"]
        for number, run in enumerate(runs):
            assert len(run) <= 12 and not {ids[position] for position in run[:-1]} & {*STOP}
            earned = rollout.turn_rewards[place, run].tolist()
            assert earned == [0.0] * (len(run) - 1) + [number + 1], "at the turn's last token"
        for before, after in itertools.pairwise(runs):
            said = tokenizer.decode(ids[before[0] : before[-1] + 1], skip_special_tokens=True)
            between = tokenizer.decode(ids[before[-1] + 1 : after[0]])
            end = "" if ids[before[-1]] in STOP else "<|im_end|>"
            assert between == f"{end}\n<|im_start|>tool\n{len(said)}<|im_end|>\n<|im_start|>assistant\n"
        assert int(rollout.lengths[place]) == runs[-1][-1] + 1, "it ends with the actor's own words"
        assert bool(rollout.stopped[place]) == (wanted < 9 and ids[runs[-1][-1]] in STOP), "who would go on was cut off"
    assert rollout.stopped.any()
    assert episode_metrics(rollout, world) == {
        "environment/turns": pytest.approx((3 + 1 + 3) / 3),
        "environment/reward": pytest.approx(2 * 13 / 6),
        "environment/truncated": pytest.approx(1 - float(rollout.stopped.float().mean())),
        "environment/observations_cut": 0.0,
    }


def test_all_that_follows_the_prompt_fits_in_max_new_tokens(build: Any) -> None:
    sampling = replace(SAMPLING, sampling=replace(SAMPLING.sampling, max_new_tokens=64))
    rollout = build(sampling=sampling, max_turns=50, max_turn_tokens=6).sampler.sample(PROMPTS, step=1)
    followed = rollout.lengths - rollout.response_mask.int().argmax(dim=1)
    assert int(followed.max()) <= 64 and not rollout.stopped[4:].any()
    assert (64 - followed[4:] <= 22).all(), "no observation, of 21 tokens or 22, is added without room for its answer"
    overlong = PenaltiesConfig(overlong_fraction=0.5, length=0.01)
    expected = (followed - 32).clamp(min=0) / 32 + 0.01 * rollout.response_mask.sum(dim=1)
    torch.testing.assert_close(score_penalties(rollout, overlong, max_new_tokens=64, scores_std=1.0), expected)


def test_episodes_have_the_experts_of_all_their_turns(world: World, tmp_path: Path) -> None:
    model = variant("qwen3_moe")
    model.save_pretrained(tmp_path)
    parts = build_environment(world, str(tmp_path), sampling=replace(SAMPLING, routing_replay=True), **SHORT)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    assert any(len(turns_of(rollout, place)) == 3 for place in range(len(rollout)))
    routes = rollout.padded_routes
    assert routes is not None
    for row, length in enumerate(rollout.lengths.tolist()):
        expected = module_routes(model, rollout.input_ids[row, :length].tolist())
        assert routes[row, : length - 1].sort().values.tolist() == np.sort(expected[:-1]).tolist()
        assert (routes[row, length - 1 :] == -1).all()


def test_scores_are_the_environments_and_rewards_lie_where_they_were_earned(world: World, build: Any) -> None:
    parts = build(**SHORT)
    rollout = parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=1, greedy=True), greedy=True)
    assert rollout.scores.tolist() == rollout.greedy_scores.tolist() == [6, 6, 1, 1, 6, 6]
    rollout = parts.scorer.compute_logprobs(rollout, parts.planner.plan(rollout))
    torch.testing.assert_close(parts.estimate(rollout, kl_coef=0.0).rewards, rollout.turn_rewards)
    batch = build(**SHORT, algorithm=replace(ALGORITHM, score_clip=5.0)).estimate(rollout, kl_coef=0.0)
    factor = torch.tensor([5 / 6, 5 / 6, 1, 1, 5 / 6, 5 / 6])[:, None]
    torch.testing.assert_close(batch.rewards, rollout.turn_rewards * factor)  # a clip scales every turn
    assert rollout_metrics(batch, world)["objective/score_clipfrac"] == pytest.approx(4 / 6)
    assert batch.rollout.greedy_scores.tolist() == [5, 5, 1, 1, 5, 5], "and from a baseline"


def on_ranks(world: World, path: str, tensor_parallel: int) -> dict[str, Any]:
    """What comes of prompts with as many ranks generating together."""
    sampling = replace(SAMPLING, tensor_parallel=tensor_parallel)
    parts = build_environment(world, path, sampling=sampling, **SHORT)
    rollout = parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=1))
    result = {name: tensor.tolist() for name, tensor in whole(rollout, world).tensors().items()}
    one = parts.sampler.sample(PROMPTS[:1], step=2)  # a rank has no share
    result["one"] = whole(one, world).input_ids.tolist()
    options = {"how": "raise", "where": "c"}
    failing = build_environment(world, path, Failing, sampling=sampling, options=options, max_turns=2)
    try:
        failing.sampler.sample(PROMPTS, step=1)
    except UserError as error:
        result["failure"] = str(error)
    return result


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_episodes_are_the_same_on_any_ranks_and_a_failure_stops_all(
    tensor_parallel: int, tmp_path: Path, world: World, paths: dict[str, str]
) -> None:
    alone = on_ranks(world, paths["actor"], 1)
    assert "failed in 2 of 6 episodes: it raised ValueError: no" in alone["failure"]
    for found in run_ranks(on_ranks, 2, tmp_path, paths["actor"], tensor_parallel):
        for name in ("input_ids", "response_mask", "turn_rewards", "stopped", "scores", "one", "failure"):
            assert found[name] == alone[name], name
        logprobs = (torch.tensor(each["sampled_logprobs"]) for each in (found, alone))
        torch.testing.assert_close(*logprobs, atol=1e-5, rtol=1e-4)


class Failing(Scripted):
    """Fails on prompts with a letter, in its second turn or at once."""

    def __init__(self, *, how: str, where: str, at: int = 1) -> None:
        super().__init__()
        self._how, self._where, self._at = how, where, at

    def reset(self, row: Mapping[str, Any]) -> Any:
        self._fails = self._where in row["prompt"][0]["content"]
        super().reset(row)
        return self._result(0, None)

    def step(self, completion: str) -> Any:
        right = super().step(completion)
        return self._result(self._turn, right)

    def _result(self, turn: int, right: Any) -> Any:
        if not self._fails or turn != self._at:
            return right
        if self._how == "raise":
            raise ValueError("no")
        if self._how == "sleep":
            time.sleep(5)
        return WRONG.get(self._how)


WRONG = {
    "number": 3.0,
    "nan": ("x", math.nan, False),
    "bool": ("x", True, False),
    "silent": (None, 1.0, False),
    "done": ("x", 1.0, 1),
    "long": "x" * 200,
    "role": [{"role": "me", "content": "x"}],
}


@pytest.mark.parametrize(
    ("how", "at", "reason"),
    [
        ("raise", 1, r"it raised ValueError: no \(test_environments.py:\d+\)"),
        ("raise", 0, "it raised ValueError: no"),
        ("sleep", 2, "it took longer than 1 s"),
        ("number", 1, r"step must return \(observation, reward, done\), it returned 3.0"),
        ("number", 0, "reset must return messages, a text or None, it returned 3.0"),
        ("role", 0, "reset must return messages"),
        ("long", 0, r"reset returned \d+ tokens, rollout.max_prompt_tokens is 80"),
        ("nan", 1, "step must return a finite number as reward, it returned nan"),
        ("bool", 1, "step must return a finite number as reward, it returned True"),
        ("done", 2, "step must return done as True or False, it returned 1"),
        ("silent", 1, "step must return a text or a list of parts as observation, it returned None"),
    ],
)
def test_an_environment_that_fails_stops_the_run_or_ends_its_episode(
    how: str, at: int, reason: str, build: Any, log_lines: list[str]
) -> None:
    limit = 1.0 if how == "sleep" else 30.0  # a loaded machine is no fault of the others
    stop, zero, drop = (
        build(Failing, options={"how": how, "where": "e", "at": at}, on_failure=effect, timeout_seconds=limit, **SHORT)
        for effect in ("stop", "zero", "drop")
    )
    with user_error(f"environment .*:Failing failed in 2 of 6 episodes: {reason}.*; fix it"):
        stop.sampler.sample(PROMPTS, step=1)
    rollout = zero.sampler.sample(PROMPTS, step=1)
    # after a failed reset there is no turn, as there is no task to answer
    assert [len(turns_of(rollout, place)) for place in range(len(rollout))] == [3, 3, 1, 1, *([at] * 2 if at else [])]
    scores = zero.scorer.score(PROMPTS, rollout).scores.tolist()
    assert scores == [6, 6, 1, 1, *([at - 1] * 2 if at else [])] and not rollout.stopped[4:].any()
    kept = drop.sampler.sample(PROMPTS, step=1)
    assert kept.groups.tolist() == [0, 0, 1, 1] and kept.turn_rewards.sum(dim=1).tolist() == [6, 6, 1, 1]
    for what in ("gives 0 and ends", "drops what failed"):
        assert sum(f"{what} in 2 of 6 episodes" in line for line in log_lines) == 1
    with user_error("must leave episodes to learn from, it failed in 2 of 2 episodes: "):
        drop.sampler.sample(PROMPTS[2:], step=1)
    assert len(drop.sampler.sample(PROMPTS[2:], step=1, may_be_empty=True)) == 0


def test_a_failed_episode_is_left_out_with_its_sequences_and_a_prompt_without_its_greedy_one(
    world: World, build: Any
) -> None:
    runner = build(on_failure="drop").sampler._environments

    def kept(*episodes: tuple[int, bool, str | None, int | None]) -> list[bool]:
        """Of episodes by prompt: whether each is greedy, why it failed, and its number where it has sequences."""
        of_runner = [
            (place, greedy, Episode([1], [2, 2], failure=failure, sample=sample))
            for place, greedy, failure, sample in episodes
        ]
        return runner.kept(of_runner, world, may_drop_all=True)  # type: ignore[no-any-return]

    fine = (0, False, None, None)
    assert (
        kept((0, False, "no", 0), (0, False, None, 0), (0, False, None, 1), (1, False, None, 0))
        == [False] * 2 + [True] * 2
    )
    assert kept(fine, (0, False, "no", None), (1, False, None, None)) == [True, False, True]
    assert kept(fine, (0, True, "no", None), (1, False, None, None), (1, True, None, None)) == [False] * 2 + [True] * 2


def test_calls_run_at_once_and_a_blocked_loop_is_left() -> None:
    patient, quick = (EnvironmentCalls(timeout_seconds=limit, device=CPU, threads=32) for limit in (30.0, 1.0))
    late, ended = CallFailure("it took longer than 1 s"), threading.Event()

    async def wait(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def fail(error: BaseException) -> None:
        raise error

    async def block() -> None:
        ended.wait(60)

    start = time.perf_counter()
    assert patient([partial(wait, 0.2)] * 50) == [0.2] * 50
    assert patient([partial(time.sleep, 0.2)] * 20) == [None] * 20
    assert time.perf_counter() - start < 12.0, "one after the other they take 14 seconds"
    raised, left, exited = patient(
        [partial(fail, TimeoutError("mine")), partial(fail, SystemExit(3)), partial(exit, 3)]
    )
    assert "it raised TimeoutError: mine" in raised.reason
    assert "it raised SystemExit: 3" in left.reason and "SystemExit" in exited.reason
    assert quick([partial(wait, 30)]) == [late]
    start = time.perf_counter()
    assert quick([block] * 9) == [late] * 9
    assert time.perf_counter() - start < 9.0, "they waited together"
    assert quick([partial(wait, 0.0)]) == [0.0], "in another loop"
    assert quick([partial(ended.wait, 60)] * 16) == [late] * 16
    assert "16 earlier calls still hang" in quick([lambda: 1])[0].reason
    ended.set()


def test_a_long_call_does_not_delay_the_next_ones() -> None:
    """A call started when all calls 32 places before it had ended, so one long call stopped the others."""
    calls = EnvironmentCalls(timeout_seconds=90.0, device=CPU, threads=2)
    reached, running, most = threading.Event(), list[int](), list[int]()

    def count(place: int) -> int:
        running.append(place)
        most.append(len(running))
        assert place or reached.wait(60), "the last call never started"
        if place == 9:
            reached.set()
        running.remove(place)
        return place

    assert calls([partial(count, place) for place in range(10)]) == [*range(10)]
    assert max(most) == 2, "as many as there are threads"


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_that_raise_are_repeated_and_the_result_says_so(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool behind a network fails now and then; before, one failure ended the episode or the run."""
    monkeypatch.setattr("hybrid_rlhf.rl.environments.calls.retry_delay_seconds", lambda tries: 0.01)

    def failing(times: int) -> Any:
        tries = itertools.count(1)

        def call() -> int:
            if (number := next(tries)) <= times:
                raise ConnectionError(f"attempt {number}")
            return number

        async def coroutine() -> int:
            return call()

        return coroutine if is_async else call

    calls = EnvironmentCalls(timeout_seconds=60.0, device=CPU, threads=2, retries=2)
    *results, failure = calls([failing(0), failing(1), failing(2), failing(3)])
    assert results == [1, 2, 3]
    assert re.match(r"it raised ConnectionError: attempt 3.*\(try 3\)$", failure.reason)
    once = EnvironmentCalls(timeout_seconds=60.0, device=CPU, threads=2)([failing(1)])[0]
    assert "attempt 1" in once.reason and "try" not in once.reason


def test_each_attempt_has_the_whole_time_and_only_coroutines_are_repeated_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that hangs still uses its environment; a second call would run beside it."""
    monkeypatch.setattr("hybrid_rlhf.rl.environments.calls.retry_delay_seconds", lambda tries: 0.01)
    calls = EnvironmentCalls(timeout_seconds=1.0, device=CPU, threads=4, retries=1)
    tries, ended = [], threading.Event()

    def slow_then_late() -> None:
        tries.append("function")
        ended.wait(0.2 if len(tries) == 1 else 60)
        raise ConnectionError

    async def late() -> None:
        tries.append("coroutine")
        await asyncio.sleep(30)

    twice = CallFailure("it took longer than 1 s (try 2)")
    assert [*calls([slow_then_late]), *calls([late])] == [twice, twice]
    assert calls([partial(ended.wait, 60)]) == [CallFailure("it took longer than 1 s")]
    ended.set()
    assert tries == ["function"] * 2 + ["coroutine"] * 2


def test_reset_may_give_the_prompt_with_results_in_the_order_of_their_calls(build: Any) -> None:
    """As in rows of data: templates pair them with calls by their order."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "ab"]
    asked: list[Any] = [user("?"), {"role": "assistant", "tool_calls": calls}]
    sampling = replace(SAMPLING, max_prompt_tokens=400)

    def opened(opening: Any) -> list[int]:
        parts = build(options={"opening": opening}, max_turns=1, sampling=sampling)
        rollout = parts.sampler.sample(PROMPTS[:1], step=1)
        return rollout.input_ids[0, : turns_of(rollout, 0)[0][0]].tolist()  # type: ignore[no-any-return]

    for opening, expected in (
        ("u", [user("u")]),
        ([{"role": "system", "content": "s"}, user("u")],) * 2,
        ([*asked, *reversed(results)], [*asked, *results]),
    ):
        assert opened(opening) == encode_prompt(expected, tiny_tokenizer())
    with user_error("reset: each result of a turn's tool calls must have the 'tool_call_id' of one"):
        opened([*asked, results[0], results[0]])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_end|>\n<|im_start|>tool\n4 < 5<|im_end|>\n<|im_start|>assistant\n"),
        (None, "<|im_end|>\n\nTool: 4 < 5\n\nAssistant:"),
        (  # says nothing of a tool
            "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]{% elif m['role'] == 'assistant' %}"
            "{{ m['content'] }} <|im_end|>{% endif %}{% endfor %}",
            " <|im_end|>[4 < 5]",
        ),
        (  # refuses a tool
            "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
            "<user>4 < 5<assistant>",
        ),
        (  # ends a past turn with no token: the next one keeps its beginning
            "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content }}{% endfor %}"
            "{{ '<|im_start|>assistant' if add_generation_prompt else '<|im_end|>' }}",
            "<|im_start|>tool 4 < 5<|im_start|>assistant",
        ),
    ],
)
def test_observations_are_turns_of_the_tool_or_else_of_the_user(template: str | None, expected: str) -> None:
    tokenizer = tiny_tokenizer(template)
    turns = ObservationEncoder(tokenizer, max_observation_tokens=20)
    assert tokenizer.decode(turns.observation_ids("4 < 5", end_token=None)) == expected
    after_end = tokenizer.decode(turns.observation_ids("4 < 5", end_token=tokenizer.eos_token_id))
    assert after_end == expected.lstrip().removeprefix("<|im_end|>"), "an end that was sampled is not repeated"
    if template in (CHATML, None):
        messages = [
            {"role": role, "content": said} for role, said in (("user", "u"), ("assistant", "a"), ("tool", "4 < 5"))
        ]
        before = render(messages[:1], tokenizer, add_generation_prompt=True) + ("a" if template else " a")
        assert before + expected == render(messages, tokenizer, add_generation_prompt=True), "as a conversation reads"


@pytest.mark.parametrize("letter", ["a", "é", "数", "🙂"])
def test_a_cut_observation_says_so_within_the_limit(letter: str) -> None:
    """Also where a cut is within a character; a text that fits keeps its tokens."""
    tokenizer = tiny_tokenizer()
    size = len(tokenizer(letter)["input_ids"])
    for limit in range(13, 30):
        turns = ObservationEncoder(tokenizer, max_observation_tokens=limit)
        fits = letter * (limit // size)
        assert turns.fitting(fits) == fits
        first, last = (letter * (half // size) for half in ((limit - 12) // 2, (limit - 13) // 2))
        assert turns.fitting(fits + letter) == f"{first}\n[truncated]\n{last}"
    with user_error(r"must have room for \[truncated\] in a longer observation, got 12: give 13 or more"):
        ObservationEncoder(tokenizer, max_observation_tokens=12)


class Talking(Scripted):
    """Says more than the limit in its second turn, and rewards what was left to score."""

    def step(self, completion: str) -> tuple[str | None, float, bool]:
        _, reward, is_done = super().step(completion)
        return "x" * (40 if self._turn == 2 else 20), reward, is_done

    async def truncated(self) -> float:
        return 10.0 * self._turn


def test_the_share_of_cut_observations_and_the_reward_at_a_limit(world: World, build: Any) -> None:
    """The actor reads that a text was cut. An episode that a limit ends, of turns or of tokens, is scored; one that its
    environment ends is not scored again."""
    rollout = build(Talking, **SHORT, max_observation_tokens=20).sampler.sample(PROMPTS, step=1)
    shown = [tiny_tokenizer().decode(ids) for ids in rollout.input_ids]
    assert [text.count("x" * 20) for text in shown] == [1, 1, 0, 0, 1, 1]
    assert [text.count("tool\nxxxx\n[truncated]\nxxx<|im_end|>") for text in shown] == [1, 1, 0, 0, 1, 1]
    metrics = episode_metrics(rollout, world)
    assert metrics["environment/observations_cut"] == 4 / 8
    assert rollout.turn_rewards.sum(dim=1).tolist() == [6, 6, 1, 1, 36, 36]
    sampling = replace(SAMPLING, sampling=replace(SAMPLING.sampling, max_new_tokens=40))
    short = build(Talking, sampling=sampling, max_turn_tokens=6).sampler.sample(PROMPTS[2:], step=1)
    assert [len(turns_of(short, place)) for place in (0, 1)] == [1, 1]
    assert short.turn_rewards.sum(dim=1).tolist() == [11, 11]


class Unscored(Scripted):
    def truncated(self) -> Any:
        return None if self._turns == 3 else {}["no score"]


def test_a_reward_at_a_limit_that_fails_is_a_failure(build: Any) -> None:
    with user_error("failed in 4 of 6 episodes: truncated must return a finite number as reward, it returned None"):
        build(Unscored, max_turns=2, max_turn_tokens=12).sampler.sample(PROMPTS, step=1)
    with user_error("failed in 2 of 2 episodes: it raised KeyError: 'no score'"):
        build(Unscored, max_turns=2, max_turn_tokens=12).sampler.sample(PROMPTS[2:], step=1)


def test_a_template_without_a_place_for_observations_is_refused() -> None:
    with user_error("needs a chat template that shows a tool's or a user's turn"):
        ObservationEncoder(tiny_tokenizer("{{ messages[0]['content'] }}"), max_observation_tokens=20)


@pytest.mark.parametrize(
    ("name", "sampled", "expected"),
    [
        ("gpt-oss, channels, another end in history", "<|return|>", "<|start|>functions.look to=assistant<|message|>4"),
        ("gpt-oss, channels, another end in history", "<|call|>", "<|start|>functions.look to=assistant<|message|>4"),
        ("gpt-oss, channels, another end in history", None, "<|end|><|start|>functions.look to=assistant<|message|>4"),
        ("llama 3.1, calls as parameters, results of ipython", "</s>", "<|start_header_id|>ipython<|end_header_id|>"),
    ],
)
def test_a_turn_ends_with_one_token(name: str, sampled: str | None, expected: str) -> None:
    """The end of a past turn in the template followed the stop token that was sampled, so that a turn had both."""
    tokenizer = tokenizer_of(FAMILIES[name])
    end = None if sampled is None else tokenizer.convert_tokens_to_ids(sampled)
    turns = ObservationEncoder(tokenizer, max_observation_tokens=20)
    assert tokenizer.decode(turns.observation_ids("4", end_token=end)).startswith(expected)


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Half:\n    def reset(self, row): pass\n\nx = 3\n\n"
        "class Needy:\n    def __init__(self, level): pass\n"
        "    def reset(self, row): pass\n    def step(self, text): pass\n"
    )
    for path, options, rule in (
        (f"{tmp_path}/absent.py:E", {}, "absent.py does not exist"),
        ("no_such_module:E", {}, "environment.path: no_such_module:E cannot be imported"),
        (f"{file}:x", {}, "names a class, .* is a int"),
        (f"{file}:Half", {}, "has no step"),
        (f"{file}:Needy", {}, "cannot be made with the options {}.*level"),
        (f"{file}:Needy", {"levle": 1}, "cannot be made with the options .*levle"),
        (
            f"{__name__}:Scripted",
            {"stop_strings": "</calc>"},
            "is a list of texts, none of them empty, .* has '</calc>'",
        ),
        (f"{__name__}:Scripted", {"stop_strings": [""]}, "is a list of texts, none of them empty, .* has \\[''\\]"),
    ):
        with user_error(rule):
            read_environment(EnvironmentConfig(path=path, options=options))


@pytest.mark.parametrize("name", TOOL_CLASSES)
def test_tools_are_classes_of_the_library(name: str, tmp_path: Path) -> None:
    """Also those whose packages are not installed; a saved config has the name and the class, and is read again."""
    config = parse_config(RLConfig, ["--environment.tools", name])
    assert config.environment is not None and config.environment.path is not None
    module, _, kind = config.environment.path.partition(":")
    found = find_spec(module)
    assert found is not None and f"class {kind}:" in Path(str(found.origin)).read_text()
    save_config(config, tmp_path / "config.yaml")
    assert parse_config(RLConfig, ["--config", str(tmp_path / "config.yaml")]) == config


def test_the_calculator_computes_and_nothing_else() -> None:
    for text, value in {"12*7": 84, " (1 + 2) / 4": 0.75, "-2 ** 2": -4, "7 // 2 % 2": 1, "2**0.5": 2**0.5}.items():
        assert compute(text) == pytest.approx(value)
    words = "|1 +|x|__import__('os')|'a' * 9|9**9**9|1/0|(-8)**0.5|[1][0]|True + 1|1 < 2|1e400|10**15 * 10|abs(1)|1j"
    for text in (*words.split("|"), "2**-1e9**9", "0**-1", "\0", "1" * 300, "(" * 150):
        with pytest.raises(ValueError, match="."):
            compute(text)


def test_the_calculator_as_an_episode() -> None:
    game = Calculator(call_reward=0.1)
    opening = game.reset({"prompt": [user("12*7?")], "answer": 84})
    assert opening[0]["content"].startswith("12*7?\n\nWrite <calc>")
    for said, expected in {
        "let me see <calc>12 * 7</calc>": ("84", 0.1, False),
        "<calc>12 *</calc>": ("error: not an expression", 0.0, False),
        "hm": ("Write <calc>expression</calc> or <answer>number</answer>.", 0.0, False),
        "so <answer> 84.0 </answer>": (None, 1.0, True),
        "<answer>85</answer>": (None, 0.0, True),
        "<answer>?</answer>": (None, 0.0, True),
    }.items():
        assert game.step(said) == expected
    with pytest.raises(ValueError, match="the column answer must be a number"):
        game.reset({"prompt": opening, "answer": "many"})


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
def test_python_is_a_tool_in_the_sandbox() -> None:
    """Each observation says what the program wrote and why it failed; a failure does not end the episode."""
    options = {"sandbox": {"timeout_seconds": 60.0, "output_bytes": 50}, "call_reward": 0.1}
    path = "hybrid_rlhf.rl.environments.python_tool:PythonTool"
    factory = read_environment(EnvironmentConfig(path=path, options=options))
    assert factory.stop_strings == ("</python>", "</answer>")
    game: Any = factory.make()
    (message,) = game.reset({"prompt": [user("12 * 7?")], "answer": 84})
    assert message["content"].startswith("12 * 7?\n\nWrite <python>")
    for program, observation, reward in (
        ("print(12 * 7)", "84", 0.1),
        ("pass", "[no output]", 0.1),
        ("print('a')\nprint(1 / 0)", "a\n[exit status 1: ZeroDivisionError: division by zero]", 0.0),
        ("print('x' * 99)", "x" * 50 + "\n[output truncated]", 0.1),
    ):
        assert game.step(f"I run <python>{program}</python>") == (observation, reward, False), program
    assert game.step("84").observation.startswith("Write <python>")
    for answer, reward in ((" 84.0 ", 1.0), ("eighty", 0.0)):
        assert game.step(f"so <answer>{answer}</answer>") == (None, reward, True)
    hasty: Any = read_environment(EnvironmentConfig(path=path, options={"sandbox": {"timeout_seconds": 0.5}})).make()
    hasty.reset({"prompt": [user("12 * 7?")], "answer": 84})
    told = hasty.step("<python>while True: pass</python>")
    assert told == ("[it took longer than its time limit]", 0.0, False)
    with user_error("PythonTool: unknown key memory_gb: the nearest is memory_gib"):
        read_environment(EnvironmentConfig(path=path, options={"sandbox": {"memory_gb": 1}}))


def test_a_tool_that_cannot_be_isolated_ends_the_run_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the first program, and with the sandbox's own advice, which is no advice about the options."""
    monkeypatch.setattr(local, "_candidates", list)
    path = "hybrid_rlhf.rl.environments.python_tool:PythonTool"
    options = {"sandbox": {"timeout_seconds": 7.5}}  # another sandbox than those of other tests
    with user_error(f"^environment.path: {path}: programs of a model run in namespaces.*: install bubblewrap") as told:
        read_environment(EnvironmentConfig(path=path, options=options))
    assert "environment.options" not in str(told.value)


@pytest.mark.parametrize(("module", "library"), [("reasoning_gym", "reasoning_gym"), ("verifiers_hub", "verifiers")])
def test_a_command_of_an_environment_without_its_library_ends_with_one_line(
    module: str, library: str, tmp_path: Path
) -> None:
    """The library is imported before the command begins, which printed a traceback."""
    (tmp_path / f"{library}.py").write_text("raise ImportError('absent')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python(["-m", f"hybrid_rlhf.rl.environments.{module}", "a", "b.jsonl", "3"], PYTHONPATH=path)
    assert done.returncode == 2 and re.fullmatch(r"error: .* cannot be imported \(absent\): pip .*\n", done.stderr)


def test_reasoning_gym_makes_and_judges_its_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    from hybrid_rlhf.rl.environments import reasoning_gym as adapter

    file, short = tmp_path / "rows.jsonl", tmp_path / "new" / "short.jsonl"
    adapter.main(["chain_sum", str(file), "3", "7"])
    rows = read_rows(file)
    assert len({row["prompt"] for row in rows}) == 3
    problem = adapter.problems("chain_sum", 3, 7, "{}")[2]
    seen = {**rows[2], "prompt": [user(rows[2]["prompt"])]}
    for tries, said, expected in (
        (2, "<answer>nonsense</answer>", ("That is not right. Try again.", 0.0, False)),
        (2, f"so <answer>{problem['answer']}</answer>", (None, 1.0, True)),
        (1, problem["answer"], (None, 1.0, True)),
        (1, "no", (None, pytest.approx(0.0, abs=0.1), True)),
    ):
        game = adapter.ReasoningGym(tries=tries)
        assert game.reset(seen)[0]["content"] == f"{problem['question']}\n\n{adapter.INSTRUCTION}"
        assert game.step(said) == expected
    with user_error("got one without dataset, size, seed, settings, index: write them with"):
        adapter.ReasoningGym().reset({"prompt": seen["prompt"], "answer": "4"})
    adapter.main(["chain_sum", str(short), "1", "0", '{"max_terms": 2}'])
    assert read_rows(short)[0]["settings"] == {"max_terms": 2}
    for name, path, more, rule in (
        ("chain_sum", "other", ["1", "0", "[2]"], r"settings must be a JSON object, got '\[2\]'"),
        ("no_such_set", "other", ["3"], "no_such_set with {} fails"),
        ("chain_sum", "rows", ["3"], "the file must not exist"),
        ("chain_sum", "other", [], "the line must be DATASET FILE.jsonl SIZE"),
    ):
        with user_error(rule):
            adapter.main([name, str(tmp_path / f"{path}.jsonl"), *more])


def test_the_page_is_right(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/environments.md: its class works, its commands parse, its table has the defaults."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    monkeypatch.chdir(tmp_path)
    sources = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, source in zip(("guess.py", "zoom.py", "agent.py", "worker.py"), sources, strict=True):
        Path(name).write_text(textwrap.dedent(source))
    commands = re.findall(r"^    hybrid-rlhf rl (.*?[^\\])$", page, re.DOTALL | re.MULTILINE)
    configs = [parse_config(RLConfig, shlex.split(line.replace("\\\n", " "))) for line in commands]
    assert len(configs) == 6
    for config in configs:
        assert build_runner(config.environment, rollout=SAMPLING, tokenizer=tiny_tokenizer(), world=world) is not None
    assert configs[0].environment is not None
    game: Any = read_environment(configs[0].environment).make()
    assert game.reset({"prompt": [], "secret": 7}) == "I think of a number from 1 to 10. Which?"
    assert [game.step(said) for said in ("3", "nine", " 7")] == [
        ("Higher.", 0.0, False),
        ("That is no number.", -0.1, False),
        (None, 1.0, True),
    ]
    defaults = {"path": None}  # the section is null until it is given
    for field in fields(EnvironmentConfig):
        defaults.setdefault(field.name, getattr(EnvironmentConfig(path="a:B"), field.name))
    shown = {
        name: "none" if value is None else str(value).lower().removesuffix(".0") for name, value in defaults.items()
    }
    rows = dict(re.findall(r"^\| `environment\.(\w+)` \| `?(\S+?)`? \|", page, re.MULTILINE))
    assert rows == shown


def test_with_an_environment_no_reward_model_is_needed() -> None:
    line = "--steps sft,rl --rl.environment.path a:B".split()
    config = train.parse_config(train.PipelineConfig, line, prog="train.py", defaults=train.DEMO)
    without = replace(config, rl=replace(config.rl, environment=None))
    views = (config, replace(config, steps="sft,reward,rl"), without)
    components = [train.step_config("rl", view).reward.components for view in views]
    assert [[Path(path).name for path in paths] for paths in components] == [[], ["step2_reward"], ["step2_reward"]]


def test_a_run_learns_from_an_environment_alone(model_folder: Path, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", ({"prompt": f"{i}", "turns": 1 + i % 3} for i in range(24)))
    own = tmp_path / "mine.py"
    own.write_text(
        "class Counting:\n    def __init__(self, weight): self.weight, self.turn = weight, 0\n"
        "    async def reset(self, row): self.turns = row['turns']\n"
        "    def step(self, text):\n        self.turn += 1\n"
        "        return 'go on', self.weight * (len(set(text)) - 8), self.turn == self.turns\n"
    )
    folder = tmp_path / "run"
    settings = (
        f"--algorithm grpo --reward.components [] --environment.path {own}:Counting --environment.max_turn_tokens 8 "
        "--environment.max_turns 2 --rollout.sampling.n 2 --rollout.sampling.max_new_tokens 64 "
        "--rollout.max_prompt_tokens 48 --algorithm.mini_batches 2 --logging.samples_every 1"
    )
    line = rollout_line(folder, model_folder, rows, settings, "--environment.options", "{weight: 0.1}")
    run_main("hybrid_rlhf.cli.rl", 1, line)
    whole = run_outputs(folder)
    before, *steps = whole["metrics"]
    assert "eval/environment/turns" in before
    for metrics in steps:
        assert 1 <= metrics["environment/turns"] <= 2 and 0 < metrics["environment/truncated"] <= 1
        assert metrics["objective/scores"] == pytest.approx(metrics["environment/reward"], abs=1e-5)
        assert metrics["rollout/logprob_abs_diff_max"] < 1e-3 and metrics["actor/grad_norm"] > 0
    assert any("tool\\ngo on" in sample for sample in whole["samples"])
    (folder / "finished.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_4")
    run_main("hybrid_rlhf.cli.rl", 1, [*line, "--resume", "auto"])
    assert run_outputs(folder) == whole
