"""Rollouts ahead of training: by the weights that they say, never more steps behind than allowed, and resumable."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.configs.sections.rollout import AsyncSamplingConfig, RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.batching.sampler import DecodeBatch
from hybrid_rlhf.generation.batching.workspace import Workspace, _Graphs
from hybrid_rlhf.rl.rollouts.collector import AsyncSampler
from hybrid_rlhf.rl.rollouts.sampler import Pending, RolloutSampler
from hybrid_rlhf.runtime.background import BackgroundCall
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ahead import (
    PROMPTS,
    build_sampling_actor,
    change_weights,
    metrics_without_times,
    rollout_line,
    trained_logprobs,
)
from tests.support.errors import user_error
from tests.support.faults import Point, run_step
from tests.support.marks import faults, slow
from tests.support.ranks import run_main, run_ranks
from tests.support.rl import whole
from tests.support.steps import run_outputs, write_rows

STEPS, PER_STEP = 4, 2


def lag_of(steps: int) -> AsyncSamplingConfig | None:
    return AsyncSamplingConfig(policy_lag=steps) if steps else None


def ahead_of(actor: HybridEngine, stream: RowStream, staleness: int, *, max_new_tokens: int = 8) -> AsyncSampler:
    sampling = SamplingParams(n=2, max_new_tokens=max_new_tokens)
    config = RolloutConfig(sampling=sampling, async_sampling=lag_of(staleness))
    sampler = RolloutSampler(actor, config, world=actor.world, stop_token_ids=(), seed=0, timers=Timers(actor.device))
    prompts = Dataset.from_list([{"input_ids": [5 + row, 7, 9]} for row in range(PROMPTS)])
    return AsyncSampler(
        sampler, prompts=prompts, stream=stream, per_step=PER_STEP, total_steps=STEPS, policy_lag=staleness
    )


def whose(world: World, path: str, staleness: int, stage: int, rank: int) -> list[tuple[int, float, float]]:
    """Of each step how many updates made the weights that sampled, how far its log-probs are from theirs, and from the
    current ones; a rollout ahead samples only after the weights have changed. As on a GPU, nothing is packed, so that a
    lag of 1 writes all weights in place."""
    torch.backends.mkldnn.enabled = False
    actor, stream = build_sampling_actor(world, path, stage=stage, rank=rank, async_sampling=lag_of(staleness))
    ahead = ahead_of(actor, stream, staleness)
    taken = []
    for step in range(1, STEPS + 1):
        taken.append(whole(ahead.take(step)[1], world))
        with ahead.sampler._in_turn():  # the threads wait until the weights have changed
            ahead.begin(step)
            change_weights(actor, step)
        for later in ahead._ahead.values():
            if isinstance(later.completions, Pending):
                later.completions.call.result()
    assert not ahead._ahead and stream.taken == STEPS * PER_STEP
    fresh, _ = build_sampling_actor(world, path, stage=stage, rank=rank)
    off: dict[int, list[torch.Tensor]] = {}
    for version in range(STEPS + 1):
        off[version] = [(trained_logprobs(fresh, one) - one.sampled_logprobs).abs().max() for one in taken]
        change_weights(fresh, version + 1)
    found = []
    for place, one in enumerate(taken):
        (version,) = one.weight_versions[one.response_mask].unique().tolist()
        assert not one.weight_versions[~one.response_mask].any()
        assert float(one.staleness(place)[:, 0].sum()) == (place - version) * int(one.response_mask.sum())
        found.append((version, float(off[version][place]), float(off[place + 1][place])))
    return found


class ReplayedOnCpu(_Graphs):
    """CUDA graphs without CUDA, in all workspaces: a replay runs the step again, on what lies at its addresses."""

    log: ClassVar[list[tuple[str, int, bool]]] = []
    """What happened, with which batch size, and whether in the main thread."""

    def __init__(self, rows: DecodeBatch, slots: torch.Tensor) -> None:
        self._rows, self._captured, self.captures, self.missing = rows, {}, True, set()

    def note(self, what: str, batch: int) -> None:
        self.log.append((what, batch, threading.current_thread() is threading.main_thread()))

    def __call__(self, step: Any, batch: int) -> torch.Tensor:
        if batch not in self._captured and not self.captures:
            self.note("launch", batch)
        return super().__call__(step, batch)

    def close(self) -> None:
        self.note("close", 0)

    def _capture(self, step: Any, batch: int) -> Any:
        self.note("capture", batch)
        saved, result = self._rows.save(), step(batch)
        self._rows.restore(saved)

        def replay() -> None:
            self.note("replay", batch)
            result.copy_(step(batch))

        return SimpleNamespace(replay=replay), result


def graphs_of_snapshots(world: World, path: str, cuda_graphs: bool, first_ahead: bool) -> tuple[list[Any], list[Any]]:
    """The tokens of all steps, and what happened to graphs in each; `first_ahead`: a thread samples the first."""
    torch.backends.mkldnn.enabled = False  # nothing is packed, as on a GPU
    allocate = Workspace.__init__

    def allocated(self: Workspace, *args: Any, cuda_graphs: bool = True, **named: Any) -> None:
        allocate(self, *args, cuda_graphs=cuda_graphs, **named)
        self._graphs = ReplayedOnCpu(self.rows, self.slots) if cuda_graphs else None

    Workspace.__init__ = allocated  # type: ignore[method-assign]
    actor, stream = build_sampling_actor(world, path, async_sampling=lag_of(1), cuda_graphs=cuda_graphs)
    ahead, tokens, logs = ahead_of(actor, stream, 1), [], []
    if first_ahead:
        ahead.begin(0)
    for step in range(1, STEPS + 1):
        tokens.append(ahead.take(step)[1].input_ids.tolist())
        logs.append(ReplayedOnCpu.log.copy())
        ReplayedOnCpu.log.clear()
        change_weights(actor, step)
        ahead.begin(step)
    return tokens, logs


@pytest.mark.parametrize("first_ahead", [False, True])
def test_graphs_of_snapshots_are_captured_once_and_replayed_with_new_weights(
    first_ahead: bool, model_folder: Path, tmp_path: Path
) -> None:
    """Snapshots launched the kernels of each step one by one, in a workspace that each allocated."""
    (tokens, logs), (launched, without) = (
        run_ranks(graphs_of_snapshots, 1, tmp_path / str(graphs), str(model_folder), graphs, first_ahead)[0]
        for graphs in (True, False)
    )
    assert tokens == launched
    assert not any(without), "rollout.cuda_graphs false"
    assert {what for what, _, _ in logs[0]} == ({"launch"} if first_ahead else {"capture", "replay"})
    told = [event for log in logs for event in log]
    captured = [batch for what, batch, _ in told if what == "capture"]
    assert captured and len(set(captured)) == len(captured)
    assert all(main for what, _, main in told if what == "capture"), "a thread that samples beside training must not"
    assert [{what for what, _, _ in log} for log in logs[2:]] == [{"replay"}] * (STEPS - 2)
    assert not any(main for log in logs[1:] for what, _, main in log if what == "replay")


class Meeting:
    """The collectives of two ranks of a tensor-parallel group: both must call the same ones in the same order."""

    def __init__(self) -> None:
        self._barrier, self._calls = threading.Barrier(2, timeout=20), ["", ""]

    def __call__(self, rank: int, call: str) -> None:
        self._calls[rank] = call
        self._barrier.wait()
        if self._calls[0] != self._calls[1]:
            self._barrier.abort()
            raise AssertionError(f"the ranks wait for each other in {self._calls}")
        self._barrier.wait()


class FakeEngine:
    """A sampling engine of one of two tensor-parallel ranks, that computes nothing."""

    def __init__(self, world: World) -> None:
        self.world = self.generation_world = world
        self.device, self.work = world.device, DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        self.groups = (1, 0)

    def snapshot(self, **stop: Any) -> Any:
        return SimpleNamespace(work=DecodeWork(), close=lambda: None)

    def inference(self, **stop: Any) -> Any:
        return contextlib.nullcontext(self.snapshot())


class MeetingSampler(RolloutSampler):
    """A sampler whose rollouts are two collectives of both ranks, after some delay."""

    def __init__(self, rank: int, meeting: Meeting, delays: Callable[[], float]) -> None:
        world = solo_world(torch.device("cpu"))
        config = RolloutConfig(sampling=SamplingParams(n=1, max_new_tokens=2))
        timers = Timers(world.device)
        super().__init__(FakeEngine(world), config, world=world, stop_token_ids=(), seed=0, timers=timers)  # type: ignore[arg-type]
        self._place, self._meeting, self.delay = rank, meeting, lambda: time.sleep(delays())

    def _sample(self, generation: Any, mine: Any, *rest: Any, **more: Any) -> Any:
        (prompt,) = mine
        for part in ("prefill", "decode"):
            self.delay()
            self._meeting(self._place, f"{part} of {prompt.row['name']}")
        return mine, [[]]

    def _gathered(self, sampled: Any, cost: Any, *, partial: bool = False) -> Any:
        return sampled


def sample_on(rank: int, meeting: Meeting, *, seed: int, lag: int) -> None:
    """A main thread that samples ahead and evaluates after every step."""
    chance = random.Random(2 * seed + rank)
    sampler = MeetingSampler(rank, meeting, lambda: chance.choice([0.0, 0.0, 0.004]))
    pending: list[Pending] = []
    for step in range(5):
        while len(pending) < lag:
            pending.append(sampler.begin([{"name": f"rollout {step + len(pending)}"}], step=step))
        sampler.delay()
        sampler.sample([{"name": f"evaluation {step}"}], step=step)
        pending.pop(0).call.result()


@pytest.mark.parametrize("lag", [2, 3])
def test_ranks_that_share_a_model_sample_in_the_same_order(lag: int) -> None:
    """A main thread took its turn by its arrival: on one rank before the next pending rollout, on the other after."""
    for seed in range(10):
        meeting, device = Meeting(), torch.device("cpu")
        ranks = [
            BackgroundCall(partial(sample_on, rank, meeting, seed=seed, lag=lag), device=device) for rank in range(2)
        ]
        for rank in ranks:
            rank.result(60)


@pytest.mark.parametrize(
    ("staleness", "stage", "ranks", "rank"),
    [
        (1, 2, 1, 4),
        slow(2, 3, 2, 0),
        *(faults(*case) for case in [(0, 0, 1, 0), (1, 0, 1, 0)]),
    ],
)
def test_tokens_are_of_the_weights_that_they_say(
    staleness: int, stage: int, ranks: int, rank: int, model_folder: Path, tmp_path: Path
) -> None:
    for found in run_ranks(whose, ranks, tmp_path, str(model_folder), staleness, stage, rank):
        assert [version for version, _, _ in found] == [max(0, step - staleness) for step in range(STEPS)]
        for _, own, other in found:
            assert own < 1e-4 < 1e-2 < other


def unchanged(world: World, path: str, staleness: int) -> list[dict[str, torch.Tensor]]:
    """All that is sampled while the weights stay as they are."""
    actor, stream = build_sampling_actor(world, path, async_sampling=lag_of(staleness))
    ahead = ahead_of(actor, stream, staleness)
    found = []
    for step in range(1, STEPS + 1):
        found.append(ahead.take(step)[1].tensors())
        ahead.begin(step)
    return found


def test_sampling_ahead_gives_what_sampling_at_the_time_gives(model_folder: Path, tmp_path: Path) -> None:
    plain, ahead = (
        run_ranks(unchanged, 1, tmp_path / str(staleness), str(model_folder), staleness)[0] for staleness in (0, 3)
    )
    for one, other in zip(plain, ahead, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def stopped_early(world: World, path: str) -> str:
    """Why the rollout ahead of a loop that fails ends."""
    actor, stream = build_sampling_actor(world, path, async_sampling=lag_of(1))
    ahead = ahead_of(actor, stream, 1, max_new_tokens=400)
    with contextlib.suppress(KeyError), ahead.running():
        ahead.take(1)
        ahead.begin(1)
        pending = ahead._ahead[2].completions
        raise KeyError
    assert isinstance(pending, Pending) and pending.call.has_ended()
    try:
        pending.call.result()
    except RuntimeError as error:
        return str(error)
    return "it went on"


def test_a_rollout_that_nobody_waits_for_ends(model_folder: Path, tmp_path: Path) -> None:
    assert "closed" in run_ranks(stopped_early, 1, tmp_path, str(model_folder))[0]


class TwoTurns:
    """An environment."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.turns = 0

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        return "and?", float(len(completion)), self.turns == 2


