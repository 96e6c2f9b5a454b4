"""What runs on one base compute together, on one rank and on several, and functions that meet at a rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
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
from hybrid_rlhf.runtime.agreement import RankAgreement
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_ranks

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


def actor_of(base: SharedBase, name: str, model: Path, world: World) -> AdapterActor:
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant", warmup_fraction=0.0)
    lora = LoraConfig(rank=2 if name == "a" else 5)
    spec = EngineSpec("actor", str(model), ModelConfig(), ZeroConfig(), 0, optimizer, lora)
    return AdapterActor(base, name, spec, world, rollout=RolloutConfig(), max_logprob_diff=None)


def learn(
    base: SharedBase,
    name: str,
    model: Path,
    weights: dict[str, Tensor],
    *,
    world: World = CPU,
    steps: int = 2,
    fails: bool = False,
) -> None:
    """Sample, and learn from fixed tokens; with `fails` no backward pass follows the first forward pass. Of several
    ranks the first has the prompt, and all rows of b; those of a are dealt."""
    actor = actor_of(base, name, model, world)
    ranks = torch.arange(2) % world.size if name == "a" else torch.zeros(2)
    mask = MASK & (ranks == world.rank)[:, None]
    for _ in range(steps):
        with actor.inference() as generation:
            prompts = [[5, 6]] if world.is_main else []
            completions = generation.generate(prompts, SamplingParams(n=2, max_new_tokens=3, seed=1))
            assert len(completions) == len(prompts)
        logprobs, entropy = actor(IDS, mask, mask, 0.5 if name == "a" else 1.0)
        if fails:
            raise ValueError("no loss")
        actor.backward(-(logprobs + 0.1 * entropy).sum(), count=11)
        actor.step()
    weights[name] = base.engine.adapter(name).flat("weights").clone()


def trained(
    names: str, model: Path, *, tokens: int = 100, **of_b: Any
) -> tuple[dict[str, Tensor], dict[str, BaseException | None]]:
    base = SharedBase(RankAgreement(CPU), micro_batch_tokens=tokens)
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


def on_ranks(world: World, model: Path, tokens: int) -> tuple[list[list[str]], dict[str, Tensor]]:
    """The runs whose calls were computed together, in their order, and the weights."""
    agreement = RankAgreement(world)
    world = replace(world, before_collective=agreement.meet)
    base = SharedBase(agreement, micro_batch_tokens=tokens)
    weights: dict[str, Tensor] = {}
    functions = {
        name: partial(learn, base, name, model, weights, world=world, steps=2 + (name == "b")) for name in "ab"
    }
    together: list[list[str]] = []

    def compute(waiting: Sequence[Call]) -> Sequence[Call]:
        calls = base.compute(waiting)
        together.append([call.function for call in calls])
        return calls

    assert base.rendezvous.run(functions, compute) == {"a": None, "b": None}
    return together, weights


@pytest.mark.parametrize(("tokens", "step"), [(100, [["a", "b"]] * 3), (12, [["a", "b"], ["a"], ["a"], ["b"], ["b"]])])
def test_ranks_compute_the_same_runs_and_learn_what_one_does(
    tokens: int, step: list[list[str]], model_folder: Path, tmp_path: Path
) -> None:
    """Also where a rank has no prompts and no rows, and where the rows of both runs fit into a pass on one rank and not
    on the other: catches a choice by a rank's own rows, gradients that are not summed, and a rank that does not wait
    with the others."""
    wanted, _ = trained("ab", model_folder, steps=3)
    (together, weights), (others_together, others) = run_ranks(on_ranks, 2, tmp_path, model_folder, tokens)
    assert together == others_together == [*step, *step, ["b"], ["b"], ["b"]]
    for name in "ab":
        assert torch.equal(weights[name], others[name])
        assert torch.allclose(weights[name], wanted[name], atol=1e-5)


FAILURES: list[tuple[str, type[BaseException]]] = [
    (place, kind) for place in ("collective 1", "wait 1", "computation 1", "end") for kind in (UserError, ValueError)
] + [("collective 1", SystemExit)]
"""Where a function fails on rank 1 alone, and its error. The last one ends there, while it goes on on rank 0."""
Met = tuple[list[str], dict[str, tuple[str, str]]]


def meetings(world: World) -> list[Met]:
    """Of each failure the order of the functions, and kind and text of their errors."""
    return [met(world, *failure) for failure in FAILURES]


def met(world: World, failing: str, kind: type[BaseException]) -> Met:
    agreement = RankAgreement(world, timeout_seconds=60)
    rendezvous = Rendezvous(agreement)
    world = replace(world, before_collective=agreement.meet)
    order: list[str] = []

    def reach(place: str, name: str) -> None:
        if (place, name, world.rank) == (failing, "faulty", 1):
            raise kind("no reward")

    def work(name: str, calls: int) -> None:
        for number in range(calls):
            reach(f"collective {number}", name)
            assert world.all_reduce(torch.tensor([1.0 + world.rank])) == 3.0
            order.append(name)
            reach(f"wait {number}", name)
            assert rendezvous.wait(number, f"number {number}") == number
        reach("end", name)

    def compute(waiting: Sequence[Call]) -> Sequence[Call]:
        for call in waiting:
            call.result = call.argument
            try:
                reach(f"computation {call.argument}", call.function)
            except (UserError, ValueError) as error:
                call.error = error
        return waiting

    functions = {name: partial(work, name, calls) for name, calls in {"long": 4, "faulty": 3, "short": 2}.items()}
    ends = rendezvous.run(functions, compute)
    return order, {name: (type(error).__name__, str(error)) for name, error in ends.items() if error is not None}


def test_a_function_that_fails_on_one_rank_ends_on_all_and_the_others_go_on(tmp_path: Path) -> None:
    """Wherever it fails: catches a rank that waits forever in a collective of a function that has ended elsewhere, or
    pairs it with a collective of the next function."""
    places = "all ranks run the same functions in the same order, got "
    places += "rank 0 at faulty: all_reduce, rank 1 at faulty: ends"
    wanted = {
        UserError: (("UserError", "no reward"), ("UserError", "no reward")),
        ValueError: (("OtherRankError", "rank 1 has failed, ValueError: no reward"), ("ValueError", "no reward")),
        SystemExit: (("RuntimeError", places), ("RuntimeError", places)),
    }
    for (_, kind), *of_ranks in zip(FAILURES, *run_ranks(meetings, 2, tmp_path), strict=True):
        (order, ends), (order_of_other, ends_of_other) = of_ranks
        assert order == order_of_other and (order.count("long"), order.count("short")) == (4, 2)
        assert ({"faulty": wanted[kind][0]}, {"faulty": wanted[kind][1]}) == (ends, ends_of_other)


def test_one_function_runs_at_a_time_and_an_error_of_the_computation_ends_all() -> None:
    rendezvous = Rendezvous(RankAgreement(CPU))
    seen: list[str] = []

    def count(name: str, calls: int) -> None:
        for number in range(calls):
            seen.append(f"{name}{number}")
            assert rendezvous.wait(number, "a number") == 10 * number
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
