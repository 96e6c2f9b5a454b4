"""Measures the curves of this machine: what `hybrid-rlhf calibrate` runs, in less than three minutes.

Primitives first (products, attention, optimizer steps, copies, collectives); then small models through the real
engines. What a model takes beyond the primitives of its layers is the rest of a layer, and what it takes beyond its
layers the cost of a call; rests are fitted by lines, which are not below nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch

from hybrid_rlhf.placement.costs import ATTENTION_BACKWARD, DECODE_PRODUCTS
from hybrid_rlhf.placement.curves import Curve, MachineCurves, Surface
from hybrid_rlhf.placement.machines import collectives, layers
from hybrid_rlhf.placement.machines.layers import LONG_CONTEXT, SHORT_CONTEXT, ModelTimes, TimedBatch, TimedModel
from hybrid_rlhf.placement.machines.ranks import run_on_ranks
from hybrid_rlhf.runtime.world import World

_CPU_RANKS = 8
_LEAST = 1e-9
"""Seconds of a rest that comes out below nothing."""


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
    hidden: list[int]
    few_layers: int
    more_layers: int
    vocabulary: int
    batches: list[TimedBatch]
    decoded: list[int]


def default_ranks() -> int:
    """Ranks that measure collectives: all GPUs, or up to eight processes on a CPU."""
    return torch.cuda.device_count() or _CPU_RANKS


def calibrate(ranks: int, *, quick: bool = False, show: Callable[[str], None] = lambda line: None) -> MachineCurves:
    """Measure this machine.

    Args:
        ranks: that collectives are measured on.
        quick: fewer and smaller sizes.
        show: takes a line before each part.

    Raises:
        UserError: when the ranks do not finish in time.
    """
    sizes = measured_sizes(gpu=torch.cuda.is_available(), quick=quick)
    show(f"collectives on {ranks} ranks")
    times, sharing = run_on_ranks(_together, ranks, sizes.bytes)[0]
    show("matrix products, attention, optimizer steps, copies; small models")
    base, models = run_on_ranks(_alone, 1, sizes)[0]
    surfaces = {kind: _surface(found) for kind, found in times.items() if found}
    if ranks == 1:
        surfaces = {kind: Surface(((1.0, Curve.of([(1, _LEAST)])),)) for kind in times}
    curves = replace(
        base,
        collectives=surfaces,
        between_hosts=surfaces,
        slowdown=Curve.of(sharing) if base.device == "cpu" else Curve.zero(),
        device_gib=_device_gib(ranks),
        ranks_per_host=ranks,
    )
    return with_models(curves, models, sizes)


def measured_sizes(*, gpu: bool, quick: bool) -> MeasuredSizes:
    """What is measured on a CPU or a GPU, or in a quick try."""
    if gpu:
        hidden, weights, rows = [1024, 4096], [1024, 2048, 4096, 8192], [1, 8, 64, 512, 4096, 16384]
        batches, decoded = [TimedBatch(4, 512), TimedBatch(16, 1024)], [1, 32, 256]
    else:
        hidden, weights = [64, 192, 512], [32, 64, 128, 256, 512, 1024]
        rows, batches = [1, 4, 16, 64, 256, 1024, 4096], [TimedBatch(2, 32), TimedBatch(4, 128), TimedBatch(8, 128)]
        decoded = [1, 8, 64]
    full = MeasuredSizes(
        dtypes=["float32", "bfloat16"] if gpu else ["float32"],
        weights=weights,
        rows=rows,
        attention=[16, 64, 256, 1024, 2048],
        parameters=[10**3, 10**4, 10**5, 10**6, 10**7],
        copies=[2**10, 2**14, 2**18, 2**22, 2**26],
        bytes=[2**8, 2**14, 2**18, 2**20, 2**22, 2**24],
        hidden=hidden,
        few_layers=2,
        more_layers=5,
        vocabulary=8192,
        batches=batches,
        decoded=decoded,
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
        hidden=hidden[:1],
        more_layers=4,
        vocabulary=2048,
        batches=batches[:1],
        decoded=[2],
    )


def _together(world: World, sizes: list[int]) -> tuple[collectives.Times, list[tuple[float, float]]]:
    return collectives.time_collectives(world, sizes), collectives.time_sharing(world)


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
        device_gib=0.0,
        ranks_per_host=1,
        products={
            name: _surface(layers.time_products(world, sizes.weights, sizes.rows, name)) for name in sizes.dtypes
        },
        decode_products={
            name: _surface(layers.time_decode_products(world, sizes.weights, decode_rows, name))
            for name in sizes.dtypes
        },
        attention=Curve.of(layers.time_attention(world, sizes.attention)),
        layer=Curve.zero(),
        layer_backward=Curve.zero(),
        head=Curve.zero(),
        cache_reads=Curve.zero(),
        decode_layer=Curve.zero(),
        decode_step=Curve.zero(),
        copies=copies,
        host_link=copies,
        optimizer=optimizer,
        host_optimizer=optimizer,
        collectives={},
        between_hosts={},
    )
    found = [TimedModel(count, side) for side in sizes.hidden for count in (sizes.few_layers, sizes.more_layers)]
    found.append(TimedModel(sizes.few_layers, sizes.hidden[0], sizes.vocabulary))
    found += [TimedModel(count, sizes.hidden[0], zero=3) for count in (sizes.few_layers, sizes.more_layers)]
    return curves, layers.time_models(world, found, sizes.batches, sizes.decoded)


def with_models(curves: MachineCurves, models: list[ModelTimes], sizes: MeasuredSizes) -> MachineCurves:
    """The curves with what models take beyond primitives."""
    known = {times.model: times for times in models}
    few, more, least = sizes.few_layers, sizes.more_layers, sizes.hidden[0]
    plain = TimedModel(few, least)
    pairs = [(known[TimedModel(few, side)], known[TimedModel(more, side)]) for side in sizes.hidden]
    curves = _with_passes(curves, pairs, known[plain], known[TimedModel(few, least, sizes.vocabulary)])
    gathered = [
        (times.forward[batch] + times.backward[batch]) / 2
        for times in (*pairs[0], known[replace(plain, zero=3)], known[TimedModel(more, least, zero=3)])
        for batch in sizes.batches[:1]
    ]
    per_layer = ((gathered[3] - gathered[2]) - (gathered[1] - gathered[0])) / (more - few)
    # an optimizer step of an engine takes more than its AdamW: what it takes at each size
    steps = [(times.model.sizes.parameters, times.step) for times in models if not times.model.zero]
    calls = {**curves.calls, "gathered_layer": max(0.0, per_layer)}
    return _with_decoding(replace(curves, calls=calls, optimizer=_largest(steps, curves.optimizer)), pairs)


def _with_passes(
    curves: MachineCurves, pairs: list[tuple[ModelTimes, ModelTimes]], plain: ModelTimes, wide: ModelTimes
) -> MachineCurves:
    """With the rest of a layer, the head, and calls."""
    name = next(iter(curves.products))
    product, forward, backward, head = curves.products[name], [], [], []
    calls: dict[str, float] = {}
    for few, more in reversed(pairs):  # the smallest model is the last, and gives the cost of calls
        sizes, between = few.model.sizes, more.model.layers - few.model.layers
        for batch in sorted(few.forward, key=lambda batch: -batch.rows * batch.length):
            tokens = batch.rows * batch.length
            products = sizes.products * product(sizes.layer_weights / sizes.products, tokens)
            attention = curves.attention(2.0 * sizes.attention_width * batch.rows * batch.length**2)
            layer = (more.forward[batch] - few.forward[batch]) / between
            layer_backward = (more.backward[batch] - few.backward[batch]) / between
            forward.append((tokens * sizes.hidden, layer - products - attention, layer))
            rest = layer_backward - 2 * products - ATTENTION_BACKWARD * attention
            backward.append((tokens * sizes.hidden, rest, layer_backward))
            logits = product(sizes.vocabulary * sizes.hidden, tokens)
            calls["forward"] = max(0.0, few.forward[batch] - few.model.layers * layer - logits)
            calls["backward"] = max(0.0, few.backward[batch] - few.model.layers * layer_backward - 2 * logits)
    hidden = plain.model.hidden
    for batch in plain.forward:
        tokens, more_logits = batch.rows * batch.length, wide.model.vocabulary - plain.model.vocabulary
        taken = wide.forward[batch] + wide.backward[batch] - plain.forward[batch] - plain.backward[batch]
        head.append((tokens * more_logits, taken - 3 * product(more_logits * hidden, tokens)))
    return replace(curves, layer=_line(forward), layer_backward=_line(backward), head=_proportional(head), calls=calls)


def _with_decoding(curves: MachineCurves, pairs: list[tuple[ModelTimes, ModelTimes]]) -> MachineCurves:
    """With decoding steps, weight syncs, and calls of generation."""
    product = curves.decode_products[next(iter(curves.products))]
    reads, rest, steps = [], [], []
    for _, more in pairs:
        rows = max(count for count, _ in more.decode)
        longer = more.decode[rows, LONG_CONTEXT] - more.decode[rows, SHORT_CONTEXT]
        size = 4.0 * rows * (LONG_CONTEXT - SHORT_CONTEXT) * more.model.sizes.cache_width
        reads.append((size, longer / more.model.layers))
    cache = _proportional(reads)
    for few, more in pairs:
        sizes, between = few.model.sizes, more.model.layers - few.model.layers
        for rows, context in [key for key in few.decode if key[1] == SHORT_CONTEXT]:
            layer = (more.decode[rows, context] - few.decode[rows, context]) / between
            known = DECODE_PRODUCTS * product(sizes.layer_weights / DECODE_PRODUCTS, rows)
            known += cache(4.0 * rows * context * sizes.cache_width)
            rest.append((rows * sizes.hidden, layer - known, few.decode[rows, context]))
            head = product(sizes.vocabulary * sizes.hidden, rows)
            if few is pairs[0][0]:
                taken = few.decode[rows, context]
                steps.append((rows, taken - few.model.layers * layer - head, taken))
    small, large = pairs[0][0], pairs[-1][1]
    more_bytes = 4 * (large.model.sizes.parameters - small.model.sizes.parameters)
    check = 2 * (curves.calls["forward"] + small.model.layers * curves.layer(16 * small.model.hidden))
    calls = {**curves.calls, "generation": max(0.0, small.sync - check)}
    return replace(
        curves,
        cache_reads=cache,
        decode_layer=_line(rest),
        decode_step=_line(steps),
        copies=_proportional([(more_bytes, large.sync - small.sync)]),
        calls=calls,
    )


def _surface(found: Iterable[tuple[float, float, float]]) -> Surface:
    by_first: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for first, second, seconds in found:
        by_first[first].append((second, seconds))
    return Surface(tuple((first, Curve.of(points)) for first, points in sorted(by_first.items())))


def _line(points: Sequence[tuple[float, float, float]]) -> Curve:
    """The line a + b x size, a and b not below 0, nearest to (size, rest, whole) by squares of rest errors over wholes.

    Why a line: a rest is a difference of noisy times, and single points may come out below nothing.
    """
    sizes, rests, wholes = np.asarray(points, dtype=np.float64).T
    weights = 1 / np.maximum(wholes, _LEAST)
    both = np.stack([weights, weights * sizes], axis=1)
    found = np.linalg.lstsq(both, weights * rests, rcond=None)[0] if len(points) > 1 else np.asarray([-1.0, 0.0])
    if (found < 0).any():  # one of the two alone, whichever is nearer
        alone = [max(0.0, float(column @ (weights * rests) / (column @ column))) for column in both.T]
        errors = [
            float(((column * value - weights * rests) ** 2).sum()) for column, value in zip(both.T, alone, strict=True)
        ]
        found = np.asarray([alone[0], 0.0] if errors[0] <= errors[1] else [0.0, alone[1]])
    constant, slope = map(float, found)
    return Curve.of((2.0**power, constant + slope * 2.0**power) for power in range(0, 61))


def _proportional(points: Iterable[tuple[float, float]]) -> Curve:
    """A curve in proportion to the size, by the largest of the points."""
    size, seconds = max(points)
    rate = max(_LEAST, seconds) / size
    return Curve.of((2.0**power, rate * 2.0**power) for power in range(0, 61))


def _largest(steps: Iterable[tuple[float, float]], primitive: Curve) -> Curve:
    """Steps of engines, and beyond the largest those of the primitive with the same distance."""
    rest = Curve.of(steps)
    last, seconds = rest.points[-1]
    more = max(0.0, seconds - primitive(last))
    beyond = [(size, taken + more) for size, taken in primitive.points if size > last]
    return Curve.of([*rest.points, *beyond])


def _device_gib(ranks: int) -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory) / 2**30
    return float(psutil.virtual_memory().total) / 2**30 / ranks
