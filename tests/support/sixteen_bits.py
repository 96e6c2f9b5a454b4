"""An actor that trains in 16 bits, also in float16 on a CPU: losses, norms and sizes of its updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from hybrid_rlhf.configs.sections.training import OptimizerConfig
from hybrid_rlhf.engines import builder
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.deepspeed_internals import optimizer_slice
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, token_rows

UPDATES = 15
Case = dict[str, Any]
"""Settings of `actor_spec`; `sequence` and `experts`: numbers of ranks that share rows or experts."""


def float16_here() -> None:
    """Let this process train in float16 on its CPU, which DeepSpeed refuses."""
    get_accelerator().is_fp16_supported = lambda: True
    builder.training_dtype = lambda model, device: DTYPES[model.dtype]  # type: ignore[attr-defined]


def built(path: Path, world: World, sequence: int = 1, experts: int = 1, **settings: Any) -> HybridEngine:
    """An actor that clips its gradients in every update, but with Muon."""
    if settings.get("dtype") == "float16":
        float16_here()
    spec = actor_spec(path, **settings)
    assert spec.optimizer is not None
    clips = 0.0 if spec.optimizer.name == "muon" else 0.5
    return build_actor(
        replace(
            spec,
            model=replace(spec.model, sequence_parallel=sequence, expert_parallel=experts),
            optimizer=OptimizerConfig(
                name=spec.optimizer.name, lr=1e-3, schedule="constant", warmup_fraction=0.0, max_grad_norm=clips
            ),
        ),
        world,
    )


def masters(engine: HybridEngine) -> list[Tensor]:
    """This rank's parts of the float32 weights."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    places = [optimizer_slice(engine.deepspeed_engine, parameter) for parameter in trained]
    return [
        place.flat.detach().flatten()[place.start : place.start + place.elements].float().clone()
        for place in places
        if place is not None
    ]


def update(engine: HybridEngine, world: World) -> tuple[float, float | None, float]:
    """One update on four rows, shared over the ranks, in micro-batches of one; the loss of all, the norm, and the mean
    change of this rank's weights."""
    ids = token_rows()[world.rank :: world.size].to(world.device)
    mask = torch.ones_like(ids[:1], dtype=torch.bool)
    before = masters(engine)
    total = torch.zeros((), device=world.device)
    for row in ids:
        loss = sft_loss(engine(row[None], mask, mask)[0], mask=mask)
        engine.backward(loss.total, count=36)
        total += loss.total.detach()
    norm = engine.step().grad_norm
    changes = torch.cat([(now - then).abs().flatten() for now, then in zip(masters(engine), before, strict=True)])
    size, elements = world.all_reduce(torch.stack([changes.sum(), changes.new_tensor(len(changes))]))
    return float(world.all_reduce(total)) / 36, norm, float(size / elements)


def trained(world: World, folders: Path, cases: list[Case]) -> list[dict[str, list[Any]]]:
    """Losses, norms and sizes of the updates of each case."""
    results = []
    for case in cases:
        engine = built(folders / ("mixture" if "experts" in case else "dense"), world, **case)
        losses, norms, sizes = zip(*(update(engine, world) for _ in range(UPDATES)), strict=True)
        results.append({"losses": losses, "norms": norms, "sizes": sizes})
    return results
