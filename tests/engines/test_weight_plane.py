"""The plan of a weight transfer: intervals, what ranks need, which rank sends what; adapters and checksums."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.engines.separate.intervals import Runs, needed_runs, read_elements
from hybrid_rlhf.engines.separate.layout import NeededWeights, SentTensor, SentWeight, TrainedModel
from hybrid_rlhf.engines.separate.routes import RoutePlan
from hybrid_rlhf.engines.separate.transfer import checksum
from hybrid_rlhf.generation.weights.inference_weights import InferenceWeights
from hybrid_rlhf.models.lora import Adapter, add_lora, base_weight, lora_layers, weights_of
from hybrid_rlhf.runtime.world import World
from tests.support.families import VARIANTS, variant
from tests.support.separate import weight_tensors

CPU = torch.device("cpu")


@st.composite
def runs(draw: st.DrawFn) -> Runs:
    length, count = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return Runs(draw(st.integers(0, 20)), length, count, draw(st.integers(length, 12)) if count > 1 else 0)


def elements(of: Runs) -> list[int]:
    return sorted(of.start + run * of.period + place for run in range(of.count) for place in range(of.length))


@settings(max_examples=500, deadline=None)
@given(runs(), st.integers(0, 100), st.integers(0, 100))
def test_an_interval_of_runs_has_their_elements_in_it(of: Runs, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    parts = list(of.within(start, stop))
    assert sorted(sum(map(elements, parts), [])) == [place for place in elements(of) if start <= place < stop]
    assert len(parts) <= 3 and all(part.elements for part in parts)
    flat = torch.arange(200)
    assert sorted(flat[elements(of)].tolist()) == sorted(of.view(flat).flatten().tolist())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(runs(), min_size=1, max_size=3), st.lists(st.integers(0, 100), min_size=1, max_size=4), st.integers(1, 3)
)
def test_each_needed_element_is_sent_once(needs: list[Runs], cuts: list[int], receivers: int) -> None:
    bounds = sorted({0, 200, *cuts})
    held = {rank: {"sharded": interval} for rank, interval in enumerate(pairwise(bounds))}
    # runs of a weight do not overlap
    seen: set[int] = set()
    parts = [part for part in needs if not seen & {*elements(part)} and not seen.update(elements(part))]
    targets = range(len(held), len(held) + receivers)
    needed = {rank: {"sharded": tuple(parts), "whole": (Runs(0, 50),)} for rank in targets}
    weights = [SentWeight(SentTensor(name, (200,), torch.float32, True)) for name in ("sharded", "whole")]
    plan = RoutePlan(held, needed, ["a"] * (len(held) + receivers))
    (bucket,) = plan.buckets(weights, everything=True, bucket_elements=1000)
    for target in targets:
        arrived = Counter[int]()
        for piece in bucket.pieces:
            if piece.target == target and piece.tensor == "sharded":
                start, stop = held[piece.source]["sharded"]
                places = sum(map(elements, piece.runs), [])
                assert all(start <= place < stop for place in places)
                arrived.update(places)
        assert arrived == Counter(sum(map(elements, parts), []))
    sources = Counter(piece.source for piece in bucket.pieces if piece.tensor == "whole")
    assert max(sources.values()) - min(sources.get(rank, 0) for rank in held) <= 1, "replicas share the work"


def test_parts_come_from_the_same_host_where_they_can() -> None:
    weights = [SentWeight(SentTensor(str(index), (8,), torch.float32, trained=index < 5)) for index in range(6)]
    whole = {str(index): (Runs(0, 8),) for index in range(6)}
    plan = RoutePlan({0: {}, 1: {}}, {2: whole, 3: whole, 4: whole}, ["a", "b", "a", "b", "c"])
    buckets = plan.buckets(weights, everything=False, bucket_elements=16)
    assert [len(bucket.weights) for bucket in buckets] == [2, 2, 2]
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    assert {(piece.source, piece.target) for piece in pieces if piece.target != 4} == {(0, 2), (1, 3)}
    assert Counter(piece.target for piece in pieces) == {2: 5, 3: 5, 4: 5}


def rank_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size, CPU)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_ranks_need_is_all_that_the_loader_reads(name: str) -> None:
    """Weights that are NaN elsewhere give the same inference weights, from a description that was sent."""
    model = variant(name)
    described: TrainedModel = pickle.loads(pickle.dumps(TrainedModel.of(model)))
    weights = {weight: parameter.detach() for weight, parameter in model.named_parameters()}
    recurrence = described.described.architecture.recurrence
    shared = [] if recurrence is not None and recurrence.units < 2 else [(0, 2), (1, 2)]
    for rank, ranks in [(0, 1), *shared]:
        inference = InferenceWeights(described.described, world=rank_of(rank, ranks), dtype=torch.bfloat16)
        needed = NeededWeights.of(described, inference, torch.bfloat16)
        parts = {}
        for weight, values in weights.items():
            part = torch.full_like(values, torch.nan, memory_format=torch.contiguous_format).view(-1)
            for some in needed.runs[weight]:
                some.view(part).copy_(some.view(values.contiguous().view(-1)))
            exact = read_elements(inference.picks(weight), values.shape).flatten()
            assert torch.equal(part.isfinite(), exact), weight
            parts[weight] = part.view(values.shape).to(needed.dtypes[weight])
        made = [
            weight_tensors(inference.build((weight, values, False) for weight, values in given.items()))
            for given in (weights, parts)
        ]
        assert made[0].keys() == made[1].keys() and len(made[0]) > 10
        for place, tensor in made[0].items():
            assert torch.equal(tensor, made[1][place]), place


def test_columns_are_one_piece() -> None:
    assert needed_runs([lambda t: t[:, 2:4]], (6, 8)) == (Runs(2, 2, 6, 8),)
    assert needed_runs([lambda t: t.t()[2:4]], (6, 8)) == (Runs(2, 2, 6, 8),)
    assert needed_runs([lambda t: t[2:4]], (6, 8)) == (Runs(16, 16),)
    assert needed_runs([lambda t: torch.cat([t[:1], t[4:]])], (6, 8)) == (Runs(0, 8), Runs(32, 16))
    assert needed_runs([torch.zeros_like], (6, 8)) == ()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "llama4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_merged_as_peft_does(name: str, dtype: torch.dtype) -> None:
    model = variant(name).to(dtype)
    add_lora(model, LoraConfig(rank=3, alpha=5), "causal_lm", seed=0)
    layers = dict(lora_layers(model))
    assert len(layers) > 5
    for place, layer in layers.items():
        base, a, b = (weight.detach() for weight in weights_of(layer))
        with torch.no_grad():
            layer.lora_B["default"].weight.normal_()
            expected = base + layer.get_delta_weight("default").to(base.dtype)
        assert torch.equal(Adapter.of(layer).merged(base, a, b), expected), place
        assert not torch.equal(expected, base_weight(layer)), place


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
