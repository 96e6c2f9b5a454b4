"""The experts that a Hugging Face model's own routers choose, and completions that record them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hybrid_rlhf.generation import Completion
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


def assert_own_routes(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], results: Sequence[Sequence[Completion]]
) -> None:
    """Each completion has the experts of the model's own forward over its tokens, and none for the last."""
    for prompt, samples in zip(prompts, results, strict=True):
        for sample in samples:
            assert sample.routes is not None
            tokens = [*prompt, *sample.token_ids]
            assert len(sample.routes) == len(tokens)
            assert (sample.routes[-1] == -1).all()
            expected = module_routes(model, tokens)
            np.testing.assert_array_equal(np.sort(sample.routes[:-1]), np.sort(expected[:-1]))
