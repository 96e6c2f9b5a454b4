"""The Triton kernel of latent attention, against float64, and models on it against themselves without."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_rlhf.generation import GenerationEngine, sampler
from hybrid_rlhf.generation.model import decoder, layers
from hybrid_rlhf.runtime.world import default_device
from tests.support.families import variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, token_ids_of
from tests.support.triton_kernels import LEAST_SHARED_BYTES, compiled, launches_of_a_layer

pytest.importorskip("triton")
kernels = importlib.import_module("hybrid_rlhf.generation.model.kernels")


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "rotated", "latent"), [(3, 6, 12), (16, 8, 32), (40, 64, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_and_chunks_attend_to_latents(
    heads: int,
    rotated: int,
    latent: int,
    splits: int,
    dtype: torch.dtype,
    on_the_device: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one launch: a long and a short row, a chunk and the first tokens of a sequence."""
    monkeypatch.setattr(kernels.latent, "splits_of", lambda programs, capacity: (splits, 16))
    torch.manual_seed(0)
    keys = torch.randn(40, 16, 1, rotated + latent).to(dtype)
    pages, positions = torch.randperm(40).int().view(4, 10), torch.tensor([150, 3])
    starts, lengths, scale = [20, 0], [7, 3], (rotated + latent) ** -0.5
    queries = torch.randn(2 + sum(lengths), heads, rotated + latent).to(dtype)
    tiles = kernels.chunk_tiles(2, starts, lengths, tokens=kernels.latent_tokens_at_once(dtype))
    given = torch.tensor(tiles, dtype=torch.int32)
    found = kernels.latent_attention(queries, keys, pages, positions, rotated_dims=rotated, scale=scale, tiles=given)
    assert found.shape == (12, heads, latent)
    tokens = [(0, 150), (1, 3), *((2, 20 + i) for i in range(7)), *((3, i) for i in range(3))]
    for token, (sequence, position) in enumerate(tokens):
        known = keys[pages[sequence].long()].flatten(0, 1)[: position + 1, 0].double()
        weights = (queries[token].double() @ known.T * scale).softmax(dim=1)
        close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
        torch.testing.assert_close(found[token].double(), weights @ known[:, rotated:], **close)


@pytest.mark.parametrize(("rotated", "width"), [(6, 6), (6, 4), (8, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inputs_are_rotated_and_normed(rotated: int, width: int, dtype: torch.dtype, on_the_device: None) -> None:
    torch.manual_seed(0)
    queries, down = torch.randn(5, 3, 10 + rotated).to(dtype), torch.randn(5, 12 + rotated).to(dtype)
    weight, angles = torch.randn(12).to(dtype), torch.randn(5, 1, width // 2)
    table = None
    if width:
        cos, sin = (torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1))
        table = (cos.to(dtype), sin.to(dtype))
    found = kernels.latent_inputs(queries, down, weight, table, 1e-5, in_float32=True)
    key, turned = down[:, None, 12:], queries[..., 10:]
    if table is not None:
        key, turned = layers.rotate(key, *table), layers.rotate(turned, *table)
    latent = torch.nn.functional.rms_norm(down[:, :12].float(), (12,), weight.float(), 1e-5).to(dtype)
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(found[:, :3, :rotated], turned, **close)
    for place in (3, 4):
        torch.testing.assert_close(found[:, place, :rotated], key[:, 0], **close)
        torch.testing.assert_close(found[:, place, rotated:], latent, **close)


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.faults) for name in ("deepseek_v2", "minicpm3"))],
)
def test_a_model_with_latents_samples_with_kernels_what_it_does_without(
    name: str, everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampling = variant(name).to(default_device()), replace(SAMPLED, max_new_tokens=3)
    launched: list[int] = []
    own = kernels.latent_attention
    monkeypatch.setattr(kernels, "latent_attention", lambda *a, **k: launched.append(1) or own(*a, **k))
    engine = GenerationEngine.from_model(model, stop_token_ids=STOP_TOKEN_IDS)
    found = token_ids_of(engine.generate(PROMPTS[:3], sampling))
    assert launched
    for module in (decoder, layers, sampler):
        monkeypatch.setattr(module, "kernels_for", lambda device, dtype: None)
    plain = GenerationEngine.from_model(model, stop_token_ids=STOP_TOKEN_IDS)
    assert found == token_ids_of(plain.generate(PROMPTS[:3], sampling))


@pytest.mark.parametrize(("name", "launches"), [("minicpm3", 16), ("deepseek_v3", 16)])
def test_a_decoding_step_of_a_layer_with_latents_takes_few_launches(
    name: str, launches: int, everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a dense MLP. Queries have a latent of their own, with a norm."""

    def model_of(depth: int) -> PreTrainedModel:
        dense = {"first_k_dense_replace": depth} if name == "deepseek_v3" else {}
        return variant(name, num_hidden_layers=depth, **dense)

    assert launches_of_a_layer(monkeypatch, model_of) == launches


_TILE = """
from hybrid_rlhf.generation.model.kernels import latent
def attention(rotated, size, model, target, splits, tiles):
    constants = dict(N=16, R=rotated, L=size, SPLITS=splits, SPAN=128, TILES=tiles)
    constants |= latent.latent_tile(rotated, size, TYPES[model], tiles=tiles)
    warps = constants.pop("num_warps")
    head = dict(R=rotated, R_PAD=rotated, L=size, L_PAD=size, WIDTH=rotated, IN_FLOAT32=False)
    shared_bytes(latent._latent_inputs_kernel, head, model, target)
    return shared_bytes(latent._latent_kernel, constants, model, target, {"num_warps": warps})
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [90, *(pytest.param(target, marks=pytest.mark.faults) for target in (80, 100))])
def test_latents_of_published_models_fit_into_shared_memory(target: int) -> None:
    """DeepSeek V2, V3 and their relatives have 64 + 512 dimensions, MiniCPM3 has 32 + 256."""
    calls = (
        f"attention(*size, model, {target}, splits, tiles) for size in ((64, 512), (32, 256)) "
        "for model in TYPES for splits in (1, 8) for tiles in (False, True)"
    )
    taken = compiled(f"{_TILE}print(json.dumps([{calls}]))")
    assert len(taken) == 16 and all(0 < size <= LEAST_SHARED_BYTES for size in taken), taken
