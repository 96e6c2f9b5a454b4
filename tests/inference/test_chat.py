"""Chat and generate as a user drives them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hybrid_rlhf.configs.inference import SamplingConfig
from hybrid_rlhf.data.chat import encode_prompt
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.chat import Conversation
from inference import chat, generate
from tests.tiny import tiny_model, tiny_tokenizer


def conversation(system: str | None = None) -> Conversation:
    tokenizer = tiny_tokenizer()
    return Conversation(GenerationEngine(tiny_model()), tokenizer, lambda m: encode_prompt(m, tokenizer), system=system)


def drive(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Conversation, str]:
    """Type lines, then Ctrl-D; what appears."""
    pending = iter(lines)

    def typed(prompt: str) -> str:
        line = next(pending, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    talk = conversation()
    chat.Session(talk, SamplingConfig(max_new_tokens=5, seed=0)).run()
    return talk, capsys.readouterr().out


def test_turns_are_remembered_cleared_and_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    talk, out = drive(["hi", "", "again", f"/save {file}", f"/save {file}", "/quit", "never said"], monkeypatch, capsys)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in talk.messages][::2] == ["hi", "again"]
    assert json.loads(file.read_text())["messages"] == talk.messages
    assert out.count("model> ") == 2 and "exists: choose another name" in out
    talk, out = drive(["hi", "/clear"], monkeypatch, capsys)
    assert talk.messages == [] and "cleared" in out


def test_system_and_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk, out = drive(
        ["/system be brief", "/set", "/set temperature 0", "/set top_p x", "/set nothing 1", "/set top_p 7", "/what",
         "/help"],
        monkeypatch, capsys,
    )  # fmt: skip
    assert talk.system == "be brief"
    assert talk.transcript() == [{"role": "system", "content": "be brief"}]
    for text in (
        "max_new_tokens 5",
        "temperature 0.0",
        "takes a number, got 'x'",
        "got 'nothing'",
        "top_p must be in (0, 1], got 7.0",
        "no command /what",
        "/quit ",
    ):
        assert text in out, text


def test_the_pieces_of_an_answer_are_the_answer() -> None:
    talk = conversation()
    pieces = list(talk.say("hi", SamplingParams(max_new_tokens=20, seed=1)))
    assert len(pieces) > 3
    assert "".join(pieces).strip().rstrip("\ufffd") == talk.messages[-1]["content"].rstrip("\ufffd").strip()


def test_an_interrupted_answer_keeps_what_was_said() -> None:
    talk = conversation()
    answer = talk.say("hi", SamplingParams(max_new_tokens=20, seed=1))
    next(answer)
    answer.close()
    assert talk.messages[-1]["role"] == "assistant"


def test_generate_completes_a_file(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out" / "answers.jsonl"
    source.write_text('{"prompt": "hi", "id": 7}\n{"messages": [{"role": "user", "content": "yo"}]}\n')
    line = [
        str(model_folder),
        "--input",
        str(source),
        "--output",
        str(output),
        "--n",
        "2",
        "--sampling.max_new_tokens",
        "4",
        "--sampling.temperature",
        "0",
    ]
    generate.main(line)
    rows = [json.loads(text) for text in output.read_text().splitlines()]
    assert rows[0]["id"] == 7 and [len(row["completions"]) for row in rows] == [2, 2]
    first, second = rows[0]["completions"]
    assert first == second and first["finish_reason"] in ("stop", "length") and first["logprob"] < 0
    assert "2 prompts, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ([], "a model must be named"),
        (["absent/folder/x", "--input", "INPUT", "--output", "b"], "absent/folder/x is none: check the path"),
        (["MODEL", "--input", "absent.jsonl", "--output", "b"], "absent.jsonl does not exist"),
        (["MODEL"], "--input and --output must name files"),
    ],
)
def test_mistakes_are_one_line(
    line: list[str], rule: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n')
    places = {"MODEL": str(model_folder), "INPUT": str(tmp_path / "in.jsonl")}
    with pytest.raises(SystemExit) as stopped:
        generate.main([places.get(word, word) for word in line])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert re.search(rule, err) and err.count("\n") == 1
