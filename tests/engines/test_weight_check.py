"""The check after each weight sync: faults are caught and placed; clean steps raise no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines import hybrid, weight_check
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.weight_check import Rerouted, TrainingProbe, WeightCheck
from hybrid_rlhf.generation.model import layers
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.models.head_check import PROBE_TOKENS
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, route_to_expert_0, train_step
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.marks import faults


@dataclass(frozen=True)
class Streamed:
    """A weight on its way into the inference weights."""

    name: str
    values: Tensor
    is_persistent: bool = True

    def sampled(self) -> Tensor:
        """Its value."""
        return self.values


LAYER = "model.layers.1."
WRONG_WEIGHTS = {
    "a head that is not tied": ("qwen3", "lm_head.weight", "the head"),
    "an embedding of other tokens": ("qwen3", "model.embed_tokens.weight", "the embedding"),
    "rows exchanged": ("llama", LAYER + "mlp.up_proj.weight", "layer 1"),
    "experts exchanged": ("qwen3_moe", LAYER + "mlp.experts.gate_up_proj", "layer 1"),
    "a router of other experts": ("qwen3_moe", LAYER + "mlp.gate.weight", "layer 1"),
}


def wrong_rotary(decoder: Decoder) -> None:
    decoder._inv_freq = [None if table is None else table * 1.3 for table in decoder._inv_freq]


def shifted_positions(decoder: Decoder) -> None:
    right = decoder.hidden
    vars(decoder)["hidden"] = lambda tokens, positions, attend, **more: right(
        tokens, positions + 3 * (len(tokens) == 1), attend, **more
    )


def wrong_decay(decoder: Decoder) -> None:
    others = decoder._weights.layers[2].recurrent.weights.others
    others["decay"] = others["decay"] + 0.7


WRONG_DECODERS: dict[str, tuple[str, Callable[[Decoder], None], str]] = {
    "a rotary base": ("llama", wrong_rotary, "layer 0"),
    "a decay of states": ("qwen3_5", wrong_decay, "layer 2"),
    "positions of decoding": ("llama", shifted_positions, "the head"),
}


def actor_of(
    name: str,
    world: World,
    folder: Path,
    *,
    quantization: Any = None,
    max_logprob_diff: float | None = None,
    weight_check_every: int = 1,
    **settings: Any,
) -> HybridEngine:
    variant(name).save_pretrained(folder)
    spec, rollout = actor_spec(folder, **{"lr": 0.05, **settings}), RolloutConfig(quantization=quantization)
    return build_actor(
        spec, world, rollout=rollout, max_logprob_diff=max_logprob_diff, weight_check_every=weight_check_every
    )


def sync(actor: HybridEngine) -> None:
    with actor.inference(stop_token_ids=()):
        pass


@pytest.mark.parametrize("fault", WRONG_WEIGHTS)
def test_wrong_weights_are_caught_and_placed(
    fault: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of rows; a matrix of the same size in its place differs no less."""
    name, wrong_weight, place = WRONG_WEIGHTS[fault]
    actor = actor_of(name, world, tmp_path)
    sync(actor)
    train_step(actor, world)
    right = hybrid.full_weights

    def wrong(*arguments: Any, **more: Any) -> Iterator[Streamed]:
        for weight in right(*arguments, **more):
            values = weight.merged().clone()
            yield Streamed(weight.name, values.flip(0) if weight.name == wrong_weight else values)

    monkeypatch.setattr(hybrid, "full_weights", wrong)
    with user_error(f"after the weight sync of update 1, first in {place}"):
        sync(actor)


