"""A lag: each prompt once and in order, tokens of the weights that they say, none older than allowed, exact resumes."""

from __future__ import annotations

import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.open_batch import PromptBatch
from hybrid_rlhf.rl.rollouts.live import LiveBatch
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ahead import (
    PROMPTS,
    STOP_TOKEN_IDS,
    build_sampling_actor,
    change_weights,
    metrics_without_times,
    rollout_line,
    save_stopping_model,
    trained_logprobs,
)
from tests.support.errors import user_error
from tests.support.faults import Point, run_step
from tests.support.marks import faults, slow
from tests.support.programs import client_of
from tests.support.ranks import run_main, run_ranks
from tests.support.rl import whole
from tests.support.steps import run_outputs, write_lines, write_rows
from tests.support.tiny import tiny_model

SEPARATE = ("--placement", "separation")
GROUPS = ("--algorithm", "rloo", "--rollout.sampling.n", "2")
LAG = "--rollout.max_lag 2 --rollout.sampling.max_new_tokens 40 --rollout.prompts_per_step 4 --logging.samples_every 1"
PLACED = {
    "one rank": (1, ()),
    "two ranks": (2, ()),
    "a sampler": (2, SEPARATE),
    "two that share the model": (2, ("--rollout.tensor_parallel", "2")),
    "a sampler of two": (3, ("--placement", "{sampler: {ranks: 1-2, tensor_parallel: 2}}")),
}
"""Number of ranks, and settings."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stopping_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of prompts that all differ."""
    return write_lines(tmp_path / "rows.jsonl", ({"prompt": f"say {row}"} for row in range(40)))


def sampled(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "samples.jsonl")


def stream_of(
    world: World, path: str, *, lag: int, steps: int, longest: int = 24, greedy: bool = False, **settings: Any
) -> tuple[Any, StepStream]:
    actor, row_stream = build_sampling_actor(world, path, max_lag=lag, **settings)
    config = RolloutConfig(
        prompts_per_step=2, sampling=SamplingParams(n=2, max_new_tokens=longest), kv_cache_gib=0.1, max_lag=lag
    )
    sampler = RolloutSampler(
        actor, config, world=world, stop_token_ids=STOP_TOKEN_IDS, seed=0, timers=Timers(actor.device)
    )
    stream = StepStream(
        sampler,
        prompts=Dataset.from_list([{"input_ids": [5 + row, 7, 9]} for row in range(PROMPTS)]),
        stream=row_stream,
        per_step=2,
        total_steps=steps,
        max_lag=lag,
        greedy=greedy,
    )
    return actor, stream


# -- what a step trains on


