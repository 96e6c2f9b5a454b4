"""Conditional SFT: which bucket a score is in, what its row is told, what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.configs.cli import parse_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sft import SFTConfig, SFTDataConfig
from hybrid_rlhf.data.conditional import Condition, cut
from hybrid_rlhf.data.tokenized import TokenizedData, load_sft_data
from hybrid_rlhf.runtime.world import solo_world

WORLD = solo_world(torch.device("cpu"))
ROWS = [{"prompt": f"say {i}", "completion": str(i), "score": i} for i in range(9)]


@pytest.fixture
def load(tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerFast) -> Any:
    def read(rows: list[dict[str, Any]], **changes: Any) -> TokenizedData:
        settings = {"eval_fraction": 0, "condition_buckets": 3, "cache_dir": str(tmp_path / "cache")}
        config = SFTDataConfig(sources=[str(write_jsonl(rows))], **{**settings, **changes})
        return load_sft_data(config, tokenizer=tokenizer, seed=0, world=WORLD)

    return read


def texts(data: TokenizedData, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return sorted(tokenizer.decode(ids) for ids in data.train["input_ids"])


def test_rows_are_told_their_bucket(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    data = load(ROWS)
    assert data.condition == Condition([3.0, 6.0], "<score {bucket}/{buckets}> ")
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
    data = load(rows, condition_buckets=2, condition_template="[{bucket}] ")
    conversation, plain = sorted(data.train, key=lambda row: -len(row["input_ids"]))
    assert tokenizer.decode(conversation["input_ids"]).count("[2] ") == 1
    assert "user\n[2] hi" in tokenizer.decode(conversation["input_ids"])
    assert tokenizer.decode(plain["input_ids"]) == "[1] plain<|im_end|>"
    learned = [token for token, counts in zip(plain["input_ids"], plain["loss_mask"], strict=True) if counts]
    assert tokenizer.decode(learned) == "plain<|im_end|>"


def test_held_out_rows_move_no_edge(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": f"q{i:02}", "completion": "a", "score": i} for i in range(40)]
    plain = load(rows, eval_fraction=0.25, condition_buckets=0)
    told = " ".join(tokenizer.decode(ids) for ids in plain.held_out["input_ids"])
    held = [i for i in range(40) if f"q{i:02}" in told]
    assert len(held) == 10 and plain.condition is None
    others = [i for i in range(40) if i not in held]
    for score in (-1000, 1000):
        for i in held:
            rows[i]["score"] = score
        data = load(rows, eval_fraction=0.25, condition_buckets=2)
        assert data.condition.edges == [float(others[15])]
        assert all(f"<score {1 + (score > 0)}/2>" in tokenizer.decode(ids) for ids in data.held_out["input_ids"])


def test_rows_are_tokenised_anew_where_the_buckets_change(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    assert texts(load(ROWS), tokenizer) != texts(load(ROWS, condition_buckets=2), tokenizer)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=60, unique=True), st.integers(2, 4))
def test_buckets_of_different_scores_are_of_equal_size(scores: list[float], buckets: int) -> None:
    condition = Condition(cut(scores, buckets=buckets), "{bucket}")
    sizes = [[condition.bucket(score) for score in scores].count(bucket) for bucket in range(1, buckets + 1)]
    assert sum(sizes) == len(scores) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ones", [2, 5, 8])
def test_good_and_bad_are_two_buckets_however_many_there_are(ones: int) -> None:
    assert cut([1.0] * ones + [0.0] * (10 - ones), buckets=2) == [1.0]


MISTAKES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no score": (
        [{"prompt": "a", "completion": "b"}],
        "{file}:1: a row needs score (data.condition_buckets), found columns completion, prompt: rename or add them",
    ),
    "text for a score": (
        [{"prompt": "a", "completion": "b", "score": "high"}],
        "{file}:1: column 'score' is a number, got 'high': mend the row",
    ),
    "NaN": (
        [{"prompt": "a", "completion": "b", "score": float("nan")}],
        "{file}:1: column 'score' is a number, got nan: mend the row",
    ),
    "equal scores": (
        [{"prompt": "a", "completion": str(i), "score": 1 + i % 2} for i in range(6)],
        "data.condition_buckets 3 needs scores for each bucket, the 2 different ones of 6 training rows fill 2: "
        "lower it",
    ),
    "no user": (
        [{"messages": [{"role": "assistant", "content": "b"}], "score": i} for i in range(6)],
        "{file}:1: a score is told in the first user turn, this conversation has none: add one",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_in_one_line(name: str, load: Any, tmp_path: Path) -> None:
    rows, message = MISTAKES[name]
    with pytest.raises(UserError) as error:
        load(rows)
    assert str(error.value) == message.replace("{file}", str(tmp_path / "rows.jsonl"))


OPTIONS = {
    "--data.condition_buckets 1": "data.condition_buckets must be 0 (off) or 2 to 100, got 1: give for example 3",
    "--data.condition_template high": "data.condition_template must hold {bucket}, got 'high': add it",
    "--data.packing tight": "data.packing must be one of none, best_fit, got tight: see --help",
    "--algorithm distill": "algorithm distill learns from a teacher, got none: give --distill.teacher FOLDER",
    "--distill.teacher x": "distill.teacher is for algorithm distill, got x for sft: add --algorithm distill",
    "--distill.beta 1": "distill.beta must be in (0, 1), got 1.0: give for example 0.5",
    "--distill.temperature 0": "distill.temperature must be above 0, got 0.0: give for example 1.0",
    "--distill.sft_coef -1": "distill.sft_coef must be 0 or more, got -1.0: raise it",
    "--distill.on_policy_fraction 2": "distill.on_policy_fraction must be in [0, 1], got 2.0: give for example 0.5",
    "--distill.max_new_tokens 0": "distill.max_new_tokens must be 1 or more, got 0: raise it",
    "--distill.on_policy_fraction 1 --distill.sft_coef 0.5": "distill.sft_coef 0.5 needs the data's answers, got "
    "on_policy_fraction 1, which samples them all: lower one of the two",
}


@pytest.mark.parametrize("line", OPTIONS)
def test_options_that_cannot_be_are_refused(line: str) -> None:
    with pytest.raises(UserError) as error:
        parse_config(SFTConfig, line.split())
    assert str(error.value) == OPTIONS[line]
