"""Measures the curves of this machine: what `hybrid-rlhf calibrate` runs, in less than three minutes.

Primitives first (products, attention, optimizer steps, copies, collectives); then small models through the real
engines, from whose times the costs beyond primitives are fitted (fitting.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hybrid_rlhf.planning.curves import Curve, MachineCurves, Surface
from hybrid_rlhf.planning.machines import collectives, layers
from hybrid_rlhf.planning.machines.datasheets import with_usual_link
from hybrid_rlhf.planning.machines.fitting import with_gathers, with_models
from hybrid_rlhf.planning.machines.layers import ModelTimes, TimedBatch, TimedModel
from hybrid_rlhf.planning.machines.links import measured_collectives
from hybrid_rlhf.planning.machines.ranks import run_on_ranks
from hybrid_rlhf.planning.machines.runs import RunSizes, RunTimer, with_runs
from hybrid_rlhf.runtime.world import World, create_groups

_CPU_RANKS = 8


@dataclass(frozen=True)
class MeasuredSizes:
    """What is measured: sizes of primitives and of models."""

    dtypes: list[str]
    weights: list[int]
    """Sides of square matrices."""
    rows: list[int]
    attention: list[int]
    parameters: list[int]
    copies: list[int]
    bytes: list[int]
    models: list[TimedModel]
    batches: list[TimedBatch]
    decoded: list[int]
    """Rows of decoding steps; the last also with long prompts."""
    runs: list[RunSizes]
    """On one rank."""
    shared_runs: list[RunSizes]
    """On several."""


def default_ranks() -> int:
    """Ranks that measure collectives: all GPUs, or up to eight processes on a CPU."""
    return torch.cuda.device_count() or _CPU_RANKS


def calibrate(
    ranks: int, *, time_run: RunTimer, quick: bool = False, show: Callable[[str], None] = lambda line: None
) -> MachineCurves:
    """Measure this machine. Its link to other hosts is not measured: it is that of the GPU's data sheet.

    Args:
        ranks: that collectives are measured on.
        time_run: times the loop of RL, which is above this floor.
        quick: fewer and smaller sizes.
        show: takes a line before each part.

    Raises:
        UserError: when the ranks do not finish in time.
    """
    sizes = measured_sizes(gpu=torch.cuda.is_available(), quick=quick)
    show(f"collectives and ZeRO-3 on {ranks} ranks")
    times, sharded = run_on_ranks(_together, ranks, sizes)[0]
    show("matrix products, attention, optimizer steps, copies; small models")
    base, models = run_on_ranks(_alone, 1, sizes)[0]
    surfaces = measured_collectives(times) if ranks > 1 else {kind: Surface.of([(1, 1, 0.0)]) for kind in times}
    curves = replace(base, collectives=surfaces, ranks_per_host=ranks)
    curves = with_models(with_usual_link(curves), models)
    show("RL runs on one rank and on several")
    with tempfile.TemporaryDirectory() as folder:
        wanted = [(1, each) for each in sizes.runs]
        wanted += [(count, each) for count in collectives.group_sizes(ranks) for each in sizes.shared_runs]
        runs = [
            (count, run_on_ranks(time_run, count, f"{folder}/{place}", each)[0])
            for place, (count, each) in enumerate(wanted)
        ]
        curves = with_runs(curves, runs)
    return with_gathers(curves, sharded)


def measured_sizes(*, gpu: bool, quick: bool) -> MeasuredSizes:
    """What is measured on a CPU or a GPU, or in a quick try."""
    if gpu:
        shapes = [(2, 1024), (5, 1024), (2, 4096), (5, 4096)]
        weights = [1024, 2048, 4096, 8192]
        rows = [1, 8, 64, 512, 4096, 16384]
        of_runs = [(2, 1024), (5, 1024), (2, 2048), (5, 1024)]
        batches = [TimedBatch(4, 512), TimedBatch(32, 128), TimedBatch(16, 1024)]
        decoded = [1, 32, 256]
    else:
        shapes = [(2, 64), (4, 64), (2, 128), (4, 128), (2, 256), (2, 384)]
        weights = [32, 64, 128, 256, 512, 1024]
        rows = [1, 4, 16, 64, 256, 1024, 4096]
        of_runs = [(2, 64), (4, 128), (2, 384), (2, 256)]
        batches = [TimedBatch(2, 32), TimedBatch(32, 32), TimedBatch(4, 128), TimedBatch(4, 256)]
        decoded = [1, 8, 64]
    # runs on several ranks lie apart: in small ones ranks mostly wait for one another, in large ones they compute
    small, wide, widest, shared = (TimedModel(*each) for each in of_runs)
    plain = [TimedModel(layers, hidden) for layers, hidden in shapes]
    full = MeasuredSizes(
        dtypes=["float32", "bfloat16"] if gpu else ["float32"],
        weights=weights,
        rows=rows,
        attention=[16, 64, 256, 1024, 2048],
        parameters=[10**3, 10**4, 10**5, 10**6, 10**7],
        copies=[2**10, 2**14, 2**18, 2**22, 2**26],
        bytes=[2**8, 2**14, 2**18, 2**20, 2**22, 2**24],
        models=[*plain, replace(plain[0], vocabulary=8192), *(replace(each, zero=3) for each in plain[:2])],
        batches=batches,
        decoded=decoded,
        runs=[RunSizes(small, 8), RunSizes(small, 64), RunSizes(small, 128), RunSizes(wide, 32), RunSizes(widest, 16)],
        shared_runs=[RunSizes(small, 8), RunSizes(shared, 64)],
    )
    if not quick:
        return full
    return replace(
        full,
        weights=weights[1:4:2],
        rows=rows[::3],
        attention=[64, 256],
        parameters=[10**4, 10**6],
        copies=[2**12, 2**20],
        bytes=[2**10, 2**18],
        models=[*full.models[:2], *full.models[-3:]],
        batches=batches[:2],
        decoded=[2],
        runs=[RunSizes(small, 4), RunSizes(small, 64)],
        shared_runs=[RunSizes(small, 4)],
    )


def _together(world: World, sizes: MeasuredSizes) -> tuple[collectives.Times, list[tuple[int, ModelTimes]]]:
    """Collectives, and models under ZeRO-3 by number of ranks."""
    times = collectives.time_collectives(world, sizes.bytes)
    groups = [range(ranks) for ranks in collectives.group_sizes(world.size)]
    create_groups(groups)
    sharded = []
    for part in map(world.part, groups):
        if part.is_member:
            models = [each for each in sizes.models if each.zero]
            sharded += [(part.size, layers.time_model(part, each, sizes.batches[:1], [])) for each in models]
        world.barrier()
    return times, sharded


def _alone(world: World, sizes: MeasuredSizes) -> tuple[MachineCurves, list[ModelTimes]]:
    """Curves of primitives, and times of models."""
    decode_rows = [rows for rows in sizes.rows if rows <= 512]
    optimizer = Curve.of(layers.time_optimizer(world, sizes.parameters))
    copies = Curve.of(layers.time_host_link(world, sizes.copies))
    gpu = world.device.type == "cuda"
    curves = MachineCurves(
        machine=torch.cuda.get_device_name(0) if gpu else "this CPU",
        source="measured",
        device="cuda" if gpu else "cpu",
        ranks_per_host=1,
        products={
            name: Surface.of(layers.time_products(world, sizes.weights, sizes.rows, name)) for name in sizes.dtypes
        },
        decode_products={
            name: Surface.of(layers.time_products(world, sizes.weights, decode_rows, name, decode=True))
            for name in sizes.dtypes
        },
        attention=Curve.of(layers.time_attention(world, sizes.attention)),
        copies=copies,
        host_link=copies,
        optimizer=optimizer,
        host_optimizer=optimizer,
        collectives={},
        between_hosts={},
    )
    return curves, [layers.time_model(world, model, sizes.batches, sizes.decoded) for model in sizes.models]
