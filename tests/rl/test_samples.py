"""What a run records of its rollouts: rows of samples.jsonl and the tokens, as they are in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.rl.rollouts.samples import token_arrays, token_rows
from hybrid_rlhf.rl.types import Batch
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.observability.token_records import TokenRecord, TokenRecords
from tests.support.ahead import favours_short, rollout_line
from tests.support.ranks import run_main
from tests.support.rl import collect, rollout_of_rows
from tests.support.steps import write_rows


def test_the_tokens_of_a_row_are_those_of_the_batch(build: Any) -> None:
    batch, _ = collect(build())
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
    assert not {"values", "returns", "ref_logprobs", "kl"} & {*full.columns}, "no critic and no reference"


def test_a_run_records_its_samples(model_folder: Path, tmp_path: Path) -> None:
    folder, rows = tmp_path / "run", write_rows(tmp_path / "rows.jsonl")
    more = "--algorithm.mini_batches 2 --train.max_steps 3 --logging.samples_every 2"
    run_main("hybrid_rlhf.cli.rl", 1, rollout_line(folder, model_folder, rows, more))
    records, samples = TokenRecords(folder), read_lines(folder / "samples.jsonl")
    assert records.steps() == [1, 3] and {row["step"] for row in samples} == {1, 3}
    columns = {
        "logprobs",
        "old_logprobs",
        "ref_logprobs",
        "kl",
        "entropy",
        "values",
        "advantages",
        "returns",
        "rewards",
    }
    columns |= {"ratio", "weight_versions"}
    for row in samples:
        record = records.read(row["step"], row["index"])
        assert set(record.columns) == columns
        assert row["length"] == sum(record.response) and row["stopped"] == (record.ids[-1] == 2)
        (name,) = row["components"]
        assert row["components"][name] == pytest.approx(favours_short([row["completion"]])[0])
        given = [value for value in record.columns["advantages"] if value is not None]
        assert row["advantage"] == pytest.approx(sum(given) / len(given), abs=1e-3)
        assert row["kl"] == pytest.approx(sum(value or 0.0 for value in record.columns["kl"]), abs=1e-3)
    assert [row["index"] for row in samples if row["step"] == 1] == list(
        range(sum(row["step"] == 1 for row in samples))
    )
