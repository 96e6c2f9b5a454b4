"""Chat with saved models, streamed, with scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.cli.saved_models.loading import load_engine
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.chat.conversation import completion_text, encode_completion, encode_prompt
from tests.support.board import ServedBoard, served_board
from tests.support.tiny import tiny_config, tiny_model, tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "output"
    for number in (1, 2):
        tiny_model(seed=number).save_pretrained(folder / f"model_{number}")
        tiny_tokenizer().save_pretrained(folder / f"model_{number}")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    return folder


@pytest.fixture(scope="module")
def board(folder: Path) -> Iterator[ServedBoard]:
    with served_board(folder) as served:
        yield served


def chat(board: ServedBoard, **body: Any) -> list[dict[str, Any]]:
    answer = board.post("/api/chat", {"messages": HELLO, "sampling": SAMPLING, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]


def test_models_below_the_folders_are_listed(board: ServedBoard, folder: Path) -> None:
    listed = board.get("/api/models")
    assert listed == [{"path": str(folder / name), "name": name} for name in ("model_1", "model_2")]


def test_two_models_answer_as_their_engines_do_with_scores(board: ServedBoard, folder: Path) -> None:
    paths, reward = [str(folder / f"model_{number}") for number in (1, 2)], str(folder / "reward")
    events = chat(board, models=paths, reward=reward)
    scorer = AutoModelForSequenceClassification.from_pretrained(reward).eval()
    for number, path in enumerate(paths):
        engine, tokenizer = load_engine(InferenceConfig(path=path))
        ((completion,),) = engine.generate([encode_prompt(HELLO, tokenizer)], SamplingParams(**SAMPLING))
        text = completion_text(completion.token_ids, tokenizer)
        mine = [event for event in events if event["model"] == number]
        assert "".join(event.get("delta", "") for event in mine) == text
        assert mine[-1]["done"] is True and sum("done" in event for event in mine) == 1
        turn = [{"role": "assistant", "content": text}]
        ids = torch.tensor([encode_completion(HELLO, turn, tokenizer).input_ids])
        with torch.no_grad():
            hidden = scorer.model(ids).last_hidden_state
            assert mine[-1]["score"] == pytest.approx(float(scorer.score(hidden)[0, -1, 0]), abs=1e-4)


def test_another_model_takes_the_place_of_one(board: ServedBoard, folder: Path) -> None:
    (path,) = {str(folder / "model_1")}
    assert chat(board, models=[path])[-1] == {"model": 0, "done": True, "score": None}
    again = chat(board, models=[path, path])
    assert {event["model"] for event in again} == {0, 1}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"models": ["no/such model"]}, "no/such model"),
        ({"models": ["MODEL"], "reward": "MODEL"}, "score head"),
        ({"models": ["MODEL"], "messages": [{"role": "user"}]}, "messages.0"),
        ({"models": ["MODEL"], "messages": [{"role": "user", "content": "long " * 2000}]}, "tokens"),
        ({"models": ["MODEL"], "sampling": {"temperature": -1.0}}, "temperature"),
        ({"models": []}, "models"),
    ],
)
def test_a_wrong_chat_is_one_line(board: ServedBoard, folder: Path, body: dict[str, Any], word: str) -> None:
    text = json.dumps({"messages": HELLO, "sampling": SAMPLING, **body}).replace("MODEL", str(folder / "model_1"))
    answer = board.post("/api/chat", json.loads(text))
    assert answer.status_code == 400 and word in answer.json()["error"], answer.text
