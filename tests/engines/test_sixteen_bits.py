"""Training in bfloat16 and float16, as users run it on GPUs, against float32 and one rank: losses, norms, updates, and
the sum of gradients. The tests of layouts elsewhere compare float32, where DeepSpeed has other optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.ds_config import deepspeed_config
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, token_rows
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.marks import faults, slow
from tests.support.ranks import run_ranks
from tests.support.sixteen_bits import Case, built, masters, trained
from tests.support.tiny import save_tiny, tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model and a mixture."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "dense", tiny_model())
    save_tiny(folder / "mixture", variant("qwen3_moe"))
    return folder


STAGES: list[Case] = [{"stage": stage} for stage in range(4)]
KINDS: list[Case] = [
    {"lora": 4, "stage": 3},
    {"lora": 4, "stage": 0, "quantization": "nf4"},
    {"optimizer": "muon", "stage": 0},
    {"optimizer": "muon", "stage": 2},
    {"optimizer": "muon", "stage": 3},
]
SHARED: list[Case] = [
    {"tensor_parallel": 2, "stage": 0},
    {"tensor_parallel": 2, "stage": 2},
    {"tensor_parallel": 2, "stage": 3},
    {"sequence": 2, "stage": 0},
    {"sequence": 2, "stage": 3},
    {"experts": 2, "stage": 0},
    {"experts": 2, "stage": 3},
]
ALONE: list[Case] = [{}, {"lora": 4}, {"lora": 4, "quantization": "nf4"}, {"optimizer": "muon"}, {"experts": 1}]
"""One of each kind on one rank, to compare with."""


def plain(case: Case) -> int:
    """The place in ALONE of a case's kind."""
    kinds = [{key: value for key, value in case.items() if key in ("lora", "quantization", "optimizer")}]
    return ALONE.index({"experts": 1} if "experts" in case else kinds[0])


@pytest.fixture(scope="module")
def alone(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, list[Any]]]]:
    """Results of ALONE in a dtype on one rank."""
    found: dict[str, list[dict[str, list[Any]]]] = {}

    def of(dtype: str) -> list[dict[str, list[Any]]]:
        if dtype not in found:
            cases = [{**case, "dtype": dtype} for case in ALONE]
            (found[dtype],) = run_ranks(trained, 1, tmp_path_factory.mktemp(dtype), folders, cases)
        return found[dtype]

    return of


