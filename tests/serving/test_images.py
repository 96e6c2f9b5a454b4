"""Requests with images, in OpenAI's form, against transformers' `generate`."""

from __future__ import annotations

import base64
import gc
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from hybrid_rlhf.cli.saved_models.loading import find_model, load_scorer
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.data.images.reading import png
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.image_loading import SavedImageReader
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.models.structure import text_model_of
from hybrid_rlhf.models.vision import ImageEncoder
from hybrid_rlhf.serving.app import Access, build_scoring_app
from hybrid_rlhf.serving.scores import ScoreService
from hybrid_rlhf.serving.web import served_in_background
from tests.support.marks import faults
from tests.support.messages import assistant, user
from tests.support.services import Server, open_service, served_service
from tests.support.serving import server_process
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.vision import (
    FAMILIES,
    build_vision,
    chat_ids,
    model_arguments,
    picture,
    score_of,
    vision_folder,
    vision_processor,
    vision_scorer,
    vision_tokenizer,
)

Content = Sequence[str | Image.Image]
DEFAULT = ("qwen3_vl", "idefics3")
NEW_TOKENS = 10
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NEW_TOKENS}
CONTENTS: list[Content] = [
    [picture(1, (48, 32)), "What colour?"],
    [picture(2, (48, 32)), "What colour?"],
    ["Hi ", picture(3), " and ", picture(4, (24, 64)), " differ?"],
    ["no image here"],
]


def uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else image_part(uri(png(part))) for part in content]


def expected(family: str, ids: Sequence[int], pictures: Sequence[Image.Image]) -> list[int]:
    """Greedy tokens of transformers, without placeholders."""
    lm = build_vision(family)
    banned = list(vision_processor(family).banned_ids)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "suppress_tokens": banned}
    return lm.generate(**model_arguments(family, ids, pictures), **options)[0, len(ids) :].tolist()  # type: ignore[no-any-return]


@contextmanager
def serving(family: str, **settings: Any) -> Iterator[Server]:
    folder = str(vision_folder(family))
    engine = GenerationEngine.from_pretrained(folder, dtype=torch.float32)
    with open_service(engine, load_tokenizer(folder), **{"max_tokens": 600, **settings}) as service:
        with served_service(service) as url:
            yield Server(url)
    engine.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("qwen3_vl") as running:
        yield running


@pytest.mark.parametrize("family", [*DEFAULT, *(faults(name) for name in FAMILIES if name not in DEFAULT)])
def test_answers_are_those_of_transformers(family: str) -> None:
    prompts = [chat_ids(family, content) for content in CONTENTS]
    pictures = [[part for part in content if not isinstance(part, str)] for content in CONTENTS]
    wanted = [expected(family, ids, shown) for ids, shown in zip(prompts, pictures, strict=True)]
    assert wanted[0] != wanted[1], "two pictures of one size"
    with serving(family) as server, ThreadPoolExecutor(4) as clients:
        answers = list(
            clients.map(lambda content: server.chat(messages=[user(parts(content))], **GREEDY), CONTENTS * 2)
        )
        for number, answer in enumerate(answers):
            ids, tokens = prompts[number % 4], wanted[number % 4]
            assert answer.prompt_token_ids == ids and answer.usage.prompt_tokens == len(ids)
            assert answer.choices[0].token_ids == tokens[: len(answer.choices[0].token_ids)]
            assert len(answer.choices[0].token_ids) == len(tokens)
        chunks = list(server.chat(messages=[user(parts(CONTENTS[2]))], stream=True, **GREEDY))
        streamed = [piece.delta.content or "" for chunk in chunks for piece in chunk.choices]
        assert "".join(streamed) == answers[2].choices[0].message.content
        tokenized = server.post("/tokenize", {"model": "m", "messages": [user(parts(CONTENTS[2]))]}).json()
        assert tokenized["tokens"] == prompts[2] and tokenized["count"] == len(prompts[2])


