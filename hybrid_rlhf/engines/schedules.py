"""Learning-rate schedules as a pure function of the step."""

from __future__ import annotations

import math

from hybrid_rlhf.configs.sections import OptimizerConfig


def lr_factor(step: int, *, config: OptimizerConfig, total_steps: int) -> float:
    """The share of optimizer.lr at an update.

    Args:
        step: updates done, from 0.
        config: schedule and warmup_fraction.
        total_steps: updates of the whole run; linear and cosine reach 0 after the last.
    """
    warmup_steps = math.ceil(config.warmup_fraction * total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
