"""Packed rows of models with mixers (recurrent layers, Llama 4): independent sequences, and padding in mixers only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.models.families import FAMILIES
from hybrid_rlhf.models.packing import batches, packs, pads, rows, use_packing
from hybrid_rlhf.models.policy import Policy
from tests.support.model_types import tiny_of_type
from tests.support.models import assert_same_gradients, checkpointed, packed_and_padded, padded_rows
from tests.support.tensors import VARLEN_CALLS, take_slow_varlen

WITH_MIXERS = sorted(name for name, family in FAMILIES.items() if family.mixer_role is not None)
KINDS = ["qwen3_5_text", "jamba", "falcon_h1", "lfm2", "minimax", "llama4_text"]
"""One of each kind of mixer."""
LENGTHS = [19, 1, 5, 12]


def packed_model(model_type: str) -> PreTrainedModel:
    model = tiny_of_type(model_type)
    use_packing(model)
    assert packs(model) and pads(model)
    return model


def rows_of_tokens() -> tuple[Tensor, Tensor]:
    ids, mask = padded_rows(LENGTHS)
    return ids % 128, mask


@pytest.mark.parametrize("model_type", WITH_MIXERS)
def test_packed_rows_learn_as_padded_ones(model_type: str) -> None:
    packed, padded = packed_model(model_type), tiny_of_type(model_type)
    assert not packs(padded)
    ids, mask = rows_of_tokens()
    wanted = mask.clone()
    wanted[:, 3] = False
    assert_same_gradients(Policy(packed), Policy(padded), ids, mask, wanted, 0.7)
    checkpointed(packed)
    assert_same_gradients(Policy(packed), Policy(padded), ids.flip(1), mask.flip(1), mask.flip(1))


@pytest.mark.parametrize("model_type", KINDS)
def test_rows_in_groups_and_for_a_varlen_kernel(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes rows of like lengths together, in another order, or all of them by their boundaries."""
    packed, padded = packed_model(model_type), tiny_of_type(model_type)
    ids, mask = rows_of_tokens()
    monkeypatch.setitem(batches._MIN_SAVING, "cpu", 1)
    for varlen in (False, True):
        if varlen:
            take_slow_varlen(monkeypatch)
        masks = batches.pack(packed, ids, mask).arguments["attention_mask"]
        given = masks["full_attention"]
        assert given.dtype == (torch.int32 if varlen else torch.int64)
        assert varlen or len(given.groups) > 1
        found, copied = rows.rows_of(given), rows.rows_of(given.clone())
        assert sorted(found.lengths) == sorted(LENGTHS) and found.lengths == copied.lengths
        assert_same_gradients(Policy(packed), Policy(padded), ids, mask, mask)
    assert set(VARLEN_CALLS) == ({len(LENGTHS)} if model_type != "llama4_text" else set())


@pytest.mark.parametrize(
    ("model_type", "mixer", "feed_forward"),
    [("jamba", "mamba.in_proj", "feed_forward"), ("lfm2", "conv.in_proj", "feed_forward")],
)
def test_only_mixers_compute_padding(model_type: str, mixer: str, feed_forward: str) -> None:
    """Each once in a forward: under ZeRO-3 all ranks need the same number of calls."""
    model, shapes = packed_model(model_type), list[tuple[int, ...]]()
    for name in (mixer, feed_forward):
        module = model.get_submodule(f"model.layers.0.{name}")
        module.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    ids, mask = rows_of_tokens()
    Policy(model)(ids, mask, mask)
    assert shapes == [(len(LENGTHS), max(LENGTHS), 64), (1, sum(LENGTHS), 64)]


def test_under_flash_attention_models_with_mixers_are_padded() -> None:
    """Its layers get no mask, by which mixers would know the rows."""
    hybrid, (other, _) = tiny_of_type("bamba"), packed_and_padded("llama")
    for model in (hybrid, other):
        model.config._attn_implementation_internal = "flash_attention_2"
    assert packs(other) and not pads(other)
    assert not packs(hybrid) and pads(hybrid)
