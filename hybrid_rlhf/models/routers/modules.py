"""The router modules of a model, and routing without noise."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybrid_rlhf.models.structure import text_model_of


def router_modules(lm: PreTrainedModel) -> list[nn.Module]:
    """The modules whose outputs transformers records as router logits, by layer; [] without experts."""
    backbone = text_model_of(lm)
    recorded = backbone.can_record_outputs.get("router_logits", [])
    kinds = tuple(recorder.target_class for recorder in (recorded if isinstance(recorded, list) else [recorded]))
    return [module for module in backbone.modules() if isinstance(module, kinds)]


def choices(output: tuple[Tensor, ...], per_token: int) -> Tensor:
    """The experts [N, k] that a router chose: its last output. Llama 4's router returns no indices, but scores
    [N, experts] as its first output, which are 0 for experts that are not chosen."""
    return output[0].detach().topk(per_token, dim=-1)[1] if output[-1].is_floating_point() else output[-1]


def route_without_noise(model: nn.Module) -> None:
    """Disable jitter (Mixtral) and sampled experts (Phi-MoE) in training: like dropout, they would make the log-probs
    of two forwards differ."""
    for block in model.modules():
        if isinstance(getattr(block, "experts", None), nn.Module) and not isinstance(block, GradientCheckpointingLayer):
            block.eval()
            vars(block)["train"] = lambda mode=True, block=block: block
