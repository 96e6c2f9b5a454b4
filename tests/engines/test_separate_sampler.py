"""A sampler on ranks of its own samples what the actor would."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.engine import EngineFacts
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import BaseWeight
from hybrid_rlhf.engines.residency.rules import ResidencyRules
from hybrid_rlhf.engines.role_model import AbsentEngine
from hybrid_rlhf.engines.separate import broadcast
from hybrid_rlhf.engines.separate.broadcast import Bucket
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.engines.separate.synced import SyncedWeights
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.runtime.world import World, create_groups
from tests.support import errors
from tests.support.engines import PROMPTS, accumulate, actor_spec, route_to_expert_0
from tests.support.families import variant
from tests.support.marks import faults, slow
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny, tiny_model

OnRanks = Callable[..., list[Any]]
GREEDY = SamplingParams(max_new_tokens=5, temperature=0.0)


def build_separate(
    world: World,
    path: Path,
    *,
    trains: int,
    idle: int = 0,
    rollout: RolloutConfig | None = None,
    samples: bool = False,
    settings: dict[str, Any] | None = None,
    **faults: Any,
) -> tuple[HybridEngine | None, SeparateSampler]:
    """The first ranks train the actor, the last do nothing, all others sample; `samples`: the actor samples too."""
    rollout = rollout or RolloutConfig()
    actor_ranks, sampler_ranks = tuple(range(trains)), tuple(range(trains, world.size - idle))
    together = rollout.tensor_parallel
    groups = [sampler_ranks[first : first + together] for first in range(0, len(sampler_ranks), together)]
    create_groups([actor_ranks, sampler_ranks, *groups])
    own, other = map(world.part, (actor_ranks, sampler_ranks))
    actor = None
    if own.is_member:
        spec = actor_spec(path, **({"lr": 0.05} | (settings or {})))
        alone = RolloutConfig(routing_replay=rollout.routing_replay)
        actor = build_actor(spec, own, rollout=alone, samples=samples)
    model = AbsentEngine("actor", own, EngineFacts(packs=True)) if actor is None else actor
    return actor, SeparateSampler(model, world=other, rollout=rollout, **faults)


def synced(sampler: SeparateSampler) -> SyncedWeights:
    """The actor's weights."""
    assert sampler.weights is not None, "this rank neither trains nor samples"
    return sampler.weights


def learn(actor: HybridEngine | None) -> None:
    """One update of a rank that trains."""
    if actor is not None:
        accumulate(actor, actor.world)
        actor.step()


def sync(sampler: SeparateSampler) -> None:
    with sampler.inference(stop_token_ids=()):
        pass


@dataclass(frozen=True)
class Case:
    """A model, ranks of the actor, and how it trains and samples."""

    family: str
    trains: int
    settings: dict[str, Any] = field(default_factory=dict)
    rollout: RolloutConfig = RolloutConfig()
    packs: bool = False


def folder_of(name: str, root: Path) -> Path:
    folder = root / name
    if not folder.exists():
        model = tiny_model(tie_word_embeddings=name == "tied") if name in ("tied", "untied") else variant(name)
        return save_tiny(folder, model)


@pytest.fixture
def on_ranks(tmp_path: Path) -> OnRanks:
    """Run a function on ranks with the folder of a model, and return what each rank does."""

    def run(function: Callable[..., Any], ranks: int, model: str, *arguments: Any) -> list[Any]:
        return run_ranks(function, ranks, tmp_path / "ranks", folder_of(model, tmp_path), *arguments)

    return run


def compare(world: World, root: Path, cases: list[Case]) -> list[Any]:
    """Before an update, after it, and after another: what each rank samples, and with which version."""
    told = []
    for case in cases:
        with nullcontext() if case.packs else torch.backends.mkldnn.flags(enabled=False):
            actor, sampler = build_separate(
                world,
                root / case.family,
                trains=case.trains,
                rollout=case.rollout,
                samples=True,
                settings=case.settings,
            )
            rounds = []
            for _ in range(3):
                sampled = None
                if actor is not None:
                    with actor.inference(stop_token_ids=()) as generation:
                        sampled = generation.generate(PROMPTS, GREEDY)
                with sampler.inference(stop_token_ids=()) as own:
                    if own is not None:
                        sampled = own.generate(PROMPTS, GREEDY)
                assert sampled is not None
                rounds.append(([completion for (completion,) in sampled], sampler.weight_version))
                learn(actor)
            told.append(rounds)
    return told


