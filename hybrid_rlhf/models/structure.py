"""Parts of a Hugging Face model that every family has, found without knowing the family."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def backbone_of(lm: PreTrainedModel) -> PreTrainedModel:
    """The model below the head; the causal LM itself where there is none.

    `base_model` does not find it where the class names the attribute of a vision-language model instead (Llama 4).
    """
    parts = lm.children() if lm.base_model is lm else [lm.base_model]
    return next((part for part in parts if isinstance(part, PreTrainedModel)), lm)


def layer_list(lm: PreTrainedModel) -> nn.ModuleList | None:
    """The list of a model's layers; none where there is no list of that length."""
    layers: int = lm.config.get_text_config().num_hidden_layers
    lists = (module for module in backbone_of(lm).modules() if isinstance(module, nn.ModuleList))
    return next((module for module in lists if len(module) == layers), None)


def listed_mixtures(lm: nn.Module) -> list[nn.Module]:
    """Mixtures of experts whose experts are modules of their own, as in models with remote code; transformers' own
    stack their weights."""
    return [block for block in lm.modules() if isinstance(getattr(block, "experts", None), nn.ModuleList)]
