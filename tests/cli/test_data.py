"""`hybrid-rlhf data`: what the subcommands print and write, their exit codes, and that nothing is replaced unasked."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import CommandLine
from tests.support.messages import assistant, user
from tests.support.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.support.vision import picture, vision_folder

Write = Callable[..., Path]
GOOD = {"messages": [user("hi"), assistant("hello\nyou")]}
BAD = {"messages": [user("hi")]}
DIALOGUE = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
Document = Callable[[str], tuple[int, dict[str, Any]]]


@pytest.fixture
def document(cli: CommandLine) -> Document:
    """Exit code and JSON of a line, which is all that it prints on standard output."""

    def found(line: str) -> tuple[int, dict[str, Any]]:
        ended = cli(f"data {line} --json")
        assert ended.out.count("\n") == 1
        return ended.code, ended.result

    return found


def test_check_shows_the_loss_mask_lengths_and_all_problems(
    write_jsonl: Write, model_folder: Path, cli: CommandLine, document: Document
) -> None:
    file = write_jsonl([GOOD, BAD, BAD])
    line = f"check {file} --tokenizer {model_folder}"
    ended = cli(f"data {line}")
    assert ended.code == 1
    lines = ended.out.splitlines()
    assert lines[0] == "3 rows for sft; columns: messages (3)" and lines[1] == "1 row is read as messages"
    shown = lines.index("loss: hello")
    assert lines[shown + 1] == "      you<|im_end|>" and lines[shown - 1].strip() == "<|im_start|>assistant"
    assert [line for line in lines if line.startswith(f"{file}:")][1].startswith(f"{file}:2: ")
    assert lines[-1] == "2 problems"

    code, found = document(line)
    assert (code, found["rows"], found["read_as"], found["problems"]) == (1, 3, {"messages": 1}, 2)
    assert found["tokens"]["histogram"][-1]["rows"] == 1 and len(found["problem_texts"]) == 2
    assert [span["text"] for span in found["previews"][0]["spans"] if span["learned"]] == ["hello\nyou<|im_end|>"]


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_check_says_which_answer_is_which(
    task: str, write_jsonl: Write, model_folder: Path, cli: CommandLine, document: Document
) -> None:
    """Both answers of a pair had one label; a ranking has no two of them."""
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    options = f"--task {task} --tokenizer {model_folder}"
    shown = cli(f"data check {write_jsonl([pair])} {options}").out
    assert "\nchosen: yes<|im_end|>\n" in shown and "\nrejected: no<|im_end|>\n" in shown
    assert ("with loss" in shown) == (task == "preference")
    ranked = {"prompt": "q", "responses": ["a", "b", "c"], "ranks": [1, 3, 2]}
    found = document(f"check {write_jsonl([ranked], 'ranked.jsonl')} {options}")[1]["previews"]
    assert {each["learned_as"] for each in found} == {"loss" if task == "preference" else "compared"}


def test_check_reads_images(
    tmp_path: Path, write_jsonl: Write, cli: CommandLine, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(0, (40, 32)).save(tmp_path / "a.png")
    rows = [{"prompt": "q", "completion": "a", "images": [name]} for name in ("a.png", "b.png")]
    options = f"data check {write_jsonl(rows)} --task sft"
    for tokenizer in ("", f"--tokenizer {vision_folder('qwen2_5_vl')}"):
        shown = cli(f"{options} {tokenizer}").out
        assert ":2: an image must be a file in the folder of its rows" in shown and shown.endswith("1 problem\n")
    assert "<|vision_start|>[image 40x32: " in shown
    assert "tokens of images in 1 row; tokens of images:\n        1 to" in shown
    assert "images need a vision-language model, got " in cli(f"{options} --tokenizer {model_folder}").out
    picture(1).save(tmp_path / "b.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setattr("hybrid_rlhf.models.pretrained.processors.find_spec", lambda name: None)
    for tokenizer in ("", f"--tokenizer {vision_folder('qwen2_5_vl')}"):
        shown = cli(f"{options} {tokenizer}").out
        assert ":2: images need Pillow, which is not installed: run pip install 'hybrid_rlhf[vision]'" in shown
    text = f"data check {write_jsonl([GOOD], 'text.jsonl')} --tokenizer {vision_folder('qwen2_5_vl')}"
    assert cli(text).out.endswith("no problems\n")


def test_completions_with_labels_are_named_by_them(write_jsonl: Write, model_folder: Path, document: Document) -> None:
    rows = [{"prompt": "q", "completion": "yes", "label": label} for label in (True, False)]
    found = document(f"check {write_jsonl(rows)} --tokenizer {model_folder}")[1]["previews"]
    assert [each["learned_as"] for each in found] == ["desirable", "undesirable"]


def test_mixed_kinds_and_ties_are_said(write_jsonl: Write, cli: CommandLine, document: Document) -> None:
    """Neither is a problem, and a step reads such a file without a word."""
    file = write_jsonl([GOOD, {"text": "plain"}, {"prompt": "q", "chosen": "a", "rejected": "b", "tie": True}])
    ended = cli(f"data check {file}")
    assert ended.code == 0 and "note: rows of 2 kinds are mixed" in ended.out
    found = document(f"check {file}")[1]
    assert "1 row with tie true is left out" in ended.out and found["ties"] == 1
    assert found["notes"] == ["rows of 2 kinds are mixed; a step reads each by its columns: messages (1), text (1)"]


def test_a_tokenizer_without_a_chat_template_is_noted(write_jsonl: Write, tmp_path: Path, document: Document) -> None:
    """Training warns of the paragraphs that it then writes; the check showed them without a word."""
    tiny_tokenizer(None).save_pretrained(save_tiny(tmp_path / "model", tiny_model()))
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    for row, notes in ((GOOD, 1), ({"text": "plain"}, 0)):
        found = document(f"check {write_jsonl([row])} --tokenizer {tmp_path}/model")[1]
        assert sum("has no chat template: turns become paragraphs" in note for note in found["notes"]) == notes


def test_duplicates_and_held_out_prompts_are_reported_with_exit_code_1(
    write_jsonl: Write, cli: CommandLine, document: Document
) -> None:
    """Rows six times each were "no problems". Other columns, such as an id, make no row new."""
    other = {"messages": [user("ho"), assistant("x")]}
    file = write_jsonl([{**GOOD, "id": 1}, other, {**GOOD, "id": 2}])
    ended = cli(f"data check {file}")
    assert ended.code == 1 and ended.out.endswith(f"{file}:3 repeats {file}:1\n1 duplicate row\n")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with_tools = {**GOOD, "tools": tools}  # the model reads other tools in its prompt
    clean = write_jsonl([GOOD, other, with_tools], "clean.jsonl")
    held_out = write_jsonl([{"prompt": "new"}, {"prompt": "ho", "completion": "y"}], "held_out.jsonl")
    code, found = document(f"check {clean} --eval_sources {held_out}")
    assert (code, found["problems"], found["duplicates"], found["overlap"]) == (1, 0, 0, 1)
    assert found["overlap_texts"] == [f"{held_out}:2 has the prompt of {clean}:2"]


def test_a_clean_file_has_exit_code_0_and_colours_on_a_terminal(
    write_jsonl: Write, model_folder: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    line = f"data check {write_jsonl([GOOD])}"
    ended = cli(line)
    assert ended.code == 0 and ended.out.endswith("no problems\n") and "--tokenizer MODEL" in ended.out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(f"{line} --tokenizer {model_folder}").out
    assert "\x1b[32mloss: hello" in shown and "0 rows; with \nnothing to learn" in shown


def test_a_conversion_counts_what_it_leaves_out_and_takes_other_names(
    write_jsonl: Write, tmp_path: Path, cli: CommandLine, document: Document
) -> None:
    rows = [{"dialog": [{"who": "C", "value": "q"}, {"who": "gpt", "value": "a"}], "summary": "s"}]
    line = f"convert {write_jsonl(rows)} --output {tmp_path}/out.jsonl --columns '{{conversations: dialog}}'"
    line += " --tags '{from: who, human: C}'"
    assert "left out, as sharegpt has no such columns: summary (1); rename" in cli(f"data {line}").out
    code, found = document(f"{line} --overwrite true")
    assert (code, found["written"], found["unread_columns"]) == (0, 1, {"summary": 1})


def test_a_bad_row_fails_a_conversion_unless_it_is_skipped(
    write_jsonl: Write, tmp_path: Path, cli: CommandLine, document: Document
) -> None:
    file, output = write_jsonl([DIALOGUE, {"chosen": "b", "rejected": "c"}]), tmp_path / "new" / "out.jsonl"
    line = f"convert {file} --output {output}"
    code, out, _ = cli(f"data {line}")
    assert code == 1 and out.startswith(f"{file}:2: column 'chosen' must begin with") and "nothing is written" in out
    assert not output.exists()
    code, found = document(f"{line} --skip_bad true")
    assert (code, found["rows"], found["written"], found["problems"], found["format"]) == (0, 2, 1, 1, "hh")
    assert document(f"check {output}")[1]["task"] == "preference"


def test_parts_of_compressed_files_and_patterns_have_plain_names(
    write_jsonl: Write, tmp_path: Path, document: Document
) -> None:
    file = write_jsonl([{"prompt": f"q{i}"} for i in range(40)])
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    for source, name in (("packed.jsonl.gz", "packed.a.jsonl"), ("r*s.jsonl", "rs.a.jsonl")):
        code, found = document(f"split '{tmp_path}/{source}' --parts a=1,b=1 --output_dir {tmp_path}/parts")
        assert (code, Path(found["parts"]["a"]["path"]).name) == (0, name)


def test_split_and_blend(write_jsonl: Write, tmp_path: Path, cli: CommandLine, document: Document) -> None:
    file = write_jsonl([{"prompt": f"q{i}"} for i in range(100)])
    code, found = document(f"split {file} --parts train=0.9,test=0.1 --seed 3")
    train, test = (found["parts"][name] for name in ("train", "test"))
    assert code == 0 and train["rows"] + test["rows"] == 100
    assert train["path"] == str(tmp_path / "rows.train.jsonl") and Path(train["path"]).is_file()
    output = tmp_path / "both.jsonl"
    line = f"blend {train['path']}=0.5 {test['path']}=0.5 --rows 6 --output {output}"
    code, found = document(line)
    assert (code, found["rows"], set(found["sources"].values())) == (0, 6, {3})
    assert cli.refused(f"data {line}") == (
        f"error: --output must be a new file, {output} exists: choose another, or give --overwrite\n"
    )
    assert cli(f"data {line} --overwrite true").code == 0
    assert "each part must get a row" in cli.refused(
        f"data split {file} --parts a=1,b=1e-9 --output_dir {tmp_path}/new"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chek f", "unknown command 'chek': the nearest is check"),
        ("check", "a data source must be named"),
        ("check no.jsonl", "no.jsonl does not exist"),
        ("convert f.jsonl", "--output must name a file"),
        ("convert f.jsonl --output f.csv", "--output is written as JSONL, got f.csv: give a name that ends in .jsonl"),
        ("split f.jsonl --parts train", "parts must be NAME=SHARE, comma-separated, for example train=0.9,test=0.1"),
        ("split f.jsonl --parts train=1", "parts must name two parts or more"),
        ("split f.jsonl --parts a=1,a=2", "a part is named once"),
        ("split f.jsonl --parts a/b=1,c=2", "a part's name has letters"),
        ("blend --output o", "sources must name data"),
        ("blend a.jsonl=0 --output o", "sources must be SOURCE=SHARE"),
        ("blend a.jsonl=1 a.jsonl=1 --output o", "a source is given once"),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_code_2(
    line: str, message: str, cli: CommandLine, document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli.refused(f"data {line}")
    code, found = document(line)
    assert code == 2 and message in found["error"] and set(found) == {"error"}
