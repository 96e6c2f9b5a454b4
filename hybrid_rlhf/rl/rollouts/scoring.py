"""What the roles compute for sampled completions: scores and penalties, then log-probs and values.

Old log-probs come from the training forward over the same micro-batches as the first epoch, so that the first
mini-batch has a ratio of exactly 1. With a single update they are that update's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.algorithm import AlgorithmConfig, PenaltiesConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.models.policy import values_before
from hybrid_rlhf.rl.batch import MiniBatchPlan, MiniBatchPlanner, Rollout, RouterAgreement, scatter_rows
from hybrid_rlhf.rl.environments.episodes import episode_metrics
from hybrid_rlhf.rl.rewards import CompletionTexts
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.score_scaling import ScoreScaling
from hybrid_rlhf.runtime.observability.timers import Timers


class RolloutScorer:
    """Has the roles read completions."""

    def __init__(
        self,
        roles: Roles,
        *,
        algorithm: AlgorithmConfig,
        sampling: RolloutConfig,
        planner: MiniBatchPlanner,
        scaling: ScoreScaling,
        reads_reference: bool,
        tokenizer: PreTrainedTokenizerBase,
        timers: Timers,
    ) -> None:
        """Take the roles, the settings, and whether the reference's log-probs are needed."""
        self._roles, self._algorithm, self._config = roles, algorithm, sampling
        self._planner, self._scaling, self._reads_reference = planner, scaling, reads_reference
        self._tokenizer, self._timers, self._world = tokenizer, timers, roles.actor.world

    def score(
        self,
        prompts: Sequence[Mapping[str, Any]],
        rollout: Rollout,
        *,
        first: int = 0,
        greedy: bool = False,
        refill: bool = False,
    ) -> Rollout:
        """Add scores and penalties; completions that the reward drops are left out.

        Args:
            prompts: rows of the data, the same on every rank.
            rollout: equally many completions of each prompt, those of one prompt next to each other.
            first: place in the step of the first prompt.
            greedy: whether the last completion of each prompt is greedy; it becomes the greedy score of the others, and
                a prompt whose greedy completion is dropped is dropped.
            refill: the step has other completions, so that all of these may be dropped.

        Raises:
            UserError: on every rank, for a reward component without a usable score.
        """
        with self._timers("scoring"):
            report = self._roles.reward(
                rollout,
                self._planner.plan(rollout).micro_batches,
                lambda: CompletionTexts.read(prompts, rollout, self._tokenizer),
                may_drop_all=refill,
            )
        count, device = len(rollout), self._world.device
        kept = torch.ones(count, dtype=torch.bool, device=device)
        kept[report.dropped] = False
        samples, row = count // len(prompts), torch.arange(count, device=device)
        scores = report.scores
        if rollout.turn_rewards is not None:
            scores = scores + rollout.turn_rewards.sum(dim=1)
        penalties = score_penalties(
            rollout,
            self._algorithm.penalties,
            max_new_tokens=self._config.sampling.max_new_tokens,
            scores_std=self._scaling.scaled_std(scores[kept]),
        )
        scored = replace(
            rollout,
            groups=first + row // samples,
            scores=scores,
            penalties=penalties,
            metrics={**report.metrics, **episode_metrics(rollout)},
        )
        if not greedy:
            return scored.select(kept)
        last = row % samples == samples - 1
        prompt = row // samples
        scored = replace(scored, greedy_scores=scores[last][prompt], greedy_penalties=penalties[last][prompt])
        return scored.select(kept & kept[last][prompt] & ~last)

    @torch.no_grad()
    def compute_logprobs(self, rollout: Rollout, plan: MiniBatchPlan) -> Rollout:
        """Add the actor's and the reference's log-probs and the critic's values, in the micro-batches of a plan.

        The actor does not read a rollout that makes one update: its log-probs come with that update's own forward, and
        until then the generation engine's stand in, unless older weights sampled and a KL to the reference needs the
        actor's own, or a loss divides by the tokens that a correction keeps.

        Recorded routes are dropped where they are only compared, as later forwards have other weights.
        """
        roles, temperature = self._roles, self._config.sampling.temperature
        batches = [(indices, rollout.rows(indices)) for indices in plan.micro_batches]
        old, ref, values = rollout.sampled_logprobs, None, None
        routes, metrics = rollout.routes, dict(rollout.metrics)
        with self._timers("scoring"):
            if self._reads_reference:
                with self._reference() as reference:
                    ref = self._read(batches, rollout, lambda batch: _logprobs(reference, batch, temperature))
            if self._algorithm.reads_old_logprobs or (
                self._reads_reference and rollout.stale_updates(roles.actor.weight_version)
            ):
                agreement = RouterAgreement(roles.actor)
                old = self._read(batches, rollout, lambda batch: self._actor_logprobs(batch, agreement))
                if routes is not None:
                    metrics |= agreement.metrics(self._world)
                    routes = routes if self._config.routing_replay else None
            if (critic := roles.critic) is not None:
                values = self._read(
                    batches, rollout, lambda batch: values_before(critic(batch.input_ids, batch.attention_mask))
                )
        return replace(rollout, old_logprobs=old, ref_logprobs=ref, old_values=values, routes=routes, metrics=metrics)

    def _actor_logprobs(self, batch: Rollout, agreement: RouterAgreement) -> Tensor:
        logprobs = _logprobs(self._roles.actor, batch, self._config.sampling.temperature, routes=batch.padded_routes)
        agreement.add()
        return logprobs

    def _read(
        self,
        batches: Sequence[tuple[list[int | None], Rollout]],
        whole: Rollout,
        read: Callable[[Rollout], Tensor],
    ) -> Tensor:
        """[N, T] what is read of each row, whole on every rank."""
        found = torch.zeros(whole.input_ids.shape, device=self._world.device)
        for indices, batch in batches:
            scatter_rows(found, indices, read(batch))
        return self._world.all_reduce(found)  # each row is filled by one rank and zero on the others

    @contextlib.contextmanager
    def _reference(self) -> Iterator[ModelEngine]:
        reference = self._roles.reference
        with self._roles.actor.reference() if reference is None else reference.on_device():
            yield self._roles.actor if reference is None else reference


