"""Checkpoints of engines: bit for bit with the sharding that wrote them, and read with every other one."""

from __future__ import annotations

import errno
import os
import random
import threading
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hybrid_rlhf.configs.sections.training import CheckpointConfig, ZeroConfig
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import copy_weights, full_tensors
from hybrid_rlhf.engines.saved.checkpoints import CheckpointWriter, LoopState, load_checkpoint
from hybrid_rlhf.engines.saved.training_state import TrainingState
from hybrid_rlhf.runtime.files.checkpoint_folder import find_fault, read_manifest, write_manifest
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.engines import actor_spec, moments_in_8_bits_here, train_step
from tests.support.errors import user_error
from tests.support.marks import faults, slow
from tests.support.ranks import run_ranks
from tests.support.steps import checkpoint_names


def built(world: World, path: Path, settings: dict[str, Any]) -> HybridEngine:
    """An actor."""
    if settings.get("optimizer") == "adamw_8bit":
        moments_in_8_bits_here()
    return build_actor(actor_spec(path, **settings), world)


def written(world: World, path: Path, folder: Path, settings: dict[str, Any], wait: bool = True) -> list[float]:
    """Three steps and a checkpoint; the losses of the next two."""
    engine = built(world, path, settings)
    average = WeightAverage(engine.module, decay=0.5)
    for _ in range(3):
        train_step(engine, world)
        average.update()
    config = CheckpointConfig(save_async=not wait)
    writer = CheckpointWriter(folder, {"actor": TrainingState(engine, average)}, world, config)
    random.seed(7)
    writer.save(LoopState(3, {"x": 1.5}, tensors={"rows": world.rank + torch.arange(3)}), figures={"eval/loss": 2.0})
    losses = [train_step(engine, world) for _ in range(2)]
    if writer.pending is not None:
        writer.poll()
    writer.finish()
    return losses


def gone_on(world: World, path: Path, folders: list[Path], settings: dict[str, Any]) -> list[Any]:
    """What each checkpoint goes on with."""
    engine = built(world, path, settings)
    average = WeightAverage(engine.module, decay=0.5)
    found = []
    for folder in folders:
        loop = load_checkpoint(
            folder / "checkpoints" / "step_3", states={"actor": TrainingState(engine, average)}, world=world
        )
        assert (loop.step, loop.content) == (3, {"x": 1.5}) and loop.shards
        for rank, shard in enumerate(loop.shards):
            assert shard["rows"].tolist() == [rank, rank + 1, rank + 2]
        with average.applied():
            averaged = {name: float(t.double().norm()) for name, t in full_tensors(engine.lm, world) if t is not None}
        found.append(([train_step(engine, world) for _ in range(2)], averaged))
    return found


