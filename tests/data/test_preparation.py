"""Sources before training: what a check finds, and how rows are split and blended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.preparation.blending import blend_rows
from hybrid_rlhf.data.preparation.checking import check_source
from hybrid_rlhf.data.preparation.splitting import prompt_key, split_rows
from hybrid_rlhf.data.rows.counts import histogram
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.sources import open_source
from tests.support.errors import user_error
from tests.support.messages import assistant, user

Write = Callable[..., Path]
MESSAGES = [user("hi"), assistant("hello")]


def rows_of(file: Path) -> list[Row]:
    return [row for _, row in open_source(str(file))]


@pytest.mark.parametrize(
    ("row", "task", "form"),
    [
        ({"messages": MESSAGES, "id": 3}, "sft", "messages"),
        ({"prompt": "q", "completion": "a"}, "sft", "prompt + completion"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", "prompt + chosen + rejected"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 2]}, "preference", "prompt + responses + ranks"),
        ({"prompt": "q", "completion": "a", "label": True}, "preference", "prompt + completion + label"),
        ({"messages": MESSAGES, "label": False}, "preference", "messages + label"),
        ({"messages": MESSAGES, "label": "news"}, "sft", "messages"),
        ({"prompt": "q", "completions": ["a"], "labels": [1]}, "reward", "prompt + completions + labels"),
        ({"prompt": "q", "answer": "42"}, "rl", "prompt"),
        ({"text": "plain"}, "sft", "text"),
    ],
)
def test_the_step_is_guessed_and_the_form_named(
    row: Row, task: str, form: str, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    report = check_source(str(write_jsonl([row] * 2)), tokenizer=tokenizer)
    assert (report.task, dict(report.forms), report.problems.texts) == (task, {form: 2}, [])
    assert report.columns == Counter({name: 2 for name in row})
    assert len(report.lengths) == 2 and report.lengths[0] > 0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "q", "response": "a", "helpfulness": 4}, "got the format helpsteer2: convert"),
        ({"prompt": "q", "answers": [{"answer": "a", "rank": 1}]}, "got the format nectar: convert"),
        ({"messages": MESSAGES, "rejected_response": "b"}, "got the format openai_messages: convert"),
        ({"messages": MESSAGES, "kto_tag": False}, "got the format openai_messages: convert"),
        (
            {"prompt": "q", "response_a": "a", "response_b": "b"},
            "prompts for RL has no answers, got column 'response_a'",
        ),
        ({"prompt": "q", "rejected": "a"}, "prompts for RL has no answers, got column 'rejected'"),
    ],
)
def test_rows_of_no_step_are_not_taken_for_another(row: Row, problem: str, write_jsonl: Write) -> None:
    with user_error(problem):
        check_source(str(write_jsonl([row])))


def test_ties_are_left_out_and_counted(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    report = check_source(str(write_jsonl([pair | {"tie": True}, pair | {"tie": False}])), tokenizer=tokenizer)
    assert (report.task, report.rows, report.ties, len(report.lengths)) == ("preference", 1, 1, 1) and report.is_clean
    with user_error("must have rows, .* has only ties"):
        check_source(str(write_jsonl([{"prompt": "q", "responses": ["a", "b"], "tie": True}])))


def test_all_problems_are_kept_with_their_lines(write_jsonl: Write) -> None:
    rows = [{"messages": MESSAGES}, {"messages": []}, {"text": ""}, {"messages": MESSAGES[:1]}, {"other": 1}]
    file = write_jsonl(rows)
    with file.open("a") as opened:
        opened.write('{broken\n\n[1]\n{"a": "b\n')
    report = check_source(str(file), task="sft")
    assert (report.rows, report.forms["messages"], report.problems.count) == (5, 1, 7)
    wanted = {
        2: "column 'messages'",
        3: "column 'text' must not be empty",
        4: "must have an assistant turn",
        5: "a row must have",
        6: "a line must be JSON",
        8: "a row must be a JSON object",
        9: "a line must be JSON (Unterminated string starting at column 7): fix the line",
    }
    assert len(report.problems.texts) == len(wanted)
    for line, reason in wanted.items():
        assert any(text.startswith(f"{file}:{line}: ") and reason in text for text in report.problems.texts), line


def test_a_preview_marks_what_is_learned(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    """Not a turn of OpenAI's weight 0, which unlike any other key is no problem."""
    messages = [MESSAGES[0], {**MESSAGES[1], "weight": 0}, *MESSAGES]
    report = check_source(str(write_jsonl([{"messages": messages}] * 3)), tokenizer=tokenizer, previews=2)
    assert len(report.previews) == 2 and not report.problems.count and not report.unrendered
    preview = report.previews[0]
    assert "".join(text for text, _ in preview.spans) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n" * 2
    )
    assert [text for text, learned in preview.spans if learned] == ["hello<|im_end|>"]
    assert preview.learned_tokens == len("hello") + 1


