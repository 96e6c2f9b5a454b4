"""The default learning rates: published rates of models of 7B, scaled by the width of the model that learns.

docs/defaults.md has the sources and the measurements.
"""

from __future__ import annotations

from typing import Literal

from hybrid_rlhf.configs.sections.model import LoraConfig

Learning = Literal["sft", "reward", "preference", "actor", "critic"]
"""What a model learns from: tokens, pairs, or its completions."""
RATES: dict[Learning, float] = {"sft": 2e-5, "reward": 1e-5, "preference": 1e-6, "actor": 1e-6, "critic": 1e-5}
"""Peak learning rates of all weights of a model of RATES_WIDTH."""
RATES_WIDTH = 4096
"""Hidden size of the models of 7B and 8B."""
LORA_FACTOR, LORA_ALPHA = 10, 32
"""Rate of adapters relative to that of all weights, up to this alpha, of any rank (LoRA Without Regret, 2025)."""


def derived_rate(learning: Learning, *, width: int, lora: LoraConfig | None) -> tuple[float, str]:
    """The default peak learning rate of a model, and what it is derived from.

    Adam moves every weight by about the rate, so an update changes the output of a layer in proportion to the rate and
    the width (muP, arXiv 2203.03466, table 3). The update of adapters is scaled by alpha / rank, and `rank` directions
    add up.

    Args:
        learning: a row of RATES.
        width: hidden size.
        lora: adapters; none: all weights learn.
    """
    rate, source = RATES[learning] * RATES_WIDTH / width, f"width {width}"
    if lora is not None:
        rate *= LORA_FACTOR * LORA_ALPHA / max(lora.alpha, LORA_ALPHA)
        source += f" and adapters of alpha {lora.alpha:g}"
    return float(f"{rate:.1e}"), source
