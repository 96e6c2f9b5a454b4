"""Rewards: a weighted sum of components, which are models, Python functions or HTTP endpoints.

Read `components.py` (the interface), `reward.py` (the sum, failures, metrics), then `functions.py`, `models.py` and
`endpoint.py` with `replies.py`. `completion_texts.py` is the rollout as text.
"""

from hybrid_rlhf.rl.rewards.completion_texts import CompletionTexts
from hybrid_rlhf.rl.rewards.components import ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.rewards.reward import Reward, RewardReport, build_reward

__all__ = [
    "CompletionTexts",
    "ComponentScores",
    "Reward",
    "RewardComponent",
    "RewardReport",
    "RewardBatch",
    "build_reward",
]
