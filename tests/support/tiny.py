"""A byte-level tokenizer and random models that fit in a test."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 256 + len(SPECIAL)


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, and three special ones; pad equals eos."""
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    return byte_tokenizer(SPECIAL, template, **roles, unk_token="<|endoftext|>")


def byte_tokenizer(special: list[str], template: str | dict[str, str] | None, **roles: str) -> PreTrainedTokenizerFast:
    """One token per byte after the special ones, some of which have roles."""
    vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
    tokenizer.chat_template = template
    return tokenizer


def tiny_config(**changes: object) -> LlamaConfig:
    """Two layers of 32, with tied embeddings."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**settings, **changes})


def tiny_model(seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random causal LM of that configuration."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(**changes)).eval()


def tiny_scorer(seed: int = 1, **changes: object) -> PreTrainedModel:
    """A random reward model of that configuration."""
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(tiny_config(**{"num_labels": 1, **changes})).eval()


def save_tiny(folder: Path, model: PreTrainedModel) -> Path:
    """Save a model with the tokenizer, and return the folder."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
