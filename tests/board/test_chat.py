"""Chat with saved models, streamed, with scores."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.board.runs.folders import RunFolders
from hybrid_rlhf.board.runs.models import SavedModels
from hybrid_rlhf.board.runs.summary import RunSummaries
from hybrid_rlhf.cli.saved_models.loading import load_engine
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.configs.parsing.building import build_config
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.chat.conversation import completion_text, encode_completion, encode_prompt
from hybrid_rlhf.runtime.command_line import save_config
from tests.support.board import ServedBoard, append_rows, sample_rows, served_board
from tests.support.errors import user_error
from tests.support.steps import write_lines
from tests.support.tiny import save_tiny, tiny_model, tiny_scorer

HELLO = [{"role": "user", "content": "hello"}]
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "output"
    for number in (1, 2):
        save_tiny(folder / f"model_{number}", tiny_model(seed=number))
    save_tiny(folder / "reward", tiny_scorer(0))
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


def test_the_trained_actor_comes_first_with_the_system_prompt_of_its_training(folder: Path, tmp_path: Path) -> None:
    """The chat began with step1_sft, without the system prompt that the actor was trained with."""
    root = tmp_path / "output"
    for number, name in enumerate(("step3_ppo/actor", "step3_ppo/critic", "step1_sft", "step2_reward")):
        shutil.copytree(folder / ("model_1" if number % 2 == 0 else "reward"), root / name)
        os.utime(root / name / "config.json", (1000 + number, 1000 + number))
    save_config(build_config(RLConfig, [Layer({"output_dir": "x"})]), root / "step3_ppo" / "config.yaml")
    system = {"role": "system", "content": "Answer briefly."}
    append_rows(root / "step3_ppo", [{**row, "prompt": [system, *row["prompt"]]} for row in sample_rows(1, 4)])
    folders = RunFolders([root])
    models = SavedModels(folders, RunSummaries(), ["hub/name"])
    assert [(model["name"], model["kind"], model["system"]) for model in models.shown()] == [
        ("step3_ppo/actor", "chat", "Answer briefly."),
        ("step2_reward", "reward", None),
        ("step1_sft", "chat", None),
        ("hub/name", None, None),
    ]
    (run,) = folders.all()
    assert models.path_of(run.id, "chat") == str(root / "step3_ppo/actor")
    append_rows(root / "step3_ppo", sample_rows(2, 4))
    assert models.shown()[0]["system"] is None, "the prompts have different ones"


def test_a_client_names_only_models_of_the_folders_and_of_the_command_line(folder: Path, tmp_path: Path) -> None:
    """Any path and any name of the hub was loaded."""
    path = str(folder / "model_1")
    models = SavedModels(RunFolders([tmp_path]), RunSummaries(), [path])
    assert [model["path"] for model in models.shown()] == [path] and models.path_of(path, "chat") == path
    for other, kind in ((folder / "model_2", "chat"), ("gpt2", "chat"), (folder / "reward", "reward")):
        with user_error("start the board with --models"):
            models.path_of(str(other), kind)


@pytest.mark.slow
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


def test_saved_models_are_compared_on_rows_of_a_file(board: ServedBoard, folder: Path, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"messages": [*HELLO, {"role": "assistant", "content": "hi"}]}])
    models = [str(folder / f"model_{number}") for number in (1, 2)]
    body = {"models": models, "prompts": str(rows), "sampling": SAMPLING}
    pair = board.post("/api/preferences/ask", body).json()
    answers = {event["model"]: "" for event in chat(board, models=models) if "done" in event}
    for event in chat(board, models=models):
        answers[event["model"]] += event.get("delta", "")
    assert pair["prompt"] == HELLO and {pair["left"], pair["right"]} == set(answers.values())
    twice = board.post("/api/preferences/ask", {**body, "models": models[:1] * 2})
    assert twice.status_code == 400 and "choose another" in twice.json()["error"]
    absent = board.post("/api/preferences/ask", {**body, "prompts": "absent.jsonl"})
    assert absent.status_code == 400 and "absent.jsonl" in absent.json()["error"]


def test_another_model_takes_the_place_of_one(board: ServedBoard, folder: Path) -> None:
    path = str(folder / "model_1")
    assert {model["path"] for model in board.get("/api/models")} >= {path}
    assert chat(board, models=[path])[-1] == {"model": 0, "done": True, "score": None}
    again = chat(board, models=[path, path])
    assert {event["model"] for event in again} == {0, 1}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"models": ["no/such model"]}, "no/such model"),
        ({"models": ["MODEL"], "reward": "MODEL"}, "a reward model of /api/models"),
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
