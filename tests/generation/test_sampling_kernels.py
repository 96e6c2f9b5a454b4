"""Sampling by kernels against the sampler in torch, token by token: compiled for the CPU, and in Triton.

Both add up the same weights in the same order of tokens, so that they draw the same token unless a uniform number lies
within the rounding of a boundary; the seeds here have no such number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from hybrid_rlhf.generation import SamplingParams, ops
from hybrid_rlhf.generation.batching.grammar import Grammar
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.sampler import DecodeBatch, SampledTokens, Sampler, sampling_mode
from hybrid_rlhf.generation.ops import choice, cpu_kernels
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.runtime.world import default_device, solo_world
from tests.support.generation import requests_for
from tests.support.marks import faults

ROWS_OF_EACH = {"compiled": 40, "triton": 1}
"""Triton's interpreter is slow."""
MODES = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999, "temperature": 1.7},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 0.6},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 2},
    {"repetition_penalty": 1.2, "min_new_tokens": 2, "top_p": 0.9, "temperature": 0.8},
    {"logit_bias": {0: 2.5, 1: -100.0}},
    {"presence_penalty": 1.3, "frequency_penalty": 0.7},
    {"frequency_penalty": -0.7, "logit_bias": {1: 0.3}, "repetition_penalty": 1.2, "temperature": 0.8, "top_k": 20},
]


