"""A loaded model's fused layers against transformers' own modules: outputs, gradients, saving, adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rlhf.functional import operations
from hybrid_rlhf.models import fused_layers
from hybrid_rlhf.models.fused_layers import ROTARY_ATTENTIONS, fuse_layers
from tests.support.families import variant

FAMILIES = [
    "llama",
    "llama with biases",
    "llama 3 rope",
    "yarn",
    "mistral",
    "qwen2",
    "qwen2 with some windows",
    "qwen3",
    "phi3",
    "phi3 partial rotary",
]
OTHERS = ["gemma2", "gemma3", "opt", "gpt2", "pythia", "bloom"]
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each fused call."""
    seen: list[str] = []
    for name in ("rms_norm", "rotate"):
        own = getattr(operations, name)

        def note(*arguments: object, own: object = own, name: str = name, **named: object) -> torch.Tensor:
            seen.append(name)
            return own(*arguments, **named)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(fused_layers, name, note)
    return seen


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    output = model(input_ids=IDS).logits
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape))
    return {"": output.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = variant(family), variant(family)
    theirs.load_state_dict(ours.state_dict())
    fuse_layers(ours)
    seen = counted(monkeypatch)
    found, expected = gradients(ours), gradients(theirs)
    layers = ours.config.num_hidden_layers
    assert seen.count("rms_norm") >= 2 * layers + 1
    assert seen.count("rotate") == (0 if "phi3" in family else 2 * layers), "Phi-3 may rotate parts of heads"
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5 * float(tensor.abs().max()) + 1e-7)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_left_as_they_are(family: str) -> None:
    model = variant(family)
    kinds = [type(module) for module in model.modules()]
    fuse_layers(model)
    assert [type(module) for module in model.modules()] == kinds


def test_another_dtype_is_computed_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (variant("llama").bfloat16() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    fuse_layers(ours)
    seen = counted(monkeypatch)
    assert torch.equal(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
    assert not seen


def test_names_and_kin_stay(tmp_path: Path) -> None:
    model = variant("llama")
    before = {name: (type(module).__name__, type(module)) for name, module in model.named_modules()}
    fuse_layers(model)
    for name, module in model.named_modules():
        assert type(module).__name__ == before[name][0] and isinstance(module, before[name][1])
    assert any(name in ROTARY_ATTENTIONS for name, _ in before.values())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
