"""Checkpoints with MXFP4 weights, packed here by the OCP Microscaling specification (version 1.0, sections 5.3.3 and
5.4.1), load as their values; those of other ways to quantise are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.engines.builder import build_engine
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.engines import actor_spec, train_step
from tests.support.errors import user_error
from tests.support.ranks import run_ranks
from tests.support.tiny import VOCABULARY, tiny_tokenizer

BLOCK = 32
CONFIG = GptOssConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    pad_token_id=2,
    eos_token_id=2,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)


_POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([_POSITIVE, -_POSITIVE])
"""Values of the 4-bit codes: table of section 5.3.3."""


def packed(shape: tuple[int, ...], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random blocks and scales of weights [E, N, K], and their values; the low half of a byte comes first."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*shape[:-1], shape[-1] // BLOCK, BLOCK), generator=generator)
    exponents = torch.randint(118, 128, codes.shape[:-1], generator=generator)  # e8m0: 2^(stored - 127)
    values = E2M1[codes] * torch.exp2(exponents - 127.0)[..., None]
    halves = codes.unflatten(-1, (-1, 2))
    blocks = (halves[..., 0] | halves[..., 1] << 4).to(torch.uint8)
    return {"blocks": blocks, "scales": exponents.to(torch.uint8)}, values.flatten(-2)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint as OpenAI publishes gpt-oss, and the values of its experts."""
    torch.manual_seed(0)
    GptOssForCausalLM(CONFIG).bfloat16().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights, values = load_file(file), {}
    for seed, name in enumerate(sorted(key for key in weights if key.endswith(("gate_up_proj", "down_proj")))):
        experts, inputs, outputs = weights.pop(name).shape
        parts, stored = packed((experts, outputs, inputs), seed)
        values[name] = stored.transpose(1, 2)
        weights |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
    save_file(weights, file, metadata={"format": "pt"})
    write_method(tmp_path / "model", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model", values


def write_method(folder: Path, method: dict[str, Any]) -> None:
    """Into the model's config."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": method}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_weights_load_as_their_values_and_are_saved_unquantised(
    folder: tuple[Path, dict[str, Tensor]], dtype: torch.dtype, tmp_path: Path
) -> None:
    path, values = folder
    model, _ = load_model(str(path), "causal_lm", config=ModelConfig(), dtype=dtype)
    loaded = dict(model.named_parameters())
    assert len(values) == 4
    for name, expected in values.items():
        assert loaded[name].dtype == dtype and loaded[name].requires_grad
        assert torch.equal(loaded[name].float(), expected), name  # bfloat16 holds them exactly
    assert not hasattr(model.config, "quantization_config")
    world = solo_world(torch.device("cpu"))
    save_model(tmp_path / "saved", full_tensors(model, world), lm=model, tokenizer=tiny_tokenizer(), world=world)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = dict(GptOssForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).named_parameters())
    assert all(torch.equal(again[name], expected) for name, expected in values.items())


def train(world: World, path: Path, stage: int) -> list[float]:
    """Losses of two updates."""
    engine = build_engine(actor_spec(path, stage=stage), world)
    return [train_step(engine, world) for _ in range(2)]


@pytest.mark.slow
def test_a_model_from_mxfp4_trains_in_partitions(folder: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    expected = run_ranks(train, 1, tmp_path / "one", folder[0], 0)[0]
    assert expected[1] < expected[0]
    for losses in run_ranks(train, 2, tmp_path / "two", folder[0], 3):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("part", "rows", "fault"),
    [
        ("blocks", None, r"must have the shape \[4, 64, 1, 16\], in .* it is missing"),
        ("scales", 32, r"must have the shape \[4, 64, 1\], in .* it has \[4, 32, 1\]"),
    ],
)
def test_a_broken_mxfp4_weight_is_named(
    folder: tuple[Path, dict[str, Tensor]], part: str, rows: int | None, fault: str
) -> None:
    file, name = folder[0] / "model.safetensors", f"model.layers.1.mlp.experts.down_proj_{part}"
    weights = load_file(file)
    whole = weights.pop(name)
    if rows is not None:
        weights[name] = whole[:, :rows].contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    with user_error(f"^{name} {fault}: copy the model again, or correct config.json$"):
        load_model(str(folder[0]), "causal_lm", config=ModelConfig(), dtype=torch.float32)


def test_other_quantised_weights_are_refused(folder: tuple[Path, dict[str, Tensor]]) -> None:
    write_method(folder[0], {"quant_method": "gptq", "bits": 4})
    with user_error("^weights must be unquantised or in MXFP4, those of .* are in gptq: give"):
        load_model(str(folder[0]), "causal_lm", config=ModelConfig(), dtype=torch.float32)
