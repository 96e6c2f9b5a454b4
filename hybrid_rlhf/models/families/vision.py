"""The table of model types whose images are read, and the reasons why others are refused.

Images of a type in the table pass its tower, and the states of the tower take the places of the embeddings of image
tokens; nothing else depends on them but rotary positions, states added after the first layers (Qwen3-VL), and attention
in both directions inside an image (Gemma 3). `make families` checks each type.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class VisionFamily:
    """A row of the table."""

    joined_dim: int = 0
    """Dimension along which the arguments of several images are joined."""
    has_two_way_images: bool = False
    """True if the tokens of an image attend to each other in both directions."""
    processor: str = ""
    """Processor of transformers that reads the images in place of the type's own; empty: its own."""


VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily(has_two_way_images=True),
    "glm46v": VisionFamily(),
    "glm4v": VisionFamily(),
    "glm4v_moe": VisionFamily(),
    "idefics3": VisionFamily(joined_dim=1),
    "internvl": VisionFamily(),
    "llava": VisionFamily(),
    "qwen2_5_vl": VisionFamily(),
    "qwen2_vl": VisionFamily(),
    "qwen3_5": VisionFamily(),
    "qwen3_5_moe": VisionFamily(),
    "qwen3_vl": VisionFamily(),
    # its own processor, which writes the same text for an image, needs num2words for videos
    "smolvlm": VisionFamily(joined_dim=1, processor="Idefics3Processor"),
}
"""Rows by the `model_type` of the whole config."""

_REFUSED = {
    "cross attention": "evolla idefics mllama",
    "encoder-decoder": "florence2 pix2struct pp_formulanet t5gemma2 udop vision_encoder_decoder",
    "image vocabulary": "chameleon emu3 janus",
    "per-layer inputs": "gemma3n gemma4",
    "query tokens": "blip_2 instructblip instructblipvideo kosmos_2 kosmos_2.5",
}
_REASONS = {kind: reason for reason, kinds in _REFUSED.items() for kind in kinds.split()}


def images_refused(config: PreTrainedConfig) -> str | None:
    """Why a model cannot read images, in one line; None if it can."""
    kind = config.model_type
    if kind in VISION_FAMILIES:
        if getattr(getattr(config, "vision_config", None), "model_type", "") != "pixtral":
            return None
        kind = f"{kind} with a tower of Pixtral"  # whose own processor writes breaks between rows of an image
    reason = _REASONS.get(kind.replace("-", "_"), "not tested")
    is_text = config.get_text_config() is config and not hasattr(config, "vision_config")
    if is_text and reason == "not tested":
        shown = next(iter(config.architectures or ()), kind)
        return f"images need a vision-language model, got {shown}: choose a type that docs/models.md lists"
    return f"images of model type {kind} are not supported ({reason}): use one of {', '.join(VISION_FAMILIES)}"


def image_token_id(config: PreTrainedConfig) -> int:
    """Id of the token that carries a state of the tower, for a type in the table."""
    token: int | None = getattr(config, "image_token_id", None)
    return config.image_token_index if token is None else token


def banned_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids of the vocabulary that stand for images and videos, which have probability 0: a sampled one would have no
    image. Empty for types outside the table."""
    if config.model_type not in VISION_FAMILIES:
        return ()
    rows: int = config.get_text_config().vocab_size
    return tuple(sorted({image_token_id(config), getattr(config, "video_token_id", rows)}.intersection(range(rows))))
