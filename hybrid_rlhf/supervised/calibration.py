"""Calibration of a reward model on held-out rows, stored in the model's config.json.

`calibration` holds a temperature, mean and standard deviation of the scores. sigmoid(difference / temperature) is the
probability that a completion is preferred; with labels, sigmoid(score / temperature) is the probability that it is
good. RL standardizes scores by mean and standard deviation where a reward component sets `normalize`. A model with
several heads has lists, in the order of id2label.

Source: temperature scaling, Guo et al. 2017 (arXiv 1706.04599).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.row_views import RowSequence
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.calibration import TEMPERATURES, calibration_error, fit_temperature
from hybrid_rlhf.loop.batch_plan import BatchPlan
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.supervised.objectives.reward_pairs import CalibrationData, ScoreObjective
from hybrid_rlhf.supervised.trainer import one_pass


def require_held_out(rows: RowSequence, heads: Sequence[str]) -> None:
    """Check before training that each head has held-out rows.

    Raises:
        UserError: when a head has none.
    """
    seen = set(rows["head"]) if heads else {0} if len(rows) else set()
    missing = [name for place, name in enumerate(heads or ["the score"]) if place not in seen]
    if missing:
        raise UserError(
            f"objective.calibrate needs held-out rows of each score, {missing[0]} has none: raise data.eval_fraction"
        )


@torch.no_grad()
def collect_calibration_data(
    objective: ScoreObjective[Any], engine: ModelEngine, rows: RowSequence, plan: BatchPlan, run: Run
) -> CalibrationData:
    """Scores of a model on rows, gathered from all ranks. Every rank calls."""
    progress = run.progress("calibration", total=len(rows))
    scored = [
        objective.calibration_data(engine, objective.collate(micro))
        for batches in one_pass(rows, plan, run.world, padded=not engine.packs, progress=progress)
        for micro in batches
    ]
    mine = [torch.cat(tensors).cpu() for tensors in zip(*scored, strict=True)]
    gathered = run.world.all_gather_objects(mine)
    return CalibrationData(*map(torch.cat, zip(*gathered, strict=True)))


def calibrate(data: CalibrationData, heads: Sequence[str], *, is_main: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """The calibration for config.json, and its metrics.

    Metrics are the expected calibration errors eval/ece and eval/ece_calibrated, in [0, 1], and eval/temperature, with
    the suffix _NAME for several heads. The main rank warns if a temperature is at the limit of its range.
    """
    calibration: dict[str, list[float]] = {"temperature": [], "mean": [], "std": []}
    metrics: dict[str, float] = {}
    for place, name in enumerate(heads or [""]):
        margins: Tensor = data.margins[data.margin_heads == place]
        scores = data.scores[data.score_heads == place].double()
        temperature = fit_temperature(margins)
        if is_main and not 2 * TEMPERATURES[0] < temperature < TEMPERATURES[1] / 2:
            logger.warning(
                "calibration of %s: the held-out rows do not determine a temperature (%d of %d correct); %.3g is used",
                name or "the score",
                int((margins > 0).sum()),
                len(margins),
                temperature,
            )
        suffix = f"_{name}" if name else ""
        metrics[f"eval/ece{suffix}"] = calibration_error(margins)
        metrics[f"eval/ece_calibrated{suffix}"] = calibration_error(margins, temperature=temperature)
        metrics[f"eval/temperature{suffix}"] = temperature
        for key, value in (
            ("temperature", temperature),
            ("mean", float(scores.mean())),
            ("std", float(scores.std(correction=0))),
        ):
            calibration[key].append(value)
    return {key: values if heads else values[0] for key, values in calibration.items()}, metrics
