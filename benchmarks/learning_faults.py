"""Step 3 with one detail got wrong on purpose, for the table of what each guard is worth; not part of the library.

python -m benchmarks.learning_faults FAULT --config FILE.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hybrid_rlhf.cli.rl import main
from hybrid_rlhf.rl.mini_batches import MiniBatchPlan
from hybrid_rlhf.rl.rollouts import advantages
from hybrid_rlhf.rl.rollouts.scoring import RolloutScorer
from hybrid_rlhf.rl.types import Rollout


def old_logprobs_off_by_one() -> None:
    """Old log-probs of the token before."""
    compute_logprobs = RolloutScorer.compute_logprobs

    def wrong(self: RolloutScorer, rollout: Rollout, plan: MiniBatchPlan) -> Rollout:
        found = compute_logprobs(self, rollout, plan)
        assert found.old_logprobs is not None
        return replace(found, old_logprobs=found.old_logprobs.roll(1, dims=1))

    RolloutScorer.compute_logprobs = wrong  # type: ignore[method-assign]


def old_logprobs_renewed() -> None:
    """Old log-probs are always the current ones, so that nothing holds the policy near the one that sampled."""
    from hybrid_rlhf.rl.algorithms import algorithm

    loss = algorithm.clipped_surrogate
    algorithm.clipped_surrogate = lambda log_ratio, **others: loss(  # type: ignore[assignment]
        log_ratio - log_ratio.detach(), **others
    )


def score_on_the_last_column() -> None:
    """The score on a row's last column, which is padding where a completion stopped early."""
    shaped = advantages.shaped_rewards

    def wrong(*, scores: torch.Tensor, mask: torch.Tensor, **others: Any) -> torch.Tensor:
        rewards = shaped(scores=torch.zeros_like(scores), mask=mask, **others)
        rewards[:, -1] += scores * mask[:, -1]
        return rewards

    advantages.shaped_rewards = wrong  # type: ignore[assignment]


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (old_logprobs_off_by_one, old_logprobs_renewed, score_on_the_last_column)
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    main(sys.argv[2:])
