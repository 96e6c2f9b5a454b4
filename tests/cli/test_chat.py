"""Chat and generate as a user drives them."""

from __future__ import annotations

import errno
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoModelForCausalLM

from hybrid_rlhf.cli.saved_models import chat
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.chat import ChatSession
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from tests.generation.references import hugging_face_greedy
from tests.support.commands import CommandLine
from tests.support.messages import assistant, user
from tests.support.steps import read_rows
from tests.support.tiny import CHATML, tiny_model, tiny_tokenizer

Drive = Callable[..., tuple[ChatSession, str]]


def conversation(template: str = CHATML) -> ChatSession:
    tokenizer = tiny_tokenizer(template)
    engine = GenerationEngine.from_model(tiny_model())
    return ChatSession(engine, tokenizer, lambda messages: (encode_prompt(messages, tokenizer), None))


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Drive:
    """Types lines, then Ctrl-D; what appears."""

    def typed(*lines: str, template: str = CHATML) -> tuple[ChatSession, str]:
        monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError]))
        talk = conversation(template)
        sampling = SamplingParams(max_new_tokens=5, seed=0)
        chat.Session(talk, sampling, view=chat.PlainView(), load=pytest.fail, load_scorer=pytest.fail).run()
        return talk, capsys.readouterr().out

    return typed


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with one prompt."""
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "hi"}\n')
    return file


def test_turns_are_remembered_cleared_and_saved(drive: Drive, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    saves = [f"/save {name}" for name in (file, file, "x" * 300)]
    talk, out = drive("hi", "", "again", *saves, "/quit", "never said")
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in talk.messages][::2] == ["hi", "again"]
    assert json.loads(file.read_text())["messages"] == talk.messages
    assert out.count("model> ") == 2 and "exists: choose another name" in out
    assert "(File name too long): choose another folder" in out
    talk, out = drive("hi", "/clear")
    assert talk.messages == [] and "cleared" in out


def test_a_reward_model_does_not_answer(paths: dict[str, str], cli: CommandLine) -> None:
    assert cli.refused(f"chat {paths['reward']}") == (
        f"error: a model that answers must have a language model head, {paths['reward']} is a reward model: give a "
        "causal LM\n"
    )


def test_system_and_set(drive: Drive) -> None:
    wrong = ("/set top_p x", "/set nothing 1", "/set top_p 7", "/what")
    talk, out = drive("/system be brief", "/set", "/set temperature 0", *wrong, "/help")
    assert talk.system == "be brief"
    assert "system prompt set, conversation cleared" in out
    assert talk.transcript() == [{"role": "system", "content": "be brief"}]
    for text in (
        "max_new_tokens 5",
        "temperature 0.0",
        "top_p must be float, got x",
        "got 'nothing'",
        "top_p must be in (0, 1], got 7",
        "unknown command /what",
        "/quit ",
    ):
        assert text in out, text


def test_what_cannot_be_answered_is_not_said_and_the_talk_goes_on(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond the model's positions, or against its template."""
    monkeypatch.setattr(GenerationEngine, "max_positions", 256)
    talk, out = drive("hi", "long " * 60, "again")
    assert re.search(r"\nerror: the model has 256 positions, .* \d+ tokens: write less, or /clear\n", out)
    assert [m["content"] for m in talk.messages[::2]] == ["hi", "again"]
    template = "{{ raise_exception('not that') if messages[-1]['content'] == 'that' }}{{ messages[-1]['content'] }}"
    talk, out = drive("that", "hi", template=template)
    assert out.count("error: the chat template must accept") == 1
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]


