"""The experts that a Hugging Face model's own routers choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hybrid_rlhf.models.routers.modules import choices, router_modules


@torch.no_grad()
def module_routes(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """[T, mixtures, experts per token] in one forward over whole tokens, by hooks."""
    found: list[torch.Tensor] = []

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        found.append(choices(output, model.config.num_experts_per_tok))

    handles = [router.register_forward_hook(hook) for router in router_modules(model)]
    try:
        model(input_ids=torch.tensor([list(tokens)], device=model.device))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found, dim=1).cpu().numpy()
