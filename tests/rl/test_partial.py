"""Partial rollouts: no completion is lost, every token is of the weights that it says, and runs resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.configs.sections.rollout import PartialRolloutConfig, RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.rl.batch import Rollout
from hybrid_rlhf.rl.metrics import staleness_metrics
from hybrid_rlhf.rl.rollouts.collector import AsyncSampler
from hybrid_rlhf.rl.rollouts.partial import PartialRollouts
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World
from tests.support.ahead import (
    PROMPTS,
    STOP_TOKEN_IDS,
    build_sampling_actor,
    change_weights,
    rollout_line,
    trained_logprobs,
)
from tests.support.faults import run_step
from tests.support.marks import faults
from tests.support.ranks import run_main, run_ranks
from tests.support.rl import whole
from tests.support.steps import run_outputs, write_rows

STEPS, PER_STEP, EXTRA, LONGEST = 4, 4, 2, 24
Step = tuple[list[int], Rollout]


def partial_of(actor: HybridEngine, stream: RowStream, lag: int, *, max_lag: int = 4) -> AsyncSampler:
    config = RolloutConfig(
        prompts_per_step=PER_STEP,
        sampling=SamplingParams(n=2, max_new_tokens=LONGEST),
        partial=PartialRolloutConfig(extra_prompts=EXTRA / PER_STEP, max_lag=max_lag),
    )
    sampler = RolloutSampler(
        actor, config, world=actor.world, stop_token_ids=STOP_TOKEN_IDS, seed=0, timers=Timers(actor.device)
    )
    return AsyncSampler(
        sampler,
        prompts=Dataset.from_list([{"input_ids": [5 + row, 7, 9]} for row in range(PROMPTS)]),
        stream=stream,
        per_step=PER_STEP,
        total_steps=STEPS,
        policy_lag=lag,
        partial=PartialRollouts(config, actor, total_steps=STEPS),
    )


def steps_of(
    world: World, path: str, lag: int, changes: bool, actor_settings: dict[str, Any], max_lag: int = 4
) -> list[Step]:
    """What each step trains on, while the weights change after each step or stay."""
    actor, stream = build_sampling_actor(world, path, **actor_settings)
    ahead, taken = partial_of(actor, stream, lag, max_lag=max_lag), []
    for step in range(1, STEPS + 1):
        taken.append(_taken(ahead, step, world))
        ahead.begin(step)
        if changes:
            change_weights(actor, step)
    assert not ahead.has_next or stream.left == PROMPTS - STEPS * PER_STEP
    return taken


def _taken(ahead: AsyncSampler, step: int, world: World) -> Step:
    rows, rollout = ahead.take(step)
    return rows, whole(rollout, world)


def assert_each_prompt_once(steps: list[Step]) -> None:
    for rows, rollout in steps:
        assert len(rows) == PER_STEP and len(rollout) == 2 * PER_STEP
        for place, row in enumerate(rows):
            for sample in (2 * place, 2 * place + 1):
                ids = rollout.input_ids[sample][~rollout.response_mask[sample] & rollout.attention_mask[sample]]
                assert ids.tolist() == [5 + row, 7, 9], "completions belong to their prompts"
        for tokens, stopped in zip(tokens_of(rollout, rollout.input_ids), rollout.stopped.tolist(), strict=True):
            assert stopped == (tokens[-1] in STOP_TOKEN_IDS) and (stopped or len(tokens) == LONGEST)
    trained = sorted(row for rows, _ in steps for row in rows)
    assert trained == sorted(RowStream(PROMPTS, epochs=1, seed=0).take(STEPS * PER_STEP))


def checked_steps(
    world: World, path: str, lag: int, actor_settings: dict[str, Any], max_lag: int
) -> tuple[list[Step], float, float]:
    """The steps, and how far their tokens are from the log-probs of their own weights (most) and of others (mean)."""
    steps = steps_of(world, path, lag, True, actor_settings, max_lag)
    fresh, _ = build_sampling_actor(world, path, **actor_settings)
    own, others = 0.0, list[Tensor]()
    for version in range(STEPS):
        for _, rollout in steps:
            difference = (trained_logprobs(fresh, rollout) - rollout.sampled_logprobs).abs()
            mine = rollout.response_mask & (rollout.weight_versions == version)
            own = max(own, float(torch.where(mine, difference, 0).max()))
            others.append(difference[rollout.response_mask & ~mine])
        change_weights(fresh, version + 1)
    return steps, own, float(torch.cat(others).mean())


@pytest.mark.parametrize(
    ("lag", "ranks", "settings", "max_lag"),
    [
        (1, 1, {"rank": 4}, 4),
        (0, 2, {"tensor_parallel": 2}, 1),
        faults(2, 2, {"stage": 3}, 4),
        faults(0, 1, {}, 4),
    ],
)
def test_every_prompt_is_trained_on_once_by_tokens_of_the_weights_that_they_say(
    lag: int, ranks: int, settings: dict[str, Any], max_lag: int, model_folder: Path, tmp_path: Path
) -> None:
    found = run_ranks(checked_steps, ranks, tmp_path, str(model_folder), lag, settings, max_lag)
    for steps, own, others in found:
        assert own < 1e-4 < 1e-1 < others
        assert_each_prompt_once(steps)
        spans = []
        for number, (_, rollout) in enumerate(steps):
            newest = max(0, number - lag)
            for versions in tokens_of(rollout, rollout.weight_versions):
                assert versions == sorted(versions) and versions[-1] <= newest
                assert versions[0] >= newest - max_lag
                spans.append(len(set(versions)))
            ages = staleness_metrics(rollout.staleness(number), rollout.response_mask.sum(dim=1))
            assert 0 <= ages["rollout/stale_updates"] <= lag + max_lag
        assert max(spans) > 1, "some are carried"
        if max_lag == 1:
            assert max(spans) == 2
    tokens = [[rollout.input_ids.tolist() for _, rollout in steps] for steps, _, _ in found]
    assert all(each == tokens[0] for each in tokens)


def whole_steps(world: World, path: str) -> dict[int, list[list[int]]]:
    """The completions of each prompt, sampled to their ends with the random streams of the step in which it begins."""
    actor, stream = build_sampling_actor(world, path)
    ahead, found = partial_of(actor, stream, 0), {}
    for step, begins in enumerate((PER_STEP + EXTRA, PER_STEP, PER_STEP, PER_STEP - EXTRA), start=1):
        rows = stream.take(begins)
        found |= tokens_by_row(rows, ahead.sampler.sample(ahead.prompts(rows), step=step))
    return found


def tokens_of(rollout: Rollout, values: Tensor) -> list[list[int]]:
    """What a tensor has for the tokens of each completion."""
    return [row[mask].tolist() for row, mask in zip(values, rollout.response_mask, strict=True)]


def tokens_by_row(rows: list[int], rollout: Rollout) -> dict[int, list[list[int]]]:
    tokens = tokens_of(rollout, rollout.input_ids)
    return {row: tokens[2 * place : 2 * place + 2] for place, row in enumerate(rows)}


def test_carried_completions_are_those_of_whole_rollouts(model_folder: Path, tmp_path: Path) -> None:
    """While the weights stay; whatever the number of groups, how many rows are decoded together, and the lag."""
    complete = run_ranks(whole_steps, 1, tmp_path / "whole", str(model_folder))[0]
    by_groups: dict[int, list[list[int]]] = {}
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (1, 0, {}),
        (1, 2, {"max_decode_rows": 3}),
        (2, 1, {"max_decode_rows": 1}),
    ]
    for number, (ranks, lag, settings) in enumerate(cases):
        steps = run_ranks(steps_of, ranks, tmp_path / str(number), str(model_folder), lag, False, settings)[0]
        assert_each_prompt_once(steps)
        for rows, rollout in steps:
            for row, tokens in tokens_by_row(rows, rollout).items():
                assert tokens == complete[row]
        assert by_groups.setdefault(ranks, [rows for rows, _ in steps]) == [rows for rows, _ in steps]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ppo", []),
        faults("dapo", ["--rollout.sampling.n", "3"]),
    ],
)
def test_a_run_resumes_with_carried_completions(
    name: str, more: list[str], stopping_model: Path, tmp_path: Path
) -> None:
    rows, folder = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    start = rollout_line(folder, stopping_model, rows, "--algorithm", name, "--rollout.partial.extra_prompts 1")
    start += ["--rollout.sampling.max_new_tokens", "24", "--logging.samples_every", "1", *more]
    run_main("hybrid_rlhf.cli.rl", 1, start)
    whole = run_outputs(folder)
    steps = [line for line in whole["metrics"] if "rollout/stale_updates" in line]
    assert any(line["rollout/carried_ratio"] > 0 for line in steps)
    assert all(line["rollout/stale_updates"] <= line["rollout/stale_updates_max"] for line in steps)
    versions = [json.loads(line)["weight_versions"] for line in whole["samples"]]
    assert any(len(of_completion) > 1 for of_completion in versions)
    (folder / "finished.json").unlink()
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{step}", ignore_errors=True)
    if name == "ppo":
        off = [*start, "--resume", "auto", "--rollout.partial", "null"]
        assert run_step("hybrid_rlhf.cli.rl", 1, off, errors=tmp_path / "errors.txt") == [2]
        assert "partial rollouts have begun, got rollout.partial null" in (tmp_path / "errors.txt").read_text()
    run_main("hybrid_rlhf.cli.rl", 1, [*start, "--resume", "auto"])
    assert run_outputs(folder) == whole
    (folder / "finished.json").unlink()
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{step}", ignore_errors=True)
    run_main("hybrid_rlhf.cli.rl", 2, [*start, "--resume", "auto"])
    prompt_rows = {(line["step"], line["group"]): line["prompt_row"] for line in read_lines(folder / "samples.jsonl")}
    assert len({*prompt_rows.values()}) == len(prompt_rows) >= 8, "on other ranks too, each prompt once"