def test_turns_continue_their_images(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """The second turn computes no image, and equals transformers on the whole conversation."""
    encoded: list[int] = []
    encode = ImageEncoder.encode
    monkeypatch.setattr(ImageEncoder, "encode", lambda self, *given: (encoded.append(1), encode(self, *given))[1])
    shown = picture(8, (48, 48))
    messages = [user(parts([shown, "What is it?"]))]
    for turn in range(3):
        answer = server.chat(messages=messages, logprobs=True, extra_body={"prompt_logprobs": 0}, **GREEDY)
        ids = answer.prompt_token_ids
        assert answer.choices[0].token_ids == expected("qwen3_vl", ids, [shown])[: len(answer.choices[0].token_ids)]
        messages += [assistant("It is round."), user(f"Sure? {turn}")]
        places = [place for place, token in enumerate(ids) if token in vision_processor("qwen3_vl").banned_ids]
        logprobs = [answer.prompt_logprobs[place][str(ids[place])]["logprob"] for place in places]
        assert places and logprobs == [None] * len(places), "minus infinity"
    assert len(encoded) == 1


def test_samples_and_scales(server: Server) -> None:
    """A picture above the limit is read in a smaller size, and samples of a request share its prompt."""
    big = picture(5, (2200, 1100))
    answer = server.chat(messages=[user(parts([big, "q"]))], n=2, seed=3, max_tokens=5)
    small = big.resize((1448, 724), Image.Resampling.BICUBIC)
    assert answer.prompt_token_ids == chat_ids("qwen3_vl", [small, "q"])
    assert len(answer.choices) == 2


def claimed(width: int, height: int) -> bytes:
    """A PNG file of some bytes whose header has a size."""
    chunks = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"
    sized = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sized)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        (uri(png(picture(1))[:100]), "is refused: an image must be a complete PNG, JPEG, WebP, GIF or BMP file, it is"),
        (uri(claimed(12000, 12000)), "is refused: an image has at most 67,108,864 pixels, it has 12000x12000"),
        (uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "is refused: an image must be a complete"),
        ("http://127.0.0.1/cat.png\n", r"must be a data URI, got 'http://127.0.0.1/cat.png\n': send the image itself"),
        ("file:///etc/passwd", "must be a data URI, got 'file:///etc/passwd': send the image itself"),
        ("data:image/png;base64,%%%", "is refused: a data URI must be base64"),
        ("data:image/png;base64," + "A" * (23 * 2**20), "must have at most 16777216 bytes, got 18087952: scale it"),
    ],
    ids=["truncated", "claims", "svg", "http", "file", "no base64", "long"],
)
def test_faulty_images_are_refused(server: Server, url: str, rule: str) -> None:
    messages = [user([image_part(uri(png(picture(1)))), image_part(url), {"type": "text", "text": "q"}])]
    answer = server.post("/v1/chat/completions", {"model": "m", "messages": messages})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages.0.content.1.image_url.url"
    assert error["message"].startswith(f"{error['param']} {rule}") and "\n" not in error["message"]
    assert len(error["message"]) < 700


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ({"messages": [user([{"type": "image", "image": "cat.png"}])]}, "messages.0.content.0 must have type text or"),
        ({"messages": [user("a <|image_pad|> b")]}, "messages must not have <|image_pad|> ("),
        (
            {"messages": [user([*parts([picture(1)]), {"type": "text", "text": "<|image_pad|>"}])]},
            "messages is refused: a text must not have <|image_pad|>, which stands for an image",
        ),
        (
            {"messages": [assistant("a"), {"role": "system", "content": parts([picture(1)])}]},
            "messages is refused: images belong",
        ),
        (
            {"messages": [user(parts([picture(n, (64, 64)) for n in range(40)]))]},
            "messages.0.content.37.image_url.url must",
        ),
        (
            {"messages": [user("q")], "prompt_token_ids": [90, 5, 91]},
            "prompt_token_ids must not have <|image_pad|> (5)",
        ),
    ],
)
def test_images_that_no_prompt_has(server: Server, body: dict[str, Any], rule: str) -> None:
    answer = server.post("/v1/chat/completions", {"model": "m", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(rule)
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_model_of_text_refuses_images() -> None:
    with open_service(GenerationEngine.from_model(tiny_model()), tiny_tokenizer(), max_tokens=200) as service:
        with served_service(service) as url:
            body = {"model": "m", "messages": [user(parts(["q", picture(1)]))]}
            for path in ("/v1/chat/completions", "/tokenize"):
                error = Server(url).post(path, body).json()["error"]
                assert error["message"] == (
                    "messages.0.content.1 must be text, as no images are read here, got image_url: remove it"
                )


def test_text_needs_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedImageReader, "__call__", pytest.fail)
    with serving("idefics3") as server:
        assert server.chat(**GREEDY).choices


def test_the_language_model_is_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tower there are only the inference weights, which are fused copies of some of the model's."""
    models: list[weakref.ref[Any]] = []

    def loaded(*given: Any, **named: Any) -> tuple[PreTrainedModel, bool]:
        lm, fresh = load_model(*given, **named)
        models.extend(map(weakref.ref, (lm, *text_model_of(lm).modules())))
        return lm, fresh

    monkeypatch.setattr("hybrid_rlhf.generation.engine.load_model", loaded)
    engine = GenerationEngine.from_pretrained(str(vision_folder("qwen3_vl")), dtype=torch.float32)
    gc.collect()
    assert engine.image_reader is not None and len(models) > 20 and not any(model() for model in models)


def test_the_command_serves_images() -> None:
    """With its own limit of pixels; a body of 100 MB ends no connection but its own."""
    line = f"{vision_folder('qwen3_vl')} --model_name m --dtype float32 --device cpu --max_sequence_tokens 600"
    with server_process(f"{line} --max_image_pixels 1024") as (_, url):
        server = Server(url)
        answer = server.chat(messages=[user(parts([picture(3, (64, 64)), "q"]))], **GREEDY)
        assert answer.prompt_token_ids == chat_ids("qwen3_vl", [picture(3, (64, 64)).resize((32, 32)), "q"])
        refused = {"model": "m", "messages": [user([image_part("data:image/png;base64," + "A" * (100 * 2**20))])]}
        assert server.post("/v1/chat/completions", refused).status_code == 413
        again = server.chat(messages=[user(parts([picture(3, (64, 64)), "q"]))], **GREEDY)
        assert again.choices[0].token_ids == answer.choices[0].token_ids


@pytest.mark.parametrize("family", [*DEFAULT, *(faults(name) for name in FAMILIES if name not in DEFAULT)])
def test_a_reward_model_scores_images(family: str) -> None:
    """Of several conversations in a request, in one forward, as transformers' modules do alone; each image is read."""
    folder = str(vision_scorer(family)[1])
    scorer = load_scorer(find_model(ServeConfig(path=folder, dtype="float32", device="cpu")), max_image_pixels=4096)
    contents: list[Content] = [*CONTENTS, [picture(5, (96, 96)), "What colour?"]]
    small: list[Content] = [*CONTENTS, [picture(5, (96, 96)).resize((64, 64)), "What colour?"]]
    expected = [score_of(family, content, "red<|im_end|>\n") for content in small]
    assert abs(expected[0] - expected[1]) > 1e-3, "two pictures of one size"
    with served_in_background(
        build_scoring_app(ScoreService(scorer, max_queue=1, name="m"), Access(), created=0)
    ) as url:
        server = Server(url)
        messages = [[user(parts(content)), assistant("red")] for content in contents]
        answer = server.post("/score", {"model": "m", "messages": messages}).json()
        assert [row["score"] for row in answer["data"]] == pytest.approx(expected, abs=1e-4)
        for url, rule in (
            (
                uri(png(picture(1))[:100]),
                "messages is refused: an image must be a complete PNG",
            ),
            ("http://127.0.0.1/cat.png", "messages.0.content.0.image_url.url must be a data URI"),
        ):
            faulty = [user([image_part(url), {"type": "text", "text": "q"}]), assistant("red")]
            error = server.post("/score", {"model": "m", "messages": faulty}).json()["error"]
            assert error["message"].startswith(rule) and "\n" not in error["message"]
        written = vision_tokenizer(family).convert_ids_to_tokens(vision_processor(family).image_token_id)
        for content in (written, [*parts([picture(1)]), {"type": "text", "text": f"{written} q"}]):
            messages = [user(content), assistant("red")]
            error = server.post("/score", {"model": "m", "messages": messages}).json()["error"]
            assert error["message"].startswith("messages ") and "image" in error["message"]


def test_replaced_weights_are_those_of_the_tower_too() -> None:
    """As `serve --follow` replaces them: answers are those of the new model, not of encoded images that are kept."""
    folder = str(vision_folder("qwen3_vl"))
    engine = GenerationEngine.from_pretrained(folder, dtype=torch.float32)
    content = CONTENTS[0]
    other = build_vision("qwen3_vl", seed=1)
    with open_service(engine, load_tokenizer(folder), max_tokens=600) as service, served_service(service) as url:
        server = Server(url)
        first = server.chat(messages=[user(parts(content))], **GREEDY).choices[0].token_ids
        engine.replace_weights(other, 1, service.batch)  # type: ignore[arg-type]
        second = server.chat(messages=[user(parts(content))], **GREEDY).choices[0].token_ids
    ids = chat_ids("qwen3_vl", content)
    arguments = model_arguments("qwen3_vl", ids, [content[0]])  # type: ignore[list-item]
    banned = list(vision_processor("qwen3_vl").banned_ids)
    whole = other.generate(**arguments, max_new_tokens=NEW_TOKENS, do_sample=False, suppress_tokens=banned)
    assert second == whole[0, len(ids) :].tolist() != first
