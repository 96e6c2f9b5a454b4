"""Which modules of a model are its routers, and how they route without noise."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def router_modules(lm: PreTrainedModel) -> list[nn.Module]:
    """The modules whose logits transformers records as those of routers, by layer; none without experts."""
    recorded = lm.base_model.can_record_outputs.get("router_logits", [])
    kinds = tuple(one.target_class for one in (recorded if isinstance(recorded, list) else [recorded]))
    return [module for module in lm.base_model.modules() if isinstance(module, kinds)]


def route_without_noise(model: nn.Module) -> None:
    """Let mixtures of experts route in training as in evaluation, without jitter (Mixtral) and sampled experts
    (Phi-MoE): like dropout, these would make the log-probs of two forwards differ."""
    for block in model.modules():
        if isinstance(getattr(block, "experts", None), nn.Module) and not isinstance(block, GradientCheckpointingLayer):
            block.eval()
            vars(block)["train"] = lambda mode=True, block=block: block
