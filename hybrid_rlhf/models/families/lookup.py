"""Finds the row of a model in the family table.

A model for images and sound (Gemma 3, Qwen3.5) is a language model with additional towers. Its row is that of the
language model, and the towers are not used for text: they stay as they are (`unread_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.models.families.family import Family
from hybrid_rlhf.models.families.layered import LAYERED_FAMILIES
from hybrid_rlhf.models.families.recurrent import RECURRENT_FAMILIES
from hybrid_rlhf.models.families.table import FAMILIES as ATTENTION_FAMILIES
from hybrid_rlhf.models.families.training import SAME_LANGUAGE_MODEL, TOWERS_INSIDE
from hybrid_rlhf.models.structure import language_model_of, name_of, text_model_of

FAMILIES: dict[str, Family] = {**ATTENTION_FAMILIES, **RECURRENT_FAMILIES, **LAYERED_FAMILIES}


def family_of(lm: PreTrainedModel) -> Family | None:
    """The row of a causal LM, with module names as in the model; None without a row."""
    family = _row(lm.config)
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
    if (head := lm.get_output_embeddings()) is not None:  # Llama 4 has it beside the language model
        renamed["head"] = name_of(lm, head)
    return replace(family, names=renamed)


def _row(config: PreTrainedConfig) -> Family | None:
    text = config.get_text_config().model_type
    return FAMILIES.get(SAME_LANGUAGE_MODEL.get(text, text))


def has_mixers(config: PreTrainedConfig) -> bool:
    """Return True if a model has modules that mix neighbouring sequences of a packed row (`mixer_role` of its
    family)."""
    family = _row(config)
    return family is not None and family.mixer_role is not None


def unread_weights(lm: PreTrainedModel, names: Iterable[str]) -> tuple[str, ...]:
    """Those of some names that text never reads: of towers and projectors beside a language model, and of layers in it
    that only attend to images.

    Args:
        lm: causal LM or classifier, with or without adapters.
        names: names of weights or modules in the model.
    """
    language = language_model_of(lm)
    text = name_of(lm, text_model_of(lm))
    layers = getattr(lm.config.get_text_config(), "cross_attention_layers", None) or ()
    unread = [*TOWERS_INSIDE.get(lm.config.model_type, ()), *(f"{text}.layers.{layer}" for layer in layers)]
    if language is None:
        return tuple(name for name in names if _within(name, unread)) if unread else ()
    heads = [head for head in (lm.get_output_embeddings(), getattr(lm, "score", None)) if head is not None]
    read = [text, *(name_of(lm, head) for head in heads)]
    return tuple(name for name in names if _within(name, unread) or not _within(name, read))


def _within(name: str, modules: Iterable[str]) -> bool:
    """Return True for the name of a module of some, or of anything in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)
