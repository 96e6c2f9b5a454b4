"""What calibration makes of measured times: curves that give the times back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.costs.passes import ATTENTION_BACKWARD, DECODE_PRODUCTS
from hybrid_rlhf.planning.curves import Curve, MachineCurves
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import StepLengths, read_job
from hybrid_rlhf.planning.machines.calibration import MeasuredSizes, measured_sizes
from hybrid_rlhf.planning.machines.fitting import fit, with_models
from hybrid_rlhf.planning.machines.layers import (
    LONG_CONTEXT,
    MEAN_NEW_TOKENS,
    SHORT_CONTEXT,
    ModelTimes,
    TimedBatch,
    TimedModel,
)
from hybrid_rlhf.planning.machines.runs import RunTimes, with_runs
from hybrid_rlhf.planning.plans import StepPlan, flattening
from hybrid_rlhf.planning.step_time import step_time
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.placement import cost_line, cpu_machine, machine
from tests.support.tiny import tiny_config

FORWARD, BACKWARD, GATHERED, PREFILL, COMPLETION = 2e-3, 3e-3, 5e-4, 2e-3, 1e-4
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
    whole = {}
    for rows, context in [(rows, SHORT_CONTEXT) for rows in sizes.decoded] + [(sizes.decoded[-1], LONG_CONTEXT)]:
        tokens = context + MEAN_NEW_TOKENS
        layer = DECODE_PRODUCTS * decoded(shape.layer_weights / DECODE_PRODUCTS, rows)
        layer += curves.decode_layer(rows * shape.hidden) + curves.cache_reads(4.0 * rows * tokens * shape.cache_width)
        head = decoded(shape.vocabulary * shape.hidden, rows)
        decode[rows, context] = model.layers * layer + head + curves.decode_step(rows)
        prompts = rows * context
        layer = DECODE_PRODUCTS * product(shape.layer_weights / DECODE_PRODUCTS, prompts)
        layer += curves.attention(2.0 * shape.attention_width * prompts * context) + curves.layer(
            prompts * shape.hidden
        )
        whole[rows, context] = PREFILL + rows * COMPLETION + model.layers * layer + 5 * decode[rows, context]
    named = [{key: value * noise.uniform(0.95, 1.05) for key, value in each.items()} for each in (forward, backward)]
    step = curves.optimizer(shape.parameters) + 1e-3
    return ModelTimes(model, *named, step=step, sync=5e-3 + 1e-9 * shape.parameters, decode=decode, whole=whole)


@pytest.mark.parametrize("seed", range(3))
def test_fitted_curves_give_measured_times_back(seed: int) -> None:
    known, sizes = truth(), measured_sizes(gpu=False, quick=False)
    base = replace(known, decode_products={"float32": known.decode_products["bfloat16"]})
    noise = np.random.default_rng(seed)
    measured = [times_of(known, model, sizes, noise) for model in sizes.models]
    found = with_models(base, measured)
    again = replace(found, decode_products=known.decode_products)
    for times in measured:
        predicted = times_of(again, times.model, sizes, np.random.default_rng(9))
        for batch in (TimedBatch(4, 128), TimedBatch(4, 256)):
            assert predicted.forward[batch] == pytest.approx(times.forward[batch], rel=0.25)
            assert predicted.backward[batch] == pytest.approx(times.backward[batch], rel=0.25)
        for key, seconds in times.decode.items():
            assert predicted.decode[key] == pytest.approx(seconds, rel=0.15), key
    assert found.calls["forward"] == pytest.approx(FORWARD, rel=0.3)
    for kind in ("forward", "backward"):
        assert found.gathered_layer(kind, 1) == pytest.approx(GATHERED, rel=0.8)
    assert found.calls["completion"] == pytest.approx(COMPLETION, rel=0.2)


def test_costs_of_terms_are_found_beside_known_ones_and_in_spite_of_a_wrong_time() -> None:
    terms = [{"call": 1.0, "size": float(size), "none": float(size % 3)} for size in range(1, 12)]
    seconds = [0.5 + 2.0 + 0.25 * each["size"] for each in terms]
    seconds[4] *= 3
    found = fit(terms, seconds, known=[0.5] * len(terms))
    assert found == pytest.approx({"call": 2.0, "size": 0.25, "none": 0.0}, abs=0.02)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_quick_calibration_tells_what_a_step_takes_whatever_its_size(gpu: bool) -> None:
    least, *_, most = (each.prompts for each in measured_sizes(gpu=gpu, quick=True).runs)
    assert most >= 16 * least


def test_times_that_fall_with_size_are_no_reason_for_a_cost_below_nothing() -> None:
    sizes = measured_sizes(gpu=False, quick=True)
    known = truth()
    base = replace(known, decode_products={"float32": known.decode_products["bfloat16"]})
    measured = [times_of(known, model, sizes, np.random.default_rng(0)) for model in sizes.models]
    measured[1] = replace(measured[1], forward={batch: 1e-6 for batch in sizes.batches}, decode=measured[0].decode)
    found = with_models(base, measured)
    for curve in (found.layer, found.layer_backward, found.decode_layer, found.decode_step, found.head, found.copies):
        assert all(seconds > 0 for _, seconds in curve.points)
    assert all(seconds >= 0 for seconds in found.calls.values())


SIZES = [(1, 64, 8), (1, 64, 64), (1, 64, 256), (1, 256, 32), (1, 512, 32), (2, 64, 32), (2, 256, 32)]
"""Ranks, width and prompts of runs."""


def seconds_of(curves: MachineCurves, config: RLConfig, ranks: int, lengths: StepLengths) -> dict[str, float]:
    """Of a step with all roles on all ranks."""
    job = read_job(config, torch.device("cpu"), lengths=lengths)
    costs = Costs(job, curves, Cluster(ranks, ranks))
    found = step_time(costs, StepPlan(flattening([*job.roles], ranks, zero={})), rows_at_once=10**6)
    return {**found.phases, "other": found.phases["loop"], "step": found.step_seconds}


def test_runs_correct_passes_updates_and_how_ranks_share_cores(tmp_path: Path) -> None:
    base = cpu_machine()
    truth = replace(
        base,
        corrections={"forward": 1.4, "backward": 1.2},
        calls={**base.calls, "read": 3e-3, "read_token": 1e-6, "trained_token": 2e-6},
        update=Curve.of([(1, 1e-3), (2, 4e-3)]),
        slowdown=Curve.of([(1, 1.0), (2, 1.3)]),
        shared_training=Curve.of([(1, 1.0), (2, 1.2)]),
        shared_loop=Curve.of([(1, 1.0), (2, 2.0)]),
    )
    runs = []
    for number, (ranks, hidden, prompts) in enumerate(SIZES):
        folder = tmp_path / str(number)
        tiny_config(hidden_size=hidden, num_hidden_layers=2).save_pretrained(folder)
        words = f"--model.path {folder} --reward.components [{folder}] --rollout.prompts_per_step {prompts}"
        config = parse_config(RLConfig, words.split())
        times = seconds_of(truth, config, ranks, StepLengths(32.0, (32,) * prompts))
        runs.append((ranks, RunTimes(config, 32.0, 32.0, times)))
    found = with_runs(base, runs)
    for ranks, run in runs:
        lengths = StepLengths(32.0, (32,) * run.config.rollout.prompts_per_step)
        predicted, before = (seconds_of(each, run.config, ranks, lengths) for each in (found, base))
        for phase in ("scoring", "training", "step"):
            assert predicted[phase] == pytest.approx(run.seconds[phase], rel=0.03), (ranks, phase)
            assert before[phase] < 0.9 * run.seconds[phase]
    assert found.slowed(2) == pytest.approx(1.3, rel=0.05)
