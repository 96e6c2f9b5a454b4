"""A sampler on ranks of its own samples what the actor would, from the same inference weights bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import AsyncSamplingConfig, RolloutConfig
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import full_weights
from hybrid_rlhf.engines.separate import received, sampler as separate
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.weights.conversion import InferenceWeights
from hybrid_rlhf.runtime.point_to_point import Exchange
from hybrid_rlhf.runtime.world import World
from tests.support.engines import PROMPTS, token_rows
from tests.support.families import variant
from tests.support.ranks import run_ranks
from tests.support.separate import build_separate, weight_tensors
from tests.support.tiny import tiny_model, tiny_tokenizer

GREEDY = SamplingParams(max_new_tokens=5, temperature=0.0)


def learn(actor: HybridEngine | None) -> None:
    """One update on a row of each rank."""
    if actor is None:
        return
    ids = token_rows()[actor.world.rank][None].to(actor.device)
    counts = torch.ones_like(ids, dtype=torch.bool)
    logprobs, _ = actor(ids, counts, counts)
    actor.backward(sft_loss(logprobs, mask=counts).total, count=9 * actor.world.size)
    actor.step()


def sync(sampler: SeparateSampler) -> None:
    with sampler.inference(stop_token_ids=()):
        pass


def said_by(sampler: SeparateSampler) -> str:
    """What a sync raises, "" where nothing."""
    try:
        sync(sampler)
    except UserError as error:
        return str(error)
    return ""


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
        (tiny_model(tie_word_embeddings=name != "untied") if name in ("tied", "untied") else variant(name)).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def reference(
    world: World, actor: HybridEngine | None, sampler: SeparateSampler, case: Case
) -> dict[str, torch.Tensor] | None:
    """The inference weights that an actor on the ranks that sample would build."""
    weights = None
    if actor is not None:
        weights = [(weight.name, weight.merged().clone()) for weight in full_weights(actor.lm, bucket_elements=1)]
    weights = world.broadcast_object(weights)
    if not sampler.world.is_member or weights is None:
        return None
    inference = InferenceWeights(
        sampler._model.described,
        world=sampler.generation_world,
        dtype=getattr(torch, case.rollout.dtype if case.rollout.dtype != "auto" else str(weights[0][1].dtype)[6:]),
        quantization=case.rollout.quantization,
    )
    return weight_tensors(inference.build((name, values, False) for name, values in weights))


def compare(world: World, root: Path, cases: list[Case]) -> list[Any]:
    """Before an update, after it, and after another: what each rank samples, and which inference weights differ."""
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
                sampled, differ = None, []
                if actor is not None:
                    with actor.inference(stop_token_ids=()) as generation:
                        sampled = generation.generate(PROMPTS, GREEDY)
                with sampler.inference(stop_token_ids=()) as own:
                    if own is not None:
                        sampled = own.generate(PROMPTS, GREEDY)
                        found = weight_tensors(own.backend.decoder)  # type: ignore[attr-defined]
                expected = reference(world, actor, sampler, case)
                if expected is not None:
                    assert found.keys() == expected.keys()
                    differ = [place for place in found if not torch.equal(found[place], expected[place])]
                assert sampled is not None
                rounds.append(([completion for (completion,) in sampled], differ, sampler.weight_version))
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


@pytest.mark.parametrize("ranks", COMPARED)
def test_separate_ranks_sample_what_the_actor_would(ranks: int, tmp_path: Path) -> None:
    cases = COMPARED[ranks]
    for case in cases:
        folder_of(case.family, tmp_path / "models")
    results = run_ranks(compare, ranks, tmp_path / "ranks", tmp_path / "models", cases)
    for index, case in enumerate(cases):
        reduced = "bfloat16" in (case.rollout.dtype, case.settings.get("dtype"))
        for round_index in range(3):
            wanted, _, _ = results[0][index][round_index]
            for rank in range(ranks):
                found, differ, version = results[rank][index][round_index]
                assert not differ, (case, rank)
                assert version == round_index
                for mine, theirs in zip(found, wanted, strict=True):
                    assert mine.weight_version == round_index
                    if not reduced:
                        assert mine.token_ids == theirs.token_ids, (case, rank)
                        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        first, _, last = (results[0][index][place][0] for place in range(3))
        assert [one.logprobs for one in first] != [one.logprobs for one in last], "the weights have changed"


def traffic(world: World, path: Path, trains: int, tensor_parallel: int) -> dict[str, Any]:
    """Bytes that all ranks send in each sync, with and without adapters, and bytes of the model's weights."""
    told: dict[str, Any] = {}
    for lora in (0, 4):
        rollout = RolloutConfig(tensor_parallel=tensor_parallel)
        settings = {"lora": lora, "stage": 3}
        actor, sampler = build_separate(world, path, trains=trains, rollout=rollout, settings=settings)
        sent = []
        for _ in range(3):
            sync(sampler)
            sent.append(sum(world.all_gather_objects(sampler.sent_bytes)))
            sync(sampler)  # of the same version
            learn(actor)
        told[f"sent {lora}"] = sent
        sizes = {tensor.name: 4 * tensor.elements for weight in sampler._model.weights for tensor in weight.tensors}
        told["adapters"] = sum(size for name, size in sizes.items() if ".lora_" in name)
        told["base"] = sum(size for name, size in sizes.items() if ".lora_" not in name)
        told["syncs"] = sampler._syncs
    return told


