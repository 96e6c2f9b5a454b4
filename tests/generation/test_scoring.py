"""Log-probs of prompts and scores by inference weights against those of the modules, whole and split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hybrid_rlhf.generation.scoring import InferenceScorer, described_scorer, prompt_logprobs
from hybrid_rlhf.generation.weights.inference_weights import InferenceWeights, decoder_of
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.models.policy import Policy, Scorer
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.families import variant
from tests.support.ranks import run_ranks

FAMILIES = (
    "llama",
    "gemma2",
    "gemma4 that shares keys",
    "cohere",
    "opt 350m",
    "bloom",
    "falcon 7b",
    "mixtral with windows",
    "deepseek_v3",
    "gpt_oss",
    "llama4",
    "qwen3_next",
)
LENGTHS = (22, 5, 33, 1, 22)
SPLIT = ("llama", "gemma2", "mixtral", "bloom")
"""With heads for two ranks."""


def rows(vocabulary: int = 200) -> tuple[Tensor, Tensor]:
    """Ragged rows, one padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=generator)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    real[1] = real[1].flip(0)
    return ids, real


def classifier(name: str, labels: int = 1, *, bias: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config = variant(name).config
    config.num_labels = labels
    found = AutoModelForSequenceClassification.from_config(config).eval()
    if bias:
        found.score = torch.nn.Linear(config.hidden_size, labels)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    use_packing(found)
    return found


WHOLE = solo_world(torch.device("cpu"))


@torch.no_grad()
def assert_same_logprobs(lm: PreTrainedModel, world: World) -> None:
    ids, real = rows()
    expected, _ = Policy(lm)(ids, real, real)
    assert expected.std() > 0.5, "a flat distribution would prove nothing"
    decoder = decoder_of(lm, world=world, dtype=lm.dtype)
    for row, own in enumerate(real):
        found = prompt_logprobs(decoder, ids[row, own].tolist(), 0, 0).logprobs
        assert found == pytest.approx(expected[row, own][1:].tolist(), abs=1e-5, rel=1e-5)


@torch.no_grad()
def assert_same_scores(lm: PreTrainedModel, world: World) -> None:
    ids, real = rows()
    expected = Scorer(lm)(ids, real)
    assert expected.std() > 0.05
    parameters = dict(lm.named_parameters())
    weights = InferenceWeights(described_scorer(lm, parameters), world=world, dtype=lm.dtype)
    scorer = InferenceScorer(weights.build((name, weight, False) for name, weight in parameters.items()))
    torch.testing.assert_close(scorer(ids, real), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_of_prompts_are_those_of_the_module(name: str) -> None:
    lm = variant(name)
    use_packing(lm)
    assert_same_logprobs(lm, WHOLE)


@pytest.mark.parametrize(
    ("name", "labels", "bias"), [("llama", 1, False), ("gpt2", 1, True), ("qwen3_next", 3, True), ("gemma2", 2, False)]
)
def test_scores_are_those_of_the_module(name: str, labels: int, bias: bool) -> None:
    """Also of Gemma 2, which does something to logits."""
    assert_same_scores(classifier(name, labels, bias=bias), WHOLE)


def compare_split(world: World) -> None:
    for name in SPLIT:
        lm = variant(name)
        use_packing(lm)
        assert_same_logprobs(lm, world)
        assert_same_scores(classifier(name, 2, bias=name == "llama"), world)


def test_ranks_compute_their_parts(tmp_path: Path) -> None:
    run_ranks(compare_split, 2, tmp_path)
