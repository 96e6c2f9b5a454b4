"""Step 3 with one detail got wrong on purpose, for the table of what each guard is worth; not part of the library.

python -m benchmarks.learning_faults FAULT --config FILE.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hybrid_rlhf.algorithms import rollout
from hybrid_rlhf.algorithms.scoring import Scored
from training.step3_ppo.main import main


def old_logprobs_off_by_one() -> None:
    """Old log-probs of the token before."""
    score = rollout.Rollout.score

    def wrong(self: rollout.Rollout, *arguments: Any) -> Scored:
        scored = score(self, *arguments)
        return replace(scored, old_logprobs=scored.old_logprobs.roll(1, dims=1))

    rollout.Rollout.score = wrong  # type: ignore[method-assign]


def old_logprobs_renewed() -> None:
    """Old log-probs are always the current ones, so that nothing holds the policy near the one that sampled."""
    from hybrid_rlhf.algorithms.on_policy import algorithm

    loss = algorithm.ppo_policy_loss
    algorithm.ppo_policy_loss = lambda logprobs, **others: loss(  # type: ignore[assignment]
        logprobs, **{**others, "old_logprobs": logprobs.detach()}
    )


def score_on_the_last_column() -> None:
    """The score on a row's last column, which is padding where a completion stopped early."""
    shaped = rollout.shaped_rewards

    def wrong(*, scores: torch.Tensor, mask: torch.Tensor, **others: Any) -> torch.Tensor:
        rewards = shaped(scores=torch.zeros_like(scores), mask=mask, **others)
        rewards[:, -1] += scores * mask[:, -1]
        return rewards

    rollout.shaped_rewards = wrong  # type: ignore[assignment]


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (old_logprobs_off_by_one, old_logprobs_renewed, score_on_the_last_column)
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    main(sys.argv[2:])
