"""Multi-turn completions: turns of the actor, with observations of an environment in between.

Sampled tokens are never tokenized again. Their ids are appended, so that training sees exactly what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hybrid_rlhf.generation.sampling import Completion
from hybrid_rlhf.rl.batch import Rollout


@dataclass
class Episode:
    """One sample of a prompt. Lists have an entry for each token after the prompt."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    """Whether the actor sampled it."""
    logprobs: list[float] = field(default_factory=list)
    drawn_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    """Number of updates of the weights that sampled it."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each turn, at its last token."""
    routes: np.ndarray | None = None
    """[tokens of the prompt and all turns so far, mixtures, experts per token], see Completion; the last turn's, which
    has those of earlier tokens as the keys and values that it reads had them."""
    stopped: bool = False
    """Whether the episode ended by itself."""
    failure: str | None = None
    """Why the environment failed; none: it did not."""

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.token_ids

    def add_turn(self, completion: Completion) -> None:
        """Append a turn of the actor."""
        self.weight_versions += completion.weight_versions
        self.routes = completion.routes
        self._add(completion.token_ids, completion.logprobs, completion.sampling_logprobs, sampled=True)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append what the actor reads before its next turn."""
        zeros = [0.0] * len(token_ids)
        self.weight_versions += [0] * len(token_ids)
        self._add(token_ids, zeros, zeros, sampled=False)

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last turn."""
        self.turn_rewards[-1] += reward

    def _add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], drawn: Sequence[float], *, sampled: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.drawn_logprobs += drawn
        self.sampled += [sampled] * len(token_ids)
        self.turn_rewards += [0.0] * len(token_ids)


def as_rollout(episodes: Sequence[Episode], device: torch.device) -> Rollout:
    """Episodes [N] as right-padded tensors."""
    return Rollout.padded(
        [episode.prompt for episode in episodes],
        [episode.token_ids for episode in episodes],
        sampled=[episode.sampled for episode in episodes],
        logprobs=[episode.logprobs for episode in episodes],
        drawn_logprobs=[episode.drawn_logprobs for episode in episodes],
        weight_versions=[episode.weight_versions for episode in episodes],
        stopped=[episode.stopped for episode in episodes],
        turn_rewards=[episode.turn_rewards for episode in episodes],
        routes=[episode.routes for episode in episodes],
        device=device,
    )


def episode_metrics(rollout: Rollout) -> dict[str, float]:
    """Turns, rewards and truncation, means over episodes; {} without an environment."""
    if rollout.turn_rewards is None:
        return {}
    mask = rollout.response_mask
    begins = mask[:, 1:] & ~mask[:, :-1]  # the template has at least one token between two turns
    return {
        "environment/turns": float(begins.sum(dim=1).float().mean()),
        "environment/reward": float(rollout.turn_rewards.sum(dim=1).mean()),
        "environment/truncated": float((~rollout.stopped).float().mean()),
    }
