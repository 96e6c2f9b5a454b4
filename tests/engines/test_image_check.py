"""What reads the images of prompts while sampling: the tower under ZeRO, and errors that name it where it differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.data.images.references import read_reference
from hybrid_rlhf.engines import hybrid
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.tower_copy import TowerCopy
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.models.vision import EncodedImages, ImageEncoder
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec
from tests.support.errors import user_error
from tests.support.marks import faults
from tests.support.vision import FAMILIES, build_vision, chat_ids, picture, save_vision

IMAGES = [picture(1), picture(2)]


def actor(folder: Path, family: str, world: World, *, stage: int, vision: Any = "train") -> Any:
    path = save_vision(folder, family, build_vision(family, spread=2.0))
    spec = actor_spec(path, stage=stage)
    return build_actor(replace(spec, model=replace(spec.model, vision=vision)), world)


def read(engine: Any, family: str) -> list[EncodedImages]:
    """A rollout of one prompt, its check with the training forward, and what its images became."""
    encoded: list[EncodedImages] = []
    ids = chat_ids(family, [IMAGES[0], "or", IMAGES[1]])
    references = [read_reference(image, "image", folder=None, max_pixels=2**20) for image in IMAGES]
    with engine.inference(stop_token_ids=()) as generation:
        images = generation.image_reader().prompt_images(ids, references)
        encode = images.encode
        images.encode = lambda: encoded.append(encode()) or encoded[-1]  # type: ignore[func-returns-value]
        ((completion,),) = generation.generate([ids], SamplingParams(max_new_tokens=5), images=[images])
    row = torch.tensor([[*ids, *completion.token_ids]])
    real = torch.ones_like(row, dtype=torch.bool)
    logprobs = engine(row, real, real, images=[references])[0]
    assert (logprobs[0, len(ids) :].detach() - torch.tensor(completion.logprobs)).abs().max() < 1e-4
    engine.backward(-(logprobs * (torch.arange(row.shape[1]) >= len(ids))).sum(), count=5)
    engine.step()
    return encoded


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3", *(faults(each) for each in FAMILIES)])
@pytest.mark.parametrize(("stage", "vision"), [(3, "train"), (3, "freeze"), (0, "train")])
def test_sampling_reads_images_as_training_does(
    stage: int, vision: str, family: str, tmp_path: Path, world: World
) -> None:
    """With the weights of each update; those of a frozen tower stay."""
    engine = actor(tmp_path, family, world, stage=stage, vision=vision)
    first, second, third = (read(engine, family)[0].states for _ in range(3))
    assert (vision == "freeze") == torch.equal(first, second) == torch.equal(second, third)


def test_a_tower_with_old_weights_is_named(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = actor(tmp_path, "qwen3_vl", world, stage=3)
    read(engine, "qwen3_vl")
    monkeypatch.setattr(TowerCopy, "take", lambda *_: None)
    with user_error("the vision tower must read images as the training forward does, its states differ by"):
        read(engine, "qwen3_vl")


def test_a_place_of_an_image_that_differs_is_no_error_of_the_tower(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = actor(tmp_path, "qwen3_vl", world, stage=0)
    read(engine, "qwen3_vl")

    class Wrong(ImageEncoder):
        def encode(self, *arguments: Any) -> EncodedImages:
            encoded = super().encode(*arguments)
            assert encoded.positions is not None
            return replace(encoded, positions=encoded.positions * torch.tensor([1, 2, 1]))

    monkeypatch.setattr(hybrid, "ImageEncoder", Wrong)
    with user_error("with the training forward on a prompt with an image .* while the vision tower agrees: report"):
        read(engine, "qwen3_vl")