@pytest.mark.parametrize("name", ["ppo", *(faults(name) for name in ("dapo", "rloo"))])
def test_a_run_goes_on_with_the_rollouts_that_were_ahead(name: str, model_folder: Path, tmp_path: Path) -> None:
    rows, folder = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    start = rollout_line(folder, model_folder, rows, "--algorithm", name, "--rollout.async_sampling.policy_lag 2")
    if name == "dapo":
        start += ["--rollout.sampling.n", "3"]
    if name == "rloo":
        start += f"--environment.path {__file__}:TwoTurns --rollout.sampling.max_new_tokens 60".split()
    run_main("hybrid_rlhf.cli.rl", 1, start)
    whole = run_outputs(folder)
    stale = [told["rollout/stale_updates"] for told in whole["metrics"][1:]]
    if name != "dapo":
        assert stale == [0.0, 1.0, 2.0, 2.0]
    else:  # what replaces groups of equal scores is of the current weights
        assert stale[0] == 0 and all(0 < of <= bound for of, bound in zip(stale[1:], (1, 2, 2), strict=True))
    (folder / "finished.json").unlink()
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{step}")
    if name == "ppo":  # what is ahead is used also where nothing more is to be
        start += ["--rollout.async_sampling", "null"]
        uncorrected = [*start, "--resume", "auto", "--algorithm.correction", "null"]
        assert run_step("hybrid_rlhf.cli.rl", 1, uncorrected, errors=tmp_path / "errors.txt") == [2]
        assert "older weights sampled" in (tmp_path / "errors.txt").read_text()
    run_main("hybrid_rlhf.cli.rl", 1, [*start, "--resume", "auto"])
    assert run_outputs(folder) == whole