def steps_and_errors(
    world: World, path: str, settings: dict[str, Any], steps: int
) -> tuple[list[tuple[list[int], Rollout]], float, float]:
    """The rollouts of a lag of 2 while the weights change, and how far their tokens are from the log-probs of their own
    weights (most) and of others (mean)."""
    actor, stream = stream_of(world, path, lag=2, steps=steps, **settings)
    taken = []
    with stream.running():
        for step in range(1, steps + 1):
            prompts, rollout = stream.take(step)
            taken.append((prompts, whole(rollout, world)))
            change_weights(actor, step)
    fresh, _ = build_sampling_actor(world, path, **settings)
    own, others = 0.0, list[torch.Tensor]()
    for version in range(steps):
        for _, rollout in taken:
            off = (trained_logprobs(fresh, rollout) - rollout.sampled_logprobs).abs()
            mine = rollout.response_mask & (rollout.weight_versions == version)
            own = max(own, float(torch.where(mine, off, 0).max()))
            others.append(off[rollout.response_mask & ~mine])
        change_weights(fresh, version + 1)
    return taken, own, float(torch.cat(others).mean())


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {"rank": 4}), slow(2, {"tensor_parallel": 2}), faults(2, {"stage": 3}), faults(1, {})],
)
def test_each_token_is_of_the_version_that_it_says(
    ranks: int, settings: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Completions that several versions of the weights continue, against the training forward of each version."""
    steps = 5
    for taken, own, others in run_ranks(steps_and_errors, ranks, tmp_path, str(model), settings, steps):
        assert own < 1e-4 < 1e-1 < others
        expected = RowStream(PROMPTS, epochs=1, seed=0).take(2 * steps)
        assert [row for prompts, _ in taken for row in prompts] == expected, "each prompt once, in order"
        mixed = 0
        for updates, (_, rollout) in enumerate(taken):
            assert len(rollout) == 4
            for versions, mask in zip(rollout.weight_versions, rollout.response_mask, strict=True):
                of_tokens = versions[mask].tolist()
                assert of_tokens == sorted(of_tokens) and updates - 2 <= of_tokens[0] <= of_tokens[-1] <= updates
                mixed += of_tokens[0] < of_tokens[-1]
        assert mixed, "some completion has tokens of several versions"


def test_lengths_that_are_trained_on_are_those_that_were_started(world: World, model: Path) -> None:
    """With lengths from 1 to 100 tokens, at every step: a sampler that trained on what finishes first would train on
    short completions first."""

    def lengths(lag: int) -> list[int]:
        _, stream = stream_of(world, str(model), lag=lag, steps=8, longest=100)
        found: list[int] = []
        with stream.running():
            for step in range(1, 9):
                found += stream.take(step)[1].response_mask.sum(dim=1).tolist()
                assert all(number - step <= lag for number in stream._ahead), "admission bounds the lag"
        return found

    synchronous = lengths(0)
    assert max(synchronous) > 20 * min(synchronous)
    assert lengths(3) == synchronous, "the same weights: the same lengths in each step"


def test_as_many_rows_decode_together_as_a_step_has(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of later steps enter where others have ended: with more rows, more tokens would be of older weights, and
    with the rows that earlier calls had allocated, a resumed run would differ."""
    _, stream = stream_of(world, str(model), lag=3, steps=8, longest=100)
    generate, rows = GenerationEngine.generate, list[int | None]()

    def counted(self: GenerationEngine, *args: Any, **named: Any) -> Any:
        rows.append(named["rows"])
        return generate(self, *args, **named)

    monkeypatch.setattr(GenerationEngine, "generate", counted)
    with stream.running():
        stream.take(1)
    assert rows == [4] and any(prompt.begun for prompt in next(iter(stream._ahead.values())).prompts)


# -- checkpoints


def test_running_completions_survive_checkpoints_greedy_ones_too(world: World, model: Path) -> None:
    """A checkpoint is restored, written again before a rollout (as after a resume within a step), and restored; the
    greedy completion of a prompt has its own tokens beside those of the samples, finished or not."""

    def opened(lag: int) -> StepStream:
        return stream_of(world, str(model), lag=lag, steps=8, longest=40, greedy=True)[1]

    def stored(stream: StepStream) -> tuple[Any, ...]:
        return stream.state_dict(), *stream.carried_state(world), stream.row_stream.state_dict()

    def restored(state: tuple[Any, ...], lag: int) -> StepStream:
        stream, (steps, carried, tensors, row_stream) = opened(lag), state
        stream.row_stream.load_state_dict(row_stream)
        stream.load_state_dict(steps, [tensors], carried)
        return stream

    def taken(stream: StepStream, steps: range) -> list[torch.Tensor]:
        return [stream.take(step)[1].input_ids for step in steps]

    stream = opened(3)
    with stream.running():
        taken(stream, range(1, 3))
        first = stored(stream)
    assert {None, "stop"} <= {*first[1]["finish_reasons"][0]}, "some have finished, others have begun"
    again = stored(restored(first, lag=0))
    assert again[:2] == first[:2] and all(torch.equal(again[2][name], tensor) for name, tensor in first[2].items())
    expected = taken(opened(0), range(1, 6))[2:]
    for lag in (0, 1):
        resumed = restored(again, lag)
        with resumed.running():
            found = taken(resumed, range(3, 6))
        assert all(map(torch.equal, found, expected)), "the same weights and tokens"


def test_completions_of_earlier_versions_of_the_library_are_refused(world: World, model: Path) -> None:
    _, stream = stream_of(world, str(model), lag=1, steps=2)
    rows, rollout = stream.take(1)
    for held in (rollout, rollout.rows([])):  # also on a rank that gets none of them
        ahead = {f"ahead.2.{name}": tensor for name, tensor in held.tensors().items()}
        with user_error("the checkpoint holds completions of rollout.async_sampling or rollout.partial"):
            stream.load_state_dict([{"step": 2, "rows": rows}], [ahead])


@pytest.mark.parametrize(
    ("placed", "name", "more"),
    [
        ("one rank", "ppo", ()),
        slow("one rank", "remax", ()),
        slow("two ranks", "rloo", ("--rollout.sampling.n", "2")),
        faults("one rank", "dapo", ("--rollout.sampling.n", "3")),
        faults("two that share the model", "grpo", ("--rollout.sampling.n", "2")),
    ],
)
def test_a_run_that_is_killed_anywhere_ends_as_the_undisturbed_one(
    placed: str, name: str, more: tuple[str, ...], model: Path, rows: Path, tmp_path: Path
) -> None:
    """Bit for bit on the actor's ranks: stopped within a step, then killed at a random decoding step. Two kills gave
    other metrics when a time slice ended by the clock."""
    run = tmp_path / "run"
    ranks, placement = PLACED[placed]
    line = [*rollout_line(run, model, rows, "--algorithm", name, *more, *placement), *LAG.split()]
    run_main("hybrid_rlhf.cli.rl", ranks, line)
    undisturbed = run_outputs(run)
    told = [line for line in undisturbed["metrics"] if "rollout/stale_updates" in line]
    assert any(line["rollout/stale_tokens_ratio"] > 0 for line in told)
    if name != "dapo":  # what replaces groups of equal scores is of the current weights
        assert max(line["rollout/stale_updates_max"] for line in told) <= 2
    shutil.rmtree(run)
    line += ["--resume", "auto"]
    update = Point("hybrid_rlhf.rl.updates.updater:Updater.update", 2, 0, signal=signal.SIGTERM)
    assert run_step("hybrid_rlhf.cli.rl", ranks, line, update) == [STOPPED_EXIT_CODE] * ranks
    if name == "ppo":  # several updates in a step: the checkpoint is of the middle
        assert any("_update_" in path.name for path in (run / "checkpoints").iterdir())
    decoding = "hybrid_rlhf.generation.batching.continuous:ContinuousBatch._launch"
    call = random.Random(f"{name} {placed}").randrange(5, 15)
    assert any(run_step("hybrid_rlhf.cli.rl", ranks, line, Point(decoding, call, ranks - 1)))
    run_main("hybrid_rlhf.cli.rl", ranks, line)
    assert run_outputs(run) == undisturbed


def test_a_checkpoint_resumes_without_the_lag_and_on_other_ranks(model: Path, rows: Path, tmp_path: Path) -> None:
    run, errors = tmp_path / "run", tmp_path / "errors.txt"
    line = [*rollout_line(run, model, rows, *GROUPS), *LAG.split(), "--resume", "auto"]
    without_lag = [*line, "--rollout.max_lag", "0"]

    def completions() -> list[str]:
        return [line["completion"] for line in sampled(run) if line["step"] == 3]

    def rewind() -> None:
        """To the checkpoint of step 2."""
        (run / "finished.json").unlink()
        for step in (3, 4):
            shutil.rmtree(run / "checkpoints" / f"step_{step}")

    def again(ranks: int, line: list[str]) -> None:
        run_main("hybrid_rlhf.cli.rl", ranks, line)
        counted = Counter(line["prompt"][-1]["content"] for line in sampled(run))
        assert len(counted) == 16 and {*counted.values()} == {2}, "each of four prompts of four steps, with two samples"
        versions = {version for line in sampled(run) if line["step"] == 3 for version, _ in line["weight_versions"]}
        assert min(versions) < 2, "tokens of the checkpoint"

    again(1, line)
    before = completions()
    rewind()
    again(2, line)
    assert completions() == before
    rewind()
    uncorrected = [*without_lag, "--algorithm.correction", "null"]
    assert run_step("hybrid_rlhf.cli.rl", 1, uncorrected, errors=errors) == [2]
    assert "older weights sampled" in errors.read_text()
    again(1, without_lag)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("placed", "point"),
    [
        ("a sampler", Point("hybrid_rlhf.rl.rollouts.stream:StepStream.take", 2)),
        ("a sampler", Point("hybrid_rlhf.generation.open_batch:OpenBatch.renew", 2, rank=1)),
        ("a sampler of two", Point("hybrid_rlhf.generation.batching.arrivals:Arrivals.take", 60, rank=2)),
    ],
    ids=str,
)
def test_a_killed_run_trains_on_every_prompt_once(
    placed: str, point: Point, model: Path, rows: Path, tmp_path: Path
) -> None:
    """A rank dies in a step, in a weight sync, or between two decoding steps; the run resumes from its checkpoint."""
    run = tmp_path / "run"
    ranks, placement = PLACED[placed]
    line = [*rollout_line(run, model, rows, *GROUPS, *placement), *LAG.split(), "--resume", "auto"]
    assert any(run_step("hybrid_rlhf.cli.rl", ranks, line, point))
    run_main("hybrid_rlhf.cli.rl", ranks, line)
    counted = Counter(line["prompt"][-1]["content"] for line in sampled(run))
    assert len(counted) == 16 and {*counted.values()} == {2}
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]