INT8 = RolloutConfig(quantization="int8")
TWO = RolloutConfig(tensor_parallel=2)
COMPARED: dict[int, list[Case]] = {
    2: [
        Case("tied", 1, {}, packs=True),
        Case("untied", 1, {"stage": 1, "lora": 4}),
        Case("opt", 1, {"stage": 2, "lora": 4}, packs=True),
        Case("gpt2", 1, {"lora": 4}),
        Case("falcon_h1", 1, {}, RolloutConfig(dtype="bfloat16")),
        Case("tied", 1, {"lora": 4}, INT8),
    ],
    3: [
        Case("qwen3_moe", 1, {"lora": 4}, TWO),
        Case("tied", 2, {"stage": 3, "lora": 4, "dtype": "bfloat16"}),
        Case("gpt2", 1, {"stage": 2}, TWO),
        Case("qwen3_5", 1, {"lora": 4}, replace(TWO, keep_weights=False)),
    ],
    4: [
        Case("untied", 2, {"stage": 3, "lora": 4}, TWO),
        Case("qwen3_moe", 2, {"stage": 3}, TWO),
        Case("opt", 3, {"stage": 3}),
        Case("phi3", 2, {"stage": 1}, TWO),
        Case("tied", 1, {"lora": 4}, RolloutConfig(keep_weights=False)),
    ],
}


@pytest.mark.parametrize("ranks", [2, slow(3), faults(4)])
def test_separate_ranks_sample_what_the_actor_would(ranks: int, tmp_path: Path) -> None:
    cases = COMPARED[ranks]
    for case in cases:
        folder_of(case.family, tmp_path / "models")
    results = run_ranks(compare, ranks, tmp_path / "ranks", tmp_path / "models", cases)
    for index, case in enumerate(cases):
        reduced = case.rollout is INT8 or "bfloat16" in (case.rollout.dtype, case.settings.get("dtype"))
        for round_index in range(3):
            wanted, _ = results[0][index][round_index]
            for rank in range(ranks):
                found, version = results[rank][index][round_index]
                assert version == round_index
                for mine, theirs in zip(found, wanted, strict=True):
                    assert mine.weight_versions == [round_index] * len(mine.token_ids)
                    if not reduced:
                        assert mine.token_ids == theirs.token_ids, (case, rank)
                        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        first, _, last = (results[0][index][place][0] for place in range(3))
        assert [one.logprobs for one in first] != [one.logprobs for one in last], "the weights have changed"