@pytest.mark.parametrize(("ranks", "trains", "tensor_parallel"), [(4, 3, 1), (3, 1, 2)])
def test_only_what_is_needed_travels(ranks: int, trains: int, tensor_parallel: int, tmp_path: Path) -> None:
    folder = folder_of("untied", tmp_path)
    for told in run_ranks(traffic, ranks, tmp_path / "ranks", folder, trains, tensor_parallel):
        receivers = ranks - trains
        first, second, third = told["sent 4"]
        assert second == third == receivers * told["adapters"] and told["syncs"] == 3
        assert first - second == told["sent 0"][0] == told["sent 0"][2]
        assert 1.0 <= told["sent 0"][0] / told["base"] < 1.02, "ranks share a weight, except for its norms"


FAULTS: dict[str, str] = {
    "a bucket corrupted": "model.layers.1.mlp.up_proj.weight from rank 0 differs on rank 2 in the weight sync of "
    "update 1",
    "an adapter dropped": "must agree with the training forward to .* after the weight sync of update 1, first in "
    "layer 1",
    "old weights": "must agree with the training forward to .* after the weight sync of update 1, first in the "
    "embedding",
    "a rank of other updates": "same updates, rank 0 has made 1, rank 1 2: resume from a checkpoint",
}


def broken(world: World, path: Path) -> dict[str, str]:
    """What each rank says of each fault."""
    told = {}
    for fault in FAULTS:
        settings = {"lora": 4 * (fault == "an adapter dropped")}
        actor, sampler = build_separate(world, path, trains=2, settings=settings)
        assert said_by(sampler) == ""
        learn(actor)
        undo = _break(fault, actor, sampler)
        told[fault] = said_by(sampler)
        undo()
    return told


def _break(fault: str, actor: HybridEngine | None, sampler: SeparateSampler) -> Callable[[], None]:
    """Break the next sync; the result repairs what other samplers share."""
    if fault == "a bucket corrupted" and actor is None:
        wait = Exchange.wait

        def damaged(self: Exchange) -> None:
            messages = list(self._tensors)
            wait(self)
            transfer = sampler._transfers[True]
            for (_, _, incoming), message in zip(transfer._buckets, messages, strict=False):
                for slots in incoming.values():
                    for slot in slots:
                        if slot.piece.tensor == "model.layers.1.mlp.up_proj.weight":
                            slot.values(message)[7] += 1e-3

        Exchange.wait = damaged  # type: ignore[method-assign]
        return lambda: setattr(Exchange, "wait", wait)
    if fault == "an adapter dropped" and sampler._received is not None:
        full = received.ReceivedWeights._full

        def dropped(self: Any, tensor: Any, parts: Any) -> torch.Tensor:
            return full(self, tensor, parts) * (tensor.name != "model.layers.1.self_attn.v_proj.weight.lora_B")

        received.ReceivedWeights._full = dropped  # type: ignore[method-assign]
        return lambda: setattr(received.ReceivedWeights, "_full", full)
    if fault == "old weights" and sampler._inference is not None:
        build = sampler._inference.build
        old = sampler._decoder

        def stale(weights: Any) -> Any:
            for _ in weights:
                pass
            return old

        vars(sampler._inference)["build"] = stale
        del build
    if fault == "a rank of other updates" and actor is not None and actor.world.rank == 1:
        actor.deepspeed_engine.global_steps += 1
    return lambda: None


def test_faults_stop_all_ranks_by_name(tmp_path: Path) -> None:
    folder = folder_of("untied", tmp_path)
    for told in run_ranks(broken, 3, tmp_path / "ranks", folder):
        for fault, text in FAULTS.items():
            with pytest.raises(UserError, match=text):
                raise UserError(told[fault])


def checked(world: World, path: Path, always: bool) -> list[int]:
    """Checksums of each sync."""
    actor, sampler = build_separate(world, path, trains=1, check_weights=always)
    found = []
    for _ in range(4):
        sync(sampler)
        found.append(len(sampler._transfers[True].checksums) + len(sampler._transfers[False].checksums))
        learn(actor)
    return found


def test_checksums_of_the_first_two_syncs_or_of_all(tmp_path: Path) -> None:
    folder = folder_of("tied", tmp_path)
    for first_two, always in zip(*(run_ranks(checked, 2, tmp_path / "r", folder, all_) for all_ in (False, True)), strict=True):
        assert [bool(count) for count in first_two] == [True, True, False, False] or first_two[0] == first_two[1]
        assert min(always) > 10