# -- batches that outlive a step


@pytest.mark.parametrize("placed", ["a sampler", slow("a sampler of two")])
def test_a_sampler_that_works_while_the_actor_trains_keeps_the_lag(
    placed: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    ranks, placement = PLACED[placed]
    run = tmp_path / "run"
    run_main("hybrid_rlhf.cli.rl", ranks, [*rollout_line(run, model, rows, *GROUPS, *placement), *LAG.split()])
    counted = Counter(line["prompt"][-1]["content"] for line in sampled(run))
    assert len(counted) == 16 and {*counted.values()} == {2}
    told = metrics_without_times(run)[1:]
    lags = [line["rollout/stale_updates_max"] for line in told]
    assert 0 < max(lags) <= 2 and lags[0] == 0
    assert all(0 <= line["rollout/sampler_idle_ratio"] <= 1 for line in told)


class SlowTool:
    """An environment of three turns; its tool takes longer for some prompts, and counts the turns of a prompt."""

    def reset(self, row: dict[str, Any]) -> None:
        """Begin."""
        self._seconds = 0.05 if row["prompt"][-1]["content"].endswith("3") else 0.002
        self._turn = 0

    def step(self, action: str) -> tuple[str, float, bool]:
        """Sleep."""
        time.sleep(self._seconds)
        self._turn += 1
        return "go on", float(self._turn), self._turn == 3


def play_slowly(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """The same as a program; it asks for its last turn token by token."""
    tool, messages, reward = SlowTool(), list(row["prompt"]), 0.0
    tool.reset(row)
    with client_of(base_url, api_key) as client:
        for turn in range(3):
            asked = {"model": model, "messages": messages, "max_tokens": 6}
            if turn == 2:
                pieces = client.chat.completions.create(**asked, stream=True)
                said = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
            else:
                said = client.chat.completions.create(**asked).choices[0].message.content
            observation, earned, _ = tool.step(said)
            reward += earned
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observation}]
    return reward


