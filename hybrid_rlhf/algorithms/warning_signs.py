"""What the metrics of several rollouts in a row say is going wrong, in one line with the fix.

Why: a critic that explains less than a constant adds noise to every advantage, and a policy whose answers all run into
the limit learns from unfinished ones; both show in the metrics only to who looks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybrid_rlhf.runtime.logs import LOGGER_NAME

logger = logging.getLogger(LOGGER_NAME)
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Sign:
    """Something wrong, if it lasts."""

    metric: str
    wrong: Callable[[float], bool]
    rollouts: int
    """In a row, after which it is reported; once, until it goes away."""
    advice: Callable[[Metrics], str]


def _critic_advice(metrics: Metrics) -> str:
    return (
        "the critic predicts returns worse than a constant: raise critic.optimizer.lr "
        f"({metrics.get('critic/lr', 0.0):.3g}) or critic.head_lr, let it learn alone first (ppo.critic_warmup_steps "
        f"10), or bring scores, whose deviation is {metrics.get('objective/scores_std', 0.0):.3g}, to 1 "
        "(ppo.score_scaling running)"
    )


def _length_advice(metrics: Metrics) -> str:
    return (
        "almost no completion ends by itself: raise rollout.max_new_tokens if answers need more, or "
        f"ppo.missing_eos_penalty beyond the deviation of scores, {metrics.get('objective/scores_std', 0.0):.3g}; a "
        "ppo.length_penalty helps too"
    )


SIGNS = (
    Sign("val/explained_variance", lambda value: value < 0, 10, _critic_advice),
    Sign("completions/clipped_ratio", lambda value: value > 0.9, 5, _length_advice),
)


class WarningSigns:
    """Counts them over the rollouts of a run."""

    def __init__(self, *, enabled: bool) -> None:
        """Args: whether this rank logs."""
        self._enabled = enabled
        self._counts = dict.fromkeys((sign.metric for sign in SIGNS), 0)

    def watch(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step's rollout, and warn of what has lasted too long."""
        for sign in SIGNS:
            value = metrics.get(sign.metric)
            if value is None:
                continue
            self._counts[sign.metric] = self._counts[sign.metric] + 1 if sign.wrong(value) else 0
            if self._enabled and self._counts[sign.metric] == sign.rollouts:
                logger.warning(
                    "step %d: %s is %.3g, wrong for %d rollouts in a row: %s", step, sign.metric, value, sign.rollouts,
                    sign.advice(metrics),
                )  # fmt: skip
