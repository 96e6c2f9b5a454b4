"""Turns of the actor and of environments: what is learned from, what is not, who says that it is over, what fails."""

from __future__ import annotations

import asyncio
import json
import math
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
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.data.chat.template import render
from hybrid_rlhf.generation.sampling import Completion
from hybrid_rlhf.rl.environments import StepResult, build_runner
from hybrid_rlhf.rl.environments.calculator import Calculator, compute
from hybrid_rlhf.rl.environments.calls import CallFailure, EnvironmentCalls
from hybrid_rlhf.rl.environments.environment import read_environment
from hybrid_rlhf.rl.environments.observations import ObservationEncoder
from hybrid_rlhf.rl.metrics import episode_metrics, rollout_metrics
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.rewards import CompletionTexts
from hybrid_rlhf.rl.rollouts.scoring import score_penalties
from hybrid_rlhf.rl.types import Episode, Rollout
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.sandbox import local
from hybrid_rlhf.runtime.world import World
from tests.support.ahead import rollout_line
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.messages import user
from tests.support.ranks import run_main, run_ranks
from tests.support.rl import chat_row, episode_parts, whole
from tests.support.routes import module_routes
from tests.support.steps import read_rows, run_outputs, write_lines
from tests.support.templates import FAMILIES, tokenizer_of
from tests.support.tiny import CHATML, tiny_tokenizer

CPU = torch.device("cpu")
STOP = tuple(range(3, 60))
"""A random actor ends its turns now and then."""
SAMPLING = RolloutConfig(
    prompts_per_step=3,
    max_prompt_tokens=80,
    sampling=SamplingParams(n=2, max_new_tokens=120, temperature=0.8),
)
ALGORITHM = GRPOConfig(kl=None, loss_normalization="token", mini_batches=1)


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


