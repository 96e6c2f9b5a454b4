"""Floating-point operations that training a model needs, for the utilisation of GPUs.

As Chowdhery et al. 2022 (arXiv 2204.02311, appendix B): two for each weight of a product and token in a forward, two
for the gradient of its input and, if it is trained, two for its own. The head counts for the tokens whose log-probs are
computed, a mixture for the experts that a token passes through, and attention for the tokens before it within the
window. What is computed again (gradient checkpointing, attention's backward) is not counted; nor are towers for images
and sound, and the recurrences of layers without attention.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.engines.deepspeed_internals import full_shape
from hybrid_rlhf.generation.architecture.hugging_face import ATTENTION_TYPES, WINDOWS, attention_sizes, layer_types
from hybrid_rlhf.models.families import family_of
from hybrid_rlhf.models.four_bit import elements_of
from hybrid_rlhf.models.structure import active_experts, text_model_of

TRAINED = 6.0
"""Operations of a trained weight per token."""
_FROZEN = 4.0


class Operations(NamedTuple):
    """Operations of a forward and a backward."""

    token: float = 0.0
    """Per token, in the products of the layers."""
    head_token: float = 0.0
    """Per token whose log-prob is computed."""
    attention: tuple[tuple[float, float], ...] = ()
    """Windows in tokens, infinite for none, with the operations per query and key of all layers with it."""

    def of_rows(self, lengths: Tensor, *, head_tokens: float) -> float:
        """Those of rows with these numbers of tokens [N]."""
        rows = lengths.double()
        total = self.token * float(rows.sum()) + self.head_token * head_tokens
        for window, of_pair in self.attention:
            first = rows.clamp(max=window)  # tokens of a row that see all before them
            total += of_pair * float((first * (first + 1) / 2 + (rows - first) * first).sum())
        return total


def training_operations(lm: PreTrainedModel) -> Operations:
    """Operations of training a causal LM or a scorer, of whose weights this rank may have a part."""
    text = text_model_of(lm)
    config = lm.config.get_text_config()
    head = lm.get_output_embeddings()
    heads = [] if head is None else list(head.parameters())
    tables = [weight for part in text.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()]
    outside = {id(weight) for weight in (*tables, *heads)}
    token = sum(
        _of_weight(weight) * (active_experts(config) if ".experts." in name else 1.0)
        for name, weight in text.named_parameters()
        if id(weight) not in outside
    )
    return Operations(token, sum(map(_of_weight, heads)), _of_attention(lm, config))


def _of_weight(weight: nn.Parameter) -> float:
    """Operations per token; 0 for biases and norms."""
    shape = full_shape(weight)
    each = TRAINED if weight.requires_grad else _FROZEN
    return each * (elements_of(weight) or math.prod(shape)) if len(shape) > 1 else 0.0


def _of_attention(lm: PreTrainedModel, config: PreTrainedConfig) -> tuple[tuple[float, float], ...]:
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        return ()
    family = family_of(lm)
    heads, _, size = attention_sizes(config, {} if family is None else family.settings(config))
    width = heads * sum(getattr(config, name, None) or size for name in ("qk_head_dim", "v_head_dim"))
    windows = Counter(
        float((name in WINDOWS and getattr(config, WINDOWS[name])) or math.inf)
        for name in layer_types(config)
        if name in ATTENTION_TYPES
    )
    return tuple((window, TRAINED * width * layers) for window, layers in windows.items())
