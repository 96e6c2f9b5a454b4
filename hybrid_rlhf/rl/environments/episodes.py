"""Multi-turn completions: turns of the actor, with observations of an environment in between.

Sampled tokens are never tokenized again. Their ids are appended, so that training sees exactly what was sampled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams
from hybrid_rlhf.rl.batch import Rollout
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)


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
    sample: int | None = None
    """Number among the samples of its prompt, where an episode may have several sequences; none: it is one."""

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


class EpisodeRunner(Protocol):
    """Runs the episodes of a rollout."""

    def run(
        self,
        generation: GenerationEngine,
        prompts: Sequence[Mapping[str, Any]],
        requests: Sequence[SamplingParams],
        together: World,
        timers: Timers,
        *,
        record_routes: Sequence[bool] | None = None,
        on_completed: Callable[[int], None] | None = None,
    ) -> list[list[Episode]]:
        """Run episodes from prompts to their ends.

        Args:
            generation: generation engine of the actor.
            prompts: rows of `load_prompt_data`.
            requests: sampling parameters of each prompt, with a seed.
            together: tensor-parallel ranks; the first one has the environments.
            timers: timers of generation and environment.
            record_routes: for each prompt, whether the experts of its episodes are recorded; none: of no prompt.
            on_completed: called while the episodes run with the number of those that have ended since.

        Returns:
            the episodes of each prompt, n of them, or with `Episode.sample` any number of their sequences. With
            on_failure stop, the others are incomplete once one has failed.
        """

    def check_failures(self, episodes: Sequence[Episode], world: World) -> None:
        """Report the failures of a rollout; the same on every rank.

        Raises:
            UserError: for any failure if on_failure is stop.
        """


def environment_row(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the data as environments receive it."""
    return {**json.loads(prompt["columns"]), "prompt": json.loads(prompt["prompt"])}


def report_failures(episodes: Sequence[Episode], config: EnvironmentConfig, world: World) -> None:
    """See `EpisodeRunner.check_failures`."""
    reasons = [episode.failure for episode in episodes if episode.failure is not None]
    if not reasons:
        return
    where = f"in {len(reasons)} of {len(episodes)} episodes: {reasons[0]}"
    if config.on_failure == "stop":
        raise UserError(f"environment {config.name} failed {where}; fix it, or set environment.on_failure to zero")
    if world.is_main:
        logger.warning("environment %s gives 0 and ends %s", config.name, where)


def as_rollout(episodes: Sequence[Episode], device: torch.device, *, places: Sequence[int] = ()) -> Rollout:
    """Episodes [N] as right-padded tensors; those with `sample` without the ones that have no tokens.

    Args:
        episodes: in the order of their prompts.
        device: of the tensors.
        places: of their prompts, for those with `sample`.

    Raises:
        UserError: when no episode has tokens.
    """
    if not episodes or episodes[0].sample is None:
        return _padded(episodes, device)
    kept = [(place, each) for place, each in zip(places, episodes, strict=True) if each.token_ids]
    if not kept:
        raise UserError(f"environment.program must make requests, none of {len(episodes)} episodes has: fix it")
    rollout = _padded([each for _, each in kept], device)
    groups = torch.tensor([place for place, _ in kept], device=device)
    return replace(rollout, groups=groups, samples=torch.tensor([each.sample for _, each in kept], device=device))


def _padded(episodes: Sequence[Episode], device: torch.device) -> Rollout:
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
    turns, rewards = begins.sum(dim=1).float(), rollout.turn_rewards.sum(dim=1)
    whole = {"environment/truncated": float((~rollout.stopped).float().mean())}
    if rollout.samples is None:
        return {**whole, "environment/turns": float(turns.mean()), "environment/reward": float(rewards.mean())}
    first, _ = rollout.episodes()
    return {
        **whole,
        "environment/turns": float(turns.sum() / len(first)),
        "environment/reward": float(rewards[first].mean()),
        "environment/sequences": len(mask) / len(first),
    }
