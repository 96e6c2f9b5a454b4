"""Weight sync: every ZeRO stage, tensor parallelism and LoRA give the same tokens, and training is unchanged."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines import hybrid
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.sampling import Completion
from hybrid_rlhf.generation.weights.inference_weights import InferenceWeights
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.runtime.world import World
from tests.support.engines import accumulate, actor_spec, state_of, train_step
from tests.support.families import variant
from tests.support.generation import token_ids_of
from tests.support.marks import faults, slow
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny, tiny_model

PROMPTS = [[5, 6, 7], [9, 8], [4] * 20 + [6, 7], [4] * 20 + [9]]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=6, seed=3, n=2)


Case = tuple[int, int, int]
"""ZeRO stage, tensor-parallel ranks, LoRA rank."""


def with_and_without_generation(world: World, path: Path, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Train, generate in the middle of an update, train on; and the same without generating."""
    told: dict[Case, dict[str, Any]] = {}
    for case in cases:
        stage, tensor_parallel, lora = case
        result = told[case] = {"losses": [], "ends": []}
        for generates in (True, False):
            rollout = RolloutConfig(tensor_parallel=tensor_parallel)
            engine = build_actor(actor_spec(path, stage=stage, lora=lora, lr=0.05), world, rollout=rollout)
            losses = [train_step(engine, world)]
            accumulate(engine, world)
            if generates:
                before = state_of(engine)
                for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
                    with engine.inference(stop_token_ids=(11,)) as generation:
                        result[name] = generation.generate(PROMPTS, sampling)
                result["same"] = all(map(torch.equal, before, state_of(engine)))
                result["training"] = engine.module.training
            engine.step()
            result["losses"].append([*losses, train_step(engine, world)])
            result["ends"].append([float(tensor.double().sum()) for tensor in state_of(engine)])
    return told


@pytest.fixture(scope="module")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """One rank without ZeRO, by LoRA rank."""
    folder = tmp_path_factory.mktemp("plain")
    (told,) = run_ranks(with_and_without_generation, 1, folder, model_folder, [(0, 1, 0), (0, 1, 4)])
    return {lora: told[0, 1, lora] for lora in (0, 4)}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        faults(1, [(3, 1, 0), (3, 1, 4)]),
        (2, [(0, 2, 0), (2, 1, 4), (3, 1, 0), (3, 2, 4)]),
        faults(2, [(0, 1, 4), (1, 1, 0), (1, 2, 4), (2, 2, 0)]),
        faults(4, [(1, 4, 0), (2, 2, 4), (3, 2, 0), (3, 4, 4)]),
    ],
    ids=["1 rank", "2 ranks", "more on 2 ranks", "4 ranks"],
)
def test_any_sharding_samples_the_same_and_training_continues_bit_for_bit(
    ranks: int, cases: list[Case], model_folder: Path, tmp_path: Path, expected: dict[int, dict[str, Any]]
) -> None:
    for told, case in product(run_ranks(with_and_without_generation, ranks, tmp_path, model_folder, cases), cases):
        result, plain = told[case], expected[case[2]]
        for name in ("greedy", "sampled"):
            assert token_ids_of(result[name]) == token_ids_of(plain[name]), case
            for found, wanted in zip(sum(result[name], []), sum(plain[name], []), strict=True):
                assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
                assert found.weight_versions == [1] * len(found.token_ids)
        assert result["same"], f"{case}: weights, gradients and optimizer states are bit for bit what they were"
        assert result["training"]
        assert case[2] == 0 or token_ids_of(result["greedy"]) != token_ids_of(expected[0]["greedy"]), "adapters learn"
        for generated, without in (result["losses"], result["ends"]):
            assert generated == without, f"{case}: the steps after generation are bit for bit those without it"


def both_backends(world: World, path: Path, settings: dict[str, Any]) -> list[Any]:
    results = []
    for layout in ("auto", "module"):
        engine = build_actor(actor_spec(path, **settings), world, rollout=RolloutConfig(backend=layout))  # type: ignore[arg-type]
        train_step(engine, world)
        with engine.inference(stop_token_ids=(11,)) as generation:
            results.append(token_ids_of(generation.generate(PROMPTS, SAMPLED)))
    return results


