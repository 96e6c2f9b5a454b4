"""What a run records of its rollouts: rows of samples.jsonl and the tokens, as they are in the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.rl.batch import Batch
from hybrid_rlhf.rl.rollouts.samples import token_arrays, token_rows
from hybrid_rlhf.runtime.observability.token_records import TokenRecord, TokenRecords
from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_main
from tests.support.rl import build_parts, collect, rollout_of_rows
from tests.support.steps import brevity, step_line, write_rows

MODULE = "hybrid_rlhf.cli.rl"


def test_the_tokens_of_a_row_are_those_of_the_batch(world: World, paths: dict[str, str]) -> None:
    batch, _ = collect(build_parts(world, paths))
    arrays, rollout = token_arrays(token_rows(batch)), batch.rollout
    tensors = {
        "logprobs": rollout.sampled_logprobs,
        "old_logprobs": rollout.old_logprobs,
        "ref_logprobs": rollout.ref_logprobs,
        "entropy": rollout.entropy,
        "values": rollout.old_values,
        "advantages": batch.advantages,
        "returns": batch.returns,
        "rewards": batch.rewards,
        "weight_versions": rollout.weight_versions,
    }
    for row in range(len(batch)):
        record = TokenRecord.of(arrays, row)
        real, mask = rollout.attention_mask[row], rollout.response_mask[row][rollout.attention_mask[row]]
        assert record.ids == rollout.input_ids[row][real].tolist() and record.response == mask.tolist()
        assert record.prompt_length == mask.tolist().index(True)
        assert set(record.columns) == {*tensors, "kl"}
        for name, values in tensors.items():
            assert values is not None
            found = [value for value in record.columns[name] if value is not None]
            assert found == values[row][real][mask].tolist(), name
            assert [value is not None for value in record.columns[name]] == mask.tolist()
        assert rollout.kl is not None
        assert sum(value or 0.0 for value in record.columns["kl"]) == pytest.approx(float(rollout.kl[row]), abs=1e-5)


def test_a_row_without_response_tokens_is_all_prompt() -> None:
    rollout = rollout_of_rows([[5, 6], [7, 8, 9]], prompt=2)
    zeros = torch.zeros(rollout.input_ids.shape)
    empty, full = (TokenRecord.of(token_arrays(token_rows(Batch(rollout, zeros, zeros))), row) for row in (0, 1))
    assert (empty.prompt_length, empty.ids, set(empty.columns["rewards"])) == (2, [5, 6], {None})
    assert (full.prompt_length, full.columns["rewards"]) == (2, [None, None, 0.0])


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [("ppo", set[str]()), ("dapo", {"values", "returns", "ref_logprobs", "kl"})],
)
def test_a_run_records_its_samples(algorithm: str, missing: set[str], model_folder: Path, tmp_path: Path) -> None:
    folder, rows = tmp_path / "run", write_rows(tmp_path / "rows.jsonl")
    more = ["--algorithm", algorithm, "--train.max_steps", "3", "--logging.samples_every", "2"]
    run_main(MODULE, 1, rollout_run_line(folder, model_folder, rows, *more))
    records, samples = TokenRecords(folder), read_samples(folder)
    assert records.steps() == [1, 3] and {row["step"] for row in samples} == {1, 3}
    every = {"logprobs", "old_logprobs", "ref_logprobs", "kl", "entropy", "values", "advantages", "returns", "rewards"}
    every |= {"ratio"}
    for row in samples:
        record = records.read(row["step"], row["index"])
        assert set(record.columns) == (every | {"weight_versions"}) - missing
        assert row["length"] == sum(record.response) and row["stopped"] == (record.ids[-1] == 2)
        (name,) = row["components"]
        assert row["components"][name] == pytest.approx(brevity([], [row["completion"]])[0], abs=1e-4)
        given = [value for value in record.columns["advantages"] if value is not None]
        assert row["advantage"] == pytest.approx(sum(given) / len(given), abs=1e-3)
        if row["kl"] is not None:
            assert row["kl"] == pytest.approx(sum(value or 0.0 for value in record.columns["kl"]), abs=1e-3)
    assert [row["index"] for row in samples if row["step"] == 1] == list(
        range(sum(row["step"] == 1 for row in samples))
    )


def rollout_run_line(folder: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """A run of any algorithm: without what belongs to PPO alone in `step_line`."""
    line = step_line("ppo", folder, model, rows)
    own = ("--algorithm.kl.target", "--algorithm.score_scaling", "--reference.refresh_every", "--algorithm.epochs")
    kept = [
        word for name, value in zip(line[::2], line[1::2], strict=True) if name not in own for word in (name, value)
    ]
    return [*kept, *more]


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The rows of samples.jsonl."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