@pytest.fixture(params=["compiled", "triton"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which of the two, or "torch"; tensors of a test are made where it runs."""
    if request.param == "compiled" and not cpu_kernels.available():
        pytest.skip("the CPU kernels cannot be compiled here")
    if request.param == "triton":
        pytest.importorskip("triton")
    with device_of(request.param):
        yield request.param


def device_of(kernel: str) -> torch.device:
    return default_device() if kernel == "triton" else torch.device("cpu")


def sampler_of(by: str, asked: Sequence[Request], vocabulary: int) -> Sampler:
    """A sampler by a kernel or "torch"."""
    used = {"compiled": cpu_kernels, "triton": kernels}.get(by)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "kernels_for", lambda device, dtype: used)
        return Sampler(vocabulary, sampling_mode(asked), solo_world(torch.get_default_device()))


def sampled(
    by: str, logits: Tensor, asked: Sequence[Request], allowed: Tensor | None = None
) -> tuple[SampledTokens, DecodeBatch]:
    """By a kernel or "torch", and the rows after it; `allowed`: the words of grammars."""
    size = logits.shape[-1]
    rows = DecodeBatch.of(asked, vocab_size=size, device=logits.device)
    if allowed is not None:
        rows.allowed.copy_(allowed)
    return sampler_of(by, asked, size)(logits.clone(), rows), rows


def assert_same(kernel: str, logits: Tensor, asked: Sequence[Request], allowed: Tensor | None = None) -> SampledTokens:
    """Tokens, log-probs, and what is written to the rows."""
    (found, rows), (expected, expected_rows) = (sampled(by, logits, asked, allowed) for by in (kernel, "torch"))
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.stacked(), expected.stacked(), atol=3e-5, rtol=1e-5)
    assert all(map(torch.equal, rows.save(), expected_rows.save()))
    return found


@pytest.mark.parametrize("vocabulary", [2, 3001])
def test_kernels_draw_what_torch_draws(vocabulary: int, kernel: str) -> None:
    if kernel == "triton":
        vocabulary = min(vocabulary, ops.sampling._BLOCK + 76)  # the last block is not full, as with 3,001 tokens
    torch.manual_seed(vocabulary)
    params = [SamplingParams(**{**mode, "max_new_tokens": 4}) for mode in MODES for _ in range(ROWS_OF_EACH[kernel])]
    logits = 3 * torch.randn(len(params), vocabulary)
    asked = requests_for(params, prompt=[token % vocabulary for token in (1, 5, 6, 200)])
    for place, request in enumerate(asked):
        request.stop = frozenset({vocabulary // 2, vocabulary - 1})
        request.token_ids = [] if place % 2 else [1, 0, 1]
    logits[::5, 1:].masked_fill_(torch.rand(logits[::5, 1:].shape) < 0.5, -torch.inf)
    assert_same(kernel, logits, asked)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_each_mode_alone(mode: dict[str, Any], kernel: str) -> None:
    """Parts that no row needs are skipped."""
    torch.manual_seed(0)
    count = ROWS_OF_EACH[kernel]
    assert_same(kernel, 3 * torch.randn(count, 700), requests_for([SamplingParams(**mode)] * count))


@pytest.mark.parametrize("cut", [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 12, "top_p": 0.5}, {"temperature": 0.0}])
def test_of_equal_scores_the_lowest_tokens_are_kept(cut: dict[str, Any], kernel: str) -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0]).repeat(60)[None]
    count = ROWS_OF_EACH[kernel]
    asked = requests_for([SamplingParams(**cut)] * count)
    for row, request in enumerate(asked):
        request.uniforms[0] = 1 - (row + 0.5) / 40
    assert_same(kernel, logits.expand(count, -1), asked)
    assert_same(kernel, torch.zeros(count, 300), asked)


@pytest.mark.parametrize("mode", [{}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("uniform", [2**-60, 0.25, 1 - 2**-53])
def test_numbers_at_the_ends_draw_tokens_with_probability(uniform: float, mode: dict[str, Any], kernel: str) -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(4, 400)
    logits[0, :390], logits[1, 3:], logits[2] = -torch.inf, -torch.inf, -torch.inf
    logits[2, 170] = 5.0
    asked = requests_for([SamplingParams(**mode)] * 4)
    for request in asked:
        request.uniforms[0] = uniform
    probs = TopPLogitsWarper(mode.get("top_p", 1.0))(None, logits).double().softmax(dim=1)
    for by in (kernel, "torch"):
        tokens = sampled(by, logits, asked)[0].tokens[:, None]
        share, end = probs.gather(1, tokens), probs.cumsum(dim=1).gather(1, tokens)
        assert (share > 0).all() and (end - share - 1e-6 <= uniform).all() and (uniform <= end + 1e-6).all()


def test_logits_that_are_no_numbers_have_no_log_probs(kernel: str) -> None:
    """They must not be drawn from in silence, nor lead outside the vocabulary."""
    logits = torch.randn(4, 300)
    logits[0, 7], logits[1], logits[2, 5] = torch.nan, -torch.inf, torch.inf
    for mode in ({}, {"top_p": 0.9}, {"temperature": 0.0}):
        found, _ = sampled(kernel, logits, requests_for([SamplingParams(**mode)] * 4))
        assert found.logprobs[:3].isnan().all() and found.logprobs[3].isfinite()
        assert ((found.tokens >= 0) & (found.tokens < 300)).all()


def test_a_row_does_not_depend_on_threads_or_other_rows(kernel: str) -> None:
    torch.manual_seed(0)
    modes, vocabulary = (MODES, 9000) if kernel == "compiled" else (MODES[::3], 1500)
    params = [SamplingParams(**mode) for mode in modes]
    logits, asked = 3 * torch.randn(len(params), vocabulary), requests_for(params)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    together, _ = sampled(kernel, logits, asked)
    torch.set_num_threads(before)
    for row in range(0, len(params), 3):
        alone, _ = sampled(kernel, logits[row : row + 1], asked[row : row + 1])
        assert torch.equal(alone.stacked()[:, 0], together.stacked()[:, row])


@pytest.mark.parametrize("kernel", ["compiled", "triton", "torch"], indirect=True)
def test_penalties_count_on_the_device_as_in_a_new_table(kernel: str) -> None:
    """A preempted request is filled in again: its next tokens must not depend on when."""
    asked = requests_for(
        [
            SamplingParams(presence_penalty=0.37, frequency_penalty=0.11, logit_bias={1: 0.3}),
            SamplingParams(),
            SamplingParams(frequency_penalty=-0.1),
        ]
    )
    rows, sampler = DecodeBatch.of(asked, vocab_size=3, device=torch.get_default_device()), sampler_of(kernel, asked, 3)
    for _ in range(4):
        drawn = sampler(torch.zeros(3, 3), rows).tokens.tolist()
        for request, token in zip(asked, drawn, strict=True):
            request.token_ids.append(token)
    again = DecodeBatch.of(asked, vocab_size=3, device=torch.get_default_device())
    assert torch.equal(rows.bias, again.bias) and torch.equal(rows.seen, again.seen)
    assert not rows.bias[1].any() and rows.bias[0].any()


@pytest.mark.parametrize("vocabulary", [31, 32, 700])
def test_kernels_draw_from_the_allowed_tokens_alone(vocabulary: int, kernel: str) -> None:
    """A row without a grammar has no mask."""
    torch.manual_seed(0)
    count = 3 * ROWS_OF_EACH[kernel]
    asked = requests_for([SamplingParams(**({"top_k": 5} if row % 2 else {})) for row in range(count)])
    for request in asked[1:]:
        request.grammar = Grammar(Mock())
    logits = 3 * torch.randn(count, vocabulary)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocabulary // 32)), dtype=torch.int32)
    words[:, 0] |= 1
    found = assert_same(kernel, logits, asked, words)
    bits = (words.repeat_interleave(32, dim=1) >> torch.arange(32).repeat(words.shape[1])) & 1
    assert bits[:, :vocabulary].gather(1, found.tokens[:, None])[1:].all()


def test_the_compiled_kernel_refuses_what_it_would_read_wrong() -> None:
    if not cpu_kernels.available():
        pytest.skip("the CPU kernels cannot be compiled here")
    (request,) = requests_for([SamplingParams(min_new_tokens=2)])
    with pytest.raises(IndexError, match="vocabulary"):
        sampled("compiled", torch.randn(1, 2), [request])  # the stop token is 2
    rows = DecodeBatch.of([request], vocab_size=9, device=torch.device("cpu"))
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        cpu_kernels.sample(torch.randn(1, 9).double(), rows, sampling_mode([request]))


CUTS = [
    {"top_k": 50},
    {"top_p": 0.95},
    {"top_k": 1000, "top_p": 0.9},
    {"top_p": 0.999, "min_p": 1e-4, "temperature": 1.7},
]


def logits_of(kind: str, vocabulary: int) -> Tensor:
    """[1, V] of one kind of distribution."""
    normal = torch.randn(1, vocabulary)
    return {
        "of a language model": 3 * normal - 6 * (torch.rand(1, vocabulary) + 1e-4).log(),
        "normal": 3 * normal,
        "flat": 0.02 * normal,
    }[kind]


class Reads:
    """How often the interpreter reads each element of the logits and scores of a call of `sample`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, logits: Tensor) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.tables, load, empty_like = [logits], InterpreterBuilder.create_masked_load, torch.empty_like
        self.counts = torch.zeros(logits.shape, dtype=torch.long)

        def counted(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            for table in self.tables:
                offsets = torch.from_numpy(pointers.data.astype("int64") - table.data_ptr()).flatten() // 4
                inside = (offsets >= 0) & (offsets < table.numel()) & torch.from_numpy(mask.data).flatten()
                self.counts.view(-1).index_add_(0, offsets[inside], torch.ones_like(offsets[inside]))
            return load(builder, pointers, mask, *rest)

        def allocated(given: Tensor, **named: Any) -> Tensor:
            self.tables.append(empty_like(given, **named))
            return self.tables[-1]

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
        monkeypatch.setattr(torch, "empty_like", allocated)


@pytest.mark.parametrize("kind", [faults("of a language model"), "flat"])
def test_truncation_reads_the_vocabulary_three_times(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took up to 35 reads in up to 68 passes, one after the other, by a single program per row."""
    pytest.importorskip("triton")
    vocabulary = 6000
    if default_device().type == "cuda":
        pytest.skip("counts in the interpreter")
    torch.manual_seed(0)
    logits = torch.cat([logits_of(kind, vocabulary) for _ in CUTS])
    asked = requests_for([SamplingParams(**cut) for cut in CUTS])
    assert_same("triton", logits, asked)
    rows, read = DecodeBatch.of(asked, vocab_size=vocabulary, device=logits.device), Reads(monkeypatch, logits)
    kernels.sample(logits, rows, sampling_mode(asked))
    drawing = ops.sampling._BLOCK + 1  # one block, and the logit of the token
    assert int(read.counts.sum(dim=1).max()) <= 3 * vocabulary + drawing
    assert int(read.counts.max()) <= 5, "three passes of all programs, and the drawing's two loads"


@pytest.mark.parametrize(
    ("kind", "cut"),
    [("constant", {"top_p": 0.3}), ("constant", {"top_k": 4500}), ("normal", {"top_k": 4500, "top_p": 0.9})],
)
def test_more_scores_near_a_bound_than_are_collected(kind: str, cut: dict[str, Any]) -> None:
    """The bounds are then found in the whole row."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    vocabulary = ops.sampling.CANDIDATES + 1000
    logits = torch.zeros(1, vocabulary) if kind == "constant" else logits_of(kind, vocabulary)
    with device_of("triton") as device:
        assert_same("triton", logits.to(device), requests_for([SamplingParams(**cut)]))
