"""Parts that a Hugging Face model of any family has."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config with the number of routed experts of a layer."""
CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts")
"""Those with the number that a token passes through."""


def backbone_of(lm: PreTrainedModel) -> PreTrainedModel:
    """The model below the head; the causal LM itself if there is none.

    `base_model` does not find it where the class names the attribute of a vision-language model instead, or where its
    towers are beside a causal LM (Llama 4).
    """
    if lm.base_model is lm and (language := language_model_of(lm)) is not None:
        return language[1]
    parts = lm.children() if lm.base_model is lm else [lm.base_model]
    return next((part for part in parts if isinstance(part, PreTrainedModel)), lm)


def language_model_of(lm: PreTrainedModel) -> tuple[str, PreTrainedModel] | None:
    """Name and module of the language model, without a head, inside a model that also has towers for images and sound;
    None for a model of text only."""
    text = lm.config.get_text_config()
    if text is lm.config:
        return None
    parts = (part for part in lm.modules() if isinstance(part, PreTrainedModel) and part is not lm)
    part = next((part for part in parts if part.config.model_type == text.model_type), None)
    return None if part is None else (name_of(lm, backbone_of(part)), backbone_of(part))


def name_of(lm: nn.Module, module: nn.Module) -> str:
    """Name of a module inside a model."""
    return next(name for name, part in lm.named_modules() if part is module)


def text_model_of(lm: PreTrainedModel) -> PreTrainedModel:
    """The model below the head, without towers for images and sound."""
    language = language_model_of(lm)
    return backbone_of(lm) if language is None else language[1]


def towers_of(lm: PreTrainedModel) -> PreTrainedModel:
    """A model that shares the modules of a vision-language model beside its head and language model, which it does not
    keep in memory."""
    whole, backbone, text = copy.copy(lm), copy.copy(backbone_of(lm)), text_model_of(lm)
    backbone._modules = {name: part for name, part in backbone._modules.items() if part is not text}
    whole._modules = {name: backbone for name, part in lm._modules.items() if part is backbone_of(lm)}
    return whole


def layer_list(lm: PreTrainedModel) -> nn.ModuleList | None:
    """The list of a model's layers; None if there is no list of that length."""
    layers: int = lm.config.get_text_config().num_hidden_layers
    lists = (module for module in text_model_of(lm).modules() if isinstance(module, nn.ModuleList))
    return next((module for module in lists if len(module) == layers), None)


def layer_matrices(lm: PreTrainedModel) -> list[nn.Parameter]:
    """Weights of the linear modules in a model's layers. Embeddings, head, norms, biases, convolutions and stacked
    experts are not included."""
    modules = (layer_list(lm) or nn.ModuleList()).modules()
    return [module.weight for module in modules if isinstance(module, nn.Linear | Conv1D)]  # type: ignore[misc]


def has_mixture(lm: nn.Module) -> bool:
    """True if a model has a mixture of experts."""
    return any(name.split(".")[-1] in ("experts", "router") for name, _ in lm.named_modules())


def active_experts(config: PreTrainedConfig) -> float:
    """Part of the routed experts that a token passes through; 1 without a mixture."""
    experts, chosen = (
        next((value for key in keys if (value := getattr(config, key, None))), None)
        for keys in (EXPERTS, CHOSEN_EXPERTS)
    )
    return chosen / experts if chosen and experts else 1.0


def listed_mixtures(lm: nn.Module) -> list[nn.Module]:
    """Mixtures of experts whose experts are separate modules, as in models with remote code; transformers' own
    mixtures stack their weights."""
    return [block for block in lm.modules() if isinstance(getattr(block, "experts", None), nn.ModuleList)]
