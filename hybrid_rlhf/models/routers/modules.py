"""Which modules of a model are its routers, and how they route without noise."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybrid_rlhf.models.structure import text_model_of


def router_modules(lm: PreTrainedModel) -> list[nn.Module]:
    """The modules whose logits transformers records as those of routers, by layer; none without experts."""
    backbone = text_model_of(lm)
    recorded = backbone.can_record_outputs.get("router_logits", [])
    kinds = tuple(one.target_class for one in (recorded if isinstance(recorded, list) else [recorded]))
    return [module for module in backbone.modules() if isinstance(module, kinds)]


def choices(output: tuple[Tensor, ...], per_token: int) -> Tensor:
    """The experts [N, k] that a router chose: its last output. Llama 4's returns no indices, but as its first output
    scores [N, experts] that are 0 for all others."""
    return output[0].detach().topk(per_token, dim=-1)[1] if output[-1].is_floating_point() else output[-1]


def route_without_noise(model: nn.Module) -> None:
    """Let mixtures of experts route in training as in evaluation, without jitter (Mixtral) and sampled experts
    (Phi-MoE): like dropout, these would make the log-probs of two forwards differ."""
    for block in model.modules():
        if isinstance(getattr(block, "experts", None), nn.Module) and not isinstance(block, GradientCheckpointingLayer):
            block.eval()
            vars(block)["train"] = lambda mode=True, block=block: block
