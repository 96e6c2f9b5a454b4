"""What models take beyond the primitives of their layers, fitted to the times of all timed models together.

The time of a pass is a sum of terms (the call, layers, elements, products, ...), each with a cost that is not below
nothing. The costs of a kind of work come from one regression over all models, by least absolute relative errors
(iteratively reweighted least squares, Holland and Welsch 1977): differences of single times would carry the noise of
both, and a time that other work on the machine lengthened changes little.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.optimize import nnls

from hybrid_rlhf.models.head_check import PROBE_TOKENS
from hybrid_rlhf.planning.costs.passes import ATTENTION_BACKWARD, ModelPasses, PassedTokens
from hybrid_rlhf.planning.curves import Curve, MachineCurves
from hybrid_rlhf.planning.machines.layers import MEAN_NEW_TOKENS, SHORT_STEPS, ModelTimes, TimedBatch

_LEAST = 1e-12
"""Seconds of a term of size 1 that costs nothing; curves are above 0."""
_REWEIGHTED = 8
SCALES = (0.5, 2.0)
"""Factors of primitives within models, at least and at most."""
_SMALLEST_ERROR = 0.01
"""Relative error below which an error counts by its square."""


def with_models(curves: MachineCurves, models: Sequence[ModelTimes]) -> MachineCurves:
    """The curves of primitives, scaled to what models reach, with what models take beyond them."""
    curves = _with_passes(curves, models)
    # an optimizer step of an engine takes more than its AdamW: what it takes at each size
    steps = [(times.model.sizes.parameters, times.step) for times in models if not times.model.zero]
    return _with_decoding(replace(curves, optimizer=_largest(steps, curves.optimizer)), models)


def fit(
    terms: Sequence[Mapping[str, float]], seconds: Sequence[float], *, known: Sequence[float] | None = None
) -> dict[str, float]:
    """Costs of terms, none below 0, whose sums, beside the `known` seconds, have the least absolute relative errors."""
    names = list(terms[0])
    whole = np.asarray(seconds, dtype=np.float64)
    target = 1 - np.asarray(known or [0.0] * len(whole)) / whole
    sizes = np.asarray([[each[name] for name in names] for each in terms], dtype=np.float64)
    largest = np.maximum(sizes.max(axis=0), 1e-300)
    sizes = sizes / largest / whole[:, None]
    weights = np.ones_like(target)
    for _ in range(_REWEIGHTED):
        costs, _ = nnls(sizes * weights[:, None], target * weights)
        weights = 1 / np.sqrt(np.maximum(abs(sizes @ costs - target), _SMALLEST_ERROR))
    return {name: float(cost) for name, cost in zip(names, costs / largest, strict=True)}


def _with_passes(curves: MachineCurves, models: Sequence[ModelTimes]) -> MachineCurves:
    """With products and attention scaled, the rest of a layer, the head, ZeRO-3's gathers, and calls."""
    name = next(iter(curves.products))
    passes = [(times, batch) for times in models for batch in times.forward]
    forward = [times.forward[batch] for times, batch in passes]
    reached = fit([_primitives(curves, *each) | _rests(*each) for each in passes], forward)
    curves = replace(
        curves,
        products={**curves.products, name: curves.products[name].scaled(_scale(reached["products"]))},
        attention=curves.attention.scaled(_scale(reached["attention"])),
    )
    primitives = [_primitives(curves, *each) for each in passes]
    rests = [_rests(*each) for each in passes]
    ahead = fit(rests, forward, known=[each["products"] + each["attention"] for each in primitives])
    back = fit(
        rests,
        [times.backward[batch] for times, batch in passes],
        known=[2 * each["products"] + ATTENTION_BACKWARD * each["attention"] for each in primitives],
    )
    calls = {"forward": ahead["call"], "backward": back["call"]}
    gathered = {"forward": ahead["gathered_layers"], "backward": back["gathered_layers"]}
    return replace(
        curves,
        layer=Curve.line(ahead["layers"], ahead["elements"]),
        layer_backward=Curve.line(back["layers"], back["elements"]),
        head=Curve.line(0.0, ahead["logits"] + back["logits"]),
        calls={**curves.calls, **calls},
        gathered={kind: Curve.of([(1, seconds)]) for kind, seconds in gathered.items()},
    )


def with_gathers(curves: MachineCurves, sharded: Sequence[tuple[int, ModelTimes]]) -> MachineCurves:
    """The curves with ZeRO-3's bookkeeping on several ranks: what a pass takes beyond compute and collectives.

    Args:
        curves: that the machine has so far.
        sharded: times of models under ZeRO-3, with the number of their ranks.
    """
    found: dict[str, dict[int, list[float]]] = {"forward": defaultdict(list), "backward": defaultdict(list)}
    for ranks, times in sharded:
        sizes = times.model.sizes
        slowed = curves.slowed(ranks)
        passes = _passes(curves, times)
        item_bytes = passes.dtype.itemsize
        exchanged = partial(curves.collective, ranks=ranks, hosts=1)
        gathers = sizes.layers * exchanged("all_gather", size_bytes=item_bytes * sizes.layer_weights)
        gathers += exchanged("all_gather", size_bytes=item_bytes * sizes.rest_parameters)
        reduced = exchanged("reduce_scatter", size_bytes=item_bytes * sizes.trained)
        for batch in times.forward:
            passed = PassedTokens.of_rows(batch.rows, batch.length)
            rest = times.forward[batch] - slowed * passes.forward(passed) - gathers
            found["forward"][ranks].append(rest / sizes.layers)
            rest = times.backward[batch] - slowed * passes.backward(passed) - gathers - reduced
            found["backward"][ranks].append(rest / sizes.layers)
    gathered = {
        kind: Curve.of([*curves.gathered[kind].points, *((n, statistics.median(each)) for n, each in by_ranks.items())])
        for kind, by_ranks in found.items()
    }
    return replace(curves, gathered=gathered)


