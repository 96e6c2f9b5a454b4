"""Rewards: a weighted sum of components, which are models, Python functions, HTTP endpoints, verifiers or judges.

Read `components.py` (the interface, and the rollout as text), `reward.py` (the sum, failures, metrics), then
`functions.py`, `models.py`, `endpoint.py` and `judge.py` with their `replicas.py`, and `verifiers/`.
"""

from hybrid_rlhf.rl.rewards.components import CompletionTexts, ComponentScores, RewardBatch, RewardComponent
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
