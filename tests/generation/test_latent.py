"""Latent attention in its two forms: which one a chunk of a prompt takes, and that both compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.generation import Completion
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.architecture.model_description import Latent, Split
from hybrid_rlhf.generation.model import attention as attention_module
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows
from hybrid_rlhf.generation.model.cache import CacheLayout, KVCache, blocks_of
from hybrid_rlhf.generation.model.latent import LatentAttention
from hybrid_rlhf.generation.ops import cpu_kernels
from hybrid_rlhf.runtime.world import default_device
from tests.support.families import variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, engine_of, token_ids_of
from tests.support.triton_kernels import count_launches, layer_kernels

DEEPSEEK_V3 = Latent(size=512, rotated_dims=64, plain_dims=128, value_dims=128, norm_eps=1e-6)
MINICPM3 = Latent(size=256, rotated_dims=32, plain_dims=64, value_dims=64, norm_eps=1e-5)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_both_forms_compute_the_same(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, in one chunk and in chunks after a prefix beside decoding rows; all in one form, each
    in one of both, and in the plain form with one head or sequence at a time."""
    if not kernels:
        monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    model, sampling = variant(name), replace(SAMPLED, max_new_tokens=6, n=1)
    for form in ("_plain", "_absorbed"):
        compute = getattr(LatentAttention, form)
        monkeypatch.setattr(LatentAttention, form, create_autospec(compute, side_effect=compute))

    def completions(expands: Any, **options: Any) -> list[list[Completion]]:
        monkeypatch.setattr(Latent, "expands", expands)
        engine = engine_of(model, STOP_TOKEN_IDS, **options)
        LatentAttention._plain.reset_mock()
        LatentAttention._absorbed.reset_mock()
        return engine.generate(PROMPTS, sampling)

    expected = completions(lambda kind, start, length: False)
    assert LatentAttention._absorbed.called and not LatentAttention._plain.called
    for expands, prefill_tokens, expanded_tokens in [
        (lambda kind, start, length: True, 2048, 8192),
        (lambda kind, start, length: True, 25, 0),
        (lambda kind, start, length: length % 2 == 1, 25, 8192),
    ]:
        monkeypatch.setattr(attention_module, "_EXPANDED_TOKENS", expanded_tokens)
        computed = completions(expands, prefill_tokens=prefill_tokens, max_batch_rows=3)
        assert LatentAttention._absorbed.called and LatentAttention._plain.called
        assert token_ids_of(computed) == token_ids_of(expected)
        for ours, theirs in zip(computed, expected, strict=True):
            assert ours[0].logprobs == pytest.approx(theirs[0].logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", [DEEPSEEK_V3, MINICPM3])
def test_chunks_take_the_form_of_fewer_multiplications(kind: Latent) -> None:
    """Of a head; a prompt takes the plain form, and a few tokens after a long prefix the absorbed one."""
    up = kind.size * (kind.plain_dims + kind.value_dims)
    for start in (0, 1, 15, 64, 1000, 30_000):
        for length in (1, 2, 5, 64, 100, 180, 2048):
            pairs = sum(start + place + 1 for place in range(length))
            absorbed = length * up + pairs * (2 * kind.size + kind.rotated_dims)
            plain = (start + length) * up + pairs * (kind.query_dims + kind.value_dims)
            assert kind.expands(start, length) == (plain < absorbed)
    assert kind.expands(0, 1) and kind.expands(30_000, 256) and not kind.expands(30_000, 8)
    assert not replace(kind, value_dims=kind.query_dims + 1).expands(0, 100), "values have the room of keys"


def test_keys_of_few_heads_or_sequences_are_expanded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than those of the new tokens; the prefix of 160 tokens has eight times the pages of its chunk."""
    monkeypatch.setattr(Latent, "expands", lambda kind, start, length: length > 1)
    monkeypatch.setattr(attention_module, "_EXPANDED_TOKENS", 0)
    architecture, _ = describe(variant("deepseek_v3"))
    split = Split.of(architecture, 0, 1)
    cache = KVCache(CacheLayout.of(architecture, split, 256), pages=80, dtype=torch.float32, device=torch.device("cpu"))
    pages = torch.randperm(80).int().view(1, 5, 16)
    attention = Attention(architecture, split, cache, capacity_tokens=256)
    starts, lengths = [0, 16, 160, 5], [20, 16, 20, 1]
    step = attention.step(DecodeRows(pages[:, :1], torch.tensor([33]), 34), Chunks(pages[:, 1:], starts, lengths))
    new, heads = 2 + 1 + 2, len(split.heads)
    assert [(each.tokens, len(each.pages[0]), each.heads_at_once[0]) for each in step.expanded] == [
        (slice(1, 37), 4, heads * new // 4),
        (slice(37, 57), blocks_of(180), heads * new // blocks_of(180)),
    ]
    sequences = [pages[0, 1, :2], pages[0, 2, :2], pages[0, 3, :12]]
    assert torch.equal(torch.cat([each.pages[0] for each in step.expanded]), torch.cat(sequences).long())
    assert isinstance(step.absorbed, Tensor) and step.absorbed.tolist() == [0, 57]


def test_a_prefill_launches_the_attention_of_plain_heads(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in each layer, for prompts of several lengths; it launched that of latents, with tiles of 32 queries."""
    pytest.importorskip("triton")
    model = variant("deepseek_v3").to(default_device())
    engine = engine_of(model, range(model.config.vocab_size))
    launched = count_launches(monkeypatch, *layer_kernels())
    engine.generate(PROMPTS[:3], replace(SAMPLED, max_new_tokens=1, n=1))
    assert launched.count("_attention_kernel") == model.config.num_hidden_layers
    assert "_latent_kernel" not in launched
