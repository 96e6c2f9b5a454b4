"""Learning rates: the defaults, which are published rates of 7B models scaled by the width of the trained model, and
their schedules.

docs/defaults.md has the sources and the measurements of the defaults.
"""

from __future__ import annotations

import math
from typing import Literal

from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig

Learning = Literal["sft", "reward", "preference", "actor", "critic"]
"""Type of training: on tokens, on pairs, or on the model's own completions."""
RATES: dict[Learning, float] = {"sft": 2e-5, "reward": 1e-5, "preference": 1e-6, "actor": 1e-6, "critic": 1e-5}
"""Peak learning rates of a model of width RATES_WIDTH, if all weights are trained."""
RATES_WIDTH = 4096
"""Hidden size of 7B and 8B models."""
LORA_FACTOR = 10
"""Factor of the rate for adapters of any rank, up to LORA_ALPHA (LoRA Without Regret, 2025)."""
LORA_ALPHA = 32
"""Largest alpha to which LORA_FACTOR applies."""


def derived_rate(learning: Learning, *, width: int, lora: LoraConfig | None) -> tuple[float, str]:
    """Return the default peak learning rate of a model, and a text of what it is derived from.

    Adam changes every weight by about the rate, so an update changes the output of a layer in proportion to rate times
    width (muP, arXiv 2203.03466, table 3). The change of adapters is scaled by alpha / rank, and is the sum over `rank`
    directions.

    Args:
        learning: a row of RATES.
        width: hidden size.
        lora: adapters; none: all weights are trained.
    """
    rate = RATES[learning] * RATES_WIDTH / width
    source = f"width {width}"
    if lora is not None:
        rate *= LORA_FACTOR * LORA_ALPHA / max(lora.alpha, LORA_ALPHA)
        source += f" and adapters of alpha {lora.alpha:g}"
    return float(f"{rate:.1e}"), source


def lr_factor(step: int, *, config: OptimizerConfig, total_steps: int) -> float:
    """Return the factor of optimizer.lr for an update.

    Args:
        step: number of earlier updates.
        config: schedule and warmup_fraction.
        total_steps: number of updates of the run; linear and cosine schedules reach 0 after the last one.
    """
    warmup_steps = math.ceil(config.warmup_fraction * total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