def test_lengths_are_those_before_truncation(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    long = [user("x" * 50), assistant("y")]
    file = write_jsonl([{"messages": MESSAGES}, {"messages": long}])
    report = check_source(str(file), tokenizer=tokenizer, limit=30)
    assert (report.too_long, report.unusable) == (1, 1)  # the answer is beyond the limit
    assert report.lengths[1] - report.lengths[0] == 50 + 1 - len("hi") - len("hello")
    assert check_source(str(file), tokenizer=tokenizer).too_long == 0


def test_what_the_template_drops_is_counted_or_refused(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    """Metadata is counted; a key that may hold text is a problem with file, line and column, and not only a hint."""
    rows = [{"messages": [MESSAGES[0], {**MESSAGES[1], key: "hm"}]} for key in ("id", "reasoning_content", "refusal")]
    file = write_jsonl(rows)
    report = check_source(str(file), tokenizer=tokenizer)
    assert dict(report.unrendered) == {"id": 1}
    assert [text.partition(" of a message")[0] for text in report.problems.texts] == [
        f"{file}:{line}: column 'messages': the chat template does not render the key {key!r}"
        for line, key in ((2, "reasoning_content"), (3, "refusal"))
    ]


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_a_histogram_has_every_row_once(lengths: list[int]) -> None:
    bins = histogram(lengths)
    assert sum(count for _, _, count in bins) == len(lengths) and len(bins) <= 10
    for first, last, count in bins:
        assert count == sum(first <= length <= last for length in lengths)


HALVES = {"a": 1.0, "b": 1.0}


def split(file: Path, *, shares: dict[str, float] = HALVES, by: str = "prompt", seed: int = 0) -> dict[str, list[Row]]:
    """The rows of each part."""
    outputs = {name: file.with_name(f"{name}.jsonl") for name in shares}
    counts = split_rows(str(file), outputs, list(shares.items()), by=by, seed=seed)
    found = {name: rows_of(path) for name, path in outputs.items()}
    assert {name: len(rows) for name, rows in found.items()} == counts
    return found


def test_parts_share_no_prompt_and_lose_no_row(write_jsonl: Write) -> None:
    rows = [{"prompt": f"q{i % 100}", "chosen": f"a{i}", "rejected": "b"} for i in range(300)]
    parts = split(write_jsonl(rows), shares={"train": 0.8, "test": 0.2})
    assert sorted(row["chosen"] for part in parts.values() for row in part) == sorted(row["chosen"] for row in rows)
    train, test = ({row["prompt"] for row in parts[name]} for name in ("train", "test"))
    assert not train & test and 8 <= len(test) <= 32
    order = [int(row["chosen"][1:]) for row in parts["train"]]
    assert order == sorted(order), "the order of the source is kept"


def test_a_row_stays_in_its_part_when_others_come(write_jsonl: Write) -> None:
    rows = [{"prompt": f"q{i}"} for i in range(200)]
    few = split(write_jsonl(rows[::2]))
    many = split(write_jsonl(rows[::-1]))
    for name in "ab":
        assert {row["prompt"] for row in few[name]} <= {row["prompt"] for row in many[name]}
    other = split(write_jsonl(rows), seed=1)
    assert {row["prompt"] for row in other["a"]} != {row["prompt"] for row in many["a"]}


def test_rows_are_split_by_a_column(write_jsonl: Write) -> None:
    rows = [{"text": f"t{i}", "topic": i % 20} for i in range(100)]
    parts = split(write_jsonl(rows), by="topic")
    assert not {row["topic"] for row in parts["a"]} & {row["topic"] for row in parts["b"]}
    with user_error(r"rows.jsonl:1: a row must have colour \(--by\), got columns text, topic"):
        split(write_jsonl(rows), by="colour")


@pytest.mark.parametrize("by", ["prompt", "topic"])
def test_rows_with_images_are_split_where_their_paths_are_read(by: str, write_jsonl: Write, tmp_path: Path) -> None:
    """Rows with one question and the same picture stay together; the parts have the pictures of their rows."""
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(bytes([number]))
    parts = [{"type": "image", "image": "7.png"}, {"type": "text", "text": "q"}]
    rows: list[Row] = [
        {"prompt": "<image>q", "completion": str(i), "images": [f"{i % 8}.png"], "topic": i % 8} for i in range(40)
    ]
    uri = {"prompt": "<image>q", "image": "data:image/png;base64,AA==", "topic": 9}
    file = write_jsonl([*rows, uri, {"messages": [user(parts), assistant("a")], "topic": 7}])
    found = split(file, by=by)
    images = [{str(row.get("images", ["7.png"])) for row in part if "image" not in row} for part in found.values()]
    assert all(images) and not images[0] & images[1] and sum(map(len, found.values())) == 42
    other = tmp_path / "other"
    other.mkdir()
    problem = f"rows.jsonl:1: paths of images must be relative to the folder of the output, '0.png' is not in {other}"
    for copy in (None, b"another picture"):
        if copy:
            (other / "0.png").write_bytes(copy)
        with user_error(problem):
            split_rows(str(file), {name: other / name for name in "ab"}, [("a", 1.0), ("b", 1.0)], by=by, seed=0)
        assert not (other / "a").exists()
        with user_error(problem):
            blend_rows(other / "c.jsonl", [(str(file), 1.0)], rows=None, seed=0)
    only_parts = write_jsonl([{"messages": [user(parts), assistant("a")], "topic": 7}])
    with user_error("'7.png' is not in"):
        split_rows(str(only_parts), {name: other / name for name in "ab"}, [("a", 1.0), ("b", 1.0)], by=by, seed=0)


def test_later_images_are_not_of_the_prompt() -> None:
    image: Row = {"type": "image"}
    turns = [user([image, {"type": "text", "text": "q"}]), assistant("a"), user([image])]
    rows: list[Row] = [{"messages": [*turns, assistant("b")], "images": ["0.png", name]} for name in ("1.png", "2.png")]
    assert prompt_key("f:1", rows[0]) == prompt_key("f:1", rows[1])
    assert prompt_key("f:1", rows[0]) != prompt_key("f:1", rows[0] | {"images": ["2.png", "1.png"]})


def test_an_empty_part_is_refused_and_nothing_is_written(write_jsonl: Write, tmp_path: Path) -> None:
    file = write_jsonl([{"prompt": "q"}])
    with user_error("each part must get a row"):
        split(file)
    assert list(tmp_path.iterdir()) == [file]


def test_one_prompt_has_one_key_in_all_forms() -> None:
    question = [user("q")]
    answer, other = ([assistant(text)] for text in "ab")
    forms: list[Row] = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": question, "completion": answer},
        {"messages": [*question, *answer]},
        {"messages": [*question, *answer, *question, *other]},
        {"chosen": [*question, *answer], "rejected": [*question, *other]},
    ]
    assert len({prompt_key("f:1", row) for row in forms}) == 1
    assert prompt_key("f:1", {"prompt": "p"}) != prompt_key("f:1", forms[0])


def blended(
    folder: Path, shares: list[tuple[str, float]], *, rows: int | None = None, seed: int = 0
) -> tuple[list[Row], dict[str, int]]:
    """The rows of a blend, and how many each source gives."""
    taken = blend_rows(folder / "blend.jsonl", shares, rows=rows, seed=seed)
    return rows_of(folder / "blend.jsonl"), taken


def test_a_blend_has_the_shares_and_no_row_twice(write_jsonl: Write, tmp_path: Path) -> None:
    a = write_jsonl([{"text": f"a{i}"} for i in range(70)], "a.jsonl")
    b = tmp_path / "b.json"
    b.write_text(json.dumps([{"text": f"b{i}"} for i in range(100)]))
    shares = [(str(a), 0.7), (str(b), 0.3)]
    rows, taken = blended(tmp_path, shares)
    assert taken == {str(a): 70, str(b): 30}, "as many as the shares allow"
    found = [row["text"] for row in rows]
    assert len(set(found)) == 100 and sum(text.startswith("a") for text in found) == 70
    assert found != sorted(found) and "b" in "".join(found[:30]), "the sources are mixed"
    assert blended(tmp_path, shares)[0] == rows and blended(tmp_path, shares, seed=1)[0] != rows
    assert blended(tmp_path, shares, rows=10)[1] == {str(a): 7, str(b): 3}


def test_shares_that_are_not_exact_lose_no_row(write_jsonl: Write, tmp_path: Path) -> None:
    """The shares add up to 0.9999999999999999 in floating point, and the last row of the first source was left out."""
    counts = {"a": 7, "b": 2, "c": 1}
    shares = [(str(write_jsonl([{"text": name}] * rows, f"{name}.jsonl")), rows / 10) for name, rows in counts.items()]
    assert [*blended(tmp_path, shares)[1].values()] == [7, 2, 1]


def test_a_blend_repeats_no_row(write_jsonl: Write, tmp_path: Path) -> None:
    shares = [(str(write_jsonl([{"text": name}] * 4, f"{name}.jsonl")), 1.0) for name in "ab"]
    with user_error(r"has 4 of 5: give --rows 8 or lower its share"):
        blended(tmp_path, shares, rows=10)
    with user_error("gives none of 1"):
        blended(tmp_path, shares, rows=1)
    assert not (tmp_path / "blend.jsonl").exists()


@settings(deadline=None, max_examples=25)
@given(counts=st.lists(st.integers(1, 40), min_size=2, max_size=4), weights=st.lists(st.integers(1, 9), min_size=4))
def test_the_largest_blend_always_fits(
    counts: list[int], weights: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("blend")
    shares = []
    for number, count in enumerate(counts):
        file = folder / f"{number}.jsonl"
        file.write_text('{"text": "t"}\n' * count)
        shares.append((str(file), weights[number] / 7))
    try:
        rows, taken = blended(folder, shares)
    except UserError as error:
        assert "gives none" in str(error)  # a share of a few rows
    else:
        assert len(rows) == sum(taken.values())
        assert all(taken[path] <= count for (path, _), count in zip(shares, counts, strict=True))
