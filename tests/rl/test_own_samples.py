"""Current weights must sample with the log-probs that training gives: else the run stops, though the weights agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.rl import types
from tests.support.ahead import rollout_line
from tests.support.faults import intercept, run_step


@dataclass(frozen=True)
class WrongSampler:
    """Tells log-probs that are too high by 0.1; the check after a weight sync does not sample."""

    rank: int | None = 0

    def arm(self) -> None:
        def around(call: int, run: Callable[[], Any], _: Sequence[Any]) -> Any:
            sampled = run()
            return replace(sampled, logprobs=sampled.logprobs + 0.1)

        intercept("hybrid_rlhf.generation.batching.sampler:Sampler.__call__", around)


@dataclass(frozen=True)
class DeepeningSampler:
    """Tells log-probs whose error grows with the tokens before, to 0.004 at 64 of them; a depth of 48 tokens stands
    for that of 1,024."""

    rank: int | None = 0

    def arm(self) -> None:
        types.DEPTHS["1k"] = 48

        def around(call: int, run: Callable[[], Any], _: Sequence[Any]) -> Any:
            rollout = run()
            error = 0.004 * (torch.arange(rollout.input_ids.shape[1]) / 64) ** 3
            return replace(rollout, sampled_logprobs=rollout.sampled_logprobs + error * rollout.response_mask)

        intercept("hybrid_rlhf.rl.types:Rollout.of", around)


@pytest.mark.parametrize("old_logprobs", ["training", "sampler"])
def test_a_difference_that_grows_with_depth_stops_the_run(
    old_logprobs: str, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    """Though the mean over all tokens is below the limit of float32, 0.002 nats."""
    errors = tmp_path / "errors.txt"
    line = rollout_line(tmp_path / "run", model_folder, pair_rows, "--train.max_steps 1 --algorithm.mini_batches 2")
    line += f"--algorithm.old_logprobs {old_logprobs} --rollout.prompts_per_step 16".split()
    line += "--rollout.sampling.max_new_tokens 40 --algorithm.correction null".split()
    assert run_step("hybrid_rlhf.cli.rl", 1, line, DeepeningSampler(), errors=errors) == [2]
    told = [text for text in errors.read_text().splitlines() if "sampler and training must agree" in text]
    assert len(told) == 1 and "(rollout/logprob_abs_diff_at_1k)" in told[0]


@pytest.mark.parametrize("limit", [None, "0.5"])
def test_a_sampler_that_disagrees_with_training_stops_the_run(
    limit: str | None, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    """In its first step, unless so much is allowed."""
    errors = tmp_path / "errors.txt"
    line = rollout_line(tmp_path / "run", model_folder, pair_rows, "--train.max_steps 1")
    line += [] if limit is None else ["--faults.max_logprob_diff", limit]
    code = run_step("hybrid_rlhf.cli.rl", 1, line, WrongSampler(), errors=errors)
    assert code == [2 if limit is None else 0]
    assert (tmp_path / "run" / "actor").exists() == (limit is not None)
    told = [text for text in errors.read_text().splitlines() if "sampler and training must agree" in text]
    assert len(told) == (limit is None)
    assert limit is not None or all(
        part in told[0] for part in ("they differ by 0.1 in the rollout of step 1", "or raise faults.max_logprob_diff")
    )
