"""Programs that send images: what is sampled and learned is of the picture that a request had."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.data.images.reading import png
from hybrid_rlhf.rl.images import IMAGES
from hybrid_rlhf.rl_step import run_rl
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.errors import user_error
from tests.support.messages import assistant, user
from tests.support.programs import client_of
from tests.support.steps import run_outputs, words, write_lines
from tests.support.tiny import save_tiny, tiny_model
from tests.support.vision import build_vision, picture, save_vision

SIZE, SHOWN_SIZE = (24, 32), (64, 48)
REFUSED: list[str] = []
"""What was answered to faulty requests."""


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def shown(number: int, size: tuple[int, int] = SHOWN_SIZE) -> dict[str, Any]:
    return sent(png(picture(number, size)))


def sent(content: bytes) -> dict[str, Any]:
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def look(base_url: str, api_key: str, model: str, row: Mapping[str, Any]) -> float:
    """Asks about the picture of the row, or sends its own, then shows another, and asks once more."""
    own = [user([text("what is "), shown(row["number"] % 4, SIZE)])]
    messages: list[Any] = own if row["sends"] else list(row["prompt"])
    assert [*messages[0]["content"]] == own[0]["content"]
    later = [{"role": "tool", "tool_call_id": "1", "content": [text("closer: "), shown(7)]}, user("sure?")]
    with client_of(base_url, api_key) as client:
        for turn in (*later, None):
            answer = client.chat.completions.create(model=model, messages=messages)
            messages = [*messages, assistant(answer.choices[0].message.content), turn]
    return float(sum(map(ord, messages[1]["content"])) % 32)


class Looks:
    """The same of a class."""

    shows_images = True

    def reset(self, row: Mapping[str, Any]) -> None:
        self._turn, self._score = 0, 0.0

    def step(self, completion: str) -> tuple[Any, float, bool]:
        self._turn += 1
        self._score = self._score or float(sum(map(ord, completion)) % 32)
        closer = [text("closer: "), {"type": "image", "image": png(picture(7, SHOWN_SIZE))}]
        return closer, self._score * (self._turn == 2), self._turn == 2


def compare(base_url: str, api_key: str, model: str, row: Mapping[str, Any]) -> float:
    """Repeats an answer after the same picture, after another one of its size, and with the tokens of the first."""
    more = {"return_token_ids": True, "prompt_logprobs": 0}
    with client_of(base_url, api_key) as client:

        def ask(messages: list[Any], **body: Any) -> Any:
            return client.chat.completions.create(model=model, messages=messages, extra_body=body)

        first, other = ([user([shown(number), text("what?")])] for number in (1, 2))
        whole = ask(first, **more)
        (answer,) = whole.choices
        said = answer.message.content
        for begin in (first, other):
            ask([*begin, assistant(said), user("why?")])
        ask(first, prompt_token_ids=[*whole.prompt_token_ids, *answer.token_ids, 90])
        assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids)
    return float(sum(map(ord, said)) % 32)


def send_faulty(base_url: str, api_key: str, model: str, row: Mapping[str, Any]) -> float:
    """Requests that no picture or no vocabulary answers, and one of text."""
    pad = {"prompt_token_ids": [90, 5, 91]}
    requests: list[tuple[Any, Any]] = [
        ([user([sent(png(picture(1))[:100]), text("q")])], {}),
        ([user([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}])], {}),
        ([user([shown(1), text("<|image_pad|>")])], {}),
        ([user("a <|image_pad|> b")], {}),
        ([user("q")], pad),
        ([user("q")], {"prompt_token_ids": [10**6]}),
    ]
    with client_of(base_url, api_key) as client:
        for messages, more in requests:
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model=model, messages=messages, extra_body=more)
            REFUSED.append(str(refused.value.body["message"]))  # type: ignore[index]
        client.chat.completions.create(model=model, messages=requests[-1][0])
    return 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    save_vision(folder / "model", "qwen2_5_vl", build_vision("qwen2_5_vl", spread=2.0))
    for number in range(4):
        (folder / f"{number}.png").write_bytes(png(picture(number, SIZE)))
    given = ({"prompt": "what is <image>", "images": [f"{row % 4}.png"]} for row in range(8))
    write_lines(folder / "given.jsonl", (row | {"number": n, "sends": False} for n, row in enumerate(given)))
    write_lines(folder / "sent.jsonl", ({"prompt": "no", "number": row, "sends": True} for row in range(8)))
    return folder


def play(output: Path, folder: Path, rows: str, *more: str) -> dict[str, Any]:
    line = f"--model.path {folder}/model --data.sources {folder}/{rows}.jsonl --output_dir {output}".split()
    line += f"--data.cache_dir {folder}/cache --data.eval_fraction 0 --logging.sinks [] --train.max_steps 2".split()
    line += "--rollout.prompts_per_step 4 --rollout.sampling.max_new_tokens 200 --rollout.max_prompt_tokens 128".split()
    line += "--environment.max_turn_tokens 6 --actor.optimizer.lr 1e-3 --model.dtype float32".split()
    line += "--algorithm grpo --rollout.sampling.n 2 --logging.samples_every 1 --environment.max_turns 8".split()
    run_rl(parse_config(RLConfig, [*line, *words(*more)]))
    found = run_outputs(output)
    return found | {"metrics": [step for step in found["metrics"] if step["step"]]}


def require_own(metrics: list[dict[str, float]], *, turns: int, sequences: int) -> None:
    """The log-probs of the sampler are those of the trainer, and something is learned."""
    for step in metrics:
        assert step["rollout/logprob_abs_diff_mean"] < 1e-5 and step["actor/grad_norm"] > 1e-3
        assert (step["environment/turns"], step["environment/sequences"]) == (turns, sequences)


def test_a_picture_that_is_sent_is_that_of_the_row(folder: Path, tmp_path: Path) -> None:
    """The same tokens are sampled and learned, with a picture in a later turn. The run keeps what no row has."""
    program = "--environment.program", f"{__name__}:look"
    given = play(tmp_path / "given", folder, "given", *program)
    sent = play(tmp_path / "sent", folder, "sent", *program, "--environment.shows_images true")
    require_own(sent["metrics"], turns=3, sequences=1)
    for step, expected in zip(sent["metrics"], given["metrics"], strict=True):
        for name in ("loss/policy", "objective/scores", "actor/grad_norm", "completions/mean_length"):
            assert step[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    rows = [[json.loads(row) for row in found["samples"]] for found in (sent, given)]
    assert [row["completion"] for row in rows[0]] == [row["completion"] for row in rows[1]]
    for own, of_row in zip(*rows, strict=True):
        digests = [image["digest"] for image in own["shown_images"]]
        assert digests == [image["digest"] for image in (*of_row["images"], *of_row["shown_images"])]
        assert len(digests) == 2
    files = [[*(tmp_path / name / IMAGES).glob("*/*")] for name in ("sent", "given")]
    assert [*map(len, files)] == [5, 1]


def test_a_program_learns_from_the_tokens_of_a_class_that_shows_the_same(folder: Path, tmp_path: Path) -> None:
    """Those of the first two turns."""
    found = play(tmp_path / "program", folder, "given", "--environment.program", f"{__name__}:look")
    expected = play(tmp_path / "class", folder, "given", "--environment.path", f"{__name__}:Looks")
    texts = [[json.loads(row)["completion"] for row in of["samples"][:8]] for of in (found, expected)]
    assert all(mine.startswith(other) for mine, other in zip(*texts, strict=True))


def test_another_picture_is_another_sequence(folder: Path, tmp_path: Path) -> None:
    """Though its tokens are the same: with the wrong one the log-probs of sampler and trainer differ."""
    more = "--environment.shows_images true", "--environment.program", f"{__name__}:compare"
    found = play(tmp_path, folder, "sent", *more)
    require_own(found["metrics"], turns=4, sequences=3)


def test_what_is_no_picture_is_refused_and_others_go_on(folder: Path, tmp_path: Path) -> None:
    REFUSED.clear()
    more = "--train.max_steps 1", "--environment.program", f"{__name__}:send_faulty", "--environment.threads 1"
    play(tmp_path / "reads", folder, "sent", *more, "--environment.shows_images true")
    rules = [
        "messages is refused: an image must be a complete PNG, JPEG, WebP, GIF or BMP file, image 1 is damaged",
        "messages.0.content.0.image_url.url must be a data URI, got 'http://127.0.0.1/cat.png'",
        "messages is refused: a text must not have <|image_pad|>, which stands for an image",
        "messages is refused: a text must not have <|image_pad|>, which stands for an image",
        "prompt_token_ids is refused: a text must not have <|image_pad|>, which stands for an image",
        "prompt_token_ids must be token ids in 0..",
    ]
    for found, rule in zip(REFUSED[:6], rules, strict=True):
        assert found.startswith(rule), found
    REFUSED.clear()
    play(tmp_path / "text", folder, "sent", *more)
    assert REFUSED[0].startswith(
        "messages.0.content.0 must be text, as no images are read without environment.shows_images, got image_url"
    )
    save_tiny(tmp_path / "tiny", tiny_model())
    with user_error("environment.shows_images: images need a vision-language model"):
        play(tmp_path / "no", folder, "sent", f"--model.path {tmp_path}/tiny", *more, "--environment.shows_images true")
    with user_error("environment.path: the class has an attribute of this name"):
        play(tmp_path / "no", folder, "sent", f"--environment.path {__name__}:Looks --environment.shows_images true")
