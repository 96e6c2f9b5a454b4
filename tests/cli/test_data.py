"""`hybrid-rlhf data`: what the subcommands print and write, their exit codes, and that nothing is replaced unasked."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.cli.main import main

Write = Callable[..., Path]
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello\nyou"}]}
BAD = {"messages": [{"role": "user", "content": "hi"}]}
DIALOGUE = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}


def called(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a line."""
    code = 0
    try:
        main(["data", *words])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def document(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a line, which is all that it prints on standard output."""
    code, out, _ = called([*words, "--json"], capsys)
    return code, json.loads(out)


def test_check_shows_the_loss_mask_lengths_and_all_problems(
    write_jsonl: Write, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_jsonl([GOOD, BAD, BAD]))
    words = ["check", file, "--tokenizer", str(model_folder)]
    code, out, _ = called(words, capsys)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "3 rows for sft; columns: messages (3)" and lines[1] == "1 row is read as messages"
    shown = lines.index("loss: hello")
    assert lines[shown + 1] == "      you<|im_end|>" and lines[shown - 1].strip() == "<|im_start|>assistant"
    assert [line for line in lines if line.startswith(f"{file}:")][1].startswith(f"{file}:2: ")
    assert lines[-1] == "2 problems"

    code, found = document(words, capsys)
    assert (code, found["rows"], found["read_as"], found["problems"]) == (1, 3, {"messages": 1}, 2)
    assert found["tokens"]["histogram"][-1]["rows"] == 1 and len(found["problem_texts"]) == 2
    assert [span["text"] for span in found["previews"][0]["spans"] if span["learned"]] == ["hello\nyou<|im_end|>"]


def test_duplicates_and_held_out_prompts_are_reported_with_exit_code_1(
    write_jsonl: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows six times each were "no problems". Other columns, such as an id, make no row new."""
    other = {"messages": [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "x"}]}
    file = write_jsonl([{**GOOD, "id": 1}, other, {**GOOD, "id": 2}])
    code, out, _ = called(["check", str(file)], capsys)
    assert code == 1 and out.endswith(f"{file}:3 repeats {file}:1\n1 duplicate row\n")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with_tools = {**GOOD, "tools": tools}  # the model reads other tools in its prompt
    clean = write_jsonl([GOOD, other, with_tools], "clean.jsonl")
    held_out = write_jsonl([{"prompt": "new"}, {"prompt": "ho", "completion": "y"}], "held_out.jsonl")
    code, found = document(["check", str(clean), "--eval_sources", str(held_out)], capsys)
    assert (code, found["problems"], found["duplicates"], found["overlap"]) == (1, 0, 0, 1)
    assert found["overlap_texts"] == [f"{held_out}:2 has the prompt of {clean}:2"]


def test_a_clean_file_has_exit_code_0(write_jsonl: Write, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(["check", str(write_jsonl([GOOD]))], capsys)
    assert code == 0 and out.endswith("no problems\n") and "--tokenizer MODEL" in out


def test_check_is_in_colour_on_a_terminal(
    write_jsonl: Write, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = called(["check", str(write_jsonl([GOOD])), "--tokenizer", str(model_folder)], capsys)
    assert "\x1b[32mloss: hello" in out


def test_convert_then_check(write_jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = str(write_jsonl([DIALOGUE])), tmp_path / "new" / "out.jsonl"
    code, found = document(["check", file], capsys)
    assert code == 2 and "got the format hh: convert it" in found["error"]
    code, found = document(["convert", file, "--output", str(output)], capsys)
    assert (code, found["format"], found["written"], found["output"]) == (0, "hh", 1, str(output))
    code, found = document(["check", str(output)], capsys)
    assert (code, found["task"]) == (0, "preference")


def test_a_bad_row_fails_a_conversion_unless_it_is_skipped(
    write_jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_jsonl([DIALOGUE, {"chosen": "b", "rejected": "c"}]))
    words = ["convert", file, "--output", str(tmp_path / "out.jsonl")]
    code, out, _ = called(words, capsys)
    assert code == 1 and out.startswith(f"{file}:2: column 'chosen' must begin with") and "nothing is written" in out
    assert not (tmp_path / "out.jsonl").exists()
    code, found = document([*words, "--skip_bad", "true"], capsys)
    assert (code, found["rows"], found["written"], found["problems"]) == (0, 2, 1, 1)


def test_parts_of_compressed_files_and_patterns_have_plain_names(
    write_jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl([{"prompt": f"q{i}"} for i in range(40)])
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    for source, name in ((packed, "packed.a.jsonl"), (tmp_path / "r*s.jsonl", "rs.a.jsonl")):
        words = ["split", str(source), "--parts", "a=1,b=1", "--output_dir", str(tmp_path / "parts")]
        code, found = document(words, capsys)
        assert (code, Path(found["parts"]["a"]["path"]).name) == (0, name)


def test_split_and_blend(write_jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_jsonl([{"prompt": f"q{i}"} for i in range(100)])
    code, found = document(["split", str(file), "--parts", "train=0.9,test=0.1", "--seed", "3"], capsys)
    train, test = (found["parts"][name] for name in ("train", "test"))
    assert code == 0 and train["rows"] + test["rows"] == 100
    assert train["path"] == str(tmp_path / "rows.train.jsonl") and Path(train["path"]).is_file()
    output = str(tmp_path / "both.jsonl")
    words = ["blend", f"{train['path']}=0.5", f"{test['path']}=0.5", "--rows", "6", "--output", output]
    code, found = document(words, capsys)
    assert (code, found["rows"], set(found["sources"].values())) == (0, 6, {3})
    code, out, err = called(words, capsys)
    assert (code, out) == (2, "") and err == (
        f"error: --output must be a new file, {output} exists: choose another, or give --overwrite\n"
    )
    assert called([*words, "--overwrite", "true"], capsys)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chek f", "unknown command 'chek': the nearest is check"),
        ("check", "a data source must be named"),
        ("check no.jsonl", "no.jsonl does not exist"),
        ("convert f.jsonl", "--output must name a file"),
        ("convert f.jsonl --format csv --output o", "format must be one of auto, hh"),
        ("split f.jsonl --parts train", "parts must be NAME=SHARE, comma-separated, for example train=0.9,test=0.1"),
        ("split f.jsonl --parts train=1", "parts must name two parts or more"),
        ("split f.jsonl --parts a=1,a=2", "a part is named once"),
        ("split f.jsonl --parts a/b=1,c=2", "a part's name has letters"),
        ("blend --output o", "sources must name data"),
        ("blend a.jsonl=x --output o", "sources must be SOURCE=SHARE"),
        ("blend a.jsonl=0 --output o", "give a share above 0"),
        ("blend a.jsonl=1 a.jsonl=1 --output o", "a source is given once"),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = called(words.split(), capsys)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    code, found = document(words.split(), capsys)
    assert code == 2 and message in found["error"] and set(found) == {"error"}
