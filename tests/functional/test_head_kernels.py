"""Kernels of the head against its operations in torch, on a GPU and else under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.functional import head_kernels, logprobs
from hybrid_rlhf.functional.logprobs import logprobs_from_hidden
from tests.support.triton_kernels import compiled

pytest.importorskip("triton")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def heads(monkeypatch: pytest.MonkeyPatch, vocabulary: int, dtype: torch.dtype, **settings: Any) -> list[list[Tensor]]:
    """Log-probs, entropies and gradients by torch in float64, by torch and by the kernels."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16, device=DEVICE), torch.randn(vocabulary, 16, device=DEVICE)
    upstream, labels = torch.randn(2, 7, device=DEVICE), torch.randint(vocabulary, (7,), device=DEVICE)
    wanted, biased = settings.pop("wanted", (True, True)), settings.pop("biased", False)
    found = []
    for by_kernels, kept in ((False, torch.float64), (False, dtype), (True, dtype)):
        monkeypatch.setattr(logprobs, "_suits_kernels", lambda hidden, labels, by_kernels=by_kernels: by_kernels)
        leaves = [
            leaf.detach().to(dtype).to(kept, copy=True).requires_grad_()
            for leaf in (hidden, weight, weight[:, 0])[: 2 + biased]
        ]
        results = logprobs_from_hidden(
            leaves[0],
            weight=leaves[1],
            bias=leaves[2] if biased else None,
            labels=labels,
            chunk_tokens=4,
            **settings,
        )
        used = zip(results, upstream.to(results[0].dtype), wanted, strict=True)
        total = torch.stack([(result * grad).sum() for result, grad, want in used if want]).sum()
        found.append(
            [*(x.detach().double() for x in results), *(x.double() for x in torch.autograd.grad(total, leaves))]
        )
    return found


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "biased": True},
        {"softcap": 2.0, "temperature": 1.3},
        {"wanted": (True, False)},
        {"wanted": (False, True), "softcap": 5.0},
        {"banned": [0, 49]},
    ],
)
def test_a_head_computes_with_kernels_what_it_does_without(
    settings: dict[str, Any], vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 tokens take two blocks."""
    exact, _, found = heads(monkeypatch, vocabulary, torch.float32, **settings)
    torch.testing.assert_close(found, exact, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_vocabulary_in_half_precision_is_as_near_to_float64_as_by_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, by_torch, found = heads(monkeypatch, 151_936, dtype)
    for ours, torchs, true in zip(found, by_torch, exact, strict=True):
        scale = true.abs().max()
        assert (ours - true).abs().max() <= 1.1 * (torchs - true).abs().max() + 1e-6 * scale


def test_masked_out_tokens_have_no_part_and_nan_is_seen() -> None:
    logits = torch.randn(3, 6, device=DEVICE)
    logits[0, 2:] = -torch.inf
    logits[2, 4] = torch.nan
    labels = torch.tensor([1, 5, 0], device=DEVICE)
    found = head_kernels.summary(logits, labels, temperature=1.0, softcap=None)
    rows = torch.distributions.Categorical(logits=logits[:2].clamp(min=-1e30))
    torch.testing.assert_close(found[0][:2], rows.log_prob(labels[:2]))
    torch.testing.assert_close(found[1][:2], rows.entropy())
    assert all(torch.isnan(values[2]) for values in found)
    # gradients of a sum are one number, expanded
    of_sum, out = torch.ones(1, device=DEVICE).expand(3), torch.empty_like(logits)
    head_kernels.logits_gradient(
        logits, labels, found[2], found[1], of_sum, of_sum, temperature=1.0, softcap=None, out=out
    )
    leaf = logits[:2].clamp(min=-1e30).requires_grad_()
    rows = torch.distributions.Categorical(logits=leaf)
    (expected,) = torch.autograd.grad((rows.log_prob(labels[:2]) + rows.entropy()).sum(), leaf)
    torch.testing.assert_close(out[:2], expected)
    assert torch.equal(out[0, 2:], torch.zeros(4, device=DEVICE))
    assert torch.isnan(out[2]).all()


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    script = """
from hybrid_rlhf.functional import head_kernels
LOGITS = {name: "*fp32" for name in "logits logprobs entropies normalisers grad_logprobs grad_entropies".split()}
KINDS.update(LOGITS, labels="*i64", temperature="fp32", softcap="fp32")
flags = {"SOFTCAP": True, "BLOCK": 4096}
grads = {"OF_LOGPROBS": True, "OF_ENTROPIES": True}
kernels = [(head_kernels._summary_kernel, flags), (head_kernels._gradient_kernel, {**flags, **grads})]
print(json.dumps([shared_bytes(kernel, constants, options={"num_warps": 8}) for kernel, constants in kernels]))
"""
    assert max(compiled(script)) < 10_000
