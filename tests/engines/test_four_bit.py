"""Base weights in 4 bits: the sampler reads what training reads, and saved models have the log-probs of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.generation.model.four_bit import FourBitLinear, FourBitPart
from hybrid_rlhf.loop.saving import save_adapter
from hybrid_rlhf.models.four_bit import FourBitWeight, plain_value, quantise_layers
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, train_step, training_logprobs
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tokenizer


def test_sampler_and_trainer_read_one_base_that_no_forward_repacks(model_folder: Path, world: World) -> None:
    """bitsandbytes repacks weights in place in eval mode on CPUs with AVX512-BF16: gradients are lost without error."""
    engine = build_actor(actor_spec(model_folder, lora=4, quantization="nf4"), world)
    layers = [module for module in engine.lm.modules() if isinstance(module, Linear4bit)]
    before = [layer.weight.detach().clone() for layer in layers]
    with engine.inference(stop_token_ids=()) as generation:
        weights = generation.backend.decoder._weights.layers[0]  # type: ignore[attr-defined]
        sampled = [weights.qkv, weights.o, weights.up, weights.down]
    assert all(type(product) is FourBitLinear for product in sampled)
    addresses = {part.weight.codes.data_ptr() for product in sampled for part in product._parts}
    assert addresses <= {layer.weight.data_ptr() for layer in layers}
    engine.module.eval()
    module_logprobs(engine.lm, probe_tokens(100))
    engine.module.train()
    losses = [train_step(engine, world), train_step(engine, world)]
    assert losses[1] < losses[0]
    assert all(torch.equal(base, layer.weight) for base, layer in zip(before, layers, strict=True))
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


def saved(world: World, path: Path, folder: Path) -> torch.Tensor:
    engine = build_actor(actor_spec(path, stage=3, lora=4, lr=0.05, quantization="nf4"), world)
    train_step(engine, world)
    save_model(folder, full_tensors(engine.lm, world), lm=engine.lm, tokenizer=tiny_tokenizer(), world=world)
    save_adapter(folder / "adapter", engine)
    return training_logprobs(engine, torch.tensor([probe_tokens(100)]))[0, 1:]


def test_a_saved_model_has_the_log_probs_of_training(model_folder: Path, tmp_path: Path) -> None:
    """Merged into the dequantised base, not into the weights before quantisation, which training never saw."""
    expected, _ = run_ranks(saved, 2, tmp_path, model_folder, tmp_path / "saved")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    tokens = probe_tokens(100)
    assert torch.allclose(module_logprobs(merged, tokens), expected, atol=1e-4)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), str(tmp_path / "saved" / "adapter")
    )
    assert not torch.allclose(module_logprobs(plain, tokens), expected, atol=1e-4)


def test_a_scaled_weight_is_multiplied_whole() -> None:
    """The rows of a scaled weight are not those whose numbers the scaled selection gives."""
    torch.manual_seed(0)
    layer = Linear4bit(64, 48, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    weight = FourBitWeight(layer.weight.detach(), layer.weight.quant_state)
    x = torch.randn(3, 64)
    product = FourBitLinear([FourBitPart(weight, lambda tensor: 2.0 * tensor)], None)
    assert torch.allclose(product(x), 2 * layer(x), atol=1e-5)
    some = FourBitLinear([FourBitPart(weight, lambda tensor: tensor[[5, 3, 40]])], None)
    assert torch.allclose(some(x), layer(x)[:, [5, 3, 40]], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [32, 48, 64, 96, 928])
def test_rows_of_part_of_a_block_have_their_own_scales(inputs: int, dtype: torch.dtype) -> None:
    """bitsandbytes' kernel for AVX-512 takes others, so that weights of 1 differ by 2."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, 40, bias=inputs == 96, dtype=dtype)
    model: Any = torch.nn.Sequential(linear)
    model.dtype = dtype
    weight = linear.weight.detach().float() * inputs**0.5
    linear.weight.data = weight.to(dtype)
    quantise_layers(model, ["0"], device=torch.device("cpu"))
    layer = model[0]
    value = plain_value(layer.weight)
    assert (value.float() - weight).abs().max() < 0.25 * weight.abs().max()
    x = torch.randn(5, inputs, dtype=dtype, requires_grad=True)
    expected = torch.nn.functional.linear(x, value, layer.bias)
    upstream = torch.randn_like(expected)
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(layer(x), expected, **close)
    gradients = [torch.autograd.grad(out, x, upstream)[0] for out in (layer(x), expected)]
    torch.testing.assert_close(*gradients, **close)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, **close)
        torch.testing.assert_close(layer(x[:1]), expected[:1], **close)
