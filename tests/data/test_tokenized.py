"""Cache, limits, shares: what reaches a step of the rows in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import hybrid_rlhf.data.tokenized as tokenized
from hybrid_rlhf.configs.reward import RewardObjectiveConfig
from hybrid_rlhf.configs.sections.data import DataSource, RowDataConfig
from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data import encoding
from hybrid_rlhf.data.collation import collate_preferences
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.data.mismatched import with_mismatched_completions
from hybrid_rlhf.data.preparation.checking import check_source
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.messages import assistant, user
from tests.support.tiny import CHATML, tiny_tokenizer

WORLD = solo_world(torch.device("cpu"))
TOKENIZER = tiny_tokenizer()
"""Decodes what every template has encoded."""
ROWS = [{"prompt": f"question {i}", "chosen": f"answer {i}", "rejected": "no"} for i in range(40)]
Load = Callable[..., tokenized.TokenizedData]


def texts(rows: Any) -> set[str]:
    """The prompt of each row, whatever the step."""
    ids = rows["responses"] if "responses" in rows.column_names else rows["input_ids"]
    flat = [row[0] if isinstance(row[0], list) else row for row in ids]
    return {TOKENIZER.decode(row).split("question ")[1].split("<")[0] for row in flat}


@pytest.fixture
def load(tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerFast) -> Load:
    """Load rows for a step; `changes`: of the data section. All rows are for training unless that says otherwise."""

    def read(kind: str, rows: list[dict[str, Any]] = ROWS, seed: int = 0, **changes: Any) -> tokenized.TokenizedData:
        settings = {"sources": [str(write_jsonl(rows))], "cache_dir": str(tmp_path / "cache"), "max_length": 200}
        config = RowDataConfig(**{**settings, "eval_fraction": 0.0, **changes})
        limit = {"max_prompt_tokens": config.max_length} if kind == "prompt" else {}
        loader = getattr(tokenized, f"load_{kind}_data")
        return loader(config, tokenizer=tokenizer, seed=seed, world=WORLD, **limit)  # type: ignore[no-any-return]

    return read


def test_the_steps_share_a_data_set_without_overlap(load: Load) -> None:
    seen: list[set[str]] = []
    for kind in ("sft", "preference", "prompt"):
        data = load(kind, split=[2, 4, 4], eval_fraction=0.25)
        seen += [texts(data.train), texts(data.held_out)]
    assert [len(part) for part in seen] == [6, 2, 12, 4, 12, 4]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 40, "every row once"
    for seed, is_same in ((0, True), (1, False)):
        again = load("sft", seed=seed, split=[2, 4, 4], eval_fraction=0.25)
        assert (texts(again.train) == seen[0]) == is_same


def test_a_source_is_split_alike_wherever_it_stands_in_the_lists(load: Load, write_jsonl: Any) -> None:
    shared, other = str(write_jsonl(ROWS[:30], "shared.jsonl")), str(write_jsonl(ROWS[30:], "other.jsonl"))
    sft = load("sft", sources=[shared, other], split=[1, 1, 1])
    prompts = load("prompt", sources=[other, shared], split=[1, 1, 1])
    assert not texts(sft.train) & texts(prompts.train)


def test_shares_do_not_move_when_rows_are_dropped(load: Load) -> None:
    rows = [*ROWS[:3], {**ROWS[3], "chosen": "long " * 60}, *ROWS[4:]]
    kept = load("sft", split=[1, 1, 1])
    dropped = load("sft", rows, split=[1, 1, 1], too_long="drop")
    assert texts(dropped.train) == texts(kept.train) - {"3"}
    assert not texts(dropped.train) & texts(load("prompt", split=[1, 1, 1]).train)


def test_each_source_is_evaluated(load: Load, write_jsonl: Any) -> None:
    """Only the first source was evaluated; held-out rows of the others were neither trained nor evaluated on."""
    sources = [str(write_jsonl(ROWS[start:stop], f"{start}.jsonl")) for start, stop in ((0, 4), (4, 20), (20, 40))]
    numbers = [{str(number) for number in range(*rows)} for rows in ((0, 4), (4, 20), (20, 40))]
    data = load("sft", sources=sources, eval_fraction=0.5, max_eval_rows=8)
    held_out = texts(data.held_out)
    assert [len(held_out & of_source) for of_source in numbers] == [2, 3, 3]
    assert len(data.train) == 32 and not texts(data.train) & held_out
    data = load("sft", eval_sources=sources, eval_fraction=0.1, max_eval_rows=14)
    held_out = texts(data.held_out)
    assert len(data.train) == 40 and len(load("sft").held_out) == 0
    assert [len(held_out & of_source) for of_source in numbers] == [4, 5, 5]


def test_no_progress_bar_of_datasets_stands_in_the_log(load: Load, capfd: pytest.CaptureFixture[str]) -> None:
    """Prompts name their source in a column, for which `datasets` copies the rows. The user's setting remains."""
    datasets.enable_progress_bars()
    load("prompt", eval_fraction=0.2)
    assert capfd.readouterr().err == "" and datasets.utils.logging.is_progress_bar_enabled()


