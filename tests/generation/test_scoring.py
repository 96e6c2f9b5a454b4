"""Frozen models in inference weights against their modules: log-probs, entropies and scores, whole and split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hybrid_rlhf.generation.scoring import inference_policy, inference_scorer
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.models.policy import Policy, Scorer
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import refused
from tests.support.families import variant
from tests.support.ranks import run_ranks
from tests.support.separate import weight_tensors
from tests.support.tiny import tiny_config, tiny_model

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


def rows(vocabulary: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged rows, one padded on the left, and what is asked of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=generator)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    real[1] = real[1].flip(0)
    wanted = real & (torch.rand(real.shape, generator=generator) < 0.7)
    return ids, real, wanted


def classifier(name: str, labels: int = 1, *, bias: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config = variant(name).config
    config.num_labels = labels
    found: PreTrainedModel = AutoModelForSequenceClassification.from_config(config).eval()
    if bias:
        found.score = torch.nn.Linear(config.hidden_size, labels)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    use_packing(found)
    return found


def whole(device: str = "cpu") -> World:
    return solo_world(torch.device(device))


@torch.no_grad()
def assert_same_logprobs(lm: PreTrainedModel, world: World) -> None:
    ids, real, wanted = rows()
    expected = Policy(lm)(ids, real, wanted, 0.7)
    assert expected[0].std() > 0.5, "a flat distribution would prove nothing"
    for found, want in zip(inference_policy(lm, world=world)(ids, real, wanted, 0.7), expected, strict=True):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def assert_same_scores(lm: PreTrainedModel, world: World) -> None:
    ids, real, _ = rows()
    expected = Scorer(lm)(ids, real)
    assert expected.std() > 0.05
    torch.testing.assert_close(inference_scorer(lm, world=world)(ids, real), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_and_entropies_are_those_of_the_module(name: str) -> None:
    lm = variant(name)
    use_packing(lm)
    assert_same_logprobs(lm, whole())


@pytest.mark.parametrize(
    ("name", "labels", "bias"), [("llama", 1, False), ("gpt2", 1, True), ("qwen3_next", 3, True), ("gemma2", 2, False)]
)
def test_scores_are_those_of_the_module(name: str, labels: int, bias: bool) -> None:
    """Also of Gemma 2, which does something to logits."""
    assert_same_scores(classifier(name, labels, bias=bias), whole())


def compare_split(world: World) -> dict[str, float]:
    """On each rank; what part of the weights it keeps, by model."""
    parts = {}
    for name in SPLIT:
        lm = variant(name)
        use_packing(lm)
        assert_same_logprobs(lm, world)
        assert_same_scores(classifier(name, 2, bias=name == "llama"), world)
    lm = tiny_model(tie_word_embeddings=False, num_hidden_layers=3)
    for kind in (1, world.size):
        policy = inference_policy(lm, world=world if kind > 1 else whole())
        kept = weight_tensors(policy._decoder)
        parts[str(kind)] = float(sum(weight.untyped_storage().nbytes() for weight in kept.values()))
    return parts


def refusals(world: World) -> list[str]:
    cases: list[Callable[[], object]] = [
        lambda: inference_policy(tiny_model(num_attention_heads=3, num_key_value_heads=1, hidden_size=48), world=world),
        lambda: inference_policy(other_type(), world=world),
        lambda: inference_scorer(damaged(), world=world),
    ]
    return [refused(case) for case in cases]


def other_type() -> PreTrainedModel:
    lm = tiny_model()
    lm.config.model_type = "reformer"
    return lm


def damaged() -> PreTrainedModel:
    """A model whose inference weights are wrong: its norms are read with another epsilon than it has."""
    lm = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    lm.config.rms_norm_eps = 0.5
    return lm.eval()  # type: ignore[no-any-return]


def on_ranks(world: World) -> tuple[dict[str, float], list[str]]:
    return compare_split(world), refusals(world)


def test_ranks_compute_their_parts_keep_no_more_and_refuse_together(tmp_path: Path) -> None:
    (parts, first), (others, second) = run_ranks(on_ranks, 2, tmp_path)
    for kept in (parts, others):
        assert kept["2"] < 0.55 * kept["1"]  # norms are on both
    assert first == second
    heads, kind, wrong = first
    assert "3 heads with 1 KV heads, 2 ranks cannot" in heads
    assert "models of type reformer have none" in kind and kind.endswith("leave tensor_parallel out")
    assert "must agree with LlamaForSequenceClassification" in wrong
