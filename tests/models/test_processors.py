"""Processors of images against those of transformers, for each family of the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoProcessor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.image_loading import image_rules
from hybrid_rlhf.models.families.vision import VISION_FAMILIES, images_refused
from hybrid_rlhf.models.pretrained import processors
from hybrid_rlhf.models.pretrained.processors import ImageProcessor
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from tests.support.tiny import save_tiny, tiny_model
from tests.support.vision import (
    FAMILIES,
    build_vision,
    chat_ids,
    model_arguments,
    picture,
    save_vision,
    vision_folder,
    vision_processor,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_reads_what_its_processor_writes(family: str) -> None:
    torch.set_num_threads(1)
    images = [picture(1), picture(2, (64, 24)), picture(3, (90, 60))]
    ids = chat_ids(family, ["Hi ", images[0], " and ", images[1], images[2], "?"])
    arguments = model_arguments(family, ids, images)
    lm = build_vision(family)
    with torch.no_grad():
        logits = lm(**arguments).logits  # raises unless each image token has a state
        negative = lm(**{**arguments, "pixel_values": -arguments["pixel_values"]}).logits
    assert float((logits - negative)[0, -1].abs().max()) > 1e-3
    processor = vision_processor(family)
    assert processor.image_token_id in processor.banned_ids
    expansions = [processor.expansion(*image.size).count(processor.image_token_id) for image in images]
    assert sum(expansions) == ids.count(processor.image_token_id)
    one_by_one = [processor.pixels([image]) for image in images]
    for name, value in processor.pixels(images).items():
        joined = torch.cat([part[name] for part in one_by_one], dim=VISION_FAMILIES[family].joined_dim)
        assert torch.equal(joined, value)


def test_texts_of_sizes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's clients choose sizes; it kept the text of each that they had sent."""
    processor = vision_processor("qwen3_vl")
    monkeypatch.setattr(processors, "_KNOWN_SIZES", 4)
    monkeypatch.setattr(processor, "_expansions", {})
    sizes = [(32 * (1 + size % 3), 32 + size) for size in range(12)]
    texts = [processor.expansion_text(*size) for size in sizes]
    assert len(processor._expansions) <= 4 and texts == [processor.expansion_text(*size) for size in sizes]


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava"])
def test_tokens_and_pixels_equal_those_of_transformers(family: str) -> None:
    """Of the families whose processors have no part for videos."""
    images = [picture(4, (90, 60)), picture(5)]
    theirs = AutoProcessor.from_pretrained(vision_folder(family))
    content = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    text = theirs.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    expected = theirs(text=[text], images=[images], return_tensors="pt")
    ids = chat_ids(family, [images[0], " or ", images[1]])
    assert ids == expected["input_ids"][0].tolist()
    for name, value in vision_processor(family).pixels(images).items():
        assert torch.equal(value, expected[name])


def test_refusals_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "(cross attention)" in str(images_refused(AutoConfig.for_model("mllama")))
    assert "(query tokens)" in str(images_refused(AutoConfig.for_model("blip-2")))
    assert "(not tested)" in str(images_refused(AutoConfig.for_model("aria")))
    pixtral = AutoConfig.for_model("llava", vision_config={"model_type": "pixtral"})
    assert "images of model type llava with a tower of Pixtral are not supported" in str(images_refused(pixtral))
    folder = str(save_tiny(tmp_path, tiny_model()))
    assert image_rules(folder, load_tokenizer(folder), max_pixels=1).layout is None
    with pytest.raises(UserError, match="images need a vision-language model, got LlamaForCausalLM: choose"):
        ImageProcessor.load(folder, load_tokenizer(folder))
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="images need Pillow, which is not installed: run pip install"):
        ImageProcessor.load(str(vision_folder("llava")), load_tokenizer(str(vision_folder("llava"))))


def test_the_key_depends_on_settings(tmp_path: Path) -> None:
    folder = save_vision(tmp_path, "llava")
    file = folder / "preprocessor_config.json"
    keys = []
    for side in (32, 48):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"size": {"shortest_edge": side}}))
        keys.append(ImageProcessor.load(str(folder), load_tokenizer(str(folder))).key)
    assert keys[0] == vision_processor("llava").key != keys[1]
