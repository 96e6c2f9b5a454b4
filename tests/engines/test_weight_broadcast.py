"""What a weight sync broadcasts: buckets, the description of the model, merged adapters and checksums."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.engines.separate.broadcast import SentWeight, TrainedModel, checksum
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, InferenceWeights
from hybrid_rlhf.models.lora import add_lora, base_weight, lora_layers, merged_weight
from hybrid_rlhf.runtime.world import World
from tests.support.families import VARIANTS, variant
from tests.support.separate import weight_tensors

CPU = torch.device("cpu")


weights = st.builds(
    SentWeight,
    st.uuids().map(str),
    st.tuples(st.integers(1, 30), st.integers(1, 4)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(weights, min_size=1, max_size=12), st.booleans())
def test_each_weight_is_in_one_bucket_of_its_dtype(sent: list[SentWeight], everything: bool) -> None:
    model = TrainedModel(cast("DescribedModel", None), tuple(sent), torch.float32, ())
    buckets = model.buckets(everything=everything, bucket_elements=60)
    assert [w for bucket in buckets for w in bucket.weights] == [w for w in sent if everything or w.changes]
    for bucket in buckets:
        assert len({weight.dtype for weight in bucket.weights}) == 1
        assert len(bucket.weights) == 1 or sum(weight.elements for weight in bucket.weights) <= 60
    for one, other in pairwise(buckets):
        joined = sum(weight.elements for weight in (*one.weights, other.weights[0]))
        assert joined > 60 or one.weights[0].dtype != other.weights[0].dtype, "a bucket is as full as it can be"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_description_and_messages_give_the_inference_weights_of_the_model(name: str) -> None:
    model = variant(name)
    described: TrainedModel = pickle.loads(pickle.dumps(TrainedModel.of(model)))
    parameters = {weight: parameter.detach() for weight, parameter in model.named_parameters()}
    received = {}
    for bucket in described.buckets(everything=True, bucket_elements=4096):
        views = bucket.views(torch.empty(bucket.nbytes, dtype=torch.uint8))
        for weight, view in zip(bucket.weights, views, strict=True):
            received[weight.name] = view.copy_(parameters[weight.name])
    assert received.keys() == parameters.keys() - {*described.described.unread}
    recurrence = described.described.architecture.recurrence
    shared = [] if recurrence is not None and recurrence.units < 2 else [(0, 2), (1, 2)]
    for rank, ranks in [(0, 1), *shared]:
        world = World(rank, ranks, rank, ranks, CPU)
        inference = InferenceWeights(described.described, world=world, dtype=torch.bfloat16)
        made = [
            weight_tensors(inference.build((weight, values, False) for weight, values in given.items()))
            for given in (parameters, received)
        ]
        assert made[0].keys() == made[1].keys() and len(made[0]) > 10
        for place, tensor in made[0].items():
            assert torch.equal(tensor, made[1][place]), place


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "llama4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_merged_as_peft_does(name: str, dtype: torch.dtype) -> None:
    model = variant(name).to(dtype)
    add_lora(model, LoraConfig(rank=3, alpha=5), "causal_lm", seed=0)
    layers = dict(lora_layers(model))
    assert len(layers) > 5
    for place, layer in layers.items():
        base = base_weight(layer).detach()
        with torch.no_grad():
            layer.lora_B["default"].weight.normal_()
            expected = base + layer.get_delta_weight("default").to(base.dtype)
        assert torch.equal(merged_weight(layer), expected), place
        assert not torch.equal(expected, base), place


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_checksums_tell_changed_and_exchanged_values(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    values = torch.arange(size).to(dtype)
    changed = values.clone()
    place, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    changed[place] += 1 + changed[place].abs()
    assert int(checksum(changed)) != int(checksum(values))
    exchanged = values.clone()
    exchanged[[place, other]] = exchanged[[other, place]]
    assert (int(checksum(exchanged)) != int(checksum(values))) == bool(values[place] != values[other])
    assert int(checksum(values.clone())) == int(checksum(values))
