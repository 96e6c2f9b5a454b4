"""Layers of SmolLM2-135M's shape, forward and backward: fused norms and rotary positions against transformers' own.

    python -m benchmarks.fused_layers

Four layers, 16 packed rows of 60 to 66 tokens, float32, on one thread, whose own processor time is counted: so other
work on the machine disturbs it little. The two and their matrix products take turns; medians of the ratios are printed,
with oneDNN's products and with torch's.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hybrid_rlhf.functional.operations import BACKENDS, linear, use_backend
from hybrid_rlhf.models.fused_layers import BackendLinear, fuse_layers
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.models.policy import backbone_hidden, model_rows
from hybrid_rlhf.runtime.host_memory import keep_freed_memory

TURNS = 8


def model(*, fused: bool) -> PreTrainedModel:
    """As models/pretrained/loading.py leaves one, but for the fused layers."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    made = AutoModelForCausalLM.from_config(config)
    for module in made.modules():
        if type(module) is nn.Linear:
            module.__class__ = BackendLinear
    if fused:
        fuse_layers(made)
    use_packing(made)
    return made


def step(lm: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
    """Forward and backward of the layers."""
    backbone_hidden(lm, model_rows(lm, ids, mask)).square().sum().backward()
    lm.zero_grad()


def products(lm: PreTrainedModel, tokens: int) -> None:
    """Their matrix products alone."""
    for module in lm.model.modules():
        if isinstance(module, nn.Linear):
            x = torch.zeros(tokens, module.in_features, requires_grad=True)
            linear(x, module.weight).backward(torch.zeros(tokens, module.out_features))
    lm.zero_grad()


def main() -> None:
    """Measure in turn, print the ratios."""
    torch.set_num_threads(1)
    keep_freed_memory()
    lengths = torch.linspace(60, 66, 16).long()
    mask = torch.arange(66) < lengths[:, None]
    ids = torch.randint(3, 500, mask.shape)
    plain, fused, tokens = model(fused=False), model(fused=True), int(mask.sum())
    runs = {
        "plain": lambda: step(plain, ids, mask),
        "fused": lambda: step(fused, ids, mask),
        "products": lambda: products(plain, tokens),
    }
    for backend in BACKENDS:
        use_backend(backend)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(TURNS + 1):
            for name, run in runs.items():
                start = time.thread_time()
                run()
                if turn:  # the first one warms up
                    seconds[name].append(time.thread_time() - start)
        alone = seconds["products"]
        ratios = {
            name: statistics.median(a / b for a, b in zip(seconds[name], alone, strict=True))
            for name in ("plain", "fused")
        }
        gain = statistics.median(a / b for a, b in zip(seconds["plain"], seconds["fused"], strict=True))
        print(
            f"{backend:7} products {statistics.median(alone):.3f} s; layers take {ratios['plain']:.3f} plain, "
            f"{ratios['fused']:.3f} fused: {gain:.3f} times as fast"
        )


if __name__ == "__main__":
    main()