def traffic(world: World, path: Path, trains: int, tensor_parallel: int) -> dict[str, Any]:
    """Bytes of the broadcasts of each sync on this rank, with and without adapters, and of the weights; with adapters
    all syncs have checksums."""
    torch.backends.mkldnn.enabled = False  # nothing is packed, as on a GPU
    told: dict[str, Any] = {}
    share = World.broadcast

    def counted(self: World, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        messages.append(tensor.nbytes)
        return share(self, tensor, source=source)

    for lora in (0, 4):
        rollout = RolloutConfig(tensor_parallel=tensor_parallel)
        settings = {"lora": lora, "stage": 3}
        actor, sampler = build_separate(
            world, path, trains=trains, rollout=rollout, settings=settings, check_weights=lora > 0
        )
        sent, checksums = [], []
        for _ in range(3):
            messages: list[int] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(World, "broadcast", counted)
                sync(sampler)
                sync(sampler)  # of the same version
            sent.append(sum(messages))
            checksums.append(len(synced(sampler)._broadcast.checksums))
            learn(actor)
        told[f"sent {lora}"] = sent
        told[f"checksums {lora}"] = checksums
        weights = synced(sampler).model.weights
        told[f"changed {lora}"] = sum(4 * weight.elements for weight in weights if weight.changes)
        told["weights"] = sum(4 * weight.elements for weight in weights)
        told["syncs"], told["number"] = synced(sampler).syncs, len(weights)
    return told


@pytest.mark.parametrize(("ranks", "trains", "tensor_parallel"), [faults(4, 3, 1), (3, 1, 2)])
def test_only_what_has_changed_travels(ranks: int, trains: int, tensor_parallel: int, on_ranks: OnRanks) -> None:
    for rank, told in enumerate(on_ranks(traffic, ranks, "untied", trains, tensor_parallel)):
        on_path = rank == 0 or rank >= trains
        whole, changed = (told[name] * on_path for name in ("weights", "changed 4"))
        number = told["number"] * on_path
        assert told["checksums 0"] == [number, number, 0], "in the first two syncs, one for each weight"
        assert all(bool(count) == on_path for count in told["checksums 4"]), "or in all"
        assert told["sent 0"] == [whole] * 3 and told["changed 0"] == told["weights"] and told["syncs"] == 3
        assert told["sent 4"] == [whole, changed, changed] and told["changed 4"] < told["weights"]


BUCKET = 2**18


def held(world: World, path: Path, tensor_parallel: int) -> list[tuple[int, int]]:
    """Bytes of this rank's inference weights, and the most that it holds besides, in three syncs of packed weights and
    in three that write in place; nothing on a rank that does not sample."""
    told = []
    for packs in (True, False):
        with torch.backends.mkldnn.flags(enabled=packs), pytest.MonkeyPatch.context() as patch:
            patch.setattr(broadcast, "BUCKET_ELEMENTS", BUCKET)
            actor, sampler = build_separate(
                world, path, trains=1, rollout=RolloutConfig(tensor_parallel=tensor_parallel)
            )
            with LiveBytes("cpu") as counter:
                for _ in range(3):
                    gc.collect()  # of the sync before, which would be freed at any time
                    counter.restart()
                    synced(sampler).current(lambda decoder: None)
                    if actor is None:
                        told.append((counter.live, counter.peak - counter.live))
                    learn(actor)
    return told


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_rank_that_samples_holds_its_part_and_a_bucket(tensor_parallel: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 300}
    model = tiny_model(**sizes, num_attention_heads=4, num_key_value_heads=4)
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    folder = save_tiny(tmp_path / "model", model)
    product = 256 * 1024 // tensor_parallel
    for told in run_ranks(held, 1 + tensor_parallel, tmp_path / "ranks", folder, tensor_parallel)[1:]:
        assert len(told) == 6
        part = 1.1 * whole / tensor_parallel
        # gloo's threads may release a bucket late, in a sync or in the next one, but not in each of the three
        assert all(whole / tensor_parallel <= own < part + 4 * BUCKET for own, _ in told)
        most = part + 1.05 * 4 * max(BUCKET, 2 * product)
        assert all(own + more <= most + 4 * BUCKET for own, more in told)
        packed, fused = (min(own + more for own, more in syncs) for syncs in (told[:3], told[3:]))
        assert packed <= most, "after the last bucket, a product is fused and packed"
        assert fused <= part + 1.05 * 4 * BUCKET, "or fused"


DAMAGED, DROPPED = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"
FAULTS = {
    "a bucket corrupted": rf"{DAMAGED} from rank 0 differs on rank 2 in the weight sync of update 1",
    "an adapter dropped": "agree with the training forward .* after the weight sync of update 1, first in layer 1",
    "old weights": "agree with the training forward .* after the weight sync of update 1, first in (the|layer 0)",
    "a rank of other updates": "must have made the same updates, rank 0 has made 1, rank 1 2: resume from a checkpoint",
}


def broken(world: World, path: Path) -> list[tuple[str, str]]:
    """What each rank says of each fault in its second sync."""
    told = []
    for fault in FAULTS:
        settings = {"lora": 4 * (fault == "an adapter dropped")}
        actor, sampler = build_separate(world, path, trains=2, settings=settings)
        sync(sampler)
        learn(actor)
        with pytest.MonkeyPatch.context() as patch:
            _break(fault, actor, sampler, patch)
            with pytest.raises(UserError) as caught:
                sync(sampler)
        told.append((fault, str(caught.value)))
    return told


def _break(fault: str, actor: HybridEngine | None, sampler: SeparateSampler, patch: pytest.MonkeyPatch) -> None:
    if fault == "a rank of other updates" and actor is not None:
        patch.setattr(actor.deepspeed_engine, "global_steps", 1 + actor.world.rank)
    if fault == "a bucket corrupted" and actor is None:
        share, buckets, views = World.broadcast, list[Bucket](), Bucket.views

        def seen(self: Bucket, message: torch.Tensor) -> list[torch.Tensor]:
            buckets.append(self)
            return views(self, message)

        def damaged(self: World, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
            share(self, tensor, source=source)
            for weight, values in zip(buckets[-1].weights, views(buckets[-1], tensor), strict=True):
                values.view(-1)[7] += 1e-3 * (weight.name == DAMAGED)
            return tensor

        patch.setattr(Bucket, "views", seen)
        patch.setattr(World, "broadcast", damaged)
    if fault == "an adapter dropped":
        merged = BaseWeight.merged
        patch.setattr(
            BaseWeight, "merged", lambda self: self.parameter.detach() if self.name == DROPPED else merged(self)
        )
    weights = synced(sampler)
    if fault == "old weights" and weights._inference is not None:
        old = weights.decoder

        def stale(received: Any) -> Any:
            return [old for _ in received][0]

        patch.setattr(weights._inference, "build", stale)


def test_faults_stop_all_ranks_by_name(on_ranks: OnRanks) -> None:
    for told in on_ranks(broken, 3, "untied"):
        assert len(told) == len(FAULTS)
        for fault, said in told:
            assert re.search(FAULTS[fault], said), said


def sampled_by(generation: GenerationEngine | None) -> list[list[int]]:
    """Greedy tokens; nothing on a rank that does not sample."""
    return [] if generation is None else [samples[0].token_ids for samples in generation.generate(PROMPTS, GREEDY)]


def under_other_weights(world: World, path: Path) -> tuple[list[list[list[int]]], int]:
    """Tokens before, with and after other weights of the same version, and the syncs of the last two."""
    actor, sampler = build_separate(world, path, trains=1, rollout=RolloutConfig(kv_cache_gib=0.01))
    told = []

    def rollout_now() -> None:
        with sampler.inference(stop_token_ids=()) as generation:
            told.append(sampled_by(generation))

    rollout_now()
    before, parameters = synced(sampler).syncs, [] if actor is None else [p.data for p in actor.module.parameters()]
    kept = [values.clone() for values in parameters]
    with sampler.other_weights():
        for values in parameters:
            values.mul_(1.5)
        rollout_now()
    for values, old in zip(parameters, kept, strict=True):
        values.copy_(old)
    rollout_now()
    return told, synced(sampler).syncs - before


def test_other_weights_of_the_same_version_are_synced(on_ranks: OnRanks) -> None:
    _, ((now, other, again), syncs) = on_ranks(under_other_weights, 2, "tied")
    assert now == again and other != now and syncs == 2


REFUSED = {
    "needs inference weights, the actor's model has none .*leave placement.sampler out": ("bloom", RolloutConfig()),
    "got rollout.backend module: give auto, or leave": ("tied", RolloutConfig(backend="module")),
    "rollout.offload_states makes room": ("tied", RolloutConfig(offload_states=True)),
    "must split 3 heads with 3 KV heads, 4 ranks cannot": ("llama of three heads", RolloutConfig(tensor_parallel=4)),
}


def refused(world: World, root: Path) -> list[str]:
    """What each rank says of each case."""
    return [
        errors.refused(build_separate, world, root / name, trains=1, rollout=rollout)
        for name, rollout in REFUSED.values()
    ]


def test_what_cannot_be_sampled_is_refused(tmp_path: Path) -> None:
    for name, _ in REFUSED.values():
        folder_of(name, tmp_path)
    config = json.loads((tmp_path / "bloom" / "config.json").read_text())
    config["apply_residual_connection_post_layernorm"] = True
    (tmp_path / "bloom" / "config.json").write_text(json.dumps(config))
    for told in run_ranks(refused, 5, tmp_path / "ranks", tmp_path):
        for rule, said in zip(REFUSED, told, strict=True):
            assert re.search(rule, said), said


def replayed(world: World, path: Path) -> list[float] | None:
    """How many routes of the sampler the actor's forward uses, of how many."""
    actor, sampler = build_separate(world, path, trains=1, rollout=RolloutConfig(routing_replay=True))
    found = None
    with sampler.inference(stop_token_ids=()) as generation:
        if generation is not None:
            ((completion,),) = generation.generate(PROMPTS[:1], GREEDY, record_routes=True)
            found = completion.token_ids, completion.routes
    told = world.broadcast_object(found, source=1)
    if actor is None or told is None:
        return None
    ids = torch.tensor([PROMPTS[0] + told[0]])
    routes = torch.full((1, ids.shape[1], *told[1].shape[1:]), -1)
    routes[0, : len(told[1])] = torch.from_numpy(told[1])
    routes[0, 0] = routes[0, 0].flip(-1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    actor(ids, mask, mask, routes=routes)
    assert actor.router_agreement is not None
    return actor.router_agreement.tolist()


def test_the_actor_replays_routes_of_the_sampler(on_ranks: OnRanks) -> None:
    used, routes = on_ranks(replayed, 2, "qwen3_moe")[0]
    assert used == routes > 0


def rounded(world: World, path: Path) -> None:
    """A sampler that sends two tokens to other experts than the training forward does."""
    actor, sampler = build_separate(world, path, trains=1, max_logprob_diff=1e-5)
    inference, sent = synced(sampler)._inference, list[bool]()
    if inference is not None:
        right = inference.build

        def other(weights: Any) -> Any:
            decoder = right(weights)
            route_to_expert_0(decoder, 2)
            sent.append(True)
            return decoder

        vars(inference)["build"] = other
    sync(sampler)
    assert sent == [True] * (actor is None)


def test_experts_that_rounding_may_choose_are_no_alarm(on_ranks: OnRanks) -> None:
    on_ranks(rounded, 2, "qwen3_moe")


def apart(world: World, path: Path) -> tuple[bool, bool, str]:
    """Ranks that train, that sample, and that do neither: which have an engine, and inference weights of the actor."""
    actor, sampler = build_separate(world, path, trains=1, idle=1)
    with sampler.inference(stop_token_ids=()) as generation:
        generates = bool(sampled_by(generation))
    if actor is None:
        return generates, False, ""
    with pytest.raises(RuntimeError) as caught, actor.inference():
        pass
    return generates, actor._inference_weights is not None, str(caught.value)


def test_only_ranks_that_sample_have_inference_weights(on_ranks: OnRanks) -> None:
    told = on_ranks(apart, 3, "tied")
    assert [generates for generates, _, _ in told] == [False, True, False]
    assert not told[0][1] and "use the sampler" in told[0][2]


def beside_others(world: World, path: Path) -> list[tuple[bool, int, list[Any]]]:
    """By whether others compute on its ranks: whether a sampler keeps its cache, its syncs, and what it samples."""
    told = []
    for shares_ranks in (False, True):
        residency = ResidencyRules().sampler(shares_ranks=shares_ranks)
        _, sampler = build_separate(world, path, trains=1, residency=residency)
        sampled = []
        for _ in range(2):
            with sampler.inference(stop_token_ids=()) as generation:
                sampled.append(sampled_by(generation))
        told.append((sampler._backend is not None, synced(sampler).syncs, sampled))
    return told


def test_a_sampler_that_shares_its_ranks_frees_its_cache_alone(on_ranks: OnRanks) -> None:
    _, (alone, beside) = on_ranks(beside_others, 2, "tied")
    assert alone[0] and not beside[0] and alone[1] == beside[1] == 1
    assert alone[2] == beside[2] and alone[2][0] == alone[2][1]


def lost(world: World, path: Path, folder: Path, ends: str) -> tuple[str, float, int]:
    """The rank that sends ends around a sync; what the others raise, after how long, and the version that they have."""
    actor, sampler = build_separate(world, path, trains=2, settings={"stage": 3})
    sync(sampler)
    learn(actor)
    world.barrier()

    def end(*_: Any, **__: Any) -> None:
        (folder / "0.pkl").write_bytes(pickle.dumps(None))
        os._exit(0)

    if world.rank == 0:
        vars(synced(sampler)._broadcast)["send"] = end
        if ends == "before the sync":
            end()
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        sync(sampler)
    return str(caught.value), time.monotonic() - start, synced(sampler)._held_version


@pytest.mark.parametrize("ends", ["in the transfer", faults("before the sync")])
def test_a_rank_that_ends_stops_the_others(ends: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    _, second, third = on_ranks(lost, 3, "untied", tmp_path / "ranks", ends)
    for said, seconds, _ in (second, third):
        assert seconds < 60 and said
    assert third[2] in (0, -1), "not that of weights that did not arrive"
