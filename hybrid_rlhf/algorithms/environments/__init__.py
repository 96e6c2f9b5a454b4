"""What the actor speaks with in a rollout: games, tools, verifiers. `player.py` runs the episodes."""

from hybrid_rlhf.algorithms.environments.environment import Environment, Step, load_environment
from hybrid_rlhf.algorithms.environments.player import Player

__all__ = ["Environment", "Player", "Step", "load_environment"]
