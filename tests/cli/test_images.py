"""Images in the commands on saved models, against transformers on the same prompts."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from hybrid_rlhf.cli.saved_models import comparison, push
from hybrid_rlhf.configs.rl import PromptDataConfig, RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.image_loading import PromptEncoder
from hybrid_rlhf.models.pretrained.gguf.language_model import language_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from tests.support.commands import CommandLine
from tests.support.messages import assistant, user
from tests.support.steps import read_rows
from tests.support.vision import (
    build_vision,
    chat_ids,
    model_arguments,
    picture,
    save_vision,
    score_of,
    vision_folder,
    vision_processor,
    vision_scorer,
)

FAMILY = "qwen3_vl"
GREEDY = "--sampling.temperature 0 --sampling.max_new_tokens 6 --device cpu --dtype float32"
PICTURES = [picture(number, (48, 32)) for number in range(3)]


def answer(ids: Sequence[int], pictures: Sequence[Image.Image]) -> str:
    """The text of transformers' greedy tokens, without placeholders."""
    options = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": list(vision_processor(FAMILY).banned_ids)}
    whole = build_vision(FAMILY).generate(**model_arguments(FAMILY, ids, pictures), **options)
    return text_decoder(load_tokenizer(str(vision_folder(FAMILY))))(whole[0, len(ids) :].tolist())


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Files of the pictures."""
    names = [tmp_path / f"{number}.png" for number in range(len(PICTURES))]
    for name, shown in zip(names, PICTURES, strict=True):
        shown.save(name)
    return names


def test_generate(
    files: list[Path], tmp_path: Path, write_jsonl: Callable[..., Path], model_folder: Path, cli: CommandLine
) -> None:
    line = f"generate {vision_folder(FAMILY)} {GREEDY}"
    first, second, _ = PICTURES
    found = cli(f"{line} --prompt what? --image [{files[0]},{files[1]}] --json").result
    assert found["images"] == [str(file) for file in files[:2]]
    assert found["completions"][0]["text"] == answer(chat_ids(FAMILY, [first, second, "what?"]), [first, second])
    rows = write_jsonl([{"prompt": "what?", "images": [file.name]} for file in files] + [{"prompt": "hello"}])
    output = tmp_path / "out" / "rows.jsonl"
    assert cli(f"{line} --input {rows} --output {output}").code == 0
    written = read_rows(output)
    assert [row.get("images") for row in written] == [["0.png"], ["1.png"], ["2.png"], None]
    wanted = [answer(chat_ids(FAMILY, [shown, "what?"]), [shown]) for shown in PICTURES]
    wanted.append(answer(chat_ids(FAMILY, ["hello"]), []))
    assert [row["completions"][0]["text"] for row in written] == wanted and len({*wanted}) == 4
    assert cli.refused(f"{line} --prompt q --image {tmp_path / 'none.png'}") == (
        f"error: an image must be a file, {tmp_path / 'none.png'} does not exist: check the path\n"
    )
    assert "image goes with prompt" in cli.refused(f"{line} --input {rows} --output {output}2 --image {files[0]}")
    assert cli.refused(f"generate {model_folder} --prompt q --image {files[0]}") == (
        "error: --prompt: images need a vision-language model, this one reads text: remove the images\n"
    )


def test_chat_keeps_images_and_saves_their_names(
    files: list[Path],
    tmp_path: Path,
    paths: dict[str, str],
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine,
) -> None:
    saved = tmp_path / "talk.json"
    lines = (
        "/image",
        f"/image {files[1]}",
        "what?",
        "sure?",
        f"/save {saved}",
        f"/score {vision_scorer(FAMILY)[1]}",
        f"/score {paths['reward']}",
        f"/compare {model_folder}",
        "so?",
    )
    typed = "".join(f"{line}\n" for line in lines)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    out = cli(f"chat {vision_folder(FAMILY)} {GREEDY} --image {files[0]}").out
    assert "/image needs a file, got none: write /image FILE" in out
    messages = json.loads(saved.read_text())["messages"]
    shown = [{"type": "image", "image": str(file)} for file in files[:2]]
    assert messages[0] == user([*shown, {"type": "text", "text": "what?"}])
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    ids = chat_ids(FAMILY, [PICTURES[0], PICTURES[1], "what?"])
    assert messages[1] == assistant(answer(ids, PICTURES[:2]).strip())
    assert re.search(r"model: score [-+]\d+\.\d+", out)
    assert re.search("error: images need a vision-language model, got .*ForSequenceClassification", out)
    assert "images need a vision-language model, this one reads text" in out


def test_losses_of_rows_with_images(files: list[Path], write_jsonl: Callable[..., Path], cli: CommandLine) -> None:
    said = ["a b", "round", "it is so"]
    conversations = [[user("<image>what?"), assistant(text)] for text in said] + [[user("hi"), assistant("yes")]]
    rows = [
        {"messages": messages} | ({"image": file.name} if file else {})
        for messages, file in zip(conversations, [*files, None], strict=True)
    ]
    found = cli(f"evaluate {vision_folder(FAMILY)} --data {write_jsonl(rows)} --batch_rows 3 --json").result
    lm = build_vision(FAMILY)
    banned = list(vision_processor(FAMILY).banned_ids)
    losses: list[float] = []
    contents: list[tuple[list[Any], str]] = [
        ([shown, "what?"], text) for shown, text in zip(PICTURES, said, strict=True)
    ]
    for content, text in [*contents, (["hi"], "yes")]:
        prompt, whole = chat_ids(FAMILY, content), chat_ids(FAMILY, content, f"{text}<|im_end|>")
        with torch.no_grad():
            logits = lm(
                **model_arguments(FAMILY, whole, [part for part in content if not isinstance(part, str)])
            ).logits
        logits[..., banned] = -math.inf
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(whole[1:])[:, None])
        losses += (-logprobs[len(prompt) - 1 :, 0]).tolist()
    assert found["results"]["tokens"] == len(losses)
    assert found["results"]["loss per token (nats)"]["value"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_passes_of_rows_with_images(
    files: list[Path], tmp_path: Path, write_jsonl: Callable[..., Path], cli: CommandLine
) -> None:
    """The reward sees the answers to each picture, and prompts as their rows write them."""
    wanted = [answer(chat_ids(FAMILY, [shown, "what?"]), [shown]) for shown in PICTURES]
    rows = write_jsonl(
        [{"prompt": "what?", "images": [file.name], "wanted": text} for file, text in zip(files, wanted, strict=True)]
    )
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def same(prompts, completions, wanted, images, **columns):\n"
        "    assert [[image.size for image in shown] for shown in images] == [[(48, 32)]] * 3\n"
        "    assert [prompt[0]['content'] for prompt in prompts] == ['<image>what?'] * len(prompts)\n"
        "    return [float(text == right) for text, right in zip(completions, wanted)]\n"
    )
    line = f"evaluate {vision_folder(FAMILY)} --data {rows} {GREEDY}"
    assert cli(f"{line} --reward {reward}:same --json").result["results"]["pass@1"]["value"] == 1.0
    judge = f"--against {vision_folder(FAMILY)} --judge.url http://127.0.0.1:1/v1 --judge.served_name j"
    assert "a language model that judges reads text, the row has images: remove it" in cli.refused(f"{line} {judge}")


def test_a_reward_model_judges_answers_to_images(
    files: list[Path], write_jsonl: Callable[..., Path], cli: CommandLine
) -> None:
    """Each answer after its picture: with another one the sign of a margin would be that of chance."""
    other = save_vision(files[0].parent / "other", FAMILY, build_vision(FAMILY, seed=1))
    rows = write_jsonl([{"prompt": "what?", "images": [file.name]} for file in files])
    line = f"evaluate {vision_folder(FAMILY)} --data {rows} {GREEDY} --against {other}"
    output = files[0].parent / "judged.jsonl"
    cli(f"{line} --judge.model {vision_scorer(FAMILY)[1]} --output {output}")
    for row, shown in zip(json.loads(output.read_text())["rows"], PICTURES, strict=True):
        said = (f"{row[key]}<|im_end|>\n" for key in ("completion", "other"))
        ours, theirs = (score_of(FAMILY, [shown, "what?"], text) for text in said)
        assert ours != theirs and row["outcome"] == float(ours > theirs)


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "qwen3_vl"])
def test_an_exported_folder_is_read_by_transformers(family: str, tmp_path: Path, cli: CommandLine) -> None:
    source, output = vision_folder(family), tmp_path / "out"
    assert cli(f"export {source} --output {output}").code == 0
    names = {file.name for file in source.glob("*processor*")}
    assert names == {file.name for file in output.glob("*processor*")} and len(names) == 2
    assert all((output / name).read_bytes() == (source / name).read_bytes() for name in names)
    shown = [PICTURES[0], "what?"]
    arguments = model_arguments(family, chat_ids(family, shown), PICTURES[:1])
    read = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(read(**arguments).logits, build_vision(family)(**arguments).logits)
    pixels = AutoImageProcessor.from_pretrained(output, backend="pil")(PICTURES[:1], return_tensors="pt")
    assert torch.equal(pixels["pixel_values"], arguments["pixel_values"])
    if family != "qwen3_vl":  # whose part for videos needs torchvision
        written = AutoProcessor.from_pretrained(output, backend="pil").apply_chat_template(
            [user([{"type": "image"}, {"type": "text", "text": "what?"}])], add_generation_prompt=True
        )
        assert written.count(vision_processor(family).placeholder) == 1
    matched = {file.name for pattern in push.MODEL_FILES for file in output.glob(pattern)}
    assert matched == {file.name for file in output.iterdir()}


def test_gguf_has_the_language_model(tmp_path: Path, cli: CommandLine) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "a.gguf"
    ended = cli(f"export {vision_folder(FAMILY)} --output {file} --format gguf")
    assert (
        ended.code == 0 and f"the language model of {vision_folder(FAMILY)} alone: {file} reads no images" in ended.err
    )
    found = cli(f"generate {file} --prompt hello {GREEDY} --json").result
    assert found["completions"][0]["text"] == answer(chat_ids(FAMILY, ["hello"]), [])
    lm = build_vision("glm4v")
    assert language_model(lm) is lm, "no family of llama.cpp"


def test_the_engine_of_a_program() -> None:
    """In bfloat16; images are of Pillow, and text needs no list of parts."""
    folder = str(vision_folder(FAMILY))
    engine = GenerationEngine.from_pretrained(folder)
    encode = PromptEncoder(load_tokenizer(folder), engine.image_reader).conversation
    parts = [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "what?"}]
    asked = [encode([user(parts)]), encode([user("hello")])]
    assert [ids for ids, _ in asked] == [chat_ids(FAMILY, [PICTURES[0], "what?"]), chat_ids(FAMILY, ["hello"])]
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    (first,), _ = engine.generate([ids for ids, _ in asked], params, images=[images for _, images in asked])
    streamed = list(engine.stream(asked[0][0], params, images=asked[0][1]))
    assert streamed == first.token_ids


def test_the_report_after_train_completes_prompts_with_images(
    files: list[Path], tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    rows = write_jsonl([{"prompt": "what?", "images": [file.name]} for file in files])
    data = PromptDataConfig(sources=[str(rows)], eval_sources=[str(rows)], cache_dir=str(tmp_path / "cache"))
    step = RLConfig(model=ModelConfig(path=str(vision_folder(FAMILY))), data=data)
    prompts = comparison.held_out_prompts(step, max_tokens=100)
    texts = comparison.completions({"model": str(vision_folder(FAMILY))}, prompts, step, max_tokens=6)
    assert len(texts) == 3 and {row["prompt"] for row in texts} == {"<image>what?"}
    wanted = {answer(chat_ids(FAMILY, [shown, "what?"]), [shown]).strip() for shown in PICTURES}
    assert {row["model"] for row in texts} == wanted