def apart(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Relative differences."""
    return [abs(value / other - 1) for value, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "ranks", "cases"),
    [
        ("bfloat16", 1, [STAGES[0], STAGES[2], *KINDS]),
        ("bfloat16", 2, [STAGES[0], STAGES[3], *SHARED]),
        ("float16", 2, [STAGES[0], STAGES[2], SHARED[0], SHARED[-1]]),
        *(
            faults(dtype, ranks, [*STAGES, *KINDS, *(SHARED if ranks == 2 else [])])
            for dtype in ("bfloat16", "float16")
            for ranks in (1, 2)
        ),
    ],
    ids=["bfloat16", "bfloat16 on 2 ranks", "float16 on 2 ranks", *(f"all {n}" for n in range(4))],
)
def test_losses_norms_and_updates_are_those_of_float32_in_every_layout(
    dtype: str, ranks: int, cases: list[Case], folders: Path, tmp_path: Path, alone: Any
) -> None:
    """Losses are a few roundings of the dtype apart; norms of the first updates, on weights that are still alike, and
    of one rank in the same dtype, less than one. A norm that leaves out a part, an update of another step of Adam and a
    loss that is not scaled are several percent apart."""
    results = run_ranks(trained, ranks, tmp_path, folders, [{**case, "dtype": dtype} for case in cases])
    for case, found in zip(cases, results[0], strict=True):
        same, wide = (alone(name)[plain(case)] for name in (dtype, "float32"))
        assert max(apart(found["losses"], wide["losses"])) < 0.01, case
        reports = "optimizer" not in case or (dtype == "bfloat16" and case["stage"] < 2)
        assert (found["norms"][0] is not None) == reports, case
        if reports:
            norms = apart(found["norms"][:3], same["norms"][:3])
            assert sum(norms) / 3 < 0.003, (case, norms)
        if case in STAGES:
            assert max(apart(found["sizes"][:5], wide["sizes"][:5])) < 0.01, case


def summed(world: World, folders: Path, stage: int) -> float:
    """Relative error of the sum of the gradients of 512 micro-batches.

    With so large an eps, Adam's first update is lr / eps times the gradient.
    """
    spec = actor_spec(folders / "small", stage=stage, dtype="bfloat16")
    optimizer = OptimizerConfig(lr=1e6, eps=1e6, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0)
    engine, other = (
        build_actor(replace(spec, optimizer=optimizer, zero=ZeroConfig(stage=n)), world) for n in (stage, 0)
    )
    weights = list(other.module.parameters())
    total = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights]
    before = masters(engine)
    rows = torch.randint(3, 200, (512, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 6, dtype=torch.bool)
    for row in rows:
        engine.backward(sft_loss(engine(row[None], mask, mask)[0], mask=mask).total, count=512)
        loss = sft_loss(other.module(row[None], mask, mask)[0], mask=mask).total / 512
        for part, gradient in zip(total, torch.autograd.grad(loss, weights), strict=True):
            part += gradient
    engine.step()
    gradient = torch.cat([(then - now).double() for now, then in zip(masters(engine), before, strict=True)])
    expected = torch.cat([part.flatten() for part in total])
    return float((gradient - expected).norm() / expected.norm())


@pytest.mark.parametrize("stage", [0, slow(2), slow(3)])
def test_gradients_of_many_micro_batches_are_summed_in_float32(stage: int, folders: Path, tmp_path: Path) -> None:
    """A sum in bfloat16 is 2.6% off."""
    save_tiny(folders / "small", tiny_model(num_hidden_layers=1))
    (error,) = run_ranks(summed, 1, tmp_path, folders, stage)
    assert error < 0.003


def test_a_users_stage_0_is_refused(tmp_path: Path) -> None:
    zero, said = ZeroConfig(stage=2), {"zero_optimization": {"stage": 0}}
    assert deepspeed_config(zero=zero, dtype=torch.float32, optimizer=OptimizerConfig(), overrides=said)
    assert deepspeed_config(zero=zero, dtype=torch.bfloat16, optimizer=None, overrides=said)
    with user_error("zero_optimization.stage must be 1 or more for training in torch.bfloat16, got 0: remove it"):
        deepspeed_config(zero=zero, dtype=torch.bfloat16, optimizer=OptimizerConfig(), overrides=said)


def searched(world: World, folders: Path, factor: float) -> list[tuple[bool, bool]]:
    """Whether each of 20 updates was skipped, and whether that is a fault."""
    engine = built(folders / "dense", world, dtype="float16", stage=1)
    ids = token_rows()
    mask = torch.ones_like(ids, dtype=torch.bool)
    found = []
    for _ in range(20):
        engine.backward(factor * sft_loss(engine(ids, mask, mask)[0], mask=mask).total, count=36)
        stats = engine.step()
        found.append((stats.skipped, stats.is_fault))
    return found


@pytest.mark.parametrize("factor", [1e4, float("inf")])
def test_the_search_for_the_loss_scale_is_no_fault(factor: float, folders: Path, tmp_path: Path) -> None:
    """Three skipped updates in a row end a run. A search from 2^16 may take more; one that reaches 1 has found none."""
    (found,) = run_ranks(searched, 1, tmp_path, folders, factor)
    skipped = sum(skips for skips, _ in found)
    faults_from = 17 if factor == float("inf") else 20  # the first overflow does not lower the scale
    assert skipped == 20 if factor == float("inf") else 3 < skipped < 15
    assert [is_fault for _, is_fault in found] == [False] * faults_from + [True] * (20 - faults_from)
