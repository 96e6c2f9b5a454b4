"""Packed rows against padded ones: outputs and gradients, each family, with gaps and activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.models.families import PACKING_FAMILIES
from hybrid_rlhf.models.packing import PACKED_ATTENTION, batches, packs, rows, use_packing
from hybrid_rlhf.models.policy import Policy, Scorer
from tests.support.families import variant
from tests.support.model_types import tiny_of_type
from tests.support.models import (
    HEAD_FAMILIES,
    assert_same_gradients,
    build_model,
    checkpointed,
    packed_and_padded,
    padded_rows,
)
from tests.support.tensors import VARLEN_CALLS, take_slow_varlen

VARLEN = ["llama", "mistral", "qwen3", "gemma3_text", "phi3", "opt", "gpt2", "gpt_neox"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "varlen"),
    [(name, False) for name in sorted(PACKING_FAMILIES & HEAD_FAMILIES.keys())] + [(name, True) for name in VARLEN],
)
def test_packed_rows_give_the_logprobs_and_gradients_of_padded_ones(
    family: str, varlen: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention by torch, or by a slow kernel for rows of any lengths in the place of the GPU's."""
    if varlen:
        take_slow_varlen(monkeypatch)
    packed, padded = packed_and_padded(family)
    if checkpointing:
        checkpointed(packed)
    for left in (False, True):
        ids, mask = padded_rows([9, 1, 5, 7], left=left)
        wanted = mask.clone()
        wanted[:, 3] = False  # a gap in the response
        assert_same_gradients(Policy(packed), Policy(padded), ids, mask, wanted, 0.7)
    assert not varlen or set(VARLEN_CALLS) == {4}, "all rows in each call"


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma4_text", "qwen3_moe", "deepseek_v3"])
def test_types_that_pack_have_the_gradients_of_padded_ones(model_type: str) -> None:
    """Sinks, heads of several sizes, experts, latent attention."""
    packed, padded = tiny_of_type(model_type), tiny_of_type(model_type)
    use_packing(packed)
    assert packs(packed) and not packs(padded)
    ids, mask = padded_rows([19, 1, 5, 12])
    assert_same_gradients(Policy(packed), Policy(padded), ids % 128, mask, mask)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_rows_of_like_lengths_are_attended_to_together(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batches._MIN_SAVING, "cpu", 1)
    packed, padded = packed_and_padded(family)
    ids, mask = padded_rows([3, 9, 1, 7, 9, 4], left=False)
    given = batches.pack(packed, ids, mask).arguments["attention_mask"]
    groups = given.groups
    for one, other in zip(rows.groups_of(given.clone()), groups, strict=True):  # ZeRO-3 drops the attribute
        assert (one.lengths, one.longest) == (other.lengths, other.longest)
        assert torch.equal(one.places, other.places) and torch.equal(one.tokens, other.tokens)
    shapes = [(len(group.places), len(group.lengths), group.longest) for group in groups]
    assert shapes == [(25, 3, 9), (4, 1, 4), (3, 1, 3), (1, 1, 1)], "tokens, rows, length of the longest"
    assert_same_gradients(Policy(packed), Policy(padded), ids, mask, mask, 0.7)
    torch.testing.assert_close(
        Policy(packed)(ids[:1], mask[:1], mask[:1])[0][:, :3], Policy(packed)(ids, mask, mask)[0][:1, :3]
    )


def test_a_row_may_have_gaps_and_may_be_alone() -> None:
    packed, padded = packed_and_padded("llama")
    ids, mask = padded_rows([9, 6, 8])
    mask[0, 4] = mask[2, 0] = False
    assert_same_gradients(Policy(packed), Policy(padded), ids, mask, mask)
    assert_same_gradients(Policy(packed), Policy(padded), ids[:1], mask[:1], mask[:1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_packed_rows_give_the_scores_of_padded_ones(family: str) -> None:
    packed, padded = (build_model(family, AutoModelForSequenceClassification, num_labels=1) for _ in "ab")
    if family == "gemma2":
        for model in (padded, packed):
            model.set_attn_implementation("eager")
    use_packing(packed)
    ids, mask = padded_rows([9, 1, 5, 7])
    assert_same_gradients(Scorer(packed), Scorer(padded), ids, mask)


@pytest.mark.parametrize("lengths", [[9, 1, 5, 7], [4, 9, 0, 6], [0, 3, 9]])
def test_a_nan_stays_in_its_row(lengths: list[int]) -> None:
    """Padding among keys holds a token: its own row's."""
    packed, _ = packed_and_padded("llama")
    ids, mask = padded_rows(lengths)
    bad = max(range(len(lengths)), key=lengths.__getitem__)
    packed.get_input_embeddings().weight.requires_grad_(False)[0] = float("nan")
    ids[ids == 0] = 3
    clean = Policy(packed)(ids, mask, mask)[0].detach()
    ids[bad, lengths[bad] - 1] = 0
    found = Policy(packed)(ids, mask, mask)[0].detach()
    others = [row for row in range(len(lengths)) if row != bad]
    assert found.isfinite()[others].all() and torch.equal(found[others], clean[others])


def test_only_real_tokens_pass_through_the_model() -> None:
    packed, _ = packed_and_padded("llama")
    shapes = []
    packed.base_model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].shape))
    ids, mask = padded_rows([9, 1, 5, 7])
    Policy(packed)(ids, mask, mask)
    assert shapes == [(1, 22, 32)]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt2", "qwen3_5_text", "granitemoehybrid"])
def test_a_model_that_packs_still_generates_through_its_own_code(model_type: str) -> None:
    packed, padded = tiny_of_type(model_type), tiny_of_type(model_type)
    use_packing(packed)
    assert packs(packed)
    ids, mask = padded_rows([9, 5, 7], left=True)
    arguments = {"attention_mask": mask.long(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(packed.generate(ids % 128, **arguments), padded.generate(ids % 128, **arguments))


def test_a_family_that_no_row_covers_is_padded_and_a_saved_model_keeps_no_trace(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = variant("bloom")
    use_packing(model)
    assert not packs(model)
    packed, _ = packed_and_padded("llama")
    packed.save_pretrained(tmp_path)
    assert PACKED_ATTENTION not in (tmp_path / "config.json").read_text()