def snapshots(world: World, path: Path) -> list[Any]:
    """A snapshot samples the same after two updates and another snapshot; other weights under the same version."""
    rollout = RolloutConfig(async_sampling=AsyncSamplingConfig(), kv_cache_gib=0.01)
    actor, sampler = build_separate(world, path, trains=1, rollout=rollout)

    def sample(generation: Any) -> Any:
        return None if generation is None else [c.token_ids for (c,) in generation.generate(PROMPTS, GREEDY)]

    first = sampler.snapshot(stop_token_ids=())
    before = sample(first)
    learn(actor)
    learn(actor)
    second = sampler.snapshot(stop_token_ids=())
    told = [before, sample(first), sample(second)]
    with sampler.inference(stop_token_ids=()) as generation:
        told.append(sample(generation))
    synced = sampler._syncs
    if actor is None:
        with sampler.inference(stop_token_ids=()) as generation:
            told.append(sample(generation))
    else:
        kept = [parameter.detach().clone() for parameter in actor.module.parameters()]
        with sampler.other_weights():
            for parameter in actor.module.parameters():
                parameter.data.mul_(1.05)
            sync(sampler)
        for parameter, values in zip(actor.module.parameters(), kept, strict=True):
            parameter.data.copy_(values)
    with sampler.inference(stop_token_ids=()) as generation:
        told.append(sample(generation))
    return [told, sampler._syncs - synced, sampler.weight_version]


def test_snapshots_stay_and_other_weights_are_not_kept(tmp_path: Path) -> None:
    (_, actor_syncs, version), (told, syncs, known) = run_ranks(snapshots, 2, tmp_path / "r", folder_of("tied", tmp_path))
    before, still, second, now, other, again = told
    assert before == still and second != before
    assert second == now == again and other != now
    assert actor_syncs == syncs == 2 and version == known == 2


def refused(world: World, path: Path, rollout: RolloutConfig) -> str:
    with pytest.raises(UserError) as caught:
        build_separate(world, path, trains=1, rollout=rollout)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "rollout", "rule"),
    [
        ("bloom", RolloutConfig(), "needs inference weights, the actor's model has none .*leave placement.sampler out"),
        ("tied", RolloutConfig(backend="module"), "got rollout.backend module: give auto, or leave"),
        ("tied", RolloutConfig(offload_states=True), "rollout.offload_states makes room"),
        ("untied of three heads", TWO, "must split 3 heads"),
    ],
)
def test_what_cannot_be_sampled_is_refused(name: str, rollout: RolloutConfig, rule: str, tmp_path: Path) -> None:
    if name == "bloom":
        model = variant(name)
        model.config.apply_residual_connection_post_layernorm = True
    else:
        model = tiny_model(**({"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3} if "three" in name else {}))
    model.save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    for said in run_ranks(refused, 1 + rollout.tensor_parallel, tmp_path / "r", tmp_path / "m", rollout):
        with pytest.raises(UserError, match=rule):
            raise UserError(said)


def quantised(world: World, path: Path) -> Any:
    actor, sampler = build_separate(world, path, trains=1, rollout=INT8, settings={"lora": 4})
    told = []
    for _ in range(2):
        learn(actor)
        with sampler.inference(stop_token_ids=()) as generation:
            if generation is not None:
                (samples,) = generation.generate(PROMPTS[:1], GREEDY)
                dtype = generation.backend.decoder._weights.layers[0].qkv.weight.dtype  # type: ignore[attr-defined]
                told.append((samples[0].token_ids, samples[0].logprobs, dtype))
    if actor is None:
        return told
    return sampler.max_logprob_diff


def test_quantised_rollouts_sample_from_the_weights_that_train(tmp_path: Path) -> None:
    limit, told = run_ranks(quantised, 2, tmp_path / "r", folder_of("tied", tmp_path))
    assert limit == 0.5 and all(dtype == torch.int8 for _, _, dtype in told)
    assert told[0][1] != told[1][1]


def replayed(world: World, path: Path) -> float:
    """The actor's forward of tokens with the routes of the sampler: the share of routes that its routers choose."""
    rollout = RolloutConfig(routing_replay=True)
    actor, sampler = build_separate(world, path, trains=1, rollout=rollout)
    routes = None
    with sampler.inference(stop_token_ids=()) as generation:
        if generation is not None:
            ((completion,),) = generation.generate(PROMPTS[:1], GREEDY, record_routes=True)
            routes = completion.routes
    routes = world.broadcast_object(routes, source=1)
    return float(routes is not None and (actor is None or hasattr(actor.module, "replay")))


def test_routes_of_the_sampler_reach_the_training_module(tmp_path: Path) -> None:
    assert run_ranks(replayed, 2, tmp_path / "r", folder_of("qwen3_moe", tmp_path)) == [1.0, 1.0]


def lost(world: World, path: Path) -> tuple[str, float]:
    """The rank that sends ends in the middle of a sync; what the others raise, and after how long."""
    _, sampler = build_separate(world, path, trains=1)
    sync(sampler)
    world.barrier()
    if sampler._actor is not None:
        learn(sampler._actor)
        separate.WeightTransfer.send = lambda self, held, *, checked: os._exit(0)  # type: ignore[method-assign,misc]
    start = time.monotonic()
    try:
        sync(sampler)
    except RuntimeError as error:
        said = type(error).__name__, time.monotonic() - start, sampler._held_version
    return said  # type: ignore[return-value]
