"""Draws against the softmax, sets of top-k, top-p and min-p against transformers, ranks against one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid_rlhf.generation.architecture.model_description import share
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.sampler import DecodeBatch, SampledTokens, Sampler, sampling_mode
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops.sampling import running_sums
from hybrid_rlhf.generation.sampling import SamplingParams
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.generation import requests_for
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch; test_sampling_kernels.py compares the kernels with it."""
    monkeypatch.setattr(choice, "kernels_for", lambda device, dtype: None)


def drawn(logits: Tensor, params: SamplingParams | Sequence[SamplingParams]) -> SampledTokens:
    each = [params] * len(logits) if isinstance(params, SamplingParams) else params
    return draw_for(logits, requests_for(each))


def draw_for(
    logits: Tensor, asked: Sequence[Request], vocabulary: int | None = None, world: World | None = None
) -> SampledTokens:
    size = vocabulary or logits.shape[-1]
    rows = DecodeBatch.of(asked, vocab_size=size, device=CPU)
    return Sampler(size, sampling_mode(asked), world or solo_world(CPU))(logits.clone(), rows)


@pytest.mark.parametrize("vocabulary", [5, 128, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_frequencies_are_those_of_the_softmax(vocabulary: int, temperature: float) -> None:
    torch.manual_seed(0)
    draws = 10_000
    logits = torch.randn(1, vocabulary) * 2
    logits[0, 3] = -torch.inf
    found = drawn(logits.expand(draws, -1), SamplingParams(temperature=temperature))
    probs = torch.softmax(logits[0].double() / temperature, 0)
    counts = torch.bincount(found.tokens, minlength=vocabulary).double()
    assert counts[3] == 0
    likely = probs * draws >= 5  # chi-square's rule; the rest is one cell
    expected = torch.cat([probs[likely] * draws, probs[~likely].sum()[None] * draws + 1e-9])
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    statistic = float(((seen - expected) ** 2 / expected.clamp(min=1)).sum())
    cells = int(likely.sum())
    assert statistic < cells + 4 * (2 * cells) ** 0.5, "4 deviations of chi-square"
    logprobs = probs.log()[found.tokens].float()
    torch.testing.assert_close(found.logprobs, logprobs, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.sampling_logprobs, found.logprobs)


@examples(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.1]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_only_the_cut_set_is_drawn_and_both_logprobs_are_known(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 2
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    found = drawn(logits.expand(1000, -1), params)
    scores = logits / temperature
    raw = scores[0].log_softmax(0)
    for cut in (*([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        scores = cut(None, scores)
    expected = scores[0].log_softmax(0)
    torch.testing.assert_close(found.logprobs, raw[found.tokens], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.sampling_logprobs, expected[found.tokens], atol=1e-4, rtol=1e-4)
    assert {*(expected.exp() > 0.03).nonzero()[:, 0].tolist()} <= {*found.tokens.tolist()}


class FloatCumsums(TorchDispatchMode):
    """Counts what torch refuses on CUDA under deterministic algorithms."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func.overloadpacket == torch.ops.aten.cumsum and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.01}])
def test_draws_take_no_running_sum_of_floats(cut: dict[str, Any]) -> None:
    """Such a sum has no deterministic kernel on CUDA."""
    with FloatCumsums() as mode:
        drawn(torch.randn(3, 300), SamplingParams(**cut))
        assert mode.found == 0
        torch.ones(2).cumsum(0)
        assert mode.found == 1, "the mode sees them"


def test_running_sums_are_those_of_floats_in_any_order() -> None:
    torch.manual_seed(0)
    probs = (4 * torch.randn(200, 1000)).softmax(dim=-1)
    exact = probs.double().cumsum(dim=-1)
    torch.testing.assert_close(running_sums(probs), exact, atol=1000 * 2**-52, rtol=0)
    assert torch.equal(running_sums(probs)[:, -1], running_sums(probs.flip(1))[:, -1])
    uniforms = torch.rand(200, 1, dtype=torch.float64) * exact[:, -1:]
    places = [torch.searchsorted(sums, uniforms, right=True) for sums in (running_sums(probs), exact)]
    assert torch.equal(*places)


def test_stop_tokens_wait_for_the_shortest_length() -> None:
    logits = torch.tensor([[3.0, 2.9, 4.0, -1.0, -1.1]])
    assert int(drawn(logits, SamplingParams(temperature=0.0)).tokens) == 2
    held = drawn(logits, SamplingParams(temperature=0.0, min_new_tokens=1))
    assert int(held.tokens) == 0, "2 is the stop token"
    expected = torch.log_softmax(logits[0, [0, 1, 3, 4]], 0)[0]
    torch.testing.assert_close(held.sampling_logprobs[0], expected)


def test_penalties_and_biases_are_those_of_hugging_face_and_openai() -> None:
    """Biases by Hugging Face's processors; penalties by OpenAI's formula: counts of the completion's tokens only."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 40)
    drawn_ids = [3, 7, 3, 3]
    bias = {3: 2.0, 9: -100.0, 11: 5.5}
    params = [
        SamplingParams(logit_bias=bias, repetition_penalty=1.4),
        SamplingParams(presence_penalty=0.8, frequency_penalty=0.3),
        SamplingParams(presence_penalty=-2.0, logit_bias={7: 1.0}),
        SamplingParams(),
    ]
    asked = requests_for(params, prompt=(7, 30))
    for request in asked:
        request.token_ids = list(drawn_ids)
        request.uniforms = np.full(8, 0.3)
    counts = torch.bincount(torch.tensor(drawn_ids), minlength=40)
    text = torch.tensor([[7, 30, *drawn_ids]])
    expected = [
        SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(
            text, RepetitionPenaltyLogitsProcessor(1.4)(text, logits[:1].clone())
        )[0],
        logits[1] - 0.3 * counts - 0.8 * (counts > 0),
        logits[2] + 2.0 * (counts > 0) + torch.nn.functional.one_hot(torch.tensor(7), 40),
        logits[3],
    ]
    found = draw_for(logits, asked)
    for row, scores in enumerate(expected):
        token = found.tokens[row]
        torch.testing.assert_close(found.sampling_logprobs[row], scores.log_softmax(0)[token])
        torch.testing.assert_close(found.logprobs[row], logits[row].log_softmax(0)[token])
        ends = scores.double().softmax(0).cumsum(0)
        assert ends[token] - scores.double().softmax(0)[token] <= 0.3 <= ends[token] + 1e-9


def draw_parts(world: World, logits: Tensor, settings: list[list[SamplingParams]]) -> list[SampledTokens]:
    mine = share(logits.shape[-1], world.rank, world.size)
    part = logits[:, mine.start : mine.stop]
    return [draw_for(part, requests_for(params), logits.shape[-1], world) for params in settings]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_vocabulary_over_ranks_draws_what_one_process_draws(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 301) * 2
    logits[0, :290] = -torch.inf  # nothing to draw on the first ranks
    logits[1, 100:] = -torch.inf  # nor on the last
    whole = [SamplingParams(temperature=0.0 if row % 7 == 6 else 0.8) for row in range(64)]
    settings = [whole, [replace(params, top_p=0.9) for params in whole]]
    expected = [drawn(logits, params) for params in settings]
    for found in run_ranks(draw_parts, ranks, tmp_path, logits, settings):
        for mine, one_process in zip(found, expected, strict=True):
            for name in ("tokens", "logprobs", "sampling_logprobs"):
                torch.testing.assert_close(getattr(mine, name), getattr(one_process, name))
