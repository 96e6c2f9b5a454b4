"""Adapters, grammars and open batches with kernels and CUDA graphs: their tests on the CPU, with the model on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.engines.adapters import AdapterEngine
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.runtime.world import solo_world
from tests.engines import test_adapters
from tests.generation import test_grammar, test_open_batch
from tests.support.families import variant
from tests.support.models import build_model
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *names, **options: build(*names, **options).cuda()


def engine_on_gpu(lm: Any, world: Any = None, **options: Any) -> AdapterEngine:
    use_packing(lm.cuda())
    return AdapterEngine(lm, world=solo_world(torch.device("cuda", 0)), **options)


def test_a_grammar_constrains_kernels_and_graphs_as_it_does_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free, biased and constrained rows of one batch have the greedy tokens that torch's operations give on a CPU."""
    prompts = [[5, 6, 7], [80, 81], [40] * 30, [9]]
    greedy = SamplingParams(max_new_tokens=60, temperature=0.0)
    mixed = [
        SamplingParams(max_new_tokens=60, temperature=0.0, response_format=test_grammar.FORMAT),
        greedy,
        SamplingParams(max_new_tokens=60, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(max_new_tokens=60, temperature=0.0, logit_bias={70: 1.0}),
    ]
    expected = [one.token_ids for (one,) in test_grammar.engine_of().generate(prompts, mixed)]
    monkeypatch.setattr(test_grammar, "tiny_model", on_gpu(tiny_model))
    assert [one.token_ids for (one,) in test_grammar.engine_of().generate(prompts, mixed)] == expected


def test_rows_with_and_without_grammars_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_grammar, "tiny_model", on_gpu(tiny_model))
    test_grammar.test_rows_with_and_without_grammars_do_not_change_each_other(monkeypatch)


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_log_probs_under_a_grammar_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,), *_ = test_grammar.engine_of(backend).generate([[5, 6, 7]], SamplingParams(max_new_tokens=3, seed=1))
    monkeypatch.setattr(test_grammar, "tiny_model", on_gpu(tiny_model))
    (again,), *_ = test_grammar.engine_of(backend).generate([[5, 6, 7]], SamplingParams(max_new_tokens=3, seed=1))
    assert again.logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    test_grammar.test_an_open_batch_takes_grammars_while_it_decodes()


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_new_weights_reach_graphs(name: str, recompute: bool, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_open_batch, "variant", on_gpu(variant))
    test_open_batch.test_new_weights_reach_running_requests(name, recompute, in_flight, monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_are_sampled_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_adapters, "engine_of", engine_on_gpu)
    test_adapters.test_sampling_has_the_current_weights_of_each_adapter(family)


def test_neighbours_change_nothing_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*test_adapters.TENANTS]
    of_cpu = test_adapters.trained(names, tmp_path / "cpu")
    monkeypatch.setattr(test_adapters, "engine_of", engine_on_gpu)
    together = test_adapters.trained(names, tmp_path / "together")
    exact = test_adapters.trained(names, tmp_path / "exact", deterministic=True)
    for name in names:
        assert test_adapters.difference(together[name], of_cpu[name]) < 1e-4
        alone = test_adapters.trained([name], tmp_path / f"alone_{name}")
        assert test_adapters.difference(together[name], alone[name]) < 1e-5
        alone = test_adapters.trained([name], tmp_path / f"exact_{name}", deterministic=True)
        assert test_adapters.difference(exact[name], alone[name]) == 0.0


def test_training_and_sampling_share_the_base_on_a_gpu() -> None:
    lm = build_model("llama").cuda().to(torch.bfloat16)
    base = sum(parameter.numel() * parameter.element_size() for parameter in lm.parameters())
    engine = engine_on_gpu(lm)
    engine.add("one", LoraConfig(rank=4), seed=0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    generation = GenerationEngine.from_model(engine.lm, stop_token_ids=[], cuda_graphs=False)
    assert torch.cuda.memory_allocated() - before < base / 2
    generation.set_adapter("one/0", engine.factors("one"))
    ((sample,),) = generation.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4), adapters=["one/0"])
    assert len(sample.token_ids) == 4
