from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybrid_rlhf.functional.logprobs import head_chunk_tokens, logprobs_from_hidden, token_logprobs
from tests.support.tensors import LargestTensor


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same from whole logits, by torch's own cross-entropy and Categorical."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    flat = -torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape), torch.distributions.Categorical(logits=logits, validate_args=False).entropy()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(1, 5),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_chunked_head_equals_whole_logits(
    batch: int, steps: int, chunk: int, temperature: float, softcap: float | None, with_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(batch, steps, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True) if with_bias else None
    labels = torch.randint(0, 9, (batch, steps))
    found = logprobs_from_hidden(
        hidden, weight=weight, bias=bias, labels=labels, temperature=temperature, softcap=softcap, chunk_tokens=chunk
    )
    expected = naive(hidden, weight, bias, labels, temperature, softcap)
    torch.testing.assert_close(found, expected)
    inputs = [hidden, weight] + ([bias] if bias is not None else [])
    upstream = [torch.randn(batch, steps, dtype=torch.float64) for _ in range(2)]
    for pick in ((1, 0), (0, 1), (1, 1)):  # log-probs alone, entropy alone, both

        def total(pair: tuple[Tensor, Tensor], pick: tuple[int, int] = pick) -> Tensor:
            return sum((p * g).sum() for p, g, wanted in zip(pair, upstream, pick, strict=True) if wanted)

        torch.testing.assert_close(
            torch.autograd.grad(total(found), inputs, retain_graph=True),
            torch.autograd.grad(total(expected), inputs, retain_graph=True),
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_several_labels_of_a_state_have_the_gradient_of_whole_logits(dtype: torch.dtype, softcap: float | None) -> None:
    """Catches a candidate that counts once where it is repeated, and a normaliser whose gradient is of one label."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64).to(dtype).requires_grad_() for n in (7, 11))
    labels = torch.randint(0, 11, (7, 4))
    labels[:, 3] = labels[:, 0]
    upstream = torch.randn(7, 4, dtype=torch.float64)
    found, entropy = logprobs_from_hidden(
        hidden, weight=weight, labels=labels, temperature=0.7, softcap=softcap, chunk_tokens=3
    )
    leaves = [of.detach().double().requires_grad_() for of in (hidden, weight)]
    logits = leaves[0] @ leaves[1].t()
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    expected = logits.log_softmax(-1).gather(1, labels)
    # a logit is a sum of 8 products of at most 9; its gradient is rounded once, and the gradients sum 11 products
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, atol=100 * torch.finfo(found.dtype).eps, rtol=0)
    torch.testing.assert_close(entropy.double(), torch.distributions.Categorical(logits=logits).entropy())
    mine = torch.autograd.grad((found * upstream.to(found)).sum() + entropy.sum(), [hidden, weight])
    total = (expected * upstream).sum() + torch.distributions.Categorical(logits=logits).entropy().sum()
    for of_mine, wanted in zip(mine, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(of_mine.double(), wanted, atol=200 * rounding, rtol=0)


@pytest.mark.parametrize(
    ("vocabulary", "device_type", "dtype", "expected"),
    [
        (151_936, "cuda", torch.bfloat16, 1024),  # 6 bytes: 912 kB for each token
        (151_936, "cuda", torch.float32, 512),
        (32_000, "cuda", torch.bfloat16, 4096),
        (1000, "cuda", torch.float16, 8192),
        (10_000_000, "cuda", torch.bfloat16, 512),
        (1000, "cpu", torch.float32, 512),
    ],
)
def test_a_chunk_on_a_gpu_is_as_long_as_a_gibibyte_allows(
    vocabulary: int, device_type: str, dtype: torch.dtype, expected: int
) -> None:
    """Catches a chunk that grows with the vocabulary, and another result on a CPU, whose sums would change."""
    assert head_chunk_tokens(vocabulary, device_type=device_type, dtype=dtype) == expected


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_results_do_not_depend_on_the_chunk(softcap: float | None) -> None:
    """Over the lengths that it may have, with a rest; sums of the weight's gradient cross all chunks."""
    hidden = torch.randn(9000, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(9, (9000,))
    found = []
    for chunk in (512, 1024, 8192):
        both = logprobs_from_hidden(hidden, weight=weight, labels=labels, softcap=softcap, chunk_tokens=chunk)
        total = (both[0] * torch.linspace(-1, 1, 9000)).sum() + both[1].sum()
        found.append([*both, *torch.autograd.grad(total, (hidden, weight))])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_logits_of_all_tokens_are_never_held(softcap: float | None) -> None:
    tokens, vocabulary, chunk = 64, 50, 8
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    with LargestTensor() as largest:
        logprobs, entropy = logprobs_from_hidden(
            hidden,
            weight=weight,
            labels=torch.zeros(tokens, dtype=torch.long),
            chunk_tokens=chunk,
            softcap=softcap,
            temperature=0.7,
        )
        (logprobs + entropy).sum().backward()
    assert largest.elements == chunk * vocabulary


def saved_shapes(hidden: Tensor, weight: Tensor) -> list[tuple[int, ...]]:
    """Shapes of what the head keeps for backward."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_from_hidden(hidden, weight=weight, labels=torch.zeros(len(hidden), dtype=torch.long), chunk_tokens=4)
    return shapes


def test_only_the_inputs_and_a_number_a_token_are_saved_and_nothing_without_a_gradient() -> None:
    hidden, weight = torch.randn(20, 3), torch.randn(7, 3)
    assert saved_shapes(hidden, weight) == []
    weight.requires_grad_()
    with torch.no_grad():
        assert saved_shapes(hidden, weight) == []
    assert set(saved_shapes(hidden, weight)) == {(20, 3), (7, 3), (20,)}


def test_a_frozen_weight_gets_no_gradient_and_hidden_the_same() -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 7, (6,))
    gradients = []
    for trained in (True, False):
        torch.manual_seed(1)
        hidden, weight = torch.randn(6, 3, requires_grad=True), torch.randn(7, 3, requires_grad=trained)
        with FlopCounterMode(display=False) as flops:
            logprobs_from_hidden(hidden, weight=weight, labels=labels, chunk_tokens=2)[0].sum().backward()
        gradients.append(hidden.grad)
        assert (weight.grad is not None) == trained
        products = 4 if trained else 3  # logits, logits again, the gradient of hidden; that of the weight
        assert flops.get_total_flops() == products * 2 * 6 * 7 * 3
    assert gradients[0] is not None and torch.equal(gradients[0], gradients[1])


def test_a_weight_may_be_released_and_gathered_again_before_backward() -> None:
    """As ZeRO-3 does: the parameter stays, its memory is another."""
    torch.manual_seed(0)
    hidden, full = torch.randn(6, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    labels = torch.randint(0, 7, (6,))
    gradients = []
    for released in (False, True):
        weight = torch.nn.Parameter(full.clone())
        logprobs, entropy = logprobs_from_hidden(hidden, weight=weight, labels=labels, chunk_tokens=4)
        if released:
            weight.data.fill_(torch.nan)  # whoever kept this memory computes NaN
            weight.data = torch.empty(0, dtype=torch.float64)
            weight.data = full.clone()
        (logprobs.sum() + entropy.sum()).backward()
        gradients.append(weight.grad)
    assert gradients[0] is not None and torch.equal(gradients[0], gradients[1])


def test_a_long_bfloat16_batch_sums_its_weight_gradient_in_float32() -> None:
    """512 chunks that add alike: bfloat16 would stop growing at 256 of them."""
    weight, bias = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((2, 1), (2,)))
    hidden, labels = torch.ones(512, 1, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.long)
    logprobs, _ = logprobs_from_hidden(hidden, weight=weight, bias=bias, labels=labels, chunk_tokens=1)
    logprobs.sum().backward()
    assert logprobs.dtype is torch.float32
    for learned in (weight, bias):
        assert learned.grad is not None and learned.grad.flatten().tolist() == [256.0, -256.0]  # 512 * (1 - 1/2)


def test_labels_that_are_not_one_a_token_are_refused() -> None:
    states, labels = torch.randn(2, 3, 4), torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="labels .* per token"):
        token_logprobs(states, labels=labels)
    with pytest.raises(ValueError, match="labels .* per token"):
        logprobs_from_hidden(states, weight=torch.randn(5, 4), labels=labels, chunk_tokens=2)


def test_low_precision_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 11).bfloat16()
    labels = torch.randint(0, 11, (2, 3))
    exact = token_logprobs(logits.double(), labels=labels)
    found = token_logprobs(logits, labels=labels)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


def test_entropy_with_a_token_ruled_out_is_finite() -> None:
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    labels = torch.zeros(1, dtype=torch.long)
    _, entropy = logprobs_from_hidden(torch.zeros(1, 2), weight=torch.zeros(3, 2), labels=labels, bias=bias)
    assert entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_banned_tokens_have_probability_0(dtype: torch.dtype) -> None:
    """As a softmax over the other tokens, with gradients; the entropy has no term of them."""
    torch.manual_seed(0)
    hidden = torch.randn(9, 8, dtype=dtype)
    weight = torch.randn(12, 8, dtype=dtype) * 3
    banned, others = [2, 7], [token for token in range(12) if token not in (2, 7)]
    labels = torch.arange(9) % len(others)
    results = []
    for rows, removed in ((weight.clone(), banned), (weight[others], [])):
        inputs = hidden.clone().requires_grad_(), rows.requires_grad_()
        of_labels = torch.tensor(others)[labels] if removed else labels
        outputs = logprobs_from_hidden(
            inputs[0], weight=inputs[1], labels=of_labels, temperature=0.5, chunk_tokens=4, banned=removed
        )
        (outputs[0].sum() + 2 * outputs[1].sum()).backward()
        results.append([*outputs, inputs[0].grad, inputs[1].grad[others] if removed else inputs[1].grad])
        assert not removed or not inputs[1].grad[banned].any()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="without a soft cap"):
        logprobs_from_hidden(hidden, weight=weight, labels=labels, softcap=2.0, banned=banned)
