"""After step 2: what its scores mean, measured on the held-out rows and kept in the model's config.json.

`calibration` there has a temperature, under which sigmoid(difference / temperature) is the chance that an answer is
preferred (of labels sigmoid(score / temperature), that it is good), and mean and deviation of the scores, which step 3
takes away where a part of the reward says `normalise`. Of several heads each is a list in the order of id2label.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.reward import Judgements, ScoreObjective
from hybrid_rlhf.algorithms.supervised import each_once
from hybrid_rlhf.configs.batch_plan import BatchPlan
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.augmented import Rows
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.calibration import TEMPERATURES, calibration_error, fit_temperature
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Run

logger = logging.getLogger(LOGGER_NAME)


def require_held_out(rows: Rows, heads: Sequence[str]) -> None:
    """Each score needs rows to be held against; told before training.

    Raises:
        UserError: when one has none.
    """
    seen = set(rows["head"]) if heads else {0} if len(rows) else set()
    lacking = [name for place, name in enumerate(heads or ["the score"]) if place not in seen]
    if lacking:
        raise UserError(
            f"preference.calibrate needs held-out rows of each score, {lacking[0]} has none: raise data.eval_fraction"
        )


@torch.no_grad()
def read_judgements(
    objective: ScoreObjective[Any], engine: ModelEngine, rows: Rows, plan: BatchPlan, run: Run
) -> Judgements:
    """What the model says of rows, of all ranks; every rank calls."""
    progress = run.progress("calibration", total=len(rows))
    told = [
        objective.judgements(engine, objective.collate(micro))
        for batches in each_once(rows, plan, run.world, padded=not engine.packs, progress=progress)
        for micro in batches
    ]
    names = [field.name for field in fields(Judgements)]
    mine = {name: torch.cat([getattr(part, name) for part in told]).cpu() for name in names}
    everyones = run.world.all_gather_objects(mine)
    return Judgements(**{name: torch.cat([part[name] for part in everyones]) for name in names})


def calibrate(
    judgements: Judgements, heads: Sequence[str], *, is_main: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """What config.json is to hold, and the metrics: eval/ece of the scores as they are and eval/ece_calibrated, both in
    [0, 1], and eval/temperature; of several heads each with _NAME. The main rank tells where there is none."""
    kept: dict[str, list[float]] = {"temperature": [], "mean": [], "std": []}
    metrics: dict[str, float] = {}
    for place, name in enumerate(heads or [""]):
        leads: Tensor = judgements.leads[judgements.lead_heads == place]
        scores = judgements.scores[judgements.score_heads == place].double()
        temperature = fit_temperature(leads)
        if is_main and not 2 * TEMPERATURES[0] < temperature < TEMPERATURES[1] / 2:
            logger.warning(
                "calibration of %s: the held-out rows set no temperature, %d of %d are judged right; %.3g is kept",
                name or "the score", int((leads > 0).sum()), len(leads), temperature,
            )  # fmt: skip
        end = f"_{name}" if name else ""
        metrics[f"eval/ece{end}"] = calibration_error(leads)
        metrics[f"eval/ece_calibrated{end}"] = calibration_error(leads, temperature=temperature)
        metrics[f"eval/temperature{end}"] = temperature
        for key, value in (
            ("temperature", temperature), ("mean", float(scores.mean())), ("std", float(scores.std(correction=0))),
        ):  # fmt: skip
            kept[key].append(value)
    return {key: values if heads else values[0] for key, values in kept.items()}, metrics