def test_weights_are_passes_over_a_source(load: Load, write_jsonl: Any) -> None:
    one = str(write_jsonl(ROWS[:10], "one.jsonl"))
    other = str(write_jsonl(ROWS[10:20], "other.jsonl"))
    sources = [DataSource(path=one, weight=2.5), DataSource(path=other, weight=0.2)]
    data = load("sft", sources=sources)
    assert len(data.train) == 25 + 2
    for weight, limit in ((0.01, 100), (0.5, 2)):
        rare = DataSource(path=other, weight=weight)
        with user_error("training row, got none: .* of 10 .* raise the limit or a source's weight"):
            load("sft", sources=[rare], max_length=limit, too_long="drop")


def test_long_rows_are_cut_or_dropped_and_counted(load: Load, log_lines: list[str]) -> None:
    rows = [
        {"prompt": "q", "completion": "a" * 90},
        {"prompt": "q" * 90, "completion": "a"},
        {"prompt": "q", "completion": "b"},
    ]
    data = load("sft", rows, max_length=80, too_long="truncate")
    assert sorted(data.train["length"]) == sorted(map(len, data.train["input_ids"]))
    assert max(data.train["length"]) == 80 and len(data.train) == 2  # the long prompt leaves no token with loss
    assert "2 were truncated to 80 tokens, 1 dropped" in log_lines[-2]
    assert log_lines[-1].endswith(
        "2 of 3 rows are longer than data.max_length 80 and were truncated; data.max_length 112 keeps all"
    )
    assert len(load("sft", rows, max_length=80, too_long="drop").train) == 1
    assert "0 were truncated to 80 tokens, 2 dropped" in log_lines[-2]


def test_many_dropped_rows_are_a_warning_with_the_limit_that_keeps_them(load: Load, log_lines: list[str]) -> None:
    """96 of 120 dropped prompts were half a line of the log; if all are dropped, the error names the limit too."""
    rows = [{**ROWS[0], "prompt": f"question {'x' * size}"} for size in (100, 100, 100, *[80] * 5, *[0] * 12)]
    key = "rollout.max_prompt_tokens"
    loading = partial(load, "prompt", rows, too_long="drop")
    longest = max(loading().train["length"])
    assert len(log_lines) == 1, "no warning"
    assert len(loading(max_length=80).train) == 12
    assert log_lines[-1] == (
        f"prompt data: 8 of 20 rows are longer than {key} 80 and were dropped; {key} {longest} keeps all"
    )
    assert [len(loading(max_length=longest - shorter).train) for shorter in (1, 0)] == [17, 20]
    with user_error(rf"20 of 20 rows were dropped .*{key} {longest} keeps all\)"):
        loading(max_length=5)
    lines = len(log_lines)
    load("prompt", [*rows[8:], *rows[8:], rows[3]], too_long="drop", max_length=80)
    assert len(log_lines) == lines + 1, "a row in 25 is no warning"
    load("prompt", [*rows[3:], rows[0]], too_long="drop", max_length=80)
    assert log_lines[-1].endswith(f", {longest - 20} nine rows in ten")


