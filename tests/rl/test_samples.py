"""What a run records of its rollouts: rows of samples.jsonl and the tokens, as they are in the batch."""

from __future__ import annotations

import statistics
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
from tests.support.steps import read_rows, write_lines, write_rows


def test_the_tokens_of_a_row_are_those_of_the_batch(build: Any) -> None:
    batch, _ = collect(build())
    arrays, rollout = token_arrays(token_rows(batch)), batch.rollout
    names = {"logprobs": "sampled_logprobs", "values": "old_values"}
    names |= {name: name for name in ("old_logprobs", "ref_logprobs", "entropy", "weight_versions")}
    tensors = {name: getattr(rollout, of) for name, of in names.items()}
    tensors |= {name: getattr(batch, name) for name in ("advantages", "returns", "rewards")}
    assert rollout.kl is not None
    for row in range(len(batch)):
        record = TokenRecord.of(arrays, row)
        real, mask = rollout.attention_mask[row], rollout.response_mask[row][rollout.attention_mask[row]].tolist()
        assert record.ids == rollout.input_ids[row][real].tolist() and record.response == mask
        assert record.prompt_length == mask.index(True) and set(record.columns) == {*tensors, "kl"}
        for name, values in tensors.items():
            of_row = zip(values[row][real].tolist(), mask, strict=True)
            assert record.columns[name] == [value if sampled else None for value, sampled in of_row], name
        assert sum(value or 0.0 for value in record.columns["kl"]) == pytest.approx(float(rollout.kl[row]), abs=1e-5)


def test_a_row_without_response_tokens_is_all_prompt() -> None:
    rollout = rollout_of_rows([[5, 6], [7, 8, 9]], prompt=2)
    zeros = torch.zeros(rollout.input_ids.shape)
    empty, full = (TokenRecord.of(token_arrays(token_rows(Batch(rollout, zeros, zeros))), row) for row in (0, 1))
    assert (empty.prompt_length, empty.ids, set(empty.columns["rewards"])) == (2, [5, 6], {None})
    assert (full.prompt_length, full.columns["rewards"]) == (2, [None, None, 0.0])


def test_a_run_records_its_samples(model_folder: Path, tmp_path: Path) -> None:
    folder, rows = tmp_path / "run", write_rows(tmp_path / "rows.jsonl")
    lines = [{**row, "answer": number, "tests": "x" * 3000} for number, row in enumerate(read_rows(rows))]
    write_lines(rows, lines)
    more = "--algorithm.mini_batches 2 --train.max_steps 3 --logging.samples_every 5"
    run_main("hybrid_rlhf.cli.rl", 1, rollout_line(folder, model_folder, rows, more))
    records, samples = TokenRecords(folder), read_lines(folder / "samples.jsonl")
    assert records.steps() == [1, 3] and [(row["step"], row["index"]) for row in samples] == [
        (step, index) for step in (1, 3) for index in range(len(samples) // 2)
    ]
    for row in samples:
        record = records.read(row["step"], row["index"])
        given = {name: [v for v in values if v is not None] for name, values in record.columns.items()}
        assert "ratio" in given and row["length"] == sum(record.response)
        assert row["stopped"] == (record.ids[-1] == 2)
        assert [*row["components"].values()] == pytest.approx(favours_short([row["completion"]]))
        assert row["advantage"] == pytest.approx(statistics.mean(given["advantages"]), abs=1e-3)
        assert row["kl"] == pytest.approx(sum(given["kl"]), abs=1e-3)
        assert row["prompt"][-1]["content"] == f"say {row['columns']['answer'] % 9}"
        assert row["columns"]["tests"] == '"' + "x" * 999 + "..."