@pytest.mark.slow
def test_a_run_that_is_stopped_in_mid_step_goes_on(model_folder: Path, tmp_path: Path) -> None:
    """One update a rollout, before which old log-probs are the sampler's own."""
    rows, folder = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    start = rollout_line(folder, model_folder, rows, "--algorithm rloo --rollout.sampling.n 2")
    start += ["--rollout.async_sampling.policy_lag", "1"]
    run_main("hybrid_rlhf.cli.rl", 1, start)
    whole = run_outputs(folder)
    shutil.rmtree(folder)
    scoring = "hybrid_rlhf.rl.rollouts.scoring:RolloutScorer.compute_logprobs"
    point = Point(scoring, 4, 0, signal=signal.SIGTERM)  # the third step's
    assert run_step("hybrid_rlhf.cli.rl", 1, start, point) == [STOPPED_EXIT_CODE]
    assert any("_update_" in path.name for path in (folder / "checkpoints").iterdir())
    run_main("hybrid_rlhf.cli.rl", 1, [*start, "--resume", "auto"])
    assert run_outputs(folder) == whole


class Failing:
    """A sampler whose rollouts ahead fail."""

    def __init__(self) -> None:
        self.sampled: list[tuple[int, list[Any]]] = []

    def sample(self, prompts: Sequence[Any], *, step: int, greedy: bool, part: None) -> str:
        self.sampled.append((step, [prompt["input_ids"][0] for prompt in prompts]))
        return "completions"

    def begin(self, prompts: Sequence[Any], *, step: int, greedy: bool, part: None) -> Pending:
        return Pending(None, None)  # type: ignore[arg-type]

    def await_in_step(self, pending: Pending) -> None:
        pass

    def finish(self, pending: Pending) -> None:
        raise UserError("environment x failed")


