"""A model and its tokenizer for the inference entry points."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import InferenceConfig, SamplingConfig
from hybrid_rlhf.configs.sections import ModelConfig
from hybrid_rlhf.data.chat import stop_token_ids
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.folders import warn_of_remote_code
from hybrid_rlhf.models.loading import training_dtype
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import default_device, solo_world


def load_engine(config: InferenceConfig) -> tuple[GenerationEngine, PreTrainedTokenizerBase]:
    """Load what a config names.

    Raises:
        UserError: when there is no such model or device, or the device does not compute in that dtype.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda needs a GPU, torch sees none: set --device cpu")
    device = default_device() if config.device == "auto" else torch.device(config.device)
    if config.dtype == "float16" and device.type == "cpu":
        raise UserError("dtype float16 needs a GPU, this is a CPU: set --dtype float32 or bfloat16")
    world = solo_world(device)
    warn_of_remote_code(config.trust_remote_code, world)
    path = resolve_model(config.path, world=world)
    tokenizer = load_tokenizer(
        path, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
    )  # fmt: skip
    dtype = training_dtype(ModelConfig(dtype=config.dtype), device)
    engine = GenerationEngine.from_pretrained(
        path, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code
    )
    engine.stop_token_ids |= {*stop_token_ids(tokenizer, None)}
    return engine, tokenizer


def sampling_params(config: SamplingConfig, *, n: int = 1) -> SamplingParams:
    """The engine's parameters of a config."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        min_new_tokens=config.min_new_tokens,
        stop_strings=tuple(config.stop_strings),
        seed=config.seed,
        n=n,
    )
