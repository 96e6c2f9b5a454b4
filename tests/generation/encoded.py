"""Images of prompts, encoded by a model of transformers: its own merging code runs, and stops before its language
model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from hybrid_rlhf.generation.batching.images import PromptImages
from hybrid_rlhf.generation.model.images import EncodedPrompt
from hybrid_rlhf.models.structure import backbone_of, text_model_of
from tests.support.vision import model_arguments, vision_processor


def prompt_images(
    lm: PreTrainedModel,
    family: str,
    ids: Sequence[int],
    images: Sequence[Image.Image],
    *,
    change: Callable[[EncodedPrompt], EncodedPrompt] = lambda encoded: encoded,
) -> PromptImages:
    """The images of a prompt, encoded when they are needed, and changed then."""
    image_token = vision_processor(family).image_token_id
    places = [place for place, token in enumerate(ids) if token == image_token]
    keys = [-1 - int.from_bytes(hashlib.blake2b(image.tobytes(), digest_size=16).digest()) for image in images]
    counts = [vision_processor(family).expansion(*image.size).count(image_token) for image in images]
    of_tokens = [key for key, count in zip(keys, counts, strict=True) for _ in range(count)]
    return PromptImages(places, of_tokens, lambda: change(encoded(lm, family, ids, images)))


@torch.no_grad()
def encoded(lm: PreTrainedModel, family: str, ids: Sequence[int], images: Sequence[Image.Image]) -> EncodedPrompt:
    """Run the tower and the family's own merging code."""
    arguments = model_arguments(family, ids, images)
    taken: dict[str, Any] = {}

    def forward(**named: Any) -> BaseModelOutputWithPast:
        taken.update(named)
        return BaseModelOutputWithPast(last_hidden_state=named["inputs_embeds"])

    text = text_model_of(lm)
    vars(text)["forward"] = forward
    try:
        backbone_of(lm)(**{**arguments, "use_cache": False})
    finally:
        del vars(text)["forward"]
    places = (arguments["input_ids"][0] == vision_processor(family).image_token_id).nonzero().squeeze(1)
    positions = taken.get("position_ids")
    rotated = None if positions is None or positions.dim() < 3 else positions[-3:, 0].t()
    return EncodedPrompt(
        places.tolist(),
        taken["inputs_embeds"][0, places],
        tuple(taken.get("deepstack_visual_embeds") or ()),
        rotated,
        0 if rotated is None else int(rotated.max()) + 1 - len(ids),
        _runs(places.tolist()) if family == "gemma3" else (),
    )


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of each run of adjacent places."""
    runs = [list(run) for _, run in groupby(enumerate(places), key=lambda entry: entry[1] - entry[0])]
    return [(run[0][1], run[-1][1] + 1) for run in runs]
