"""What only a GPU can show: the three dtypes under ZeRO, weight sync, and generation against Hugging Face."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.batching import workspace
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.generation.weights.probe import probe_logprobs
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.engines import actor_spec, train_generate_save, train_step
from tests.support.families import VARIANTS, variant
from tests.support.generation import SHORT_GREEDY, SHORT_PROMPTS, SHORT_SAMPLED
from tests.support.ranks import run_ranks
from tests.support.routes import module_routes
from tests.support.sixteen_bits import trained
from tests.support.tiny import save_tiny, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_lives_on_a_gpu(dtype: str, stage: int, model_folder: Path, tmp_path: Path) -> None:
    settings = {"stage": stage, "dtype": dtype, "lora": 4, "lr": 0.1}
    (result,) = run_ranks(train_generate_save, 1, tmp_path / "r", model_folder, tmp_path / "m", settings)
    assert result["losses"][2] < result["losses"][0]
    assert result["same"] and result["released"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_train_as_float32_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    """15 updates in each ZeRO stage; float16 does not train on a CPU without a patch of DeepSpeed."""
    save_tiny(tmp_path / "dense", tiny_model())
    cases = [{"dtype": "float32"}, *({"dtype": dtype, "stage": stage} for stage in range(4))]
    ((wide, *found),) = run_ranks(trained, 1, tmp_path / "r", tmp_path, cases)
    for stage, of_stage in enumerate(found):
        assert of_stage["losses"] == pytest.approx(wide["losses"], rel=0.01), stage
        assert of_stage["sizes"][:5] == pytest.approx(wide["sizes"][:5], rel=0.01), stage


def test_greedy_tokens_are_those_of_hugging_face_on_a_gpu() -> None:
    model = tiny_model().cuda()
    engine = GenerationEngine.from_model(model)
    for prompt, (completion,) in zip(SHORT_PROMPTS, engine.generate(SHORT_PROMPTS, SHORT_GREEDY), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert completion.token_ids == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_computes_on_a_gpu_what_its_module_does(name: str) -> None:
    model = variant(name).cuda()
    world = solo_world(torch.device("cuda", 0))
    tokens = probe_tokens(model.config.vocab_size)
    exact = module_logprobs(model, tokens)
    found = probe_logprobs(decoder_of(model, world=world, dtype=torch.float32), tokens)
    torch.testing.assert_close(found, exact, atol=1e-3, rtol=0)
    low = model.to(torch.bfloat16)  # type: ignore[arg-type]
    found = probe_logprobs(decoder_of(low, world=world, dtype=torch.bfloat16), tokens)
    # near ties of a router fall to other experts in bfloat16, in the module too
    error, of_module = ((logprobs - exact).abs().mean() for logprobs in (found, module_logprobs(low, tokens)))
    assert error < max(0.05, 2 * of_module)


@pytest.mark.parametrize("name", ["llama with biases", "mistral", "gemma2", "bloom", "falcon rw", "gpt2"])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 3}])
def test_cuda_graphs_sample_what_launched_kernels_do(name: str, cut: dict[str, Any], monkeypatch: Any) -> None:
    model, sampling = variant(name).cuda(), replace(SHORT_SAMPLED, max_new_tokens=40, **cut)
    captured = GenerationEngine.from_model(model, stop_token_ids=range(3, 30)).generate(SHORT_PROMPTS, sampling)
    monkeypatch.setattr(workspace._Graphs, "__call__", lambda self, step, batch: step(batch).clone())
    launched = GenerationEngine.from_model(model, stop_token_ids=range(3, 30)).generate(SHORT_PROMPTS, sampling)
    assert [[c.token_ids for c in samples] for samples in captured] == [
        [c.token_ids for c in samples] for samples in launched
    ]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4", "qwen3_5_moe"])
def test_cuda_graphs_record_the_experts_of_the_modules_routers(name: str) -> None:
    model, sampling = variant(name).cuda(), replace(SHORT_SAMPLED, max_new_tokens=40)
    engine = GenerationEngine.from_model(model, stop_token_ids=range(3, 30), max_batch_rows=4)
    results = engine.generate(SHORT_PROMPTS, sampling, record_routes=True)
    for prompt, samples in zip(SHORT_PROMPTS, results, strict=True):
        for sample in samples:
            assert sample.routes is not None and (sample.routes[-1] == -1).all()
            expected = module_routes(model, [*prompt, *sample.token_ids])
            # a tie within the resolution of float32 products may fall to another expert
            assert (np.sort(sample.routes[:-1]) == np.sort(expected[:-1])).mean() > 0.99


def kept(world: World, path: Path, stage: int) -> dict[str, Any]:
    told = {"graphs": [], "tokens": []}
    for keep in (True, False):
        rollout = RolloutConfig(keep_weights=keep)
        engine = build_actor(actor_spec(path, stage=stage, lora=4, lr=0.05), world, rollout=rollout)
        for _ in range(3):
            with engine.inference(stop_token_ids=()) as generation:
                samples = generation.generate(SHORT_PROMPTS, SHORT_SAMPLED)
                told["tokens"].append([[c.token_ids for c in each] for each in samples])
                if keep:
                    assert generation.backend.workspace is not None and generation.backend.workspace._graphs is not None
                    told["graphs"].append(
                        {size: id(g) for size, g in generation.backend.workspace._graphs._captured.items()}
                    )
            train_step(engine, world)
    return told


@pytest.mark.parametrize("stage", [2, 3])
def test_cuda_graphs_outlive_training_steps(stage: int, model_folder: Path, tmp_path: Path) -> None:
    (told,) = run_ranks(kept, 1, tmp_path, model_folder, stage)
    assert told["graphs"][0] == told["graphs"][1] == told["graphs"][2] != {}
    assert told["tokens"][:3] == told["tokens"][3:]


@pytest.mark.parametrize("stage", [2, 3])
def test_generation_on_a_gpu_releases_its_memory(stage: int, model_folder: Path, tmp_path: Path) -> None:
    (told,) = run_ranks(allocated, 1, tmp_path, model_folder, stage)
    assert told["inside"] > told["before"] and told["after"] <= 1.01 * told["before"]


def allocated(world: World, path: Path, stage: int) -> dict[str, int]:
    engine = build_actor(actor_spec(path, stage=stage, lora=4), world)
    told = {}
    for _ in range(2):  # the first round allocates what stays
        train_step(engine, world)
        told["before"] = torch.cuda.memory_allocated()
        with engine.inference() as generation:
            generation.generate(SHORT_PROMPTS, SHORT_SAMPLED)
            told["inside"] = torch.cuda.memory_allocated()
        told["after"] = torch.cuda.memory_allocated()
    return told
