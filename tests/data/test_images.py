"""Rows with images: their tokens are those of the processors of transformers, wherever a row has its images."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import hybrid_rlhf.data.tokenized as tokenized
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.reward import RewardObjectiveConfig
from hybrid_rlhf.configs.sections.data import RowDataConfig
from hybrid_rlhf.data.encoding import (
    encode_labelled_row,
    encode_preference_row,
    encode_prompt_row,
    encode_sft_row,
)
from hybrid_rlhf.data.images.expansion import ImageRules
from hybrid_rlhf.data.images.references import tokenised_images
from hybrid_rlhf.data.preparation.checking import check_source
from hybrid_rlhf.data.rows.files import json_line
from hybrid_rlhf.data.rows.stepwise import encode_stepwise_row
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.messages import assistant, user
from tests.support.steps import write_lines
from tests.support.tiny import tiny_model
from tests.support.vision import FAMILIES, picture, vision_folder, vision_processor

WORLD = solo_world(torch.device("cpu"))
IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "shown"}


def disordered(first: Any, second: Any) -> list[dict[str, Any]]:
    """Two calls, and their results in the other order."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in (("b", first), ("a", second))]
    return [{"role": "assistant", "content": "look", "tool_calls": calls}, *results]


SYSTEM = {"role": "system", "content": "s"}
TEMPLATES = {
    # the ways of published templates: llava-1.5 writes images before all text, SmolVLM no space before one
    "llava": "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "smolvlm": "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    # Qwen's with `add_vision_id`
    "qwen3_vl": "{% set count = namespace(value=0) %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{% set count.value = count.value + 1 %}Picture {{ count.value }}: "
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # marks of what is generated
    "qwen2_5_vl": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content if message.content is string else "
    "message.content[0].text }}<|im_end|>{% endgeneration %}{% elif message.content is string %}{{ message.content }}"
    "<|im_end|>{% else %}{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


def rules(family: str = "qwen2_5_vl", **changes: Any) -> ImageRules:
    return ImageRules(vision_processor(family), **changes)


def tokenizer(family: str = "qwen2_5_vl") -> Any:
    return load_tokenizer(str(vision_folder(family)))


def whole_ids(family: str, template: Any, messages: Sequence[Any], images: Sequence[Image.Image], **more: Any) -> Any:
    """What transformers' processor makes of a conversation."""
    text = template.apply_chat_template(messages, tokenize=False, **more)
    return vision_processor(family)._processor(images=[list(images)], text=[text])["input_ids"][0]


def shown(ids: Sequence[int], family: str = "qwen2_5_vl") -> str:
    """The text of tokens; each run of those of images is one."""
    text = str(tokenizer(family).decode(ids))
    while "<|image_pad|><|image_pad|>" in text:
        text = text.replace("<|image_pad|><|image_pad|>", "<|image_pad|>")
    return text.replace("<|vision_start|><|image_pad|><|vision_end|>", "@")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        picture(number, (40 + 16 * number, 32)).save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize(("family", "published"), [(f, False) for f in FAMILIES] + [(f, True) for f in TEMPLATES])
def test_tokens_are_those_of_the_processor(family: str, published: bool, folder: Path) -> None:
    template = tokenizer(family)
    if published:
        template.chat_template = TEMPLATES[family]
    images = [picture(number) for number in range(3)]
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    turns = [
        user([IMAGE, text("what?")]),
        {"role": "assistant", "content": [text("a dog")]},
        user([text("and "), IMAGE, text(" or"), IMAGE]),
        {"role": "assistant", "content": [text("cats")]},
    ]
    row = {"messages": turns, "images": images}
    (encoded,) = encode_sft_row("f:1", row, template, 4000, images=rules(family))
    assert encoded["input_ids"] == whole_ids(family, template, turns, images)
    assert [(image.width, image.height) for image in tokenised_images(encoded)] == [image.size for image in images]
    learned = [token for token, has_loss in zip(encoded["input_ids"], encoded["loss_mask"], strict=True) if has_loss]
    assert "a dog" in (said := template.decode(learned)) and "cats" in said and "what" not in said
    (prompt,) = encode_prompt_row("f:1", {"prompt": turns[:3], "images": images}, template, 4000, images=rules(family))
    assert prompt["input_ids"] == whole_ids(family, template, turns[:3], images, add_generation_prompt=True)
    assert prompt["input_ids"].count(vision_processor(family).image_token_id) > 0


def test_a_row_has_its_images_in_many_ways(folder: Path) -> None:
    file = folder / "rows.jsonl"
    file.write_text("")
    content = [(folder / f"{number}.png").read_bytes() for number in range(2)]
    uris = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in content]
    column = ["0.png", {"bytes": content[1], "path": "x"}]
    asked = [IMAGE, {"type": "text", "text": "see "}, IMAGE]
    linked = {"type": "image_url", "image_url": {"url": uris[1]}}
    rows: list[dict[str, Any]] = [
        {"prompt": [user(asked)], "images": column},
        {"prompt": "<image>see <image>", "images": ["0.png", "1.png"]},
        {"prompt": [user([IMAGE, {"text": "see <image>"}])], "images": [Image.open(folder / "0.png"), uris[1]]},
        {"prompt": [user([IMAGE | {"image": "0.png"}, asked[1], linked])]},
        {"prompt": [user([IMAGE, asked[1], IMAGE | {"image": content[1]}])], "image": "0.png"},
        {"messages": [user("<image>see <image>"), assistant("no")], "images": uris},
    ]
    encoded = [encode_prompt_row(f"{file}:1", row, tokenizer(), 999, images=rules())[0] for row in rows]
    assert shown(encoded[0]["input_ids"]) == "<|im_start|>user\n@see @<|im_end|>\n<|im_start|>assistant\n"
    for row in encoded:
        assert row["input_ids"] == encoded[0]["input_ids"]
        assert [image.digest for image in tokenised_images(row)] == [image["digest"] for image in encoded[0]["images"]]
        assert json.loads(row["columns"]) == {}
    # without a placeholder: before the text of the first user turn
    plain = {"prompt": [SYSTEM, user("see"), assistant("a"), user("b")], "images": column}
    (row,) = encode_prompt_row(f"{file}: row 1", plain, tokenizer(), 999, images=rules())
    assert shown(row["input_ids"]).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n@@see<|im_end|>")
    # text without images means what it says
    (row,) = encode_prompt_row("f:1", {"prompt": "<image>?", "images": []}, tokenizer(), 999, images=rules())
    assert shown(row["input_ids"]).startswith("<|im_start|>user\n<image>?<|im_end|>") and row["images"] is None


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "<image><image>", "images": ["0.png"]}, "got 1 in its column and 2 placeholders"),
        ({"prompt": "<image>", "images": ["0.png", "1.png"]}, "got 2 in its column and 1 placeholders"),
        ({"prompt": [user([IMAGE])]}, "got 0 in its column and 1 placeholders"),
        (
            {"prompt": "a <|image_pad|>", "images": ["0.png"]},
            r"must not have <\|image_pad\|>, which stands for an image",
        ),
        ({"prompt": "a <|image_pad|>"}, r"rows.jsonl:3: a text must not have <\|image_pad\|>"),
        ({"prompt": "a <|video_pad|>"}, r"a text must not have <\|video_pad\|>"),
        ({"prompt": "\ufdd0\ufdd1"}, "must not have the characters U.FDD0"),
        ({"prompt": "q", "images": ["0.png", "x.png"]}, "rows.jsonl:3: an image must be a file .*x.png does not exist"),
        ({"prompt": "q", "images": ["0.png"], "image": "1.png"}, "got 'images' and 'image'"),
        ({"prompt": [{"role": "system", "content": "<image>"}, user("q")], "images": ["0.png"]}, "turn of the system"),
        ({"prompt": [user("q"), assistant("<image>")], "images": ["0.png"]}, "in a turn of the assistant, '<image>'"),
        ({"prompt": [{"role": "tool", "content": "q"}], "images": ["0.png"]}, "must have a user turn"),
        ({"prompt": [user([{"type": "image", "url": "x"}])]}, "got keys 'type', 'url'"),
        ({"prompt": [user([{"type": "image_url"}])]}, "got keys 'type'"),
        (
            {"prompt": [user([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}])]},
            "image_url.url must be a data URI, got 'https://a/b.png': send the image itself",
        ),
        ({"prompt": [user([{"type": "video", "video": "x"}])]}, "the content of a message must be text"),
        ({"prompt": "q", "videos": ["x.mp4"]}, "got column 'videos'"),
        (
            {
                "prompt": [user("q"), *disordered([IMAGE], [IMAGE, TEXT])],
                "images": ["0.png"] * 2,
            },
            "results of tools with images of the row's column must be in the order of their calls",
        ),
        (
            {"prompt": [user("q"), *disordered("<image>", "no picture <image>")], "images": ["0.png"] * 2},
            "results of tools with images of the row's column must be in the order of their calls",
        ),
        ({"prompt": "q", "images": 3}, "an image must be a path, a data URI or bytes, image 1 is int"),
    ],
)
def test_refused_rows(row: dict[str, Any], rule: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_text("")
    with user_error(rule):
        encode_prompt_row(f"{folder}/rows.jsonl:3", row, tokenizer(), 999, images=rules())


SAME = functools.cache(tokenizer)
values = st.recursive(
    st.none()
    | st.integers()
    | st.binary(max_size=9)
    | st.sampled_from(["0.png", "data:;base64,AA", "<image>", "\ufdd0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "image", "text", "bytes", "path", "image_url", "url"]), inner)
        | st.fixed_dictionaries({"type": st.sampled_from(["image", "text", "image_url"])}, optional={"image": inner})
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({"content": values}, optional={"images": values, "image": values}))
def test_any_values_of_images(folder: Path, columns: dict[str, Any]) -> None:
    """Each row is refused in one line, or has an image for each of its marks."""
    (folder / "rows.jsonl").write_text("")
    content = columns.pop("content")
    row = {"prompt": [user(content)], "chosen": "a", "rejected": "b", **columns}
    with contextlib.suppress(UserError):
        (encoded,) = encode_preference_row(f"{folder}/rows.jsonl:1", row, SAME(), 9999, images=rules())
        assert len(tokenised_images(encoded)) == shown(encoded["responses"][0]).count("@")


def test_refusals_of_models_and_templates(folder: Path) -> None:
    row = {"prompt": "q", "completion": "a", "images": [picture(0)]}
    refusal = str(images_refused(tiny_model().config))
    for either in (row, {"messages": [user([IMAGE | {"image": picture(0)}]), assistant("a")]}):
        with user_error("f:1: images need a vision-language model, got .*docs/models.md lists, or remove its images"):
            encode_sft_row("f:1", either, tokenizer(), 99, images=ImageRules(refusal=refusal))
    with user_error("f:1: a row must be text, got column 'images'"):
        encode_sft_row("f:1", row, tokenizer(), 99)
    with user_error("f:1: a row must be text, got an image: remove the row, or remove its images"):
        encode_sft_row("f:1", {"messages": [user([IMAGE]), assistant("a")]}, tokenizer(), 99)
    for plain in ({"text": "<image>"}, {"segments": [{"text": "a", "label": True}]}):
        with user_error("rows of plain text have no images, got column 'images'"):
            encode_sft_row("f:1", plain | {"images": [picture(0)]}, tokenizer(), 99, images=rules())
    template = tokenizer()
    template.chat_template = "{% for message in messages %}{{ message.content[0].text }}{% endfor %}"
    with user_error("the chat template must write each image of a conversation once, it writes 0 of 1"):
        encode_sft_row("f:1", row, template, 99, images=rules())
    template.chat_template = tokenizer("llava").chat_template
    with user_error(r"the chat template must write <\|image_pad\|> for an image, got"):
        encode_sft_row("f:1", row, template, 99, images=rules())
    template.chat_template = None
    with user_error("images need a chat template"):
        encode_sft_row("f:1", row, template, 99, images=rules())


def test_completions_and_their_images(folder: Path) -> None:
    images = [picture(number, (32, 32)) for number in range(3)]
    more = [assistant("a"), user([IMAGE]), assistant("b")]
    row = {"prompt": "q", "images": images[:1], "chosen": "a", "rejected": "b"}
    (encoded,) = encode_preference_row("f:1", row, tokenizer(), 999, images=rules())
    assert encoded["image_order"] == [[0], [0]] and len(encoded["images"]) == 1
    assert [shown(ids) for ids in encoded["responses"]] == [
        f"<|im_start|>user\n@q<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n" for answer in "ab"
    ]
    asked = user([IMAGE, {"type": "text", "text": "q"}])
    row = {"prompt": [asked], "images": images, "responses": [more, [assistant("c")], more], "ranks": [1, 2, 3]}
    row["responses"][2] = [assistant("d"), *more[1:]]
    (encoded,) = encode_preference_row("f:1", row, tokenizer(), 999, images=rules())
    assert encoded["image_order"] == [[0, 1], [0], [0, 2]]
    assert [shown(ids).count("@") for ids in encoded["responses"]] == [2, 1, 2]
    # whole conversations share the turns of equal images only
    inline = [[user([IMAGE | {"image": image}]), assistant("a")] for image in (images[0].tobytes(), b"")]
    pair = {"chosen": [user([IMAGE]), assistant("a")], "rejected": [user([IMAGE]), assistant("b")]}
    (encoded,) = encode_preference_row("f:1", pair | {"images": images[:1]}, tokenizer(), 999, images=rules())
    assert encoded["image_order"] == [[0], [0]]
    with user_error("must begin with the same turns|the prompt"):
        encode_preference_row(
            "f:1", {"prompt": "x", "chosen": inline[0], "rejected": inline[1]}, tokenizer(), 999, images=rules()
        )
    (encoded,) = encode_labelled_row("f:1", row, tokenizer(), 999, images=rules())
    assert encoded["labels"] == [True, False] and encoded["image_order"] == [[0, 1], [0, 2]]
    row = {"prompt": "q", "completion": "a", "label": True, "image": images[0]}
    (encoded,) = encode_labelled_row("f:1", row, tokenizer(), 999, images=rules())
    assert encoded["image_order"] == [[0]]
    row = {"prompt": "<image>q", "completions": ["one", "two"], "labels": [1, 0], "images": images[:1]}
    (encoded,) = encode_stepwise_row("f:1", row, tokenizer(), 999, separator="\n", images=rules())
    assert shown(encoded["responses"][0]).startswith("<|im_start|>user\n@q<|im_end|>") and len(encoded["images"]) == 1
    assert [shown(encoded["responses"][0][: end + 1])[-3:] for end in encoded["ends"][:1]] == ["one"]
    (encoded,) = encode_preference_row("f:1", {"tie": True}, tokenizer(), 999, images=rules())
    assert encoded["images"] is encoded["image_order"] is None


def test_an_image_is_never_cut() -> None:
    """Each limit keeps all tokens of the images, or drops the row."""
    image = picture(0, (64, 64))
    prompt = [SYSTEM, user(f"{'long ' * 5}"), assistant("b"), user([{"type": "text", "text": "see "}, IMAGE])]
    rows: list[tuple[Any, dict[str, Any]]] = [
        (encode_sft_row, {"messages": [*prompt, assistant("said")], "images": [image]}),
        (encode_prompt_row, {"prompt": prompt, "images": [image]}),
        (encode_preference_row, {"prompt": prompt, "chosen": "a", "rejected": "b", "images": [image]}),
    ]
    token = rules().layout.image_token_id  # type: ignore[union-attr]
    for encode, row in rows:
        full = encode("f:1", row, tokenizer(), 999, images=rules())[0]
        count = sum(ids.count(token) for ids in full.get("responses") or [full["input_ids"]])
        assert count % 16 == 0 and count and full["usable"]
        seen = set()
        for limit in range(8, full["full_length"], 3):
            encoded = encode("f:1", row, tokenizer(), limit, images=rules())[0]
            assert encoded["cut"]
            kept = sum(ids.count(token) for ids in encoded.get("responses") or [encoded["input_ids"]])
            assert kept == count or not encoded["usable"]
            seen.add(encoded["usable"])
        assert seen == {True, False}


def test_tokenised_data(folder: Path, write_jsonl: Callable[..., Path]) -> None:
    """Columns, the cache, changed files, sources with and without images."""
    rows: list[dict[str, Any]] = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(4)]
    text = str(write_jsonl(rows, "text.jsonl"))
    with_images = str(write_jsonl([row | {"images": ["0.png", "1.png"][: n % 3]} for n, row in enumerate(rows)]))
    table = folder / "rows.parquet"
    content = [{"bytes": (folder / "2.png").read_bytes(), "path": None}]
    datasets.Dataset.from_list([rows[0] | {"images": content}]).to_parquet(table)

    def load(kind: str, *sources: str, **more: Any) -> datasets.Dataset:
        config = RowDataConfig(sources=list(sources), eval_fraction=0.0, cache_dir=str(folder / "cache"))
        named = {"tokenizer": tokenizer(), "seed": 0, "world": WORLD} | more
        extra = {"prompt": {"max_prompt_tokens": 999}}.get(kind, {})
        given = [RewardObjectiveConfig()] if kind == "reward" else []
        return getattr(tokenized, f"load_{kind}_data")(config, *given, **named, **extra).train  # type: ignore[no-any-return]

    for kind in ("sft", "preference", "labelled", "reward", "prompt"):
        before = load(kind, text)
        assert not {"images", "image_order"} & {*before.column_names}
        loaded = load(kind, text, with_images, str(table), images=rules())
        images = [tokenised_images(row) for row in loaded]
        assert sorted(map(len, images)) == [0, 0, 0, 0, 0, 0, 1, 1, 2]
        assert all(image.path and image.image() for of_row in images for image in of_row), "rows have no bytes"
        same = load(kind, text, images=rules()).remove_columns(
            ["images", *(["image_order", "prompt_images"] if "responses" in before.column_names else [])]
        )
        assert same.to_list() == before.to_list()
    loaded = load("sft", with_images, images=rules())
    found = {image.path: image.width for row in loaded for image in tokenised_images(row)}
    assert found == {str(folder / "0.png"): 40, str(folder / "1.png"): 56}
    picture(7, (24, 24)).save(folder / "1.png")
    for _ in range(2):
        changed = load("sft", with_images, images=rules())
        found = {image.path: image.image().width for row in changed for image in tokenised_images(row)}
        assert found == {str(folder / "0.png"): 40, str(folder / "1.png"): 24}
    (folder / "copy").mkdir()
    for name in ("0.png", "1.png"):
        picture(9, (32, 48)).save(folder / "copy" / name)
    copied = shutil.copy(with_images, folder / "copy")
    found = {image.path for row in load("sft", copied, images=rules()) for image in tokenised_images(row)}
    assert found == {str(folder / "copy" / "0.png"), str(folder / "copy" / "1.png")}
    small = load("sft", with_images, images=rules(max_pixels=100))
    assert all(image.width * image.height <= 100 for row in small for image in tokenised_images(row))
    (folder / "1.png").unlink()
    with user_error("rows.jsonl:3: an image must be a file in the folder of its rows, .*1.png does not exist"):
        load("sft", with_images, images=rules())


def test_a_check_shows_sizes_and_names_bad_files(folder: Path, write_jsonl: Callable[..., Path]) -> None:
    (folder / "cut.png").write_bytes((folder / "2.png").read_bytes()[:60])
    asked = [
        {"prompt": "<image>q<image>", "completion": "a", "images": ["0.png", name]} for name in ("1.png", "cut.png")
    ]
    file = str(write_jsonl([*asked, asked[0] | {"images": ["1.png", "0.png"]}, asked[0]]))
    report = check_source(file, tokenizer=tokenizer(), images=rules(), previews=1)
    (preview,) = report.previews
    counts = [len(vision_processor("qwen2_5_vl").expansion(width, 32)) for width in (40, 56)]
    assert "".join(text for text, _ in preview.spans).startswith(
        f"<|im_start|>user\n<|vision_start|>[image 40x32: {counts[0]} tokens]<|vision_end|>q"
        f"<|vision_start|>[image 56x32: {counts[1]} tokens]<|vision_end|><|im_end|>"
    )
    assert preview.tokens > sum(counts)
    assert report.image_tokens == [sum(counts)] * 3
    (problem,) = report.problems.texts
    assert (
        problem.startswith(f"{file}:2: an image must be a complete PNG") and "cut.png is damaged or cut off" in problem
    )
    assert report.duplicates.texts == [f"{file}:4 repeats {file}:1"]
    only_read = check_source(file, images=ImageRules(), eval_sources=[file])
    assert only_read.problems.texts[0] == problem
    assert only_read.overlap.texts == [
        f"{file}:{line} has the prompt of {file}:{first}" for line, first in ((1, 1), (3, 3), (4, 1))
    ]
    shutil.copy(folder / "0.png", folder / "same.png")
    same = {"prompt": "<image>q", "completion": "a", "images": ["same.png"]}
    first = write_jsonl([same | {"images": ["0.png"]}, same, same | {"images": ["1.png"]}])
    for encodes in (True, False):
        report = check_source(str(first), tokenizer=tokenizer() if encodes else None, images=rules())
        assert report.duplicates.texts == [f"{first}:2 repeats {first}:1"], "the pixels count, not the name"
    (folder / "held").mkdir()
    shutil.copy(folder / "0.png", folder / "held" / "1.png")
    held = write_lines(folder / "held" / "rows.jsonl", [same | {"images": ["1.png"]}, {"prompt": "q", "images": ["0"]}])
    report = check_source(str(first), images=ImageRules(), eval_sources=[str(held)])
    assert report.overlap.texts == [f"{held}:1 has the prompt of {first}:1"]
    assert report.problems.texts[0].startswith(f"{held}:2: an image must be a file in the folder of its rows")
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["0.png"]}
    report = check_source(str(write_jsonl([pair])), tokenizer=tokenizer(), images=rules())
    assert [preview.spans[0][0].count("[image 40x32: ") for preview in report.previews] == [1, 1]
    refusal = str(images_refused(tiny_model().config))
    report = check_source(str(write_jsonl([pair])), tokenizer=tokenizer(), images=ImageRules(refusal=refusal))
    assert "docs/models.md lists, or remove its images" in report.problems.texts[0]


def test_images_of_rows_from_python_are_written_as_data_uris(folder: Path) -> None:
    image = Image.open(folder / "0.png")
    for source in (image, (folder / "0.png").read_bytes(), {"bytes": (folder / "0.png").read_bytes()}):
        row = json.loads(json_line({"prompt": "q", "images": [source]}))
        (encoded,) = encode_prompt_row("f:1", row, tokenizer(), 999, images=rules())
        (read,) = tokenised_images(encoded)
        assert read.image().tobytes() == image.tobytes()
