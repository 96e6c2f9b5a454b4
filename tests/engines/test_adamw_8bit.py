"""AdamW with moments in 8 bits: against torch's, over ranks and ZeRO stages; bitsandbytes also updates on a CPU, where
runs are refused for its speed only."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines import builder
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.deepspeed_internals import wrapped_optimizer
from hybrid_rlhf.engines.ds_config import deepspeed_config
from hybrid_rlhf.engines.residency.offload import OffloadedStates
from hybrid_rlhf.engines.saved.training_state import TrainingState
from hybrid_rlhf.planning.engine_memory import engine_memory
from hybrid_rlhf.planning.shapes import shaped_model
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, moments_in_8_bits_here, state_of, train_step
from tests.support.errors import user_error
from tests.support.marks import faults
from tests.support.ranks import run_ranks
from tests.support.sixteen_bits import masters

LR = 1e-3
STEPS = 8
HALF, EIGHT = {"dtype": "bfloat16"}, {"optimizer": "adamw_8bit"}
ROUNDING = 0.9 / 64 / 2 / 0.1
"""Of a moment of at least 0.1 of the largest in its block, to one of 64 codes from there to 1: 7%."""


def trained(world: World, path: Path, settings: dict[str, Any]) -> list[Any]:
    """This rank's master weights of an actor before and after one and all updates; the bytes of its moments, and those
    planned."""
    moments_in_8_bits_here()
    spec = actor_spec(path, lr=LR, **settings)
    assert spec.optimizer is not None
    # elements far below those of their block have moments of 0, so a small eps would make their updates large
    spec = replace(spec, optimizer=replace(spec.optimizer, weight_decay=0.1, eps=1e-4))
    engine = build_actor(spec, world)
    found: list[Any] = []
    for step in range(STEPS + 1):
        if step in (0, 1, STEPS):
            found.append(torch.cat([part.double() for part in masters(engine)]))
        train_step(engine, world)
    dtype = engine.lm.dtype
    model = shaped_model(str(path), "causal_lm", config=spec.model, dtype=dtype, lora=None, learns=True)
    planned = engine_memory(model, spec.zero, spec.optimizer, dtype=dtype, ranks=world.size, overrides={}).held
    states = wrapped_optimizer(engine.deepspeed_engine).state.values()
    tensors = [tensor for state in states for name, tensor in state.items() if not name.startswith(("step", "qmap"))]
    weights = 4 * len(found[0]) if engine.deepspeed_engine.zero_optimization_stage() else 0
    return [*found, sum(tensor.nbytes for tensor in tensors), planned.optimizer - weights]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"stage": 2}),
        (2, {"stage": 1, **HALF}),
        faults(2, {"stage": 2, **HALF}),
        faults(2, {"stage": 0}),
        faults(1, {"stage": 1}),
    ],
    ids=str,
)
def test_it_is_adamw_with_rounded_moments(
    ranks: int, settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """The first update has no moments that were rounded: it is AdamW's, with its rates, decay and groups. Without ZeRO
    most weights of the tiny model have fewer than 4096 elements, and moments in float32."""
    _, first, eight, held, planned = run_ranks(trained, ranks, tmp_path / "8", model_folder, settings | EIGHT)[0]
    before, exact, full, held_by_adamw, _ = run_ranks(trained, ranks, tmp_path / "32", model_folder, settings)[0]
    assert torch.all((first - exact).abs() <= 2**-22 * (exact.abs() + LR))
    assert 0 < (eight - full).norm() < ROUNDING * (full - before).norm()
    if settings["stage"]:
        assert held == pytest.approx(planned, rel=0.1) and held < 0.3 * held_by_adamw


def test_its_states_return_from_the_host(model_folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes shares one table of codes among the states of all partitions."""
    monkeypatch.setattr(builder, "_require_optimizer", builder._require_optimizer)
    moments_in_8_bits_here()
    actor = build_actor(actor_spec(model_folder, stage=2, **EIGHT), world)
    train_step(actor, world)
    before = state_of(actor)
    with OffloadedStates(actor.deepspeed_engine, world.device).on_host():
        pass
    assert all(map(torch.equal, before, state_of(actor)))
    train_step(actor, world)
    assert TrainingState(actor).numbers()["optimizer_steps"] == 2


@pytest.mark.parametrize(
    ("kind", "section"), [(SFTConfig, ""), (RewardConfig, ""), (PreferenceStepConfig, ""), (RLConfig, "actor.")]
)
def test_it_trains_all_weights_of_whole_models(kind: Any, section: str) -> None:
    line = [f"--{section}optimizer.name", "adamw_8bit"]
    for more, found in (
        ([f"--{section}lora.rank", "8"], f"{section}lora"),
        (["--model.tensor_parallel", "2"], "model.tensor_parallel 2"),
        (["--model.expert_parallel", "4"], "model.expert_parallel 4"),
    ):
        with user_error(f"adamw_8bit trains all weights of a model that ranks do not split, got {found}: set it"):
            parse_config(kind, line + more)


def test_where_it_cannot_run_is_refused(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is loaded: the folder is empty."""
    with user_error("^optimizer.name adamw_8bit needs a GPU, this is a CPU: set it to adamw$"):
        build_actor(actor_spec(tmp_path, **EIGHT), world)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with user_error(
        r"^optimizer.name adamw_8bit needs bitsandbytes \(.*\): pip install 'hybrid_rlhf\[quantization\]'$"
    ):
        build_actor(actor_spec(tmp_path, **EIGHT), world)
    optimizer = OptimizerConfig(name="adamw_8bit")
    on_host = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    for zero, overrides, found in (
        (ZeroConfig(stage=3), {}, "stage 3: set"),
        (ZeroConfig(), {"zero_optimization": {"stage": 3}}, "stage 3: set"),
        (ZeroConfig(stage=2, offload_optimizer=True), {}, "stage 2 with offload_optimizer: set"),
        (ZeroConfig(stage=1), on_host, "stage 1 with offload_optimizer: set"),
    ):
        with user_error(
            f"^optimizer.name adamw_8bit keeps its states on the GPU under ZeRO stages 0 to 2, got {found}"
        ):
            deepspeed_config(zero=zero, dtype=torch.float32, optimizer=optimizer, overrides=overrides)
