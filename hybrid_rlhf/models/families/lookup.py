"""Finds the row of a model in the family table.

A model for images and sound that transformers loads as a causal LM (Gemma 3, Gemma 4) is a language model with
additional towers. Its row is that of the language model, and the towers are not used for text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.models.families.family import Family
from hybrid_rlhf.models.families.layered import LAYERED_FAMILIES
from hybrid_rlhf.models.families.recurrent import RECURRENT_FAMILIES
from hybrid_rlhf.models.families.table import FAMILIES as ATTENTION_FAMILIES
from hybrid_rlhf.models.structure import language_model_of

FAMILIES: dict[str, Family] = {**ATTENTION_FAMILIES, **RECURRENT_FAMILIES, **LAYERED_FAMILIES}


def family_of(lm: PreTrainedModel) -> Family | None:
    """The row of a causal LM, with module names as in the model; None without a row."""
    family = FAMILIES.get(lm.config.get_text_config().model_type)
    language = language_model_of(lm)
    if family is None or language is None:
        return family
    prefix = f"{family.names['embed'].partition('.')[0]}."
    name = f"{language[0]}."
    places = {role: module.split("|") for role, module in family.names.items()}
    renamed = {
        role: "|".join(
            name + module.removeprefix(prefix) if module.startswith(prefix) else module for module in modules
        )
        for role, modules in places.items()
    }
    return replace(family, names=renamed)


def has_mixers(config: PreTrainedConfig) -> bool:
    """Return True if a model has modules that mix neighbouring sequences of a packed row (`mixer_role` of its
    family)."""
    family = FAMILIES.get(config.get_text_config().model_type)
    return family is not None and family.mixer_role is not None


def unread_weights(lm: PreTrainedModel, names: Iterable[str]) -> tuple[str, ...]:
    """Names of the weights of the towers beside a causal LM's language model."""
    language = language_model_of(lm)
    if language is None:
        return ()
    owner = language[0].rpartition(".")[0]
    return tuple(
        name for name in names if owner and name.startswith(f"{owner}.") and not name.startswith(f"{language[0]}.")
    )
