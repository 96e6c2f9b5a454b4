"""Streaming rollouts: equal to the synchronous loop without a lag, exact versions, repeatable, nothing lost."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.configs.sections.rollout import RolloutConfig, StreamingConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.batching.arrivals import Taken
from hybrid_rlhf.generation.open_batch import PromptBatch
from hybrid_rlhf.rl.batch import Rollout
from hybrid_rlhf.rl.replay.recorded import RecordedStep
from hybrid_rlhf.rl.rollouts.live import LiveBatch
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.streaming import StreamingSampler, recorded_order
from hybrid_rlhf.runtime.files.checkpoint_folder import read_manifest
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
from tests.support.ranks import run_main, run_mains
from tests.support.steps import write_lines
from tests.support.tiny import tiny_model

STREAMED = ("rollout/stale", "rollout/carried_ratio", "rollout/sampler_idle_ratio")
"""Metrics of streaming alone."""
SEPARATE = ("--placement", "separation")
GROUPS = ("--algorithm", "rloo", "--rollout.sampling.n", "2")


def same_metrics(first: Path, second: Path) -> None:
    found = [
        [{key: value for key, value in line.items() if not key.startswith(STREAMED)} for line in of]
        for of in (metrics_without_times(first), metrics_without_times(second))
    ]
    assert found[0] == found[1]


def same_weights(first: Path, second: Path) -> bool:
    weights = [(folder / "actor" / "model.safetensors").read_bytes() for folder in (first, second)]
    return weights[0] == weights[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stopping_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of prompts that all differ."""
    return write_lines(tmp_path / "rows.jsonl", ({"prompt": f"say {row}"} for row in range(40)))


PLACED = {
    "one rank": (1, ()),
    "a sampler": (2, SEPARATE),
    "two that share the model": (2, ("--rollout.tensor_parallel", "2")),
    "a sampler of two": (3, ("--placement", "{sampler: {ranks: 1-2, tensor_parallel: 2}}")),
}
"""Number of ranks, and settings."""


WAYS = {
    "synchronous": "",
    "no_lag": "--rollout.streaming.max_lag 0",
    "streams": "--rollout.streaming.max_lag 2",
    "repeats": "--rollout.streaming.max_lag 2 --rollout.streaming.replay_order {folder}/streams/order.jsonl",
}


def run_all_ways(folder: Path, ranks: int, *line: Any) -> None:
    """Runs without streaming, without a lag, with one, and in the order of that."""
    lines = [rollout_line(folder / name, *line, *way.format(folder=folder).split()) for name, way in WAYS.items()]
    run_mains("hybrid_rlhf.cli.rl", ranks, lines)


