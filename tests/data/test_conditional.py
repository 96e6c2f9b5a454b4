"""Conditional SFT: the bucket of a score, the text in its row, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.configs.sft import ConditionConfig, SFTConfig, SFTDataConfig
from hybrid_rlhf.data.rows.conditional import ScoreBuckets, bucket_edges
from hybrid_rlhf.data.tokenized import TokenizedData, load_sft_data
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error

THREE = ConditionConfig(buckets=3)
WORLD = solo_world(torch.device("cpu"))
ROWS = [{"prompt": f"say {i}", "completion": str(i), "score": i} for i in range(9)]


@pytest.fixture
def load(tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerFast) -> Any:
    def read(rows: list[dict[str, Any]], condition: ConditionConfig | None = THREE, **changes: Any) -> TokenizedData:
        settings = {"eval_fraction": 0, "cache_dir": str(tmp_path / "cache")}
        config = SFTDataConfig(sources=[str(write_jsonl(rows))], **{**settings, **changes})
        return load_sft_data(config, tokenizer=tokenizer, seed=0, world=WORLD, conditional=condition)

    return read


def texts(data: TokenizedData, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return sorted(tokenizer.decode(ids) for ids in data.train["input_ids"])


def test_rows_name_their_bucket(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    data = load(ROWS)
    assert data.score_buckets == ScoreBuckets([3.0, 6.0], "<score {bucket}/{buckets}> ")
    assert texts(data, tokenizer) == [
        f"<|im_start|>user\n<score {1 + i // 3}/3> say {i}<|im_end|>\n<|im_start|>assistant\n{i}<|im_end|>\n"
        for i in range(9)
    ]


def test_it_stands_in_the_first_user_turn_and_before_text_without_loss(
    load: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    turns = [("system", "be good"), ("user", "hi"), ("assistant", "yes"), ("user", "hm"), ("assistant", "no")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns], "score": 2.5},
        {"text": "plain", "score": -1},
    ]
    data = load(rows, ConditionConfig(buckets=2, template="[{bucket}] "))
    conversation, plain = sorted(data.train, key=lambda row: -len(row["input_ids"]))
    assert tokenizer.decode(conversation["input_ids"]).count("[2] ") == 1
    assert "user\n[2] hi" in tokenizer.decode(conversation["input_ids"])
    assert tokenizer.decode(plain["input_ids"]) == "[1] plain<|im_end|>"
    learned = [token for token, counts in zip(plain["input_ids"], plain["loss_mask"], strict=True) if counts]
    assert tokenizer.decode(learned) == "plain<|im_end|>"


def test_held_out_rows_move_no_edge(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": f"q{i:02}", "completion": "a", "score": i} for i in range(40)]
    plain = load(rows, condition=None, eval_fraction=0.25)
    text = " ".join(tokenizer.decode(ids) for ids in plain.held_out["input_ids"])
    held = [i for i in range(40) if f"q{i:02}" in text]
    assert len(held) == 10 and plain.score_buckets is None
    others = [i for i in range(40) if i not in held]
    for score in (-1000, 1000):
        for i in held:
            rows[i]["score"] = score
        data = load(rows, ConditionConfig(buckets=2), eval_fraction=0.25)
        assert data.score_buckets.edges == [float(others[15])]
        assert all(f"<score {1 + (score > 0)}/2>" in tokenizer.decode(ids) for ids in data.held_out["input_ids"])


def test_rows_are_tokenised_anew_where_the_buckets_change(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    assert texts(load(ROWS), tokenizer) != texts(load(ROWS, ConditionConfig(buckets=2)), tokenizer)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=60, unique=True), st.integers(2, 4))
def test_buckets_of_different_scores_are_of_equal_size(scores: list[float], buckets: int) -> None:
    condition = ScoreBuckets(bucket_edges(scores, buckets=buckets), "{bucket}")
    sizes = [[condition.bucket(score) for score in scores].count(bucket) for bucket in range(1, buckets + 1)]
    assert sum(sizes) == len(scores) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ones", [2, 5, 8])
def test_good_and_bad_are_two_buckets_however_many_there_are(ones: int) -> None:
    assert bucket_edges([1.0] * ones + [0.0] * (10 - ones), buckets=2) == [1.0]


ERRORS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no score": (
        [{"prompt": "a", "completion": "b"}],
        r"{file}:1: .* score \(condition\.buckets\), got columns completion, prompt: rename",
    ),
    "text for a score": (
        [{"prompt": "a", "completion": "b", "score": "high"}],
        "{file}:1: column 'score' .* number, got 'high': fix",
    ),
    "NaN": (
        [{"prompt": "a", "completion": "b", "score": float("nan")}],
        "{file}:1: column 'score' .* number, got nan: fix",
    ),
    "equal scores": (
        [{"prompt": "a", "completion": str(i), "score": 1 + i % 2} for i in range(6)],
        r"condition\.buckets .* got 3, .* 2 different scores of 6 training rows fill 2: lower it",
    ),
    "no user": (
        [{"messages": [{"role": "assistant", "content": "b"}], "score": i} for i in range(6)],
        "{file}:1: .* user turn with condition.buckets, got none: add",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line(name: str, load: Any, tmp_path: Path) -> None:
    rows, message = ERRORS[name]
    with user_error(f"^{message.replace('{file}', re.escape(str(tmp_path / 'rows.jsonl')))}"):
        load(rows)


OPTIONS = {
    "--condition.buckets 1": r"condition\.buckets .* \[2, 100\], got 1: raise .* 3",
    "--condition.template high": r"condition\.template .* {bucket}, got 'high': add",
    "--distill {}": r"distill\.teacher .* got none: .*--distill\.teacher",
    "--distill.beta 1": r"distill\.beta .*\(0, 1\), got 1: .*0\.5",
    "--distill.temperature 0": r"distill\.temperature .* above 0, got 0: .*1\.0",
    "--distill.sft_coef -1": r"distill\.sft_coef .* 0 or more, got -1: raise",
    "--distill.on_policy_fraction 2": r"distill\.on_policy_fraction .*\[0, 1\], got 2: lower",
    "--distill.sampling.max_new_tokens 0": r"distill\.sampling\.max_new_tokens .* 1 or more, got 0: raise",
    "--distill.on_policy_fraction 1 --distill.sft_coef 0.5": r"distill\.sft_coef 0\.5 .* on_policy_fraction 1.*: lower",
}


@pytest.mark.parametrize(("line", "error"), OPTIONS.items())
def test_invalid_options_are_rejected(line: str, error: str) -> None:
    with user_error(f"^{error}"):
        parse_config(SFTConfig, line.split())
