"""What calibration makes of measured times: curves that give the times back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid_rlhf.placement.costs import ATTENTION_BACKWARD, DECODE_PRODUCTS
from hybrid_rlhf.placement.curves import MachineCurves
from hybrid_rlhf.placement.machines.calibration import MeasuredSizes, measured_sizes, with_models
from hybrid_rlhf.placement.machines.layers import LONG_CONTEXT, SHORT_CONTEXT, ModelTimes, TimedBatch, TimedModel
from tests.support.placement import cost_line, machine

FORWARD, BACKWARD, GATHERED = 2e-3, 3e-3, 5e-4
"""Seconds of calls that the machine of these tests takes."""


def truth() -> MachineCurves:
    known = machine(device="cpu", calls={}, layer=cost_line(1e9, 1e-4), layer_backward=cost_line(5e8, 2e-4))
    known = replace(known, decode_layer=cost_line(1e8, 5e-5), decode_step=cost_line(1e6, 2e-4), head=cost_line(1e8))
    return replace(known, products={"float32": known.products["bfloat16"]}, decode_products=known.products)


def times_of(curves: MachineCurves, model: TimedModel, sizes: MeasuredSizes, noise: np.random.Generator) -> ModelTimes:
    """Times by the laws of the curves, each off by up to 5%."""
    shape, product, decoded = model.sizes, curves.products["float32"], curves.decode_products["bfloat16"]
    forward, backward, decode = {}, {}, {}
    for batch in sizes.batches:
        tokens = batch.rows * batch.length
        products = shape.products * product(shape.layer_weights / shape.products, tokens)
        attention = curves.attention(2.0 * shape.attention_width * batch.rows * batch.length**2)
        head, logits = product(shape.vocabulary * shape.hidden, tokens), curves.head(tokens * shape.vocabulary) / 2
        rest = curves.layer(tokens * shape.hidden) + (GATHERED if model.zero else 0.0)
        forward[batch] = FORWARD + model.layers * (products + attention + rest) + head + logits
        rest = curves.layer_backward(tokens * shape.hidden) + (GATHERED if model.zero else 0.0)
        layer = 2 * products + ATTENTION_BACKWARD * attention + rest
        backward[batch] = BACKWARD + model.layers * layer + 2 * head + logits
    for rows, context in [(rows, SHORT_CONTEXT) for rows in sizes.decoded] + [(sizes.decoded[-1], LONG_CONTEXT)]:
        layer = DECODE_PRODUCTS * decoded(shape.layer_weights / DECODE_PRODUCTS, rows)
        layer += curves.decode_layer(rows * shape.hidden) + curves.cache_reads(4.0 * rows * context * shape.cache_width)
        head = decoded(shape.vocabulary * shape.hidden, rows)
        decode[rows, context] = model.layers * layer + head + curves.decode_step(rows)
    named = [{key: value * noise.uniform(0.95, 1.05) for key, value in each.items()} for each in (forward, backward)]
    step = curves.optimizer(shape.parameters) + 1e-3
    return ModelTimes(model, *named, step=step, sync=5e-3 + 1e-9 * shape.parameters, decode=decode, whole={})


@pytest.mark.parametrize("seed", range(3))
def test_fitted_curves_give_measured_times_back(seed: int) -> None:
    known, sizes = truth(), measured_sizes(gpu=False, quick=False)
    base = replace(known, decode_products={"float32": known.decode_products["bfloat16"]})
    few, more, least = sizes.few_layers, sizes.more_layers, sizes.hidden[0]
    models = [TimedModel(count, side) for side in sizes.hidden for count in (few, more)]
    models += [
        TimedModel(few, least, sizes.vocabulary),
        TimedModel(few, least, zero=3),
        TimedModel(more, least, zero=3),
    ]
    noise = np.random.default_rng(seed)
    measured = [times_of(known, model, sizes, noise) for model in models]
    found = with_models(base, measured, sizes)
    again = replace(found, decode_products=known.decode_products)
    for times in measured[: 2 * len(sizes.hidden)]:
        predicted = times_of(again, times.model, sizes, np.random.default_rng(9))
        for batch in (TimedBatch(4, 128), TimedBatch(8, 128)):
            assert predicted.forward[batch] == pytest.approx(times.forward[batch], rel=0.25)
            assert predicted.backward[batch] == pytest.approx(times.backward[batch], rel=0.25)
        for key, seconds in times.decode.items():
            assert predicted.decode[key] == pytest.approx(seconds, rel=0.15), key
    assert 0 < found.calls["forward"] < 3 * FORWARD and found.calls["gathered_layer"] < 10 * GATHERED


def test_times_that_fall_with_size_are_no_reason_for_a_cost_below_nothing() -> None:
    sizes = measured_sizes(gpu=False, quick=True)
    known = truth()
    base = replace(known, decode_products={"float32": known.decode_products["bfloat16"]})
    few, more, least = sizes.few_layers, sizes.more_layers, sizes.hidden[0]
    models = [TimedModel(few, least), TimedModel(more, least), TimedModel(few, least, sizes.vocabulary)]
    models += [TimedModel(few, least, zero=3), TimedModel(more, least, zero=3)]
    measured = [times_of(known, model, sizes, np.random.default_rng(0)) for model in models]
    measured[1] = replace(measured[1], forward={batch: 1e-6 for batch in sizes.batches}, decode=measured[0].decode)
    found = with_models(base, measured, sizes)
    for curve in (found.layer, found.layer_backward, found.decode_layer, found.decode_step, found.head, found.copies):
        assert all(seconds > 0 for _, seconds in curve.points)
    assert all(seconds >= 0 for seconds in found.calls.values())
