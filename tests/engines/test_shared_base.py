"""What runs on one base compute together, and functions that meet at a rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.adapters.actor import AdapterActor
from hybrid_rlhf.engines.adapters.base import SharedBase
from hybrid_rlhf.engines.adapters.engine import AdapterEngine, AdapterRow
from hybrid_rlhf.engines.adapters.rendezvous import Call, Rendezvous
from hybrid_rlhf.engines.builder import EngineSpec
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import NewTokens, Request
from hybrid_rlhf.runtime.world import solo_world

CPU = solo_world(torch.device("cpu"))
IDS = torch.tensor([[5, 6, 7, 8, 9, 0], [9, 8, 7, 6, 5, 4]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()


class Recorder:
    """Records which runs each pass and each batch of requests has."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[set[str]] = []
        self.batches: list[int] = []
        packed = AdapterEngine.packed
        run = NativeBackend.run

        def recorded_pass(engine: AdapterEngine, rows: Sequence[AdapterRow], **options: Any) -> Any:
            self.passes.append({row.adapter for row in rows})
            return packed(engine, rows, **options)

        def recorded_run(backend: NativeBackend, requests: Sequence[Request]) -> Iterator[NewTokens]:
            self.batches.append(len({request.adapter for request in requests}))
            return run(backend, requests)

        patch.setattr(AdapterEngine, "packed", recorded_pass)
        patch.setattr(NativeBackend, "run", recorded_run)


def actor_of(base: SharedBase, name: str, model: Path) -> AdapterActor:
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant", warmup_fraction=0.0)
    lora = LoraConfig(rank=2 if name == "a" else 5)
    spec = EngineSpec("actor", str(model), ModelConfig(), ZeroConfig(), 0, optimizer, lora)
    return AdapterActor(base, name, spec, CPU, rollout=RolloutConfig(), max_logprob_diff=None)


def learn(
    base: SharedBase, name: str, model: Path, weights: dict[str, Tensor], *, steps: int = 2, fails: bool = False
) -> None:
    """Sample, and learn from fixed tokens; with `fails` no backward pass follows the first forward pass."""
    actor = actor_of(base, name, model)
    for _ in range(steps):
        with actor.inference() as generation:
            generation.generate([[5, 6]], SamplingParams(n=2, max_new_tokens=3, seed=1))
        logprobs, entropy = actor(IDS, MASK, MASK, 0.5 if name == "a" else 1.0)
        if fails:
            raise ValueError("no loss")
        actor.backward(-(logprobs + 0.1 * entropy).sum(), count=11)
        actor.step()
    weights[name] = base.engine.adapter(name).flat("weights").clone()


def trained(
    names: str, model: Path, *, tokens: int = 100, **of_b: Any
) -> tuple[dict[str, Tensor], dict[str, BaseException | None]]:
    base = SharedBase(micro_batch_tokens=tokens)
    weights: dict[str, Tensor] = {}
    functions: dict[str, Callable[[], None]] = {
        name: partial(learn, base, name, model, weights, **(of_b if name == "b" else {})) for name in names
    }
    return weights, base.rendezvous.run(functions, base.compute)


def test_passes_and_rollouts_of_runs_are_common(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as both go on and the tokens fit: catches runs that compute one after the other."""
    recorder = Recorder(monkeypatch)
    trained("ab", model_folder, steps=3)
    assert recorder.passes == [{"a", "b"}, {"a", "b"}, {"b"}]
    assert recorder.batches == [2, 2, 1]
    recorder.passes.clear()
    trained("ab", model_folder, tokens=12)
    assert recorder.passes == [{"a"}, {"b"}] * 2


def test_a_run_that_fails_after_a_common_pass_leaves_the_gradient_of_the_other(model_folder: Path) -> None:
    alone, _ = trained("a", model_folder)
    beside, ends = trained("ab", model_folder, fails=True)
    assert isinstance(ends["b"], ValueError) and ends["a"] is None
    assert torch.allclose(beside["a"], alone["a"], atol=1e-6)
    assert float(alone["a"].std()) > 0


def test_one_function_runs_at_a_time_and_an_error_of_the_computation_ends_all() -> None:
    rendezvous = Rendezvous()
    seen: list[str] = []

    def count(name: str, calls: int) -> None:
        for number in range(calls):
            seen.append(f"{name}{number}")
            assert rendezvous.wait(number) == 10 * number
            seen.append(f"{name}{number} goes on")

    def compute(waiting: Sequence[Call]) -> Sequence[Call]:
        for call in waiting:
            call.result = 10 * call.argument
        if any(call.argument == 2 for call in waiting):
            raise KeyboardInterrupt
        return waiting

    functions = {"a": partial(count, "a", 2), "b": partial(count, "b", 1)}
    assert rendezvous.run(functions, compute) == {"a": None, "b": None}
    assert seen == ["a0", "b0", "a0 goes on", "a1", "b0 goes on", "a1 goes on"]
    ends: list[str] = []

    def ended(name: str) -> None:
        try:
            count(name, 3)
        finally:
            ends.append(name)

    with pytest.raises(KeyboardInterrupt):
        rendezvous.run({name: partial(ended, name) for name in "ab"}, compute)
    assert ends == ["a", "b"]
