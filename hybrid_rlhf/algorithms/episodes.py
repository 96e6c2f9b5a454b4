"""A completion under way in a rollout: what the actor sampled, and what an environment said in between.

Tokens that were sampled are never tokenised again: their ids are appended, so that training reads what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.generation.sampling import Completion


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
    """Updates that had made the weights which sampled it."""
    rewards: list[float] | None = None
    """What an environment gave, at the last token of each turn; none: there is none."""
    stopped: bool = False
    """Whether it ended by itself."""
    failure: str | None = None
    """Why its environment could not go on."""

    @classmethod
    def of_turn(cls, prompt: Sequence[int], completion: Completion) -> Episode:
        """One that is a single turn, without an environment."""
        episode = cls(list(prompt), stopped=completion.finish_reason == "stop")
        episode.say(completion)
        return episode

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.token_ids

    def say(self, completion: Completion) -> None:
        """Add a turn of the actor."""
        self.weight_versions += [completion.weight_version] * len(completion.token_ids)
        self._add(completion.token_ids, completion.logprobs, completion.sampling_logprobs, sampled=True)

    def hear(self, token_ids: Sequence[int]) -> None:
        """Add what the actor is told."""
        zeros = [0.0] * len(token_ids)
        self.weight_versions += [0] * len(token_ids)
        self._add(token_ids, zeros, zeros, sampled=False)

    def earn(self, reward: float) -> None:
        """Give a reward to the last turn."""
        assert self.rewards is not None
        self.rewards[-1] += reward

    def _add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], drawn: Sequence[float], *, sampled: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.drawn_logprobs += drawn
        self.sampled += [sampled] * len(token_ids)
        if self.rewards is not None:
            self.rewards += [0.0] * len(token_ids)


def as_sequences(episodes: Sequence[Episode], device: torch.device) -> Sequences:
    """Episodes [N] as right-padded tensors."""
    shape = (len(episodes), max(len(episode.ids) for episode in episodes))
    ids = torch.zeros(shape, dtype=torch.long)
    attention, response = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    sampled, drawn, rewards = torch.zeros(3, *shape)
    versions = torch.zeros(shape, dtype=torch.long)
    for row, episode in enumerate(episodes):
        start, end = len(episode.prompt), len(episode.ids)
        ids[row, :end] = torch.tensor(episode.ids)
        attention[row, :end] = True
        response[row, start:end] = torch.tensor(episode.sampled)
        sampled[row, start:end] = torch.tensor(episode.logprobs)
        drawn[row, start:end] = torch.tensor(episode.drawn_logprobs)
        versions[row, start:end] = torch.tensor(episode.weight_versions)
        if episode.rewards is not None:
            rewards[row, start:end] = torch.tensor(episode.rewards)
    stopped = torch.tensor([episode.stopped for episode in episodes])
    whole = Sequences(*(x.to(device) for x in (ids, attention, response, sampled, drawn, stopped, versions)))
    if all(episode.rewards is None for episode in episodes):
        return whole
    return replace(whole, turn_rewards=rewards.to(device))


def episode_metrics(sequences: Sequences) -> dict[str, float]:
    """What environments made of a rollout, means over its episodes; {} where there are none."""
    if sequences.turn_rewards is None:
        return {}
    mask = sequences.response_mask
    begins = mask[:, 1:] & ~mask[:, :-1]  # between two turns the actor is told something, if only that it speaks next
    return {
        "environment/turns": float(begins.sum(dim=1).float().mean()),
        "environment/reward": float(sequences.turn_rewards.sum(dim=1).mean()),
        "environment/truncated": float((~sequences.stopped).float().mean()),
    }