def _logprobs(engine: ModelEngine, batch: Rollout, temperature: float, *, routes: Tensor | None = None) -> Tensor:
    logprobs: Tensor = engine(batch.input_ids, batch.attention_mask, batch.response_mask, temperature, routes=routes)[0]
    return logprobs


def score_penalties(
    rollout: Rollout, config: PenaltiesConfig | None, *, max_new_tokens: int, scores_std: float
) -> Tensor:
    """[N] float32, what is subtracted from scores: for a missing end, and for length.

    Source: the EOS trick of N+ details, for scores of standard deviation 1; overlong shaping, DAPO (arXiv 2503.14476,
    eq. 13).

    Args:
        rollout: the N completions.
        config: the penalties; none: zero.
        max_new_tokens: longest completion.
        scores_std: standard deviation of the rollout's scores, the penalty for a missing end where that is "auto".
    """
    config = config or PenaltiesConfig()
    lengths = rollout.response_mask.sum(dim=1)
    missing_eos = scores_std if config.missing_eos == "auto" else config.missing_eos
    penalties = missing_eos * (~rollout.stopped) + config.length * lengths
    overlong_tokens = config.overlong_fraction * max_new_tokens
    if overlong_tokens:
        begins = rollout.response_mask.int().argmax(dim=1)
        followed = torch.where(lengths > 0, rollout.lengths - begins, 0)  # observations take room too
        overlong = (followed - (max_new_tokens - overlong_tokens)).clamp(min=0) / overlong_tokens
        penalties = penalties + config.overlong * overlong
    return penalties.float()
