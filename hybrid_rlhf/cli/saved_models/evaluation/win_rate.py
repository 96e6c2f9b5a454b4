"""Share of prompts for which a judge prefers a model's completion to another model's."""

from __future__ import annotations

from hybrid_rlhf.cli.saved_models.evaluation.completing import complete, read_prompts
from hybrid_rlhf.cli.saved_models.evaluation.judges import EndpointJudge, RewardJudge
from hybrid_rlhf.cli.saved_models.evaluation.results import Measurement, wilson
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig


def win_rate(config: EvaluateConfig) -> Measurement:
    """Complete each prompt with both models, and judge; a tie counts as half a win. The interval is over prompts."""
    judge = RewardJudge(config) if config.judge.url is None else EndpointJudge(config.judge)
    prompts = read_prompts(config)
    with_images = next((where for where, row in prompts if row.images), None)
    if with_images is not None:
        raise UserError(f"{with_images}: judges of win_rate read text, the row has images: remove it")
    ours, theirs = ([text for (text,) in complete(config, prompts, model=model)] for model in (None, config.against))
    verdicts = judge.verdicts([row for _, row in prompts], ours, theirs)
    outcomes = [verdict.outcome for verdict in verdicts]
    counts = {
        "wins": sum(outcome > 0.5 for outcome in outcomes),
        "ties": sum(outcome == 0.5 for outcome in outcomes),
        "losses": sum(outcome < 0.5 for outcome in outcomes),
    }
    changed, unreadable = (sum(getattr(v, name) for v in verdicts) for name in ("changed_with_order", "unreadable"))
    judged = (
        {} if config.judge.url is None else {"verdicts that changed with the order": changed, "unreadable": unreadable}
    )
    return Measurement(
        f"{config.path} against {config.against}",
        {"win rate": wilson(outcomes), **counts, "prompts": len(prompts), **judged},
        [
            {"prompt": row.messages, "completion": our_text, "other": their_text, "outcome": verdict.outcome}
            for (_, row), our_text, their_text, verdict in zip(prompts, ours, theirs, verdicts, strict=True)
        ],
    )