HALF, MUON, EIGHT = {"dtype": "bfloat16"}, {"optimizer": "muon"}, {"optimizer": "adamw_8bit"}
OFFLOAD, SPLIT = {"offload_optimizer": True}, {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"stage": 0, "lora": 4}),
        (2, {"stage": 3, **HALF}),
        (2, {"stage": 2, **HALF, **MUON}),
        (2, {"stage": 1, **SPLIT}),
        (2, {"stage": 1, **HALF, **EIGHT}),
        *(faults(2, {"stage": stage, **EIGHT}) for stage in (0, 1, 2)),
        faults(1, {"stage": 2, **HALF, **EIGHT}),
        faults(1, {"stage": 0}),
        *(faults(2, {"stage": stage, **HALF}) for stage in (0, 1)),
        faults(2, {"stage": 2, **OFFLOAD}),
        faults(4, {"stage": 3, **HALF, **SPLIT}),
        faults(2, {"stage": 0, **HALF, **SPLIT}),
        faults(4, {"stage": 0, **SPLIT}),
        faults(2, {"stage": 2, **OFFLOAD, **SPLIT}),
        faults(2, {"stage": 1, **MUON}),
        *(faults(2, {"stage": stage, **HALF, **MUON}) for stage in (0, 3)),
        *(faults(2, {"stage": stage, **OFFLOAD, **MUON}) for stage in (1, 3)),
        faults(2, {"stage": 3, "lora": 4, **OFFLOAD, "offload_parameters": True}),
    ],
    ids=str,
)
def test_an_engine_goes_on_bit_for_bit(
    ranks: int, settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    want = run_ranks(written, ranks, tmp_path / "w", model_folder, run, settings, False)[0]
    assert run_ranks(gone_on, ranks, tmp_path / "r", model_folder, [run], settings)[0][0][0] == want
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_3"]


def refusal(world: World, *given: Any) -> str:
    """The error that resuming ends in."""
    with user_error(None) as raised:
        gone_on(world, *given)
    return str(raised.value)


def test_moments_in_8_bits_resume_with_the_sharding_that_wrote_them(model_folder: Path, tmp_path: Path) -> None:
    """Blocks of a partition fit no other partition, and would be read as if they did."""
    run = tmp_path / "run"
    run_ranks(written, 1, tmp_path / "w", model_folder, run, {"stage": 2, **EIGHT})
    for ranks, stage in ((2, 2), (1, 1)):
        for message in run_ranks(refusal, ranks, tmp_path / "r", model_folder, [run], {"stage": stage, **EIGHT}):
            assert f"ZeRO stage of the checkpoint, 1 and 2, got {ranks} and {stage}: use those" in message


@pytest.mark.parametrize(
    ("shardings", "settings"),
    [
        slow([(1, 0), (2, 3)], {}),
        # stages 1 and 2 keep the momentum of whole matrices on each rank that has a part of them
        slow([(1, 0), (2, 2), (2, 3)], MUON),
        faults(list(product((1, 2, 4), (0, 1, 2, 3))), {}),
    ],
    ids=["few", "muon", "all"],
)
def test_shardings_read_each_other(
    shardings: list[tuple[int, int]], settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """Every number of ranks and ZeRO stage resumes from what every other wrote."""
    folders = {sharding: tmp_path / f"run_{sharding[0]}_{sharding[1]}" for sharding in shardings}
    for (ranks, stage), folder in folders.items():
        run_ranks(written, ranks, tmp_path / "w", model_folder, folder, {"stage": stage} | settings)
    want = None
    for ranks, stage in shardings:
        given = model_folder, [*folders.values()], {"stage": stage} | settings
        for of_rank in run_ranks(gone_on, ranks, tmp_path / "r", *given):
            want = want or of_rank[0]
            for losses, averaged in of_rank:
                assert losses == pytest.approx(want[0], rel=1e-5), (ranks, stage)
                assert not averaged or averaged == pytest.approx(want[1], rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_refreshed_reference_is_kept(stage: Any, model_folder: Path, tmp_path: Path, world: World) -> None:
    """A frozen model that took other weights is saved, and comes back with them."""
    frozen = EngineSpec("reference", str(model_folder), actor_spec(model_folder).model, ZeroConfig(stage=stage), 0)
    reference, again = build_engine(frozen, world), build_engine(frozen, world)
    actor = build_actor(actor_spec(model_folder, stage=stage), world)
    train_step(actor, world)
    copy_weights(actor.lm, reference.lm)
    CheckpointWriter(tmp_path, {"reference": TrainingState(reference)}, world, CheckpointConfig()).save(
        LoopState(1, {})
    )
    load_checkpoint(tmp_path / "checkpoints" / "step_1", states={"reference": TrainingState(again)}, world=world)
    wanted, found = (dict(full_tensors(engine.lm, world)) for engine in (actor, again))
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)


def update_with_nan_gradient(world: World, path: Path, stage: int, dtype: str) -> list[Any]:
    """An update whose gradient is NaN on one rank, between two that are not."""
    engine = build_actor(actor_spec(path, stage=stage, dtype=dtype), world)
    first = train_step(engine, world)
    ids = torch.full((1, 6), 5)
    mask = torch.ones_like(ids, dtype=torch.bool)
    logprobs, _ = engine(ids, mask, mask)
    engine.backward(logprobs.sum() * (torch.nan if world.rank == world.size - 1 else 1.0), count=5)
    skipped = engine.step().skipped
    return [first, skipped, train_step(engine, world), engine.deepspeed_engine.skipped_steps]


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float32"),
        (3, "bfloat16"),
        *(faults(stage, "bfloat16") for stage in (0, 1, 2)),
        *(faults(stage, "float32") for stage in (1, 2, 3)),
    ],
)
def test_an_update_that_is_not_finite_is_skipped_on_all_ranks(
    stage: int, dtype: str, model_folder: Path, tmp_path: Path
) -> None:
    for first, skipped, after, count in run_ranks(update_with_nan_gradient, 2, tmp_path, model_folder, stage, dtype):
        assert skipped and after < first and count == 1, "the update before it has effect, it has none"


