"""How model families compute logits: scale and soft cap, besides the matrix product.

They are read from config attributes, so a family with a known convention needs no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.models.families.vision import banned_ids

_MULTIPLIED_BY_SCALING = ("hyperclovax",)


@dataclass(frozen=True)
class HeadConvention:
    """Logits are softcap(scale * (hidden @ weight.T + bias))."""

    scale: float = 1.0
    softcap: float | None = None
    banned: tuple[int, ...] = ()
    """Ids that stand for images and have probability 0, in training as in sampling."""


def head_convention(config: PreTrainedConfig) -> HeadConvention:
    """The scale and soft cap with which a causal LM's head computes logits.

    Gemma 2/3 and RecurrentGemma cap the logits (`final_logit_softcapping`, `logits_soft_cap`), Cohere and Falcon-H1
    multiply them (`logit_scale`, `lm_head_multiplier`), Granite divides them by `logits_scaling`, and HyperCLOVA X
    multiplies them by it.
    """
    text = config.get_text_config()
    scaling = float(getattr(text, "logits_scaling", None) or 1.0)
    scale = scaling if text.model_type in _MULTIPLIED_BY_SCALING else 1 / scaling
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= float(getattr(text, name, None) or 1.0)
    softcap = getattr(text, "final_logit_softcapping", None) or getattr(text, "logits_soft_cap", None)
    return HeadConvention(scale=scale, softcap=float(softcap) if softcap else None, banned=banned_ids(config))


def keep_float32_logits(lm: PreTrainedModel, wanted: bool) -> None:
    """Record on a causal LM whether its logits are computed in float32 (model.head_dtype); training, distillation and
    generation read the record."""
    vars(lm)["float32_logits"] = wanted


def has_float32_logits(lm: PreTrainedModel) -> bool:
    """Return the record of `keep_float32_logits`, True by default."""
    return bool(vars(lm).get("float32_logits", True))
