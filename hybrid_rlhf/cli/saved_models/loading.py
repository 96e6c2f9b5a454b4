"""Loading of a model and its tokenizer for `chat`, `generate` and `serve`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.engine import default_stop_token_ids
from hybrid_rlhf.models.pretrained.adapters import adapter_merged
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
    path, tokenizer = _tokenizer(config, device)
    engine = GenerationEngine.from_pretrained(
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
        kv_cache_gib=kv_cache_gib,
    )
    engine.stop_token_ids |= {*stop_token_ids(tokenizer, None)}
    return engine, tokenizer


def load_adapted(
    config: InferenceConfig, adapters: Mapping[str, str], *, kv_cache_gib: float
) -> tuple[GenerationEngine, PreTrainedTokenizerBase, dict[str, GenerationEngine]]:
    """As `load_engine`, and an engine for each adapter, which shares the weights that it does not adapt.

    Args:
        config: of the model.
        adapters: peft folders by name.
        kv_cache_gib: of each engine.

    Raises:
        UserError: also for a folder without an adapter of this model, and a model without inference weights.
    """
    device, dtype = _place(config)
    path, tokenizer = _tokenizer(config, device)
    own = ModelConfig(path=path, trust_remote_code=config.trust_remote_code)
    loaded, _ = load_model(path, "causal_lm", config=own, dtype=dtype)
    model = loaded.to(device).eval()  # type: ignore[arg-type]
    stop = {*default_stop_token_ids(model), *stop_token_ids(tokenizer, None)}

    def engine() -> GenerationEngine:
        built = GenerationEngine.from_model(
            model, stop_token_ids=stop, tokenizer=tokenizer, kv_cache_gib=kv_cache_gib, cuda_graphs=False
        )
        if not isinstance(built.backend, NativeBackend):
            raise UserError(f"adapters need inference weights, {type(model).__name__} has none: serve merged models")
        return built

    found = {}
    for name, folder in adapters.items():
        with adapter_merged(model, folder):
            found[name] = engine()
    return engine(), tokenizer, found


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


def _tokenizer(config: InferenceConfig, device: torch.device) -> tuple[str, PreTrainedTokenizerBase]:
    """The resolved model and its tokenizer."""
    world = solo_world(device)
    warn_of_remote_code(config.trust_remote_code, world)
    path = resolve_model(config.path, world=world)
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    return path, tokenizer