def greedily(folder: Path, text: str) -> str:
    """What Hugging Face's generate answers in four tokens at most."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    tokens = hugging_face_greedy(model, encode_prompt([user(text)], tokenizer), 4, stop=[tokenizer.eos_token_id])
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_generate_completes_a_prompt(model_folder: Path, cli: CommandLine) -> None:
    line = f"generate {model_folder} --prompt 'say 1' --sampling.temperature 0 --device cpu --sampling.max_new_tokens 4"
    document = cli(f"{line} --json").result
    assert document["prompt"] == "say 1" and len(document["completions"]) == 1
    assert cli(line).out == document["completions"][0]["text"] + "\n"
    assert "takes --prompt or --input, got both" in cli.refused(f"{line} --input rows.jsonl")


def test_generate_completes_a_file(model_folder: Path, tmp_path: Path, cli: CommandLine) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out" / "answers.jsonl"
    source.write_text('{"prompt": "hi", "id": 7}\n{"messages": [{"role": "user", "content": "yo"}]}\n')
    line = f"generate {model_folder} --input {source} --output {output}"
    line += " --sampling.n 2 --sampling.max_new_tokens 4 --sampling.temperature 0"
    assert "2 prompts, " in cli(line).out
    rows = read_rows(output)
    assert rows[0]["id"] == 7 and [len(row["completions"]) for row in rows] == [2, 2]
    first, second = rows[0]["completions"]
    assert first == second and first["finish_reason"] in ("stop", "length") and first["logprob"] < 0
    assert [row["completions"][0]["text"] for row in rows] == [greedily(model_folder, text) for text in ("hi", "yo")]
    assert "--output must be a new file" in (err := cli.refused(line)) and "give --overwrite\n" in err
    found = cli(f"{line} --overwrite --json").result
    assert (found["output"], found["prompts"]) == (str(output), 2) and found["tokens"] > 0


def test_with_json_a_chat_is_events_and_ends_with_the_messages(
    model_folder: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n/set top_p 7\n{'long ' * 60}\n"))
    monkeypatch.setattr(GenerationEngine, "max_positions", 256)
    ended = cli(f"chat {model_folder} --sampling.max_new_tokens 4 --sampling.temperature 0 --json")
    _, *pieces, reply, notice, refusal, result = map(json.loads, ended.out.splitlines())
    said = "".join(piece["text"] for piece in pieces).strip()
    assert reply == {"event": "reply", "model": "model", "text": said, "stopped": False}
    assert "error: top_p must be in" in notice["text"] and "256 positions" in refusal["text"]
    assert result == {"messages": [user("hi"), assistant(greedily(model_folder, "hi").strip())]}


@pytest.mark.parametrize("json_option", ["--json", ""])
def test_a_line_that_is_no_text_is_refused_and_the_talk_goes_on(
    model_folder: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, json_option: str
) -> None:
    said = io.BytesIO(b"\xff\xfe\n/system \xff\nhi\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(said, encoding="utf-8"))
    out = cli(f"chat {model_folder} --sampling.max_new_tokens 2 {json_option}").out
    assert out.count("a line must be text that UTF-8 can write, got '") == 2
    if json_option:
        *events, result = map(json.loads, out.splitlines())
        assert [event["event"] for event in events if "model" in event][:2] == ["refusal"] * 2
        assert [message["role"] for message in result["messages"]] == ["user", "assistant"]


def test_a_disk_that_fails_leaves_nothing_beside(
    model_folder: Path, source: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = source.with_name("answers.jsonl")
    full = OSError(errno.ENOSPC, "No space left on device", str(output))
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    assert cli(f"generate {model_folder} --input {source} --output {output} --sampling.max_new_tokens 2").code
    assert [*source.parent.iterdir()] == [source]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("absent/folder/x --input {input} --output b", "absent/folder/x is none: check the path"),
        ("{model} --input absent.jsonl --output b", "absent.jsonl does not exist"),
        (
            "{model} --input {input} --output {input}.out --device cpu --dtype float16",
            "error: dtype float16 needs a GPU, this is a CPU: set --dtype float32 or bfloat16",
        ),
    ],
)
def test_mistakes_are_one_line(line: str, rule: str, model_folder: Path, source: Path, cli: CommandLine) -> None:
    assert rule in cli.refused(f"generate {line.format(model=model_folder, input=source)}")