def test_after_two_syncs_one_in_a_few_is_checked(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that stop following training are found in the next sync that is checked, by their elements."""
    actor = actor_of("llama", world, tmp_path, weight_check_every=4, lr=1e-6)
    checked = list[bool]()
    for _ in range(9):
        sync(actor)
        checked.append(actor.weight_check_seconds > 0)
        train_step(actor, world)
    assert [number for number, was in enumerate(checked, start=1) if was] == [1, 2, 4, 8]
    kept = [Streamed(w.name, w.merged().clone()) for w in hybrid.full_weights(actor._weights, bucket_elements=1)]
    monkeypatch.setattr(hybrid, "full_weights", lambda *_, **__: iter(kept))
    for _ in range(2):
        train_step(actor, world)
        sync(actor)
    train_step(actor, world)
    with user_error("elements of .* differ after the weight sync of update 12"):
        sync(actor)


@pytest.mark.parametrize("fault", WRONG_DECODERS)
def test_a_wrong_forward_is_caught_and_placed(
    fault: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, place = WRONG_DECODERS[fault]
    actor = actor_of(name, world, tmp_path)
    assert actor._inference_weights is not None
    right = actor._inference_weights.build

    def wrong(*arguments: Any) -> Decoder:
        decoder = right(*arguments)
        change(decoder)
        return decoder

    monkeypatch.setattr(actor._inference_weights, "build", wrong)
    remedy = "report the model, or set rollout.backend to module"
    with user_error(f"must agree with the training forward.*first in {place}: {remedy}"):
        sync(actor)


@pytest.mark.parametrize(("tokens", "same"), [(2, True), (8, False)])
def test_experts_that_rounding_may_choose_are_no_alarm(
    tokens: int, same: bool, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = actor_of("qwen3_moe", world, tmp_path, max_logprob_diff=1e-5)
    assert actor._inference_weights is not None
    right, least = actor._inference_weights.build, list[float]()

    def other(*arguments: Any) -> Decoder:
        decoder = right(*arguments)
        route_to_expert_0(decoder, tokens)
        return decoder

    def rerouted(probe: TrainingProbe, routes: Tensor) -> Rerouted:
        least.append((found := by_training(probe, routes)).same_experts)
        return found

    by_training = TrainingProbe.rerouted
    monkeypatch.setattr(TrainingProbe, "rerouted", rerouted)
    monkeypatch.setattr(actor._inference_weights, "build", other)
    monkeypatch.setattr(weight_check, "_LEAST_SAME_EXPERTS", 0.9)
    with nullcontext() if same else user_error("agree with the training forward to 1e-05 nats.*layer 1"):
        sync(actor)
    assert least == pytest.approx([1 - tokens / (2 * (PROBE_TOKENS - 1))]), "two experts of each token"
    module: Any = actor.module
    assert not module.replay._replays, "training goes on with the experts that it chooses"


class TwoRanks:
    """The collectives of a rank whose peer has these values."""

    device = torch.device("cpu")

    def __init__(self, *of_peer: float) -> None:
        self.of_peer = list(of_peer)

    def all_gather_objects(self, item: Any) -> list[Any]:
        return [item, torch.zeros(1)]

    def all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return tensor.maximum(torch.tensor(self.of_peer.pop(0)))


@pytest.mark.parametrize(("of_peer", "agrees"), [([-0.4], False), ([-0.6, -1.0], True)])
def test_ranks_agree_on_the_experts_before_they_compare_log_probs(of_peer: list[float], agrees: bool) -> None:
    """A rank above the limit entered a collective that its peer, below the limit, did not."""

    class Agreeing:
        def rerouted(self, routes: Tensor) -> Rerouted:
            return Rerouted(torch.zeros(1), 0.9)

    world: Any = TwoRanks(*of_peer)
    probe: Any = Agreeing()
    assert WeightCheck(world, None, quantised=False)._agrees_with_its_experts(None, probe) == agrees
    assert not world.of_peer, "both ranks run the same collectives"


@pytest.mark.parametrize("part", ["up", "o"])
def test_a_wrong_quantisation_scale_is_caught_and_placed(
    part: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = actor_of("llama", world, tmp_path, quantization="int8")
    sync(actor)
    train_step(actor, world)
    right, calls = layers.quantise, list[int]()
    wrong_call = 4 + ["qkv", "o", "up", "down"].index(part)  # of layer 1

    def wrong(rows: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
        codes, scale = right(rows, kind)
        calls.append(1)
        return codes, scale * 1.25 if len(calls) == wrong_call + 1 else scale

    monkeypatch.setattr(layers, "quantise", wrong)
    with user_error(f"after the weight sync of update 1, .* in {part} of layer 1: report"):
        sync(actor)


@pytest.mark.parametrize(
    ("fault", "name", "dtype", "lr", "quantization", "stage"),
    [
        ("a layer of before the update", "llama", "float32", 0.05, None, 0),
        ("adapters left out", "llama", "float32", 1e-6, None, 3),
        ("adapters left out", "llama", "bfloat16", 1e-3, None, 0),
        ("adapters left out", "qwen3_moe", "float32", 1e-6, None, 0),
        ("a weight of before the update", "llama", "float32", 1e-6, "int8", 0),
        ("a weight of before the update", "llama", "bfloat16", 1e-5, None, 3),
        ("an expert of before the update", "qwen3_moe", "float32", 1e-6, None, 0),
    ],
)
def test_weights_that_do_not_follow_training_are_caught(
    fault: str,
    name: str,
    dtype: str,
    lr: float,
    quantization: Any,
    stage: int,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their log-probs, and by elements where the learning rates of real runs change them less than rounding."""
    settings = {"lr": lr, "dtype": dtype, "stage": stage, "lora": 4 * (fault == "adapters left out")}
    actor = actor_of(name, world, tmp_path, quantization=quantization, **settings)
    sync(actor)
    right = hybrid.full_weights
    old = {weight.name: weight.merged().clone() for weight in right(actor._weights, bucket_elements=1)}
    train_step(actor, world)

    def wrong(*arguments: Any, **more: Any) -> Iterator[Any]:
        for weight in right(*arguments, **more):
            value = weight.merged().clone()
            if fault == "an expert of before the update" and weight.name == LAYER + "mlp.experts.down_proj":
                value[2] = old[weight.name][2]
            if fault == "a layer of before the update" and weight.name.startswith(LAYER):
                value = old[weight.name]
            if fault == "a weight of before the update" and weight.name == LAYER + "mlp.down_proj.weight":
                value = old[weight.name]
            if fault == "adapters left out":
                value = weight.parameter.detach().clone()
            yield Streamed(weight.name, value)

    monkeypatch.setattr(hybrid, "full_weights", wrong)
    said = "first in layer" if lr == 0.05 else "elements of model.layers.* differ"
    with user_error(f"(?=.*after the weight sync of update 1).*{said}"):
        sync(actor)


MORE_CLEAN = [
    ("llama", "bfloat16", 0.05, 4, None, 40),
    ("llama", "float32", 0.05, 4, None, 40),
    ("llama", "float32", 0.05, 4, "int8", 40),
    ("qwen3_moe", "float32", 0.05, 0, None, 500),
    ("llama", "float32", 0.05, 0, "int8", 500),
    # At 0.05 adapters reach weights of 2.5, and sync 312 differs by 0.106 where 0.1 is allowed; none does without.
    ("llama", "bfloat16", 1e-3, 4, None, 500),
]


@pytest.mark.parametrize(
    ("name", "dtype", "lr", "lora", "quantization", "syncs"),
    [("llama", "bfloat16", 0.05, 4, None, 15), *(faults(*case) for case in MORE_CLEAN)],
)
def test_clean_syncs_raise_no_alarm(
    name: str, dtype: str, lr: float, lora: int, quantization: Any, syncs: int, world: World, tmp_path: Path
) -> None:
    actor = actor_of(name, world, tmp_path, quantization=quantization, dtype=dtype, lr=lr, lora=lora)
    for _ in range(syncs):
        train_step(actor, world)
        sync(actor)