def _primitives(curves: MachineCurves, times: ModelTimes, batch: TimedBatch) -> dict[str, float]:
    """Seconds of a forward's products and attention."""
    passes = _passes(curves, times)
    passed = PassedTokens.of_rows(batch.rows, batch.length)
    return {
        "products": times.model.layers * passes.products(passed.tokens) + passes.head(passed.head_tokens),
        "attention": times.model.layers * passes.attention(passed.squares),
    }


def _rests(times: ModelTimes, batch: TimedBatch) -> dict[str, float]:
    """Sizes of what else a pass takes."""
    sizes = times.model.sizes
    tokens = batch.rows * batch.length
    return {
        "call": 1.0,
        "layers": sizes.layers,
        "elements": sizes.layers * tokens * sizes.hidden,
        "logits": tokens * sizes.vocabulary,
        "gathered_layers": sizes.layers * bool(times.model.zero),
    }


def _with_decoding(curves: MachineCurves, models: Sequence[ModelTimes]) -> MachineCurves:
    """With decoding steps, prefills, weight syncs, and calls of generation."""
    name = next(iter(curves.decode_products))
    rollouts = [(times, rows, context) for times in models for rows, context in times.decode]
    steps = [times.decode[rows, context] for times, rows, context in rollouts]
    reached = fit([{"products": _decode_products(curves, *each)} | _decode_rests(*each) for each in rollouts], steps)
    scaled = curves.decode_products[name].scaled(_scale(reached["products"]))
    curves = replace(curves, decode_products={**curves.decode_products, name: scaled})
    products = [_decode_products(curves, *each) for each in rollouts]
    rest = fit([_decode_rests(*each) for each in rollouts], steps, known=products)
    curves = replace(
        curves,
        cache_reads=Curve.line(0.0, rest["cache"]),
        decode_layer=Curve.line(rest["layers"], rest["elements"]),
        decode_step=Curve.line(rest["step"], rest["rows"]),
    )
    calls = fit(
        [{"call": 1.0, "completions": each[1], "prefill": _prefill(curves, *each)} for each in rollouts],
        [times.whole[rows, context] for times, rows, context in rollouts],
        known=[SHORT_STEPS * seconds for seconds in steps],
    )
    synced = [times for times in models if times.decode]
    sync = fit(
        [{"call": 1.0, "bytes": 4 * times.model.sizes.parameters} for times in synced],
        [times.sync for times in synced],
        known=[_check(curves, times) for times in synced],
    )
    return replace(
        curves,
        copies=Curve.line(0.0, sync["bytes"]),
        calls={
            **curves.calls,
            "generation": sync["call"],
            "prefill": calls["call"],
            "completion": calls["completions"],
        },
        corrections={**curves.corrections, "prefill": max(_LEAST, calls["prefill"])},
    )


def _decode_products(curves: MachineCurves, times: ModelTimes, rows: int, context: int) -> float:
    return float(_passes(curves, times).decode_products(np.asarray([float(rows)]))[0])


def _decode_rests(times: ModelTimes, rows: int, context: int) -> dict[str, float]:
    """Sizes of what else a decoding step takes."""
    sizes = times.model.sizes
    tokens = context + MEAN_NEW_TOKENS
    return {
        "step": 1.0,
        "rows": rows,
        "layers": sizes.layers,
        "elements": sizes.layers * rows * sizes.hidden,
        "cache": 4.0 * sizes.layers * rows * tokens * sizes.cache_width,
    }


def _prefill(curves: MachineCurves, times: ModelTimes, rows: int, context: int) -> float:
    """Seconds of the layers of a prefill."""
    tokens = float(rows * context)
    return times.model.layers * _passes(curves, times).split_layer(tokens, tokens * context)


def _check(curves: MachineCurves, times: ModelTimes) -> float:
    """Seconds of the check of a weight sync."""
    passes = _passes(curves, times)
    return passes.forward(PassedTokens.of_rows(1, PROBE_TOKENS)) + passes.probe()


def _passes(curves: MachineCurves, times: ModelTimes) -> ModelPasses:
    """The passes of a timed model, whose weights have the first dtype of the curves."""
    return ModelPasses(curves, times.model.sizes, getattr(torch, next(iter(curves.products))))


def _scale(reached: float) -> float:
    """A primitive's time within models over its time alone: caches differ, sizes do not."""
    low, high = SCALES
    return min(high, max(low, reached))


def _largest(steps: Iterable[tuple[float, float]], primitive: Curve) -> Curve:
    """Steps of engines, and beyond the largest those of the primitive with the same distance."""
    rest = Curve.of(steps)
    last, seconds = rest.points[-1]
    more = max(0.0, seconds - primitive(last))
    beyond = [(size, taken + more) for size, taken in primitive.points if size > last]
    return Curve.of([*rest.points, *beyond])
