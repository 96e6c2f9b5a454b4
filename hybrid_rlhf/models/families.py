"""Quirks of model families, as a table: what a head does besides a matrix product.

The table is read from config attributes, so a family that shares a convention needs no row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class HeadConvention:
    """Logits are softcap(scale * (hidden @ weight.T + bias))."""

    scale: float = 1.0
    softcap: float | None = None


def head_convention(config: PreTrainedConfig) -> HeadConvention:
    """How a causal LM's head turns hidden states into logits.

    Gemma 2/3 cap the logits (`final_logit_softcapping`), Cohere multiplies (`logit_scale`), Granite divides
    (`logits_scaling`).
    """
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    softcap = getattr(text, "final_logit_softcapping", None)
    return HeadConvention(scale=scale, softcap=float(softcap) if softcap else None)