def test_preferences_lose_the_beginning_of_their_prompt_first(load: Load, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "p" * 100, "chosen": "good", "rejected": "bad"}]
    with user_error("got none: 1 of 1 rows were dropped at 60 tokens"):
        load("preference", rows, max_length=60)
    data = load("preference", rows, max_length=60, too_long="truncate")
    (responses,) = data.train["responses"]
    for ids, answer in zip(responses, ("good", "bad"), strict=True):
        assert len(ids) <= 60 and TOKENIZER.decode(ids).endswith(f"{answer}<|im_end|>\n")
        assert TOKENIZER.decode(ids).startswith("<|im_start|>user\np"), "the head of the conversation stays"
    rows = [{"prompt": "p", "chosen": "1" + "x" * 90 + "1", "rejected": "2" + "x" * 90 + "2"}]
    (responses,) = load("preference", rows, max_length=60, too_long="truncate").train["responses"]
    head = "<|im_start|>user\n"
    assert [TOKENIZER.decode(ids) for ids in responses] == [f"{head}{n}{'x' * (59 - 6)}" for n in "12"]
    rows = [{"prompt": "p", "chosen": "x", "rejected": "x "}]
    tokenizer.chat_template = CHATML.replace("message['content']", "message['content'] | trim")
    with user_error("training row, got none"):  # the template makes them equal
        load("preference", rows, max_length=60, too_long="truncate")


def test_padding_of_completions_counts_against_the_token_limit(load: Load) -> None:
    """Only tokens without padding were counted, so that a micro-batch had twice as many as allowed."""
    rows = [{"prompt": "p", "responses": ["x" * 60, *"abcdefg"], "ranks": [*range(8)]}] * 4
    data = load("preference", rows)
    micro_batches = MicroBatches(tokens=1400, padded=True)
    (batches,) = BatchLoader(
        data.train, global_batch_size=4, world_rank=0, world_size=1, micro_batches=micro_batches, seed=0
    ).iterate(1)
    shapes = [collate_preferences(rows, 2).input_ids.shape for rows in batches]
    assert len(shapes) == 2 and all(shape.numel() <= 1400 for shape in shapes)