def test_a_rollout_that_fails_ahead_costs_no_checkpoint() -> None:
    prompts = Dataset.from_list([{"input_ids": [row]} for row in range(4)])

    def build_ahead() -> tuple[AsyncSampler, Failing]:
        sampler, stream = Failing(), RowStream(4, epochs=1, seed=0)
        sizes = {"per_step": 2, "total_steps": 2, "policy_lag": 1}
        return AsyncSampler(sampler, prompts=prompts, stream=stream, **sizes), sampler  # type: ignore[arg-type]

    ahead, _ = build_ahead()
    ahead.take(1)
    ahead.begin(1)
    state = ahead.state_dict()
    assert [part["step"] for part in state] == [2] and not ahead.tensors()
    with user_error("environment x failed"):
        ahead.take(2)
    again, sampler = build_ahead()
    again.load_state_dict(state, {}, solo_world(torch.device("cpu")))
    assert again.take(2) == (state[0]["rows"], "completions")
    assert sampler.sampled == [(2, state[0]["rows"])], "it is sampled when it is due"


def test_the_correction_is_that_of_the_weights_that_sampled(model_folder: Path, tmp_path: Path) -> None:
    """A policy lag needs no other key: the KV cache and the correction were two more, each demanded by a separate
    error."""
    line = rollout_line(tmp_path / "run", model_folder, write_rows(tmp_path / "rows.jsonl"), "--algorithm rloo")
    for key in ("--rollout.kv_cache_gib", "--algorithm.correction.method"):
        del line[line.index(key) : line.index(key) + 2]
    line += "--rollout.sampling.n 2 --rollout.async_sampling.policy_lag 1".split()
    run_main("hybrid_rlhf.cli.rl", 1, line)
    first, *later = metrics_without_times(tmp_path / "run")[1:]
    assert [step["rollout/stale_updates"] for step in (first, *later)] == [0.0, 1.0, 1.0, 1.0]
    assert first["rollout/correction_mean"] == pytest.approx(1.0, abs=1e-4)
    assert all(abs(step["rollout/correction_mean"] - 1) > 1e-3 for step in later)
    assert first["rollout/logprob_abs_diff_max"] < 1e-3
    assert all(step["rollout/logprob_abs_diff_max"] > 1e-2 for step in later)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "algorithm.correction.ratio token, method truncate, clip 2: another policy than" in log
    assert re.search(r"rollout.kv_cache_gib 0\.\d+: by the memory plan, for all completions of a rollout", log)


@pytest.mark.parametrize(
    "line",
    [
        "--rollout.async_sampling.policy_lag 1",
        "--rollout.partial.max_lag 1",
        "--rollout.quantization int8",
        "--rollout.vllm.python python",
        '--rollout.sampling.response_format={"type":"json_object"}',
    ],
)
def test_samples_of_another_policy_are_corrected_by_default(line: str) -> None:
    assert parse_config(RLConfig, line.split()).algorithm.correction == CorrectionConfig()
    given = [*line.split(), "--algorithm.correction.method", "mask"]
    assert parse_config(RLConfig, given).algorithm.correction == CorrectionConfig(method="mask")
    assert not hasattr(parse_config(RLConfig, [*line.split(), "--algorithm", "online_dpo"]).algorithm, "correction")
    for algorithm in ("gspo", "cispo"):
        config = parse_config(RLConfig, [*line.split(), "--algorithm", algorithm]).algorithm
        assert config.correction == type(config).default_correction != CorrectionConfig()
    assert parse_config(RLConfig, []).algorithm.correction is None
