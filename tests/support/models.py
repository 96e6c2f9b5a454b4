"""Models for each convention of the head, padded rows for them, the same model with packed rows, and adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_rlhf.models.packing import batches, packs, use_packing
from tests.support.families import COMMON
from tests.support.tiny import VOCABULARY

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**SMALL, "num_key_value_heads": 2}
HEAD_FAMILIES = {
    "llama": GQA,
    "mistral": {**GQA, "sliding_window": 4},
    "qwen2": GQA,
    "qwen3": {**GQA, "head_dim": 8},
    "gemma2": {**GQA, "head_dim": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {**GQA, "head_dim": 8},
    "phi3": GQA,
    "granite": {**GQA, "logits_scaling": 4.0},
    "cohere": {**GQA, "logit_scale": 0.5},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 16,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**SMALL, "max_position_embeddings": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "new_decoder_architecture": False},
    "phi": {**SMALL, "max_position_embeddings": 64},
    "hyperclovax": {**GQA, "logits_scaling": 0.5},
}


def build_model(family: str, auto: type = AutoModelForCausalLM, **extra: object) -> PreTrainedModel:
    """A random model of a row of the table, whose every weight matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **HEAD_FAMILIES[family], **extra})
    config.initializer_range = 0.2
    model = auto.from_config(config).eval()
    for parameter in model.parameters():  # fresh biases are zero and would prove nothing
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def padded_rows(lengths: list[int], *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows [B, T], padded; ids and mask."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.full((len(lengths), width), 2)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        span = slice(width - length, width) if left else slice(0, length)
        ids[row, span] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, span] = True
    return ids, mask


def packed_and_padded(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model packed and padded."""
    padded, packed = build_model(family), build_model(family)
    if family == "gemma2":
        for model in (padded, packed):
            model.set_attn_implementation("eager")
    use_packing(packed)
    assert packs(packed) and not packs(padded)
    return packed, padded


def checkpointed(model: PreTrainedModel) -> None:
    """Let a model train with activation checkpointing, without dropout as models/pretrained/loading.py leaves it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def assert_same_gradients(packed: torch.nn.Module, padded: torch.nn.Module, *arguments: object) -> None:
    """The same outputs, and gradients of a weighted sum of them."""
    outputs = []
    for module in (packed, padded):
        module.zero_grad()
        output = module(*arguments)
        output = output if isinstance(output, torch.Tensor) else torch.stack(output)
        weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
        (output * weights).sum().backward()
        outputs.append(output.detach())
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-5, rtol=1e-4)
    gradients = [dict(module.named_parameters()) for module in (packed, padded)]
    for name, parameter in gradients[0].items():
        expected = gradients[1][name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            # rounding is relative to the terms of a gradient, which a recurrence over the tokens lets cancel
            torch.testing.assert_close(
                parameter.grad, expected, atol=5e-4 * float(expected.abs().max()) + 1e-6, rtol=1e-4
            )


def random_adapter(model: PreTrainedModel, folder: Path, seed: int, layers: str | list[str]) -> str:
    """The folder of an adapter that changes much."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=4 + seed, lora_alpha=16, target_modules=layers))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return str(folder)


def assert_equal_gradients(first: torch.nn.Module, second: torch.nn.Module, *, atol: float) -> None:
    """Gradients that two modules have of the same parameters."""
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=atol, msg=message)


def rows_that_begin_alike() -> tuple[torch.Tensor, torch.Tensor]:
    """Padded rows [B, T] of 198 distinct tokens of 312: two prompts with one template, each with completions, one of
    them of a single token, a row with the template alone between them, and another row; ids and mask."""
    generator = torch.Generator().manual_seed(1)
    tokens = lambda count: torch.randint(3, 120, (count,), generator=generator)  # noqa: E731
    template = tokens(19)
    first, second = tokens(37), torch.cat([template, tokens(21)])
    rows = [torch.cat([first, tokens(count)]) for count in (9, 1, 14)]
    rows.append(torch.cat([template, tokens(30)]))
    rows += [torch.cat([second, tokens(count)]) for count in (3, 12)]
    rows.append(tokens(33))
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(rows, batch_first=True), torch.arange(int(lengths.max())) < lengths[:, None]


class InFloat64(TorchFunctionMode):
    """Context in which what asks for float32 gets float64, as norms and softmaxes of transformers do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        wide = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def distance_of_shared_rows(module: torch.nn.Module, *arguments: torch.Tensor) -> float:
    """Largest difference of outputs, and of gradients of a weighted sum of them, of a model in float64 from those
    without shared prefixes, relative to the largest output and gradient."""
    module.double()
    results = []
    with InFloat64(), pytest.MonkeyPatch.context() as patch:
        for share in (True, False):
            patch.setattr(batches, "shares_prefixes", lambda lm, share=share: share)
            module.zero_grad()
            output = module(*arguments)
            output = output if isinstance(output, torch.Tensor) else torch.stack(output)
            (output * torch.linspace(-1, 1, output.numel()).double().view(output.shape)).sum().backward()
            gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
            results.append((output.detach(), torch.cat(gradients)))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(*results, strict=True))