def test_rows_are_tokenised_once_and_again_when_anything_changes(
    load: Load, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    encode = encoding.encode_conversation
    monkeypatch.setattr(encoding, "encode_conversation", lambda *a, **k: calls.append("x") or encode(*a, **k))

    def tokenises(**changes: Any) -> bool:
        calls.clear()
        load("sft", **changes)
        return bool(calls)

    assert tokenises()
    assert not tokenises(), "from the cache"
    assert not tokenises(split=[1, 1, 1]), "shares are taken from the same entry"
    assert tokenises(max_length=64)
    assert tokenises(rows=ROWS[:30])
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|im_end|> ")
    assert tokenises()
    assert not list((tmp_path / "cache" / "tokens").glob("*.partial"))


def test_user_errors_are_one_line(load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with user_error(r"rows\.jsonl:2: a row must have"):
        load("sft", [ROWS[0], {"x": 1}])
    assert not list((tmp_path / "cache").rglob("*.arrow")), "nothing is left of it"
    with user_error("data.sources must have .* got none"):
        load("sft", sources=[])
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with user_error(r"rows\.jsonl:1: the chat template .* error"):
        load("sft")


def test_no_training_row_is_said_with_its_cause(load: Load) -> None:
    """A share that holds out every row, and rows without a target, for which `too_long` is no remedy."""
    with user_error(r"got none: 2 of 2 rows are held out \(data.eval_fraction 0.99\): lower it or add rows$"):
        load("sft", ROWS[:2], eval_fraction=0.99, max_eval_rows=2)
    with user_error("2 of 2 rows were dropped at 12 tokens .*: raise the limit or a source's weight or add rows$"):
        load("sft", ROWS[:2], max_length=12, too_long="truncate")
    with user_error("weight, set data.too_long to truncate or add rows$"):
        load("sft", ROWS[:2], max_length=12, too_long="drop")


@pytest.mark.parametrize("kind", ["preference", "labelled", "sft"])
def test_ties_are_left_out_and_counted(kind: str, load: Load, log_lines: list[str]) -> None:
    """As the board writes them, and as it wrote them before."""
    ties = [{"prompt": "b?", "chosen": "b", "rejected": "c"}, {"prompt": "c?", "responses": ["b", "c"]}]
    data = load(kind, [row | {"tie": True} for row in ties] + [row | {"tie": False} for row in ROWS[:3]])
    assert len(data.train) == 3 and texts(data.train) == {"0", "1", "2"}
    assert data.counts.dropped == 2 and data.counts.ties == 2 * (kind != "sft")
    assert log_lines[-1].endswith("0 were truncated to 200 tokens, 2 dropped" + ", 2 of them ties" * (kind != "sft"))


def test_labels_stand_alone_or_come_of_pairs(load: Load) -> None:
    rows = [
        {"prompt": "a?", "completion": "yes", "label": True},
        {"prompt": "b?", "completion": "bad", "label": 0},
        {"prompt": "c?", "chosen": "good", "rejected": "worse"},
        {"prompt": "d?", "responses": ["mid", "best", "low"], "ranks": [2, 1, 3]},
    ]
    data = load("labelled", rows)
    decoded = {
        TOKENIZER.decode(own_tokens(row, number)[:-1]): label
        for row in data.train
        for number, label in enumerate(row["labels"])
    }
    assert decoded == {"yes": True, "bad": False, "good": True, "worse": False, "best": True, "low": False}
    own = list(data.train)
    view, short = (with_mismatched_completions(data.train, max_length=limit) for limit in (64, 20))
    counts = [len(row["labels"]) for row in own]
    assert (2, 2) in pairwise([*counts, counts[0]]), "a pair follows a pair"
    for place, count in enumerate(counts):
        following = own[(place + 1) % len(own)]
        others = [own_tokens(following, number) for number in range(len(following["labels"]))]
        row = view[place]
        taken = [own_tokens(row, number) for number in range(count, len(row["responses"]))]
        assert taken == [others[(place + number) % len(others)] for number in range(count)], "of a pair both kinds"
        begin = row["masks"][0].index(True)
        for ids, mask in zip(row["responses"][count:], row["masks"][count:], strict=True):
            assert ids[:begin] == row["responses"][0][:begin] and mask.index(True) == begin
        sizes = [*map(len, row["responses"])]
        assert view["tokens"][place] >= sum(sizes) and view["padded_tokens"][place] >= len(sizes) * max(sizes)
        assert max(map(len, short[place]["responses"][count:])) <= 20


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [("aabbcc", [2, 2, 4, 4, 0, 0]), ("abbbaa", [1, 4, 4, 4, 1, 1]), ("aab", [2, 2, 0]), ("aaa", [1, 2, 0])],
)
@pytest.mark.parametrize("begin", ["", "word " * 30])
def test_mismatched_completions_are_of_another_prompt(
    load: Load, prompts: str, expected: list[int], begin: str
) -> None:
    """Adjacent rows of one prompt, around the end, and those whose answers leave different parts of a long prompt."""
    rows = [
        {"prompt": f"{begin}{prompt}?", "completion": "a" * (place + 1), "label": place % 2 == 0}
        for place, prompt in enumerate(prompts)
    ]
    data = load("labelled", rows, max_length=60, too_long="truncate").train

    def answer(row: Any, number: int) -> int:
        return len(own_tokens(row, number)) - 2  # its place, without the end of its turn

    shuffled = [answer(row, 0) for row in data]
    data = data.select([shuffled.index(place) for place in range(len(prompts))])
    view = with_mismatched_completions(data, max_length=60)
    assert [answer(view[place], 1) for place in range(len(prompts))] == expected
    if not begin:
        return
    kept = {len(row["responses"][0]) - answer(row, 0) for row in data}
    assert len(kept) > 1, "parts of different lengths"


def own_tokens(row: Any, number: int) -> list[int]:
    """The tokens of one answer of a row."""
    return [t for t, own in zip(row["responses"][number], row["masks"][number], strict=True) if own]


def conversation(number: int) -> dict[str, Any]:
    return {
        "messages": [
            user(f"question {number}<"),
            assistant("one"),
            user("more"),
            {"role": "assistant", "content": "two", "name": "hm"},
        ]
    }


def test_a_conversation_with_several_rows_is_split_as_one(
    load: Load, tokenizer: PreTrainedTokenizerFast, log_lines: list[str]
) -> None:
    """Its turns are never on both sides of a split."""
    tokenizer.chat_template = CHATML.replace("'<|im_end|>\n'", "('<|im_end|>\n' if loop.last else '<|endoftext|>')")
    rows = [conversation(number) for number in range(20)]
    seen = []
    for kind, count in (("sft", 2), ("prompt", 1)):
        data = load(kind, rows, split=[1, 0, 1], eval_fraction=0.2, max_eval_rows=100)
        for part in (data.train, data.held_out):
            names = texts(part)
            assert len(part) == len(names) * count
            seen.append(names)
    assert sum(map(len, seen)) == len(set.union(*seen)) == 20
    assert any("20 conversations make 40 rows" in line for line in log_lines)
    assert any("does not render all of the rows: name (20)" in line for line in log_lines)
    lines = len(log_lines)
    load("sft", rows)
    assert any("does not render all" in line for line in log_lines[lines:]), "also when the rows come from the cache"


def test_a_file_of_mixed_kinds_is_said(load: Load, log_lines: list[str]) -> None:
    """`data check` noted it, training did not; the kinds of ties, and of the rows of other files, are not counted."""
    tie = {"prompt": "question 9", "chosen": "a", "rejected": "b", "tie": True}
    rows = [conversation(0), conversation(1), tie, {"text": "question 2"}]
    load("sft", rows[:3])
    assert not any("kinds are mixed" in line for line in log_lines)
    for _ in range(2):
        load("sft", rows)
    said = "rows of 2 kinds are mixed; a step reads each by its columns: messages (2), text (1)"
    assert sum(said in line for line in log_lines) == 2, "also when the rows come from the cache"


def test_completions_with_turns_without_loss_are_counted(
    load: Load, tokenizer: PreTrainedTokenizerFast, log_lines: list[str], write_jsonl: Any, tmp_path: Path
) -> None:
    """A template that renders them differently before the last turn: they had no loss, without a word."""
    turns = [assistant("one"), user("and?"), assistant("two")]
    rows = [{"prompt": f"question {i}", "chosen": turns, "rejected": "no"} for i in range(3)]
    load("preference", rows)
    report = check_source(str(write_jsonl(rows)), tokenizer=tokenizer)
    assert not report.notes and not any("carry no loss" in line for line in log_lines)
    tokenizer.chat_template = CHATML.replace("'<|im_end|>\n'", "('<|im_end|>\n' if loop.last else '<|endoftext|>')")
    load("preference", rows)
    assert sum("preference data: 3 completions have turns before the last" in line for line in log_lines) == 1
    report = check_source(str(write_jsonl(rows)), tokenizer=tokenizer)
    assert report.notes[0].startswith("3 completions have turns") and not report.unrendered
    assert not check_source(str(write_jsonl(rows)), task="reward", tokenizer=tokenizer).notes
    lines = len(log_lines)
    config = RowDataConfig(sources=[str(write_jsonl(rows))], eval_fraction=0.0, cache_dir=str(tmp_path / "scored"))
    tokenized.load_reward_data(config, RewardObjectiveConfig(), tokenizer=tokenizer, seed=0, world=WORLD)
    assert not any("carry no loss" in line for line in log_lines[lines:]), "a reward model reads all turns"


def test_weights_and_unrendered_keys_reach_training(load: Load) -> None:
    """An assistant turn of weight 0 was trained on; a key that the template does not render was only a log line."""
    row = conversation(1)
    assert learned_text(load("sft", [row])) == ["one<|im_end|>two<|im_end|>"]
    row["messages"][1]["weight"] = 0
    assert learned_text(load("sft", [row])) == ["two<|im_end|>"]
    pair: dict[str, Any] = {"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": "no"}
    (pairs,) = load("preference", [pair]).train
    assert TOKENIZER.decode(own_tokens(pairs, 0)) == "two<|im_end|>"
    pair["chosen"][-1]["a,b"] = "hm"
    with user_error(r"rows\.jsonl:1: column 'chosen': .* does not render the key 'a,b'"):
        load("preference", [pair])


def learned_text(data: tokenized.TokenizedData) -> list[str]:
    """The text with loss of each training row."""
    return [
        TOKENIZER.decode([token for token, loss in zip(row["input_ids"], row["loss_mask"], strict=True) if loss])
        for row in data.train
    ]


def test_prompts_keep_their_head_their_end_and_their_other_columns(load: Load) -> None:
    """A prompt whose head fills the limit is dropped."""
    system = {"role": "system", "content": "s" * 60}
    rows = [{"prompt": [system, user("q" * 40 + "END")], "answer": 4}, {"prompt": "short", "answer": 5}]
    (row,) = load("prompt", rows, max_length=50, too_long="truncate").train
    assert json.loads(row["columns"]) == {"answer": 5} and json.loads(row["prompt"]) == [user("short")]
    data = load("prompt", rows, max_length=100, too_long="truncate")
    longest = max(data.train["input_ids"], key=len)
    assert len(longest) == 100
    assert TOKENIZER.decode(longest).startswith("<|im_start|>system\n" + "s" * 60 + "<|im_end|>\n<|im_start|>user\nq")
    assert TOKENIZER.decode(longest).endswith("qEND<|im_end|>\n<|im_start|>assistant\n")