class OneWeight(SimpleNamespace):
    """A TrainingState without an engine."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(weight=nn.Parameter(values), world=solo_world(torch.device("cpu")))

    def tensors(self) -> Any:
        yield "weight/0/weight", self.weight.detach()

    def numbers(self) -> dict[str, Any]:
        return {}


SOLO = solo_world(torch.device("cpu"))


def writer(folder: Path, **config: Any) -> CheckpointWriter:
    states: Any = {"actor": OneWeight(torch.arange(1000.0))}
    return CheckpointWriter(folder, states, SOLO, CheckpointConfig(**config))


def test_what_need_not_be_kept_is_removed_and_nothing_else(tmp_path: Path) -> None:
    mine = tmp_path / "checkpoints" / "step_by_step_notes"
    mine.mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_1").mkdir()
    (tmp_path / "checkpoints" / "step_2.partial").mkdir()
    saving = writer(tmp_path, keep_last=2, keep_every=4, keep_best="min:eval/loss")
    for step, loss in ((3, 1.0), (4, 5.0), (5, 0.5), (6, float("nan")), (7, 0.7), (8, 0.8), (9, 3.0)):
        saving.save(LoopState(step, {}), figures={"eval/loss": loss})
    saving.save(LoopState(9, {}, update=2))
    before = (tmp_path / "checkpoints" / "step_9_update_2" / "manifest.json").stat()
    saving.save(LoopState(9, {}, update=2))
    assert (tmp_path / "checkpoints" / "step_9_update_2" / "manifest.json").stat() == before, "it is there"
    kept = "step_1 step_4 step_5 step_8 step_9 step_9_update_2 step_by_step_notes"
    assert checkpoint_names(tmp_path) == kept.split()


def test_a_checkpoint_within_a_rollout_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """Its rollout is whole in one file; without it, the rest of the step would be sampled again."""
    writer(tmp_path).save(LoopState(1, {}, update=2))
    checkpoint = tmp_path / "checkpoints" / "step_1_update_2"
    manifest = read_manifest(checkpoint)
    manifest["files"]["loop.safetensors"] = manifest["files"]["actor_00000.safetensors"]
    write_manifest(checkpoint, manifest)
    with user_error("resumes in the version that wrote it"):
        load_checkpoint(checkpoint, states={}, world=SOLO)


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = writer(tmp_path)
    saving.save(LoopState(1, {}))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for config in ({}, {"save_async": True}):
        failing = writer(tmp_path, **config)
        with monkeypatch.context() as patched:
            patched.setattr("hybrid_rlhf.engines.saved.checkpoints.save_file", full)
            with pytest.raises(OSError, match="No space left"):
                failing.save(LoopState(2, {}))
                failing.finish()
        assert checkpoint_names(tmp_path) == ["step_1"]
        assert find_fault(tmp_path / "checkpoints" / "step_1", SOLO) is None


def test_beside_training_what_is_written_is_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = writer(tmp_path, save_async=True)
    state: Any = saving._states["actor"]
    go = threading.Event()
    from hybrid_rlhf.engines.saved import checkpoints

    real = checkpoints.save_file
    monkeypatch.setattr(checkpoints, "save_file", lambda *arguments: (go.wait(60), real(*arguments)))
    saving.save(LoopState(1, {}))
    with torch.no_grad():
        state.weight.zero_()
    saving.poll()
    assert not (tmp_path / "checkpoints" / "step_1").exists(), "it is not whole before all is written"
    go.set()
    saving.finish()
    loaded = load_file(tmp_path / "checkpoints" / "step_1" / "actor_00000.safetensors")
    assert loaded["weight/0/weight"].tolist() == list(range(1000))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    writer(tmp_path).save(LoopState(1, {}))
    with user_error("has no critic"):
        load_checkpoint(tmp_path / "checkpoints" / "step_1", states={"critic": None}, world=SOLO)  # type: ignore[dict-item]


def test_random_states_come_back(tmp_path: Path) -> None:
    saving = writer(tmp_path)
    saving.save(LoopState(1, {}))
    want = (random.random(), np.random.rand(), float(torch.rand(())))
    load_checkpoint(tmp_path / "checkpoints" / "step_1", states={}, world=SOLO)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == want
