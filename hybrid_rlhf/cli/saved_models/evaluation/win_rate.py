"""Share of prompts for which a judge prefers a model's completion to another model's.

The judge is a reward model, or the language model of `reward.components` (rl/rewards/judge.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_rlhf.cli.saved_models.evaluation.completing import complete, read_prompts
from hybrid_rlhf.cli.saved_models.evaluation.results import Measurement, wilson
from hybrid_rlhf.cli.saved_models.loading import Place, engine_at, find_model, load_scorer
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.data.rows.formats import PromptRow
from hybrid_rlhf.rl.rewards.components import CompletionTexts
from hybrid_rlhf.rl.rewards.judge import JudgeReward
from hybrid_rlhf.rl.rewards.local_model import LocalModel
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.serving.saved_scorer import SavedScorer


def win_rate(config: EvaluateConfig) -> Measurement:
    """Complete each prompt with both models, and judge; a tie counts as half a win. The interval is over prompts.

    Raises:
        UserError: when the judge does not answer, or fails for too many prompts.
    """
    judge: Place | JudgeReward
    if config.judge.model is not None:
        judge = find_model(config, config.judge.model)
    else:
        component = RewardComponentConfig(judge=config.judge, on_failure="zero")
        judge = JudgeReward(component, device=torch.device("cpu"), local=_local(config))
    prompts = read_prompts(config)
    with_images = next((where for where, row in prompts if row.images), None)
    if with_images is not None and isinstance(judge, JudgeReward):
        raise UserError(
            f"{with_images}: a language model that judges reads text, the row has images: remove it, or give "
            "judge.model a reward model"
        )
    rows = [row for _, row in prompts]
    if isinstance(judge, JudgeReward):
        judge.require_columns(row.columns for row in rows)
    ours, theirs = ([text for (text,) in complete(config, prompts, model=model)] for model in (None, config.against))
    counted: Mapping[str, float] = {}
    if isinstance(judge, JudgeReward):
        margins, counted = _judged(judge, rows, ours, theirs)
    else:
        scorer = load_scorer(judge, max_image_pixels=config.max_image_pixels)
        margins = _rewarded(scorer, prompts, ours, theirs)
    outcomes = [0.5 + 0.5 * ((margin > 0) - (margin < 0)) for margin in margins]
    counts = {
        "wins": sum(outcome > 0.5 for outcome in outcomes),
        "ties": sum(outcome == 0.5 for outcome in outcomes),
        "losses": sum(outcome < 0.5 for outcome in outcomes),
    }
    return Measurement(
        f"{config.path} against {config.against}",
        {"win rate": wilson(outcomes), **counts, "prompts": len(prompts), **counted},
        [
            {"prompt": row.messages, "completion": our_text, "other": their_text, "outcome": outcome}
            for row, our_text, their_text, outcome in zip(rows, ours, theirs, outcomes, strict=True)
        ],
    )


def _local(config: EvaluateConfig) -> LocalModel | None:
    """The judge in this process, which is loaded after the models that it judges; None for a server."""
    if config.judge.path is None:
        return None
    place = find_model(config, config.judge.path)
    return LocalModel(config.judge, lambda: engine_at(place, kv_cache_gib=None))


def _rewarded(
    scorer: SavedScorer, prompts: Sequence[tuple[str, PromptRow]], ours: Sequence[str], theirs: Sequence[str]
) -> list[float]:
    """By how much a reward model scores our completions higher; several scores of a model are added."""
    images = [scorer.read_images(where, row.images) for where, row in prompts]
    first, second = (
        scorer.score(
            [
                (row.messages, text, row.tools, of_row)
                for (_, row), text, of_row in zip(prompts, texts, images, strict=True)
            ]
        )
        for texts in (ours, theirs)
    )
    return [sum(our_scores) - sum(their_scores) for our_scores, their_scores in zip(first, second, strict=True)]


def _judged(
    judge: JudgeReward, rows: Sequence[PromptRow], ours: Sequence[str], theirs: Sequence[str]
) -> tuple[list[float], Mapping[str, float]]:
    """By how much a judge scores our completions higher, 0 where it gives no score, and what it cost."""
    logger.info("scoring %d pairs by %s", len(rows), judge.model)
    names = dict.fromkeys(name for row in rows for name in row.columns)
    texts = CompletionTexts(
        [row.messages for row in rows] * 2,
        [*ours, *theirs],
        {name: [row.columns.get(name) for row in rows] * 2 for name in names},
    )
    found = judge.score(texts, [*range(len(rows))] * 2)
    if len(found.failures) > judge.max_failure_fraction * len(texts):
        raise UserError(
            f"a judge may fail for {judge.max_failure_fraction:.0%} of the completions, {judge.model} does for "
            f"{len(found.failures)} of {len(texts)}: {next(iter(found.failures.values()))}; use another, or raise "
            "judge.max_failure_fraction"
        )
    margins = [
        0.0 if our_score is None or their_score is None else our_score - their_score
        for our_score, their_score in zip(found.values[: len(rows)], found.values[len(rows) :], strict=True)
    ]
    return margins, {"without a verdict": len(found.failures) // 2, **judge.metrics(found.counts)}