@pytest.mark.parametrize(("ranks", "settings"), [(1, {"lora": 4}), faults(2, {"stage": 3, "lora": 4})])
def test_both_backends_generate_the_same(
    ranks: int, settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    for native, module in run_ranks(both_backends, ranks, tmp_path, model_folder, settings):
        assert native == module


def gathers(world: World, path: Path) -> dict[str, list[int]]:
    """Elements gathered at once, and how often inference weights are built."""
    seen: list[int] = []
    gathered = hybrid.full_weights
    built: list[int] = []
    assemble = InferenceWeights.assemble

    def watched(weights: Any, *, bucket_elements: int) -> Any:
        for weight in gathered(weights, bucket_elements=4000):
            parameters = [held.parameter for held in weights]
            seen.append(sum(p.numel() for p in parameters if hasattr(p, "ds_id") and not p.ds_persist))
            yield weight

    hybrid.full_weights = watched
    InferenceWeights.assemble = lambda self: built.append(1) or assemble(self)  # type: ignore[method-assign]
    engine = build_actor(actor_spec(path, stage=3), world, rollout=RolloutConfig(keep_weights=True))
    counts = []
    for _ in range(2):
        for _ in range(2):
            with engine.inference() as generation:
                generation.generate(PROMPTS, GREEDY)
            counts.append(len(built))
        train_step(engine, world)
    with engine.inference() as generation:
        rows = generation.generate([] if world.rank else PROMPTS, SAMPLED)
    train_step(engine, world)
    whole = sum(p.ds_numel for p in engine.module.parameters())
    return {"seen": [max(seen), whole], "built": counts, "sampled": [len(samples) for samples in rows]}


def test_weights_are_gathered_in_buckets_and_kept_until_they_change(tmp_path: Path) -> None:
    """A rank without prompts holds nobody up."""
    folder = tmp_path / "big"
    tiny_model(hidden_size=64, intermediate_size=96, num_hidden_layers=4, tie_word_embeddings=False).save_pretrained(
        folder
    )
    for told, sampled in zip(run_ranks(gathers, 2, tmp_path, folder), ([2] * 4, []), strict=True):
        assert told["sampled"] == sampled
        most, whole = told["seen"]
        assert most < whole / 3
        assert told["built"] == [1, 1, 2, 2]


def in_place(world: World, path: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """As on a GPU, where nothing is packed: weights and workspace stay where they are, and follow the training."""
    results = []
    with torch.backends.mkldnn.flags(enabled=False):
        for stage, tensor_parallel, lora in cases:
            told: dict[str, Any] = {"homes": [], "tokens": []}
            for keep in (True, False):
                rollout = RolloutConfig(keep_weights=keep, tensor_parallel=tensor_parallel)
                engine = build_actor(actor_spec(path, stage=stage, lora=lora, lr=0.05), world, rollout=rollout)
                sampled = []
                for _ in range(3):
                    with engine.inference(stop_token_ids=()) as generation:
                        sampled.append(token_ids_of(generation.generate(PROMPTS, SAMPLED)))
                        if keep:
                            decoder, workspace = generation.backend.decoder, generation.backend.workspace
                            products = decoder._weights.layers[0].products
                            first = products["latents" if path.name == "deepseek_v3" else "qkv"]
                            told["homes"].append((id(decoder), id(workspace), first.weight.data_ptr()))
                    train_step(engine, world)
                told["tokens"].append(sampled)
            results.append(told)
    return results


IN_PLACE: list[Case] = [(0, 1, 0), (3, 1, 4), (3, 2, 0), (2, 2, 4)]


@pytest.mark.parametrize(
    ("variety", "cases"),
    [
        slow("llama", [(0, 1, 0), (3, 2, 4)]),
        *(faults(name, IN_PLACE) for name in ("llama", "gemma4 with experts", "gemma2", "falcon_h1", "deepseek_v3")),
    ],
)
def test_inference_weights_that_are_kept_follow_the_training_in_place(
    variety: str, cases: list[Case], tmp_path: Path
) -> None:
    folder = tmp_path / variety
    model = tiny_model(pad_token_id=0) if variety == "llama" else variant(variety)
    save_tiny(folder, model)
    for case in zip(*run_ranks(in_place, 2, tmp_path, folder, cases), strict=True):
        for told in case:
            assert len(set(told["homes"])) == 1
            kept, built_again = told["tokens"]
            assert kept == built_again and kept[0] != kept[2], "the weights have changed"


def remembered(world: World, path: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Memory in use inside and after a rollout beyond what was before, in units of the whole model."""
    with LiveBytes("cpu") as counter:
        engine = build_actor(actor_spec(path, **settings), world, rollout=RolloutConfig(tensor_parallel=world.size))
        for _ in range(2):
            train_step(engine, world)
            with engine.inference() as generation:
                generation.generate(PROMPTS, SAMPLED)
        gc.collect()
        before = counter.live
        with engine.inference() as generation:
            generation.generate(PROMPTS if world.size > 1 else [], SAMPLED)
            gc.collect()
            inside = counter.live
        gc.collect()
    weights = sum(int(getattr(p, "ds_numel", p.numel())) * 4 for p in engine.lm.parameters())
    return {"inside": (inside - before) / weights, "after": (counter.live - before) / weights}


@pytest.mark.parametrize(("ranks", "settings"), [(1, {}), faults(2, {"stage": 3, "lora": 4})])
def test_memory_is_given_back(ranks: int, settings: dict[str, Any], model_folder: Path, tmp_path: Path) -> None:
    for told in run_ranks(remembered, ranks, tmp_path, model_folder, settings):
        assert told["inside"] > 0.5 / ranks, "there is something to give back: a share of the weights"
        assert abs(told["after"]) <= 0.01


def refused(world: World, path: Path) -> str:
    with nullcontext() if world.size == 1 else pytest.raises(UserError) as caught:
        engine = build_actor(actor_spec(path), world, rollout=RolloutConfig(tensor_parallel=world.size))
        with engine.inference() as generation:
            pass
        with pytest.raises(RuntimeError, match="this one was closed"):
            generation.generate(PROMPTS, GREEDY)
    return "" if caught is None else str(caught.value)


def test_a_model_without_inference_weights_cannot_be_split_and_a_closed_engine_raises(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(variant("bloom").config)
    model.config.apply_residual_connection_post_layernorm = True
    save_tiny(tmp_path / "m", model)
    assert run_ranks(refused, 1, tmp_path / "a", tmp_path / "m") == [""]
    for said in run_ranks(refused, 2, tmp_path / "b", tmp_path / "m"):
        assert "tensor_parallel to 1" in said


def crowded(world: World, path: Path) -> list[list[Completion]]:
    """Three heads of keys on two ranks, and room for not all prompts at once."""
    together = world.split(world.size)
    engine = GenerationEngine.from_pretrained(
        str(path), dtype=torch.float32, group=together.group, kv_cache_gib=3 * 256 * 3 * 2 * 2 * 16 * 4 / 2**30
    )
    return engine.generate(PROMPTS, SAMPLED)


def test_ranks_of_unequal_heads_decode_as_many_rows(tmp_path: Path) -> None:
    save_tiny(tmp_path / "m", tiny_model(hidden_size=144, num_attention_heads=9, num_key_value_heads=3))
    alone = run_ranks(crowded, 1, tmp_path / "1", tmp_path / "m")[0]
    for found in run_ranks(crowded, 2, tmp_path / "2", tmp_path / "m"):
        assert token_ids_of(found) == token_ids_of(alone)


def parallel(world: World, folder: Path, names: list[str]) -> dict[str, Any]:
    together = world.split(world.size)
    return {
        name: GenerationEngine.from_pretrained(str(folder / name), dtype=torch.float32, group=together.group).generate(
            PROMPTS, replace(SAMPLED, top_p=0.9 if name == "gpt2" else 1.0)
        )
        for name in names
    }


SPLIT_FAMILIES = {
    2: (
        "llama with biases|gemma2|phi3|opt 350m|gpt2|pythia|bloom|falcon 7b|falcon 40b|llama of three heads|olmo2|glm4|"
        "cohere2|phi|qwen2_moe|glm4_moe|phimoe|stablelm with norms of each head|cohere with norms of each head|gpt_oss|"
        "deepseek_v3|llama4|qwen3_5|qwen3_next|granite 4|falcon_h1 with a norm after the gate|gemma4|"
        "gemma4 that shares keys|gemma4 whose keys are values|gemma4 with experts"
    ).split("|"),
    3: ["olmo2 of four KV heads"],  # one rank has two of them, so ranks hold different parts of its norms
    4: ["llama with biases", "gpt2", "falcon 7b", "olmo2"],
}


@pytest.mark.parametrize("ranks", [slow(2), faults(3), faults(4)])
def test_families_split_over_ranks_sample_what_one_process_does(ranks: int, tmp_path: Path) -> None:
    names = SPLIT_FAMILIES[ranks]
    for name in names:
        save_tiny(tmp_path / name, variant(name))
    (alone,) = run_ranks(parallel, 1, tmp_path / "one", tmp_path, names)
    for told in run_ranks(parallel, ranks, tmp_path / "many", tmp_path, names):
        for name in names:
            assert token_ids_of(told[name]) == token_ids_of(alone[name]), name