@pytest.mark.parametrize(
    ("placed", "kind", "name"),
    [
        ("one rank", "path", "SlowTool"),
        slow("a sampler", "path", "SlowTool"),
        *(faults(placed, "path", "SlowTool") for placed in PLACED if placed not in ("one rank", "a sampler")),
        # requests span several time slices of a batch, and are broadcast to the ranks that share the model
        slow("one rank", "program", "play_slowly"),
        *(faults(placed, "program", "play_slowly") for placed in ("a sampler", "two that share the model")),
    ],
)
def test_episodes_begin_before_their_step(
    placed: str, kind: str, name: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    """Turns in any order, on the actor's ranks and beside them: the tokens of the synchronous loop with the same
    weights, each prompt once, none older than the lag."""
    ranks, placement = PLACED[placed]
    episodes = [f"--environment.{kind}", f"{__file__}:{name}", "--rollout.sampling.max_new_tokens", "60"]
    episodes += ["--environment.max_turn_tokens", "6", "--reward.components", "[]", "--logging.samples_every", "1"]
    found = []
    for lag in (0, 2):
        run = tmp_path / str(lag)
        line = [*rollout_line(run, model, rows, *GROUPS, *placement, *episodes), "--rollout.max_lag", str(lag)]
        run_main("hybrid_rlhf.cli.rl", ranks, line)
        found.append(sampled(run))
    for synchronous, ahead in zip(*found, strict=True):
        assert (synchronous["step"], synchronous["prompt"]) == (ahead["step"], ahead["prompt"])
        assert synchronous["step"] > 1 or synchronous["completion"] == ahead["completion"], "of the same weights"
        assert all(version == synchronous["step"] - 1 for version, _ in synchronous["weight_versions"])
    lags = [line["rollout/stale_updates_max"] for line in metrics_without_times(run)[1:]]
    assert 0 < max(lags) <= 2


def test_a_time_slice_finishes_half_of_the_turns_that_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GenerationEngine.from_model(tiny_model(max_position_embeddings=2048), stop_token_ids=[])
    takes_turns: Any = SimpleNamespace(generation_world=solo_world(torch.device("cpu")), samples_while_training=False)
    config = RolloutConfig(max_prompt_tokens=8, sampling=SamplingParams(max_new_tokens=1500))
    first, second, third = (
        PromptBatch([[5, 6]], SamplingParams(max_new_tokens=count, seed=1)) for count in (1, 100, 1500)
    )
    live = LiveBatch(takes_turns, config, stop={}, rows=3, environments=None)
    waits, told = threading.Event(), threading.Event()

    def held(opened: threading.Event, most: int) -> Any:
        """Takes so many tokens before an event; else a turn may end before this thread goes on."""
        taken = list[Any]()

        def take(tokens: list[Any]) -> None:
            taken.extend(tokens)
            assert len(taken) <= most or opened.wait(60)

        return take

    with live.decoding(engine):
        live.wait(live.submit(first, lambda tokens: None))
        turns = [live.submit(second, held(waits, 10)), live.submit(third, held(told, 200))]
        wait_for = live._changed.wait_for
        monkeypatch.setattr(live._changed, "wait_for", lambda holds: (waits.set(), wait_for(holds)))
        live.finish_turns()
        assert [turn.is_finished for turn in turns] == [True, False]
        told.set()


# -- the loss


def test_the_correction_is_that_of_the_weights_that_sampled(model: Path, tmp_path: Path) -> None:
    """A lag needs no other key: the KV cache and the correction were two more, each demanded by a separate error."""
    line = rollout_line(tmp_path / "run", model, write_rows(tmp_path / "rows.jsonl"), "--algorithm rloo")
    for key in ("--rollout.kv_cache_gib", "--algorithm.correction.method", "--rollout.sampling.max_new_tokens"):
        del line[line.index(key) : line.index(key) + 2]
    line += "--rollout.sampling.n 2 --rollout.max_lag 1 --rollout.sampling.max_new_tokens 40".split()
    run_main("hybrid_rlhf.cli.rl", 1, line)
    first, *later = metrics_without_times(tmp_path / "run")[1:]
    assert first["rollout/stale_updates"] == 0.0 < max(step["rollout/stale_updates"] for step in later) <= 1
    assert first["rollout/correction_mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["rollout/logprob_abs_diff_max"] < 1e-3
    stale = [step for step in later if step["rollout/stale_updates"] > 0]
    assert all(step["rollout/logprob_abs_diff_max"] > 1e-2 for step in stale)
    assert any(abs(step["rollout/correction_mean"] - 1) > 1e-3 for step in stale)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "algorithm.correction.ratio token, method truncate, clip 2: another policy than" in log
    assert re.search(r"biased for completions of several weight versions \(rollout.max_lag\)", log)


@pytest.mark.parametrize(
    "line",
    [
        "--rollout.max_lag 1",
        "--rollout.quantization int8",
        "--rollout.vllm.python python",
        '--rollout.sampling.response_format={"type":"json_object"}',
    ],
)
def test_samples_of_another_policy_are_corrected_by_default(line: str) -> None:
    def correction(*more: str) -> Any:
        return getattr(parse_config(RLConfig, [*line.split(), *more]).algorithm, "correction", None)

    assert correction() == CorrectionConfig()
    assert correction("--algorithm.correction.method", "mask") == CorrectionConfig(method="mask")
    assert correction("--algorithm", "online_dpo") is None
    default = CorrectionConfig(**RL_ALGORITHMS["gspo"].default_correction)  # type: ignore[attr-defined]
    assert correction("--algorithm", "gspo") == default != CorrectionConfig()
    assert parse_config(RLConfig, []).algorithm.correction is None  # type: ignore[attr-defined]
