"""Loading of a model and its tokenizer for `chat`, `generate` and `serve`."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.models.pretrained.folders import warn_of_remote_code
from hybrid_rlhf.models.pretrained.loading import load_model, training_dtype
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import default_device, solo_world


def load_engine(
    config: InferenceConfig, *, kv_cache_gib: float | None = None
) -> tuple[GenerationEngine, PreTrainedTokenizerBase]:
    """The generation engine and the tokenizer of a config; `kv_cache_gib`: see `GenerationEngine.from_model`.

    Raises:
        UserError: if there is no such model or device, or the device does not support the dtype.
    """
    device, dtype = _place(config)
    world = solo_world(device)
    warn_of_remote_code(config.trust_remote_code, world)
    path = resolve_model(config.path, world=world)
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    engine = GenerationEngine.from_pretrained(
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
        kv_cache_gib=kv_cache_gib,
    )
    engine.stop_token_ids |= {*stop_token_ids(tokenizer, None)}
    return engine, tokenizer


def load_scorer(config: InferenceConfig, path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A reward model and its tokenizer, on the device and in the dtype of a config.

    Raises:
        UserError: if there is no such model, or it has no score head.
    """
    device, dtype = _place(config)
    resolved = resolve_model(path, world=solo_world(device))
    tokenizer = load_tokenizer(resolved, trust_remote_code=config.trust_remote_code)
    own = ModelConfig(path=path, trust_remote_code=config.trust_remote_code)
    model, is_new = load_model(resolved, "scorer", config=own, dtype=dtype, heads=None)
    if is_new:
        raise UserError(f"a reward model has a score head, {path} has none: give one that `hybrid-rlhf reward` saved")
    return model.to(device).eval(), tokenizer  # type: ignore[arg-type]


def _place(config: InferenceConfig) -> tuple[torch.device, torch.dtype]:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda needs a GPU, torch finds none: set --device cpu")
    device = default_device() if config.device == "auto" else torch.device(config.device)
    if config.dtype == "float16" and device.type == "cpu":
        raise UserError("dtype float16 needs a GPU, this is a CPU: set --dtype float32 or bfloat16")
    return device, training_dtype(ModelConfig(dtype=config.dtype), device)
