"""Device, tokenizer and generation engine of a saved model, for all commands on saved models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import InferenceConfig, SavedModelConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.images.expansion import ImageRules
from hybrid_rlhf.data.images.reading import checked_size, require_size
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.image_loading import image_rules
from hybrid_rlhf.models.pretrained.folders import load_config, warn_of_remote_code
from hybrid_rlhf.models.pretrained.loading import is_scorer, load_model, training_dtype
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.files.reading import regular_file
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import default_device, solo_world
from hybrid_rlhf.serving.saved_scorer import SavedScorer


@dataclass(frozen=True)
class Place:
    """A model before its weights are loaded."""

    name: str
    """Name as the user gave it."""
    path: str
    """Folder or hub name that transformers loads."""
    device: torch.device
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    trust_remote_code: bool

    @property
    def scores(self) -> bool:
        """True for a reward model."""
        return is_scorer(load_config(self.path, trust_remote_code=self.trust_remote_code))

    def image_rules(self, max_pixels: int) -> ImageRules:
        """How the images of rows are encoded; see `image_rules`."""
        return image_rules(self.path, self.tokenizer, max_pixels=max_pixels, trust_remote_code=self.trust_remote_code)


def find_model(config: SavedModelConfig, name: str | None = None) -> Place:
    """The model of a config.

    Args:
        config: device, dtype, chat template.
        name: another model with the same settings, and its own chat template; None: the config's model.

    Raises:
        UserError: if there is no such model or device, or the device does not support the dtype.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda needs a GPU, torch finds none: set --device cpu")
    device = default_device() if config.device == "auto" else torch.device(config.device)
    if config.dtype == "float16" and device.type == "cpu":
        raise UserError("dtype float16 needs a GPU, this is a CPU: set --dtype float32 or bfloat16")
    world = solo_world(device)
    warn_of_remote_code(config.trust_remote_code, world)
    path = resolve_model(name or config.path, world=world)
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template if name is None else None,
        chat_template_kwargs=config.chat_template_kwargs if name is None else None,
    )
    dtype = training_dtype(ModelConfig(dtype=config.dtype), device)
    return Place(name or config.path, path, device, dtype, tokenizer, config.trust_remote_code)


@functools.cache
def image_content(name: str) -> bytes:
    """The bytes of an image that a command names, read once.

    Raises:
        UserError: if there is no such file, or it is no image.
    """
    file = regular_file(name, "an image must be a file")
    try:
        require_size(file.stat().st_size, name)
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"an image must be a file, {name} cannot be read ({error.strerror}): check the path") from error
    checked_size(content, name)
    return content


def with_image_files(messages: Sequence[Message]) -> list[Message]:
    """Messages with the bytes of images in the place of the names of their files."""

    def read(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": image_content(part["image"])} if "image" in part else part

    return [
        {**message, "content": [*map(read, message["content"])]} if isinstance(message["content"], list) else message
        for message in messages
    ]


def load_engine(
    config: InferenceConfig, *, kv_cache_gib: float | None = None, name: str | None = None
) -> tuple[GenerationEngine, PreTrainedTokenizerBase]:
    """The generation engine and the tokenizer of a config; `kv_cache_gib`: see `GenerationEngine.from_model`; `name`
    and errors: see `find_model`."""
    place = find_model(config, name)
    return engine_at(place, kv_cache_gib=kv_cache_gib), place.tokenizer


def engine_at(
    place: Place, *, kv_cache_gib: float | None, adapters: Mapping[str, str] | None = None
) -> GenerationEngine:
    """The generation engine of a place; `kv_cache_gib` and `adapters`: see `GenerationEngine.from_model`.

    Raises:
        UserError: for a reward model, whose language model head would be random; for an unsuitable adapter.
    """
    logger.info("loading %s (%s on %s)", place.name, str(place.dtype).removeprefix("torch."), place.device)
    if place.scores:
        raise UserError(
            f"a model that answers must have a language model head, {place.name} is a reward model: give a causal LM"
        )
    if adapters:
        engine = GenerationEngine.from_model(
            load_lm(place), tokenizer=place.tokenizer, kv_cache_gib=kv_cache_gib, adapters=adapters
        )
    else:
        engine = GenerationEngine.from_pretrained(
            place.path,
            dtype=place.dtype,
            device=place.device,
            trust_remote_code=place.trust_remote_code,
            kv_cache_gib=kv_cache_gib,
        )
    engine.maker.stop_token_ids |= {*stop_token_ids(place.tokenizer, None)}
    return engine


def load_lm(place: Place) -> PreTrainedModel:
    """The causal LM of a place, on its device."""
    logger.info("loading %s", place.name)
    config = ModelConfig(path=place.path, trust_remote_code=place.trust_remote_code)
    lm, _ = load_model(place.path, "causal_lm", config=config, dtype=place.dtype)
    return lm.to(place.device).eval()  # type: ignore[arg-type]


def load_scorer(place: Place, *, max_image_pixels: int = 2**20) -> SavedScorer:
    """The reward model of a place, which scales images down to `max_image_pixels`.

    Raises:
        UserError: if it has no score head.
    """
    logger.info("loading %s", place.name)
    return SavedScorer(
        place.path,
        place.tokenizer,
        name=place.name,
        device=place.device,
        dtype=place.dtype,
        trust_remote_code=place.trust_remote_code,
        max_image_pixels=max_image_pixels,
    )