@pytest.mark.parametrize("placed", [*[*PLACED][:2], *map(slow, [*PLACED][2:])])
def test_without_a_lag_it_is_the_synchronous_loop_and_an_order_repeats_a_run(
    placed: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    """Bit for bit, with the sampler on the actor's ranks and on its own; nothing else compares whole runs."""
    ranks, placement = PLACED[placed]
    run_all_ways(tmp_path, ranks, model, rows, *GROUPS, *placement)
    same_metrics(tmp_path / "synchronous", tmp_path / "no_lag")
    assert same_weights(tmp_path / "synchronous", tmp_path / "no_lag")
    same_metrics(tmp_path / "streams", tmp_path / "repeats")
    assert same_weights(tmp_path / "streams", tmp_path / "repeats")
    assert (tmp_path / "streams" / "order.jsonl").read_text() == (tmp_path / "repeats" / "order.jsonl").read_text()
    lags = [line["rollout/stale_updates_max"] for line in metrics_without_times(tmp_path / "streams")[1:]]
    assert 0 < max(lags) <= 2, "no token is older than the largest lag"
    assert not same_weights(tmp_path / "synchronous", tmp_path / "streams")


def streaming_of(
    world: World, path: Path, folder: Path, *, lag: int, steps: int, longest: int = 24, greedy: bool = False
) -> Any:
    actor, stream = build_sampling_actor(world, str(path), streaming=StreamingConfig(max_lag=lag))
    config = RolloutConfig(
        prompts_per_step=2,
        sampling=SamplingParams(n=2, max_new_tokens=longest),
        kv_cache_gib=0.1,
        streaming=StreamingConfig(max_lag=lag),
    )
    sampler = RolloutSampler(
        actor, config, world=world, stop_token_ids=STOP_TOKEN_IDS, seed=0, timers=Timers(actor.device)
    )
    prompts = Dataset.from_list([{"input_ids": [5 + row, 7, 9]} for row in range(PROMPTS)])
    ahead = StreamingSampler(
        sampler,
        StreamingConfig(max_lag=lag),
        prompts=prompts,
        stream=stream,
        per_step=2,
        total_steps=steps,
        folder=folder,
        greedy=greedy,
    )
    return actor, ahead


def test_each_token_is_of_the_version_that_it_says(world: World, model: Path, tmp_path: Path) -> None:
    """Completions that three versions of the weights continue, against the training forward of each version."""
    steps = 5
    actor, ahead = streaming_of(world, model, tmp_path, lag=2, steps=steps)
    rollouts: list[Rollout] = []
    rows: list[int] = []
    with ahead.running():
        for step in range(1, steps + 1):
            taken, rollout = ahead.take(step)
            rows += taken
            rollouts.append(rollout)
            change_weights(actor, step)
    assert rows == RowStream(PROMPTS, epochs=1, seed=0).take(2 * steps), "each prompt once, in the order of the data"
    fresh, _ = build_sampling_actor(world, str(model))
    errors = []
    for version in range(steps):
        for rollout in rollouts:
            of_version = rollout.response_mask & (rollout.weight_versions == version)
            off = (trained_logprobs(fresh, rollout) - rollout.sampled_logprobs).abs()
            errors += off[of_version].tolist()
        change_weights(fresh, version + 1)
    assert len(errors) == sum(int(rollout.response_mask.sum()) for rollout in rollouts)
    assert max(errors) < 1e-4
    carried = sum(float(rollout.staleness(steps)[:, 3].sum()) for rollout in rollouts)
    assert carried > 0, "some completion has tokens of several versions"


def test_lengths_that_are_trained_on_are_those_that_were_started(world: World, model: Path, tmp_path: Path) -> None:
    """With lengths from 1 to 100 tokens, at every step: a sampler that trained on what finishes first would train on
    short completions first."""
    steps = 8
    _, ahead = streaming_of(world, model, tmp_path, lag=3, steps=steps, longest=100)
    trained: list[int] = []
    with ahead.running():
        for step in range(1, steps + 1):
            _, rollout = ahead.take(step)
            trained += rollout.response_mask.sum(dim=1).tolist()
            assert all(number - step <= 3 for number in ahead._ahead), "admission bounds the lag"
    _, synchronous = streaming_of(world, model, tmp_path / "alone", lag=0, steps=steps, longest=100)
    expected: list[int] = []
    with synchronous.running():
        for step in range(1, steps + 1):
            expected += synchronous.take(step)[1].response_mask.sum(dim=1).tolist()
    assert max(expected) > 20 * min(expected) and trained == expected, "the same weights: the same lengths in each step"


def test_a_checkpoint_keeps_prompts_and_tokens(model: Path, rows: Path, tmp_path: Path) -> None:
    """Resumed after its second step, a run trains on the same prompts in each step, and on the tokens that older
    weights had sampled by then. A replay repeats its order from that checkpoint."""
    run = tmp_path / "run"
    line = rollout_line(run, model, rows, *GROUPS, "--rollout.streaming.max_lag 2 --logging.samples_every 1")
    line += ["--rollout.sampling.max_new_tokens", "40", "--rollout.prompts_per_step", "4"]
    run_main("hybrid_rlhf.cli.rl", 1, line)
    whole = sampled(run)
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
    (run / "finished.json").unlink()
    run_main("hybrid_rlhf.cli.rl", 1, [*line, "--resume", "auto"])
    resumed = sampled(run)
    prompts = [(line["step"], line["prompt"][-1]["content"]) for line in resumed]
    assert prompts == [(line["step"], line["prompt"][-1]["content"]) for line in whole]
    counted = Counter(prompt for _, prompt in prompts)
    assert len(counted) == 16 and {*counted.values()} == {2}, "each of four prompts of four steps, with two samples"
    versions = {version for line in resumed if line["step"] == 3 for version, _ in line["weight_versions"]}
    assert min(versions) < 2, "tokens of the checkpoint"
    assert [line["step"] for line in read_lines(run / "order.jsonl")] == [1, 2, 3, 4]
    opened = [line["opened"] for line in read_lines(run / "order.jsonl")]
    assert opened == [1, 1, 3, 3]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run_main("hybrid_rlhf.cli.runs.replay", 1, [str(run), "--step", "4", "--scratch", str(scratch)])
    result = json.loads((scratch / "result.json").read_text())
    assert result["identical"] and {sample["compared"] for sample in result["samples"]} == {"tokens"}
    shutil.rmtree(run / "checkpoints" / "step_2")
    with user_error("starts where the process of its step did, at step 3, got no checkpoint"):
        RecordedStep.read(run, 4).resumed_config(tmp_path / "other")


def test_running_completions_survive_checkpoints_greedy_ones_too(world: World, model: Path, tmp_path: Path) -> None:
    """A checkpoint is restored, written again before a rollout (as after a resume within a step), and restored; the
    greedy completion of a prompt has its own tokens beside those of the samples, finished or not."""

    def stored(ahead: StreamingSampler) -> tuple[Any, ...]:
        return ahead.state_dict(), ahead.carried_state(world), ahead.tensors(), ahead.stream.state_dict()

    def carried(state: tuple[Any, ...]) -> list[list[int]]:
        ids, masks = (state[2][f"carried.{name}"] for name in ("input_ids", "response_mask"))
        return [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]

    def restored(state: tuple[Any, ...], lag: int) -> StreamingSampler:
        _, ahead = streaming_of(world, model, tmp_path / "other", lag=lag, steps=8, longest=40, greedy=True)
        steps, carried, tensors, stream = state
        ahead.stream.load_state_dict(stream)
        ahead.load_state_dict(steps, [tensors], world, carried)
        return ahead

    _, ahead = streaming_of(world, model, tmp_path, lag=3, steps=8, longest=40, greedy=True)
    with ahead.running():
        for step in (1, 2):
            ahead.take(step)
        first = stored(ahead)
    assert {None, "stop"} < {*first[1]["finish_reasons"][0]}, "steps 3 and 4 are finished, step 5 has begun"
    again = stored(restored(first, lag=1))
    assert again[:2] == first[:2] and all(torch.equal(again[2][name], tensor) for name, tensor in first[2].items())
    resumed = restored(again, lag=1)  # with the smaller lag, step 3 does not begin what step 5 has
    with resumed.running():
        rollouts = [resumed.take(3)[1]]
        of_step_5 = [carried(first)[-6:], carried(stored(resumed))[-6:]]
        rollouts += [resumed.take(step)[1] for step in (4, 5)]
    assert of_step_5[0] == of_step_5[1]
    _, alone = streaming_of(world, model, tmp_path / "alone", lag=0, steps=8, longest=40, greedy=True)
    with alone.running():
        expected = [alone.take(step)[1] for step in range(1, 6)][2:]
    for rollout, of_step in zip(rollouts, expected, strict=True):
        assert torch.equal(rollout.input_ids, of_step.input_ids), "the same weights: the same tokens"


@pytest.mark.slow
def test_a_run_that_stops_within_a_step_keeps_completions_and_order(model: Path, rows: Path, tmp_path: Path) -> None:
    """The checkpoint after the step has the completions that the one within it had, and a replay has its order."""
    run = tmp_path / "run"
    line = rollout_line(run, model, rows, "--algorithm remax --rollout.streaming.max_lag 2 --logging.samples_every 1")
    line += ["--rollout.sampling.max_new_tokens", "40", "--rollout.prompts_per_step", "4"]
    point = Point("hybrid_rlhf.rl.updates.updater:Updater.update", 2, 0, signal=signal.SIGTERM)
    assert run_step("hybrid_rlhf.cli.rl", 1, line, point) == [STOPPED_EXIT_CODE]
    run_main("hybrid_rlhf.cli.rl", 1, [*line, "--resume", "auto"])
    manifests = (read_manifest(run / "checkpoints" / name) for name in ("step_1_update_0", "step_2"))
    within, after = (manifest["loop"]["carried"]["finish_reasons"] for manifest in manifests)
    assert within == after != []
    assert Counter(line["step"] for line in sampled(run)) == {1: 4, 2: 4, 3: 4, 4: 4}
    assert [(line["step"], line["opened"]) for line in read_lines(run / "order.jsonl")] == [
        (1, 1),
        (2, 1),
        (3, 3),
        (4, 3),
    ]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("placed", "point"),
    [
        ("one rank", Point("hybrid_rlhf.rl.rollouts.streaming:StreamingSampler.take", 3)),
        ("one rank", Point("hybrid_rlhf.rl.rollouts.live:LiveBatch._suspend", 2, when="after")),
        ("a sampler", Point("hybrid_rlhf.rl.rollouts.streaming:StreamingSampler.take", 2)),
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
    line = rollout_line(run, model, rows, *GROUPS, *placement, "--rollout.streaming.max_lag 2")
    line += ["--logging.samples_every", "1", "--rollout.sampling.max_new_tokens", "40", "--resume", "auto"]
    assert any(run_step("hybrid_rlhf.cli.rl", ranks, line, point))
    run_main("hybrid_rlhf.cli.rl", ranks, line)
    counted = Counter(line["prompt"][-1]["content"] for line in sampled(run))
    assert len(counted) == 8 and {*counted.values()} == {2}
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def sampled(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "samples.jsonl")


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
    tool = SlowTool()
    tool.reset(row)
    messages = list(row["prompt"])
    reward = 0.0
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
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


def test_an_order_is_repeated_where_a_turn_arrives_when_the_step_is_about_to_end() -> None:
    """The batch waits for the turn, and the end of the step for the batch."""
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=[])
    samples_between_updates: Any = SimpleNamespace(
        generation_world=solo_world(torch.device("cpu")), samples_while_training=False
    )
    turn = PromptBatch([[5, 6]], SamplingParams(max_new_tokens=4, seed=1))

    def batch() -> LiveBatch:
        config = RolloutConfig(max_prompt_tokens=8)
        return LiveBatch(samples_between_updates, config, stop={}, rows=2, environments=None, recorded={})

    first = batch()
    with first.decoding(engine, []):
        first.wait(first.submit(turn, lambda tokens: None, label="turn"))
    order = first.take_order()
    assert [taken.label for taken in order] == ["turn x1", "end 1"]
    second = batch()

    def repeat() -> None:
        with second.decoding(engine, order):
            threading.Timer(0.3, lambda: second.submit(turn, lambda tokens: None, label="turn")).start()

    repeating = threading.Thread(target=repeat, daemon=True)
    repeating.start()
    repeating.join(60)
    assert not repeating.is_alive()
    assert second.take_order() == order


def test_a_time_slice_finishes_half_of_the_turns_that_have_begun_unless_an_order_ends_it() -> None:
    engine = GenerationEngine.from_model(tiny_model(max_position_embeddings=2048), stop_token_ids=[])
    takes_turns: Any = SimpleNamespace(generation_world=solo_world(torch.device("cpu")), samples_while_training=False)
    config = RolloutConfig(max_prompt_tokens=8, sampling=SamplingParams(max_new_tokens=1500))
    first, second, third = (
        PromptBatch([[5, 6]], SamplingParams(max_new_tokens=count, seed=1)) for count in (1, 100, 1500)
    )

    def batch(recorded: dict[int, list[Taken]]) -> LiveBatch:
        return LiveBatch(takes_turns, config, stop={}, rows=3, environments=None, recorded=recorded)

    live = batch({})
    with live.decoding(engine, []):
        turns = [live.submit(turn, lambda tokens: None) for turn in (second, third)]
        live.wait(live.submit(first, lambda tokens: None))
        live.finish_turns(1)
        assert [turn.is_finished for turn in turns] == [True, False]
    repeats = batch({1: [Taken(2, "end 1", drains=True)]})
    repeats.submit(second, lambda tokens: None)
    repeats.finish_turns(1)  # this turn began in a later slice


@pytest.mark.parametrize(
    ("placed", "kind", "name"),
    [
        slow("a sampler", "path", "SlowTool"),
        *(faults(placed, "path", "SlowTool") for placed in PLACED if placed != "a sampler"),
        # requests span several time slices of a batch, and are broadcast to the ranks that share the model
        slow("one rank", "program", "play_slowly"),
        *(faults(placed, "program", "play_slowly") for placed in [*PLACED][1:3]),
    ],
)
def test_episodes_stream_and_an_order_repeats_them(
    placed: str, kind: str, name: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    """Turns in any order, on the actor's ranks and beside them: the tokens of the synchronous loop with the same
    weights, and those of a recorded run bit for bit."""
    ranks, placement = PLACED[placed]
    episodes = [f"--environment.{kind}", f"{__file__}:{name}", "--rollout.sampling.max_new_tokens", "60"]
    episodes += ["--environment.max_turn_tokens", "6", "--reward.components", "[]", "--logging.samples_every", "1"]
    run_all_ways(tmp_path, ranks, model, rows, *GROUPS, *placement, *episodes)
    told = {name: sampled(tmp_path / name) for name in WAYS}
    first = {name: [line["completion"] for line in lines if line["step"] == 1] for name, lines in told.items()}
    assert first["synchronous"] == first["no_lag"] == first["streams"], "the same weights: the same tokens"
    assert all(version == line["step"] - 1 for line in told["no_lag"] for version, _ in line["weight_versions"])
    assert told["streams"] == told["repeats"] and same_weights(tmp_path / "streams", tmp_path / "repeats")
    lags = [line["rollout/stale_updates_max"] for line in metrics_without_times(tmp_path / "streams")[1:]]
    assert 0 < max(lags) <= 2


def test_an_order_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "order.jsonl"
    file.write_text(json.dumps({"step": 3, "opened": 3, "groups": [[[0, "begin 1", False]]]}) + "\n")
    assert recorded_order(str(file), group=0, groups=1, first=3) == {3: [(0, "begin 1", False)]}
    for message, changed in (
        ("which started at steps", {"first": 1, "groups": 1}),
        ("is for 2 sampling ranks", {"first": 3, "groups": 2}),
    ):
        with user_error(message):
            recorded_order(str(file), group=0, **changed)
    with user_error("must have a line for step 1"):
        recorded_order(str(tmp_path / "none"), group=0, groups=1, first=1)
