"""The coefficient of the KL penalty: fixed, or steered to a target.

Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2; N details, no. 20. Deviation: a rollout counts for no more
than the horizon, so that the coefficient never turns its sign.
"""

from __future__ import annotations

from hybrid_rlhf.configs.sections.algorithm import KLConfig


class KLController:
    """Holds kl_coef; with a target, raises it when the KL is above and lowers it when below."""

    def __init__(self, config: KLConfig | None) -> None:
        """Args: the penalty; none: its coefficient is 0."""
        self.kl_coef = 0.0 if config is None else config.coef
        self._target, self._horizon = (None, 1) if config is None else (config.target, config.horizon)

    def update(self, kl: float, *, completions: int) -> None:
        """Move the coefficient after a rollout.

        Args:
            kl: mean KL a completion, in nats.
            completions: in the rollout.
        """
        if self._target is None:
            return
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * min(completions / self._horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.kl_coef = state["kl_coef"]
