"""Rewards from anywhere: models, Python functions and HTTP endpoints, weighted, summed and logged by name."""

from hybrid_rlhf.algorithms.rewards.answers import Answers
from hybrid_rlhf.algorithms.rewards.parts import Ratings, RewardPart, Share
from hybrid_rlhf.algorithms.rewards.reward import Reward, RewardReport, build_reward

__all__ = ["Answers", "Ratings", "Reward", "RewardPart", "RewardReport", "Share", "build_reward"]