def scored(parts: RLParts, rollout: Rollout) -> Rollout:
    """Completions of PROMPTS with scores and log-probs."""
    rollout = parts.scorer.score(PROMPTS, rollout)
    return parts.scorer.compute_logprobs(rollout, parts.planner.plan(rollout))


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
    free = build(max_turns=1, max_turn_tokens=12)
    tokenizer, whole = tiny_tokenizer(), free.sampler.sample(PROMPTS, step=1)
    said = [whole.input_ids[place, turns_of(whole, place)[0]].tolist() for place in range(6)]
    stop = tokenizer.decode(max(said, key=len))[3:5]  # what one of them says midway
    cut = [next((n for n in range(1, len(ids)) if stop in tokenizer.decode(ids[:n])), len(ids)) for ids in said]
    assert any(n < len(ids) for n, ids in zip(cut, said, strict=True))
    held = build(max_turns=2, max_turn_tokens=12, options={"stop_strings": [stop]})
    rollout = held.sampler.sample(PROMPTS, step=1)
    for place, (ids, n) in enumerate(zip(said, cut, strict=True)):
        first, *more = turns_of(rollout, place)
        assert rollout.input_ids[place, first].tolist() == ids[:n]
        if stop in tokenizer.decode(ids[:n]) and more:  # the end of the turn is told, not sampled
            told = tokenizer.decode(rollout.input_ids[place, first[-1] + 1 : more[0][0]])
            assert told.startswith("<|im_end|>"), told
        assert json.loads(PROMPTS[place // 2]["columns"])["turns"] != 1 or rollout.stopped[place] == (
            stop in tokenizer.decode(ids[:n]) or ids[n - 1] in STOP
        )


@pytest.mark.parametrize("kind", [Scripted, Waiting])
def test_an_episode_is_what_was_sampled_and_what_was_told(kind: Any, world: World, build: Any) -> None:
    parts = build(kind, **SHORT)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    tokenizer = tiny_tokenizer()
    for place in range(6):
        prompt, runs = PROMPTS[place // 2], turns_of(rollout, place)
        wanted = json.loads(prompt["columns"])["turns"]
        assert len(runs) == min(wanted, 3)
        ids = rollout.input_ids[place].tolist()
        assert ids[: runs[0][0]] == prompt["input_ids"]
        for number, run in enumerate(runs):
            assert len(run) <= 12 and all(ids[position] not in STOP for position in run[:-1])
            earned = rollout.turn_rewards[place, run]
            assert earned[-1] == number + 1 and (earned[:-1] == 0).all(), "at the turn's last token"
        for before, after in zip(runs, runs[1:], strict=False):
            said = tokenizer.decode([ids[position] for position in before], skip_special_tokens=True)
            between = tokenizer.decode(ids[before[-1] + 1 : after[0]])
            end = "" if ids[before[-1]] in STOP else "<|im_end|>"
            assert between == f"{end}\n<|im_start|>tool\n{len(said)}<|im_end|>\n<|im_start|>assistant\n"
        assert int(rollout.lengths[place]) == runs[-1][-1] + 1, "it ends with the actor's own words"
        ended = len(runs) == wanted and ids[runs[-1][-1]] in STOP
        assert bool(rollout.stopped[place]) == ended
    assert rollout.stopped.any() and not rollout.stopped[4:].any(), "who would go on was cut off"
    assert float(rollout.turn_rewards.sum()) == 2 * (6 + 1 + 6)
    told = episode_metrics(rollout, world)
    assert told["environment/turns"] == pytest.approx((3 + 1 + 3) / 3)
    assert told["environment/reward"] == pytest.approx(2 * 13 / 6)
    assert told["environment/truncated"] == pytest.approx(1 - float(rollout.stopped.float().mean()))


def test_all_that_follows_the_prompt_fits_in_max_new_tokens(build: Any) -> None:
    sampling = replace(SAMPLING, sampling=replace(SAMPLING.sampling, max_new_tokens=64))
    parts = build(sampling=sampling, max_turns=50, max_turn_tokens=6)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    followed = rollout.lengths - torch.tensor([len(PROMPTS[i // 2]["input_ids"]) for i in range(6)])
    assert int(followed.max()) <= 64 and not rollout.stopped[4:].any()
    assert (64 - followed[4:] <= 22).all(), "no observation, of 21 tokens or 22, is added without room for its answer"
    overlong = PenaltiesConfig(overlong_fraction=0.5, length=0.01)
    expected = (followed - 32).clamp(min=0) / 32 + 0.01 * rollout.response_mask.sum(dim=1)
    torch.testing.assert_close(score_penalties(rollout, overlong, max_new_tokens=64, scores_std=1.0), expected)


@pytest.mark.parametrize("replays", [False, True])
def test_episodes_have_the_experts_of_all_their_turns(replays: bool, world: World, tmp_path: Path) -> None:
    model = variant("qwen3_moe")
    model.save_pretrained(tmp_path)
    parts = build_environment(world, str(tmp_path), sampling=replace(SAMPLING, routing_replay=replays), **SHORT)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    assert any(len(turns_of(rollout, place)) == 3 for place in range(len(rollout)))
    routes = rollout.padded_routes
    assert routes is not None
    for row, length in enumerate(rollout.lengths.tolist()):
        expected = module_routes(model, rollout.input_ids[row, :length].tolist())
        assert routes[row, : length - 1].sort().values.tolist() == np.sort(expected[:-1]).tolist()
        assert (routes[row, length - 1 :] == -1).all()
    assert scored(parts, rollout).routes is not None, "the update's forward compares them"


def test_scores_are_the_environments_and_rewards_lie_where_they_were_earned(world: World, build: Any) -> None:
    parts = build(**SHORT)
    rollout = parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=1, greedy=True), greedy=True)
    scores, turn_rewards = rollout.scores, rollout.turn_rewards
    assert scores.tolist() == [6, 6, 1, 1, 6, 6]
    assert rollout.greedy_scores.tolist() == [6, 6, 1, 1, 6, 6] and rollout.metrics["environment/turns"] > 2
    rollout = parts.scorer.compute_logprobs(rollout, parts.planner.plan(rollout))
    torch.testing.assert_close(parts.estimate(rollout, kl_coef=0.0).rewards, turn_rewards)
    clipping = build(**SHORT, algorithm=replace(ALGORITHM, score_clip=5.0))
    batch = clipping.estimate(rollout, kl_coef=0.0)
    assert batch.rewards.sum(dim=1).tolist() == pytest.approx([5, 5, 1, 1, 5, 5], abs=1e-5)
    factor = torch.tensor([5 / 6, 5 / 6, 1, 1, 5 / 6, 5 / 6])[:, None]
    torch.testing.assert_close(batch.rewards, turn_rewards * factor)  # a clip scales every turn
    assert rollout_metrics(batch, world)["objective/score_clipfrac"] == pytest.approx(4 / 6)
    assert batch.rollout.greedy_scores.tolist() == [5, 5, 1, 1, 5, 5], "and from a baseline"


def on_ranks(world: World, path: str, sizes: list[int]) -> list[dict[str, Any]]:
    """What comes of prompts with as many ranks generating together."""
    return [_on_ranks(world, path, size) for size in sizes]


def _on_ranks(world: World, path: str, tensor_parallel: int) -> dict[str, Any]:
    sampling = replace(SAMPLING, tensor_parallel=tensor_parallel)
    parts = build_environment(world, path, sampling=sampling, **SHORT)
    rollout = parts.scorer.score(PROMPTS, parts.sampler.sample(PROMPTS, step=1))
    result = {name: tensor.tolist() for name, tensor in whole(rollout, world).tensors().items()}
    one = parts.sampler.sample(PROMPTS[:1], step=2)  # a rank has no share
    result["one"] = whole(one, world).input_ids.tolist()
    failing = build_environment(
        world, path, Failing, sampling=sampling, options={"how": "raise", "where": "c"}, max_turns=2
    )
    try:
        failing.sampler.sample(PROMPTS, step=1)
    except UserError as error:
        result["failure"] = str(error)
    return result


def test_episodes_are_the_same_on_any_ranks_and_a_failure_stops_all(
    tmp_path: Path, world: World, paths: dict[str, str]
) -> None:
    (alone,) = on_ranks(world, paths["actor"], [1])
    assert "failed in 2 of 6 episodes: it raised ValueError: no" in alone["failure"]
    for found in [one for rank in run_ranks(on_ranks, 2, tmp_path, paths["actor"], [1, 2]) for one in rank]:
        for name in ("input_ids", "response_mask", "turn_rewards", "stopped", "scores", "one", "failure"):
            assert found[name] == alone[name], name
        torch.testing.assert_close(
            torch.tensor(found["sampled_logprobs"]), torch.tensor(alone["sampled_logprobs"]), atol=1e-5, rtol=1e-4
        )


class Failing(Scripted):
    """Fails on prompts with a letter, in its second turn or at once."""

    def __init__(self, *, how: str, where: str, at: int = 1) -> None:
        super().__init__()
        self._how, self._where, self._at = how, where, at

    def reset(self, row: Mapping[str, Any]) -> Any:
        self._fails = self._where in row["prompt"][0]["content"]
        super().reset(row)
        return self._fail(0)

    def step(self, completion: str) -> Any:
        step = super().step(completion)
        return self._fail(self._turn, step)

    def _fail(self, turn: int, right: Any = None) -> Any:
        if not self._fails or turn != self._at:
            return right
        if self._how == "raise":
            raise ValueError("no")
        if self._how == "sleep":
            time.sleep(5)
        return {
            "number": 3.0,
            "nan": ("x", math.nan, False),
            "bool": ("x", True, False),
            "silent": (None, 1.0, False),
            "done": ("x", 1.0, 1),
            "long": "x" * 200,
            "role": [{"role": "me", "content": "x"}],
        }.get(self._how)


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
        ("silent", 1, "step must return a text as observation, it returned None"),
    ],
)
def test_an_environment_that_fails_stops_the_run_or_ends_its_episode(
    how: str, at: int, reason: str, build: Any, log_lines: list[str]
) -> None:
    limit = 1.0 if how == "sleep" else 30.0  # a loaded machine is no fault of the others
    settings = {**SHORT, "timeout_seconds": limit}
    options = {"how": how, "where": "e", "at": at}
    parts = build(Failing, options=options, **settings)
    with user_error(f"environment .*:Failing failed in 2 of 6 episodes: {reason}.*; fix it") as told:
        parts.sampler.sample(PROMPTS, step=1)
    assert "\n" not in str(told.value)
    parts = build(Failing, options=options, on_failure="zero", **settings)
    rollout = parts.sampler.sample(PROMPTS, step=1)
    failed = [] if at == 0 else [at, at]  # turns; after a failed reset there is none, as there is no task to answer
    assert [len(turns_of(rollout, place)) for place in range(len(rollout))] == [3, 3, 1, 1, *failed]
    scores = parts.scorer.score(PROMPTS, rollout).scores.tolist()
    assert scores == [6, 6, 1, 1, *(turns - 1 for turns in failed)] and not rollout.stopped[4:].any()
    assert sum("gives 0 and ends in 2 of 6 episodes" in line for line in log_lines) == 1
    parts = build(Failing, options=options, on_failure="drop", **settings)
    kept = parts.sampler.sample(PROMPTS, step=1)
    assert kept.groups.tolist() == [0, 0, 1, 1] and kept.turn_rewards.sum(dim=1).tolist() == [6, 6, 1, 1]
    assert sum("drops what failed in 2 of 6 episodes" in line for line in log_lines) == 1
    with user_error("must leave episodes to learn from, it failed in 2 of 2 episodes: "):
        parts.sampler.sample(PROMPTS[2:], step=1)
    assert len(parts.sampler.sample(PROMPTS[2:], step=1, may_be_empty=True)) == 0


def test_a_failed_episode_is_left_out_with_its_sequences_and_a_prompt_without_its_greedy_one(
    world: World, build: Any
) -> None:
    runner = build(on_failure="drop").sampler._environments

    def kept(*episodes: tuple[int, bool, Episode]) -> list[bool]:
        return runner.kept(episodes, world, may_drop_all=True)  # type: ignore[no-any-return]

    def one(*, tokens: int = 2, **known: Any) -> Episode:
        return Episode([1], [2] * tokens, **known)

    failed, other, third = one(sample=0, failure="no"), one(sample=0), one(sample=1)
    of_program = kept((0, False, failed), (0, False, other), (0, False, third), (1, False, other))
    assert of_program == [False, False, True, True]
    failed, fine = one(failure="no"), one()
    assert kept((0, False, fine), (0, False, failed), (1, False, fine)) == [True, False, True]
    of_remax = kept((0, False, fine), (0, True, failed), (1, False, fine), (1, True, fine))
    assert of_remax == [False, False, True, True]


def test_calls_run_at_once_and_a_blocked_loop_is_left() -> None:
    calls = EnvironmentCalls(timeout_seconds=1.0, device=CPU, threads=32)

    async def wait() -> int:
        await asyncio.sleep(0.2)
        return 3

    async def block() -> None:
        time.sleep(2)

    async def mine() -> None:
        raise TimeoutError("mine")

    async def stubborn() -> None:
        await asyncio.sleep(30)

    start = time.perf_counter()
    assert calls([wait] * 50) == [3] * 50 and calls([lambda: time.sleep(0.2)] * 20) == [None] * 20
    assert time.perf_counter() - start < 5.0, "one after the other they take 14 seconds"
    quick = EnvironmentCalls(timeout_seconds=0.2, device=CPU, threads=32)

    async def leave() -> None:
        raise SystemExit(3)

    patient = EnvironmentCalls(timeout_seconds=30.0, device=CPU, threads=32)
    (late,) = quick([stubborn])
    raised, left, exited = patient([mine, leave, lambda: exit(3)])
    assert "it raised SystemExit: 3" in left.reason and "SystemExit" in exited.reason
    assert "it raised TimeoutError: mine" in raised.reason and late == CallFailure("it took longer than 0.2 s")
    start = time.perf_counter()
    assert quick([block] * 9) == [CallFailure("it took longer than 0.2 s")] * 9
    assert time.perf_counter() - start < 1.5, "they waited together"
    assert calls([wait]) == [3] and EnvironmentCalls(timeout_seconds=1.0, device=CPU, threads=32)([wait]) == [3]
    assert quick([lambda: time.sleep(2)] * 16) == [CallFailure("it took longer than 0.2 s")] * 16
    assert "16 earlier calls still hang" in quick([lambda: 1])[0].reason


def test_a_long_call_does_not_delay_the_next_ones() -> None:
    """A call started when all calls 32 places before it had ended, so one long call stopped the others."""
    calls = EnvironmentCalls(timeout_seconds=20.0, device=CPU, threads=2)
    reached = threading.Event()
    running, most = [], []

    def count(place: int) -> int:
        running.append(place)
        most.append(len(running))
        if place == 0:
            assert reached.wait(15), "the last call never started"
        if place == 9:
            reached.set()
        running.remove(place)
        return place

    assert calls([partial(count, place) for place in range(10)]) == [*range(10)]
    assert max(most) == 2, "as many as there are threads"


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_that_raise_are_repeated_and_the_result_says_so(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool behind a network fails now and then; before, one failure ended the episode or the run."""
    monkeypatch.setattr("hybrid_rlhf.rl.environments.calls.retry_delay_seconds", lambda tries: 0.01 * tries)

    def failing(times: int) -> Any:
        tries = []

        def call() -> int:
            tries.append(1)
            if len(tries) <= times:
                raise ConnectionError(f"attempt {len(tries)}")
            return len(tries)

        async def coroutine() -> int:
            return call()

        return coroutine if is_async else call

    calls = EnvironmentCalls(timeout_seconds=5.0, device=CPU, threads=2, retries=2)
    *results, failure = calls([failing(0), failing(1), failing(2), failing(3)])
    assert results == [1, 2, 3]
    assert failure.reason.startswith("it raised ConnectionError: attempt 3") and failure.reason.endswith("(try 3)")
    once = EnvironmentCalls(timeout_seconds=5.0, device=CPU, threads=2)([failing(1)])[0]
    assert "attempt 1" in once.reason and "try" not in once.reason


def test_each_attempt_has_the_whole_time_and_only_coroutines_are_repeated_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that hangs still uses its environment; a second call would run beside it."""
    monkeypatch.setattr("hybrid_rlhf.rl.environments.calls.retry_delay_seconds", lambda tries: 0.01)
    calls = EnvironmentCalls(timeout_seconds=0.4, device=CPU, threads=4, retries=1)
    tries = []

    def slow_then_late() -> None:
        tries.append("function")
        time.sleep(0.3 if tries.count("function") == 1 else 2.0)
        raise ConnectionError

    async def late() -> None:
        tries.append("coroutine")
        await asyncio.sleep(30)

    assert calls([slow_then_late]) == [CallFailure("it took longer than 0.4 s (try 2)")]
    assert calls([lambda: time.sleep(2)]) == [CallFailure("it took longer than 0.4 s")]
    assert calls([late]) == [CallFailure("it took longer than 0.4 s (try 2)")]
    assert tries == ["function"] * 2 + ["coroutine"] * 2


def test_reset_may_give_the_prompt(build: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for opening, expected in (("u", messages[1:]), (messages, messages)):
        parts = build(options={"opening": opening}, max_turns=1)
        rollout = parts.sampler.sample(PROMPTS, step=1)
        ids = encode_prompt(expected, tiny_tokenizer())
        assert all(rollout.input_ids[place, : turns_of(rollout, place)[0][0]].tolist() == ids for place in range(6))


def test_results_that_reset_gives_follow_their_calls(build: Any) -> None:
    """As in rows of data: templates pair them with calls by their order."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "ab"]
    asked: list[Any] = [user("?"), {"role": "assistant", "tool_calls": calls}]
    sampling = replace(SAMPLING, max_prompt_tokens=400)
    parts = build(options={"opening": [*asked, *reversed(results)]}, max_turns=1, sampling=sampling)
    rollout = parts.sampler.sample(PROMPTS[:1], step=1)
    ids = encode_prompt([*asked, *results], tiny_tokenizer())
    assert rollout.input_ids[0, : turns_of(rollout, 0)[0][0]].tolist() == ids
    parts = build(options={"opening": [*asked, results[0], results[0]]}, max_turns=1, sampling=sampling)
    with user_error("reset: each result of a turn's tool calls must have the 'tool_call_id' of one"):
        parts.sampler.sample(PROMPTS[:1], step=1)


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
    ],
)
def test_observations_are_turns_of_the_tool_or_else_of_the_user(template: str | None, expected: str) -> None:
    tokenizer = tiny_tokenizer(template)
    turns = ObservationEncoder(tokenizer, max_observation_tokens=6)
    assert tokenizer.decode(turns.observation_ids("4 < 5", end_token=None)) == expected
    after_end = tokenizer.decode(turns.observation_ids("4 < 5", end_token=tokenizer.eos_token_id))
    assert after_end == expected.lstrip().removeprefix("<|im_end|>"), "an end that was sampled is not repeated"
    assert "123456" in (cut := tokenizer.decode(turns.observation_ids("123456789", end_token=None)))
    assert "7" not in cut
    if template in (CHATML, None):
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        before = render(messages[:1], tokenizer, add_generation_prompt=True) + ("a" if template else " a")
        messages.append({"role": "tool", "content": "4 < 5"})
        assert before + expected == render(messages, tokenizer, add_generation_prompt=True), "as a conversation reads"


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
    turns = ObservationEncoder(tokenizer, max_observation_tokens=6)
    assert tokenizer.decode(turns.observation_ids("4", end_token=end)).startswith(expected)


def test_the_opening_of_a_turn_is_no_end() -> None:
    """A template without a token at the end of past turns: the next turn keeps its beginning."""
    history = "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content }}{% endfor %}"
    last = "{{ '<|im_start|>assistant' if add_generation_prompt else '<|im_end|>' }}"
    tokenizer = tiny_tokenizer(history + last)
    turns = ObservationEncoder(tokenizer, max_observation_tokens=6)
    found = tokenizer.decode(turns.observation_ids("4", end_token=tokenizer.eos_token_id))
    assert found == "<|im_start|>tool 4<|im_start|>assistant"


def test_a_template_without_a_place_for_observations_is_refused() -> None:
    with user_error("needs a chat template that shows a tool's or a user's turn"):
        ObservationEncoder(tiny_tokenizer("{{ messages[0]['content'] }}"), max_observation_tokens=9)


def test_text_of_an_episode_is_what_the_actor_said(world: World) -> None:
    tokenizer = tiny_tokenizer()
    episode = Episode(tokenizer("Q").input_ids)
    for said, told in (("one", "TOLD"), ("two", None)):
        ids = tokenizer(said + "<|im_end|>").input_ids
        zeros = [0.0] * len(ids)
        episode.add_turn(Completion(ids, zeros, "stop", zeros))
        if told is not None:
            episode.add_observation(tokenizer(told).input_ids)
    answers = CompletionTexts.read([chat_row("Q")], replace(Rollout.of([episode]), groups=torch.tensor([0])), tokenizer)
    assert answers.completions == ["one\ntwo"]
    plain = Rollout.of([Episode.of([5], Completion([70, 2], [-1.0, -2.0], "stop", [-1.0, -2.0]))])
    assert plain.turn_rewards is None and episode_metrics(plain, world) == {}


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


def test_the_calculator_computes_and_nothing_else() -> None:
    for text, value in {"12*7": 84, " (1 + 2) / 4": 0.75, "-2 ** 2": -4, "7 // 2 % 2": 1, "2**0.5": 2**0.5}.items():
        assert compute(text) == pytest.approx(value)
    for text in (
        "",
        "1 +",
        "x",
        "__import__('os')",
        "'a' * 9",
        "9**9**9",
        "1/0",
        "(-8)**0.5",
        "[1][0]",
        "True + 1",
        "1 < 2",
        "1" * 300,
        "(" * 150,
        "1e400",
        "10**15 * 10",
        "abs(1)",
        "1j",
        "2**-1e9**9",
        "0**-1",
        "\0",
    ):
        with pytest.raises(ValueError, match="."):
            compute(text)


def test_the_calculator_as_an_episode() -> None:
    game = Calculator(call_reward=0.1)
    opening = game.reset({"prompt": [{"role": "user", "content": "12*7?"}], "answer": 84})
    assert opening[0]["content"].startswith("12*7?\n\nWrite <calc>")
    assert game.step("let me see <calc>12 * 7</calc>") == StepResult("84", 0.1, False)
    assert game.step("<calc>12 *</calc>") == StepResult("error: not an expression", 0.0, False)
    observation, reward, done = game.step("hm")
    assert observation is not None and "<answer>" in observation and not reward and not done
    assert game.step("so <answer> 84.0 </answer>") == StepResult(None, 1.0, True)
    assert game.step("<answer>85</answer>")[1:] == (0.0, True) and game.step("<answer>?</answer>")[1:] == (0.0, True)
    with pytest.raises(ValueError, match="the column answer must be a number"):
        game.reset({"prompt": opening, "answer": "many"})


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
def test_python_is_a_tool_in_the_sandbox() -> None:
    """Each observation says what the program wrote and why it failed; a failure does not end the episode."""
    options = {"sandbox": {"timeout_seconds": 5.0, "output_bytes": 50}, "call_reward": 0.1}
    path = "hybrid_rlhf.rl.environments.python_tool:PythonTool"
    factory = read_environment(EnvironmentConfig(path=path, options=options))
    assert factory.stop_strings == ("</python>", "</answer>")
    game: Any = factory.make()
    (message,) = game.reset({"prompt": [{"role": "user", "content": "12 * 7?"}], "answer": 84})
    assert message["content"].startswith("12 * 7?\n\nWrite <python>")
    for program, observation, reward in (
        ("print(12 * 7)", "84", 0.1),
        ("pass", "[no output]", 0.1),
        ("print('a')\nprint(1 / 0)", "a\n[exit status 1: ZeroDivisionError: division by zero]", 0.0),
        ("while True: pass", "[it took longer than its time limit]", 0.0),
        ("print('x' * 99)", "x" * 50 + "\n[output truncated]", 0.1),
        ("import os; print(os.environ.get('SECRET'))", "None", 0.1),
    ):
        assert game.step(f"I run <python>{program}</python>") == StepResult(observation, reward, False), program
    assert game.step("84").observation.startswith("Write <python>")
    assert game.step("so <answer> 84.0 </answer>") == StepResult(None, 1.0, True)
    assert game.step("so <answer>eighty</answer>") == StepResult(None, 0.0, True)
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


def test_reasoning_gym_makes_and_judges_its_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    from hybrid_rlhf.rl.environments import reasoning_gym as adapter

    file = tmp_path / "rows.jsonl"
    adapter.main(["chain_sum", str(file), "3", "7"])
    rows = read_rows(file)
    assert len({row["prompt"] for row in rows}) == 3
    problem = adapter.problems("chain_sum", 3, 7, "{}")[2]
    seen = {**rows[2], "prompt": [{"role": "user", "content": rows[2]["prompt"]}]}
    game = adapter.ReasoningGym(tries=2)
    assert game.reset(seen)[0]["content"] == f"{problem['question']}\n\n{adapter.INSTRUCTION}"
    observation, reward, done = game.step("<answer>nonsense</answer>")
    assert observation and reward == 0 and not done, "a second try"
    assert game.step(f"so <answer>{problem['answer']}</answer>") == StepResult(None, 1.0, True)
    for said, score in ((problem["answer"], 1.0), ("no", pytest.approx(0.0, abs=0.1))):
        once = adapter.ReasoningGym()
        once.reset(seen)
        assert once.step(said) == StepResult(None, score, True)
    with user_error("got one without dataset, size, seed, settings, index: write them with"):
        adapter.ReasoningGym().reset({"prompt": seen["prompt"], "answer": "4"})
    adapter.main(["chain_sum", str(tmp_path / "new" / "short.jsonl"), "1", "0", '{"max_terms": 2}'])
    assert json.loads((tmp_path / "new" / "short.jsonl").read_text())["settings"] == {"max_terms": 2}
    with user_error(r"settings must be a JSON object, got '\[2\]'"):
        adapter.main(["chain_sum", str(tmp_path / "other.jsonl"), "1", "0", "[2]"])
    with user_error("no_such_set with {} fails"):
        adapter.main(["no_such_set", str(tmp_path / "other.jsonl"), "3"])
    with user_error("the file must not exist"):
        adapter.main(["chain_sum", str(file), "3"])
    with user_error("the line must be DATASET FILE.jsonl SIZE"):
        adapter.main(["chain_sum"])


def test_the_page_is_right(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/environments.md: its class works, its commands parse, its table has the defaults."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    monkeypatch.chdir(tmp_path)
    sources = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, source in zip(("guess.py", "agent.py", "worker.py"), sources, strict=True):
        Path(name).write_text(textwrap.dedent(source))
    commands = re.findall(r"^    hybrid-rlhf rl (.*?[^\\])$", page, re.DOTALL | re.MULTILINE)
    configs = [parse_config(RLConfig, shlex.split(line.replace("\\\n", " "))) for line in commands]
    assert len(configs) == 6
    for config in configs:
        assert build_runner(config.environment, rollout=SAMPLING, tokenizer=tiny_tokenizer(), world=world) is not None
    assert configs[0].environment is not None
    game: Any = read_environment(configs[0].environment).make()
    assert game.reset({"prompt": [], "secret": 7}) == "I think of a number from 1 to 10. Which?"
    told = [game.step(said) for said in ("3", "nine", "9", " 7")]
    assert told == [
        ("Higher.", 0.0, False),
        ("That is no number.", -0.1, False),
        ("Lower.", 0.0, False),
        (None, 1.0, True),
    ]
    rows = dict(re.findall(r"^\| `environment\.(\w+)` \| (\S+) \|", page, re.MULTILINE))
    defaults = {field.name: getattr(EnvironmentConfig(path="a:B"), field.name) for field in fields(EnvironmentConfig)}
    defaults["path"] = None  # the section is null until it is given
    shown = {name: "none" if value is None else str(value).removesuffix(".0") for name, value in defaults.items()}
    assert {name: value.strip("`") for name, value in rows.items()} == shown


def test_with_an_environment_no_reward_model_is_needed() -> None:
    line = "--steps sft,rl --rl.environment.path a:B".split()
    config = train.parse_config(train.PipelineConfig, line, prog="train.py", defaults=train.DEMO)
    without = replace(config, rl=replace(config.rl, environment=None))
    for view, expected in (
        (config, []),
        (replace(config, steps="sft,reward,rl"), ["step2_reward"]),
        (without, ["step2_reward"]),
    ):
        components = train.step_config("rl", view).reward.components
        assert [Path(path).name for path in components] == expected


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
    told = whole["metrics"]
    assert all(math.isfinite(value) for metrics in told for value in metrics.values())
    for metrics in told[1:]:
        assert 1 <= metrics["environment/turns"] <= 2 and 0 < metrics["environment/truncated"] <= 1
        assert metrics["objective/scores"] == pytest.approx(metrics["environment/reward"], abs=1e-5)
        assert metrics["rollout/logprob_abs_diff_max"] < 1e-3 and metrics["actor/grad_norm"] > 0
    assert "eval/environment/turns" in told[0] and "reward/model/mean" not in told[1]
    assert any("tool\\ngo on" in sample for sample in whole["samples"])
    (folder / "finished.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_4")
    run_main("hybrid_rlhf.cli.rl", 1, [*line, "--resume", "auto"])
    assert run_outputs(folder) == whole
