"""What the roles compute for sampled completions: scores and penalties, then log-probs and values.

Old log-probs come from the training forward over the same micro-batches as the first epoch, so that the first
mini-batch has a ratio of exactly 1. With a single update they are that update's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.algorithm import AlgorithmConfig, PenaltiesConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.separate.critic_copy import CriticCopy
from hybrid_rlhf.engines.separate.reader import InferenceReader
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.models.policy import values_before
from hybrid_rlhf.rl.batch import MiniBatchPlan, MiniBatchPlanner, Rollout, RouterAgreement, scatter_rows
from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.rl.rewards import CompletionTexts
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World

_Reader = ModelEngine | InferenceReader
_Batches = Callable[[_Reader | CriticCopy], list[tuple[list[int | None], Rollout]]]
"""A rank's micro-batches for a role: rows of the rollout, and these rows."""


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
        tokenizer: PreTrainedTokenizerBase,
        timers: Timers,
    ) -> None:
        """Take the roles and the settings."""
        self._roles, self._algorithm, self._config = roles, algorithm, sampling
        self._planner, self._scaling = planner, scaling
        self._tokenizer, self._timers, self._world = tokenizer, timers, roles.world

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
            rollout: equally many completions of each prompt, those of one prompt next to each other; or with `samples`
                any number, and the places of their prompts in `groups`.
            first: place in the step of the first prompt.
            greedy: whether the last completion of each prompt is greedy; it becomes the greedy score of the others, and
                a prompt whose greedy completion is dropped is dropped.
            refill: the step has other completions, so that all of these may be dropped.

        Raises:
            UserError: on every rank, for a reward component without a usable score.
        """
        plan, ref = self._planner.plan(rollout), None
        with self._timers("scoring"):
            if self._algorithm.uses_reference and self._roles.reference_beside_rewards:
                ref = torch.zeros(rollout.input_ids.shape, device=self._world.device)
            report = self._roles.reward(
                rollout,
                plan.micro_batches,
                lambda: CompletionTexts.read(prompts, rollout, self._tokenizer),
                may_drop_all=refill,
                beside=lambda: None if ref is None else self._read_reference(_batches(rollout, plan), ref),
            )
            if ref is not None:
                self._world.all_reduce(ref)
        count, device = len(rollout), self._world.device
        kept = torch.ones(count, dtype=torch.bool, device=device)
        kept[report.dropped] = False
        samples, row = count // len(prompts), torch.arange(count, device=device)
        prompt = rollout.places(len(prompts))
        scores = report.scores
        if rollout.turn_rewards is not None:
            scores = scores + row_sums(rollout.turn_rewards)
        penalties = score_penalties(
            rollout,
            self._algorithm.penalties,
            max_new_tokens=self._config.sampling.max_new_tokens,
            scores_std=self._scaling.scaled_std(scores[kept]),
        )
        scored = replace(
            rollout,
            groups=first + prompt,
            scores=scores,
            penalties=penalties,
            ref_logprobs=ref,
            components=report.components,
            metrics={**report.metrics, **episode_metrics(rollout)},
        )
        if not greedy:
            return scored.select(kept)
        last = row % samples == samples - 1
        scored = replace(scored, greedy_scores=scores[last][prompt], greedy_penalties=penalties[last][prompt])
        return scored.select(kept & kept[last][prompt] & ~last)

    @property
    def weight_version(self) -> int:
        """Updates of the actor's weights."""
        return self._roles.actor.weight_version

    @torch.no_grad()
    def compute_logprobs(self, rollout: Rollout, plan: MiniBatchPlan) -> Rollout:
        """Add the actor's and the reference's log-probs and the critic's values, in the micro-batches of a plan.

        The actor does not read a rollout that makes one update: its log-probs come with that update's own forward, and
        until then the generation engine's stand in, unless older weights or other arithmetic sampled and a KL to the
        reference needs the actor's own, or a loss divides by the tokens that a correction keeps.

        Recorded routes are dropped where they are only compared, as later forwards have other weights.
        """
        roles, metrics = self._roles, dict(rollout.metrics)
        reads_ref = self._algorithm.uses_reference and rollout.ref_logprobs is None
        other_sampler = roles.actor.rounds_otherwise or self._is_stale(rollout)
        reads_old = self._algorithm.actor_scores_rollout(other_sampler=other_sampler)
        wanted = [reads_ref, reads_old, reads_old, roles.critic is not None]
        batches, agreement = _batches(rollout, plan), RouterAgreement(self._world.device)
        # Roles on disjoint ranks read at the same time, so no rank waits for another before it has read all.
        found = torch.zeros(4, *rollout.input_ids.shape, device=self._world.device)
        with self._timers("scoring"):
            if roles.critic_copy is not None:
                roles.critic_copy.sync()  # first, so that the critic's ranks may read for the actor meanwhile
            if reads_ref:
                self._read_reference(batches, found[0])
            if reads_old:
                self._read_actor(batches, found[1], found[2], agreement)
            if roles.critic is not None:
                self._read_critic(batches, found[3])
            # each row of each is filled by one rank and zero on the others
            summed = self._world.all_reduce(found[wanted]) if any(wanted) else found[:0]
            ref, old, entropy, values = _unstacked(summed, wanted)
            if reads_old and rollout.routes is not None:
                metrics |= agreement.metrics(self._world)
        return replace(
            rollout,
            old_logprobs=rollout.sampled_logprobs if old is None else old,
            ref_logprobs=rollout.ref_logprobs if ref is None else ref,
            entropy=entropy,
            old_values=values,
            routes=None if reads_old and not self._config.routing_replay else rollout.routes,
            metrics=metrics,
        )

    def _is_stale(self, rollout: Rollout) -> bool:
        """Whether older weights sampled any token, as the first rank sees it: collectives follow from the answer."""
        return self._world.broadcast_object(bool(rollout.stale_updates(self.weight_version)))

    def _read_reference(self, batches: _Batches, found: Tensor) -> None:
        """Fill this rank's rows of the reference's log-probs [N, T]; nothing on a rank without the reference."""
        actor, reference = self._roles.actor, self._roles.reference
        if reference is None and isinstance(actor, ModelEngine):
            with actor.reference() as base:
                _read(base, batches, found, self._logprobs_of(base))
        if isinstance(reference, _Reader):
            with reference.on_device():
                _read(reference, batches, found, self._logprobs_of(reference))

    def _read_actor(self, batches: _Batches, logprobs: Tensor, entropy: Tensor, agreement: RouterAgreement) -> None:
        actor, temperature = self._roles.actor, self._config.sampling.temperature
        if not isinstance(actor, ModelEngine):
            return
        for indices, batch in batches(actor):
            found = actor(
                batch.input_ids, batch.attention_mask, batch.response_mask, temperature, routes=batch.padded_routes
            )
            agreement.add(actor)
            if actor.reports_rows:
                for whole, values in zip((logprobs, entropy), found, strict=True):
                    scatter_rows(whole, indices, values)

    def _read_critic(self, batches: _Batches, found: Tensor) -> None:
        copy = self._roles.critic_copy
        reader = self._roles.critic if copy is None else copy
        if isinstance(reader, ModelEngine | CriticCopy) and reader.world.is_member:
            _read(reader, batches, found, lambda batch: values_before(reader(batch.input_ids, batch.attention_mask)))

    def _logprobs_of(self, engine: _Reader) -> Callable[[Rollout], Tensor]:
        return lambda batch: _logprobs(engine, batch, self._config.sampling.temperature)


def _batches(rollout: Rollout, plan: MiniBatchPlan) -> _Batches:
    """This rank's micro-batches for a role, cut once for all roles on the same ranks."""

    @functools.cache
    def on(world: World, tensor_parallel: int) -> list[tuple[list[int | None], Rollout]]:
        return [(indices, rollout.rows(indices)) for indices in plan.micro_batches(world, tensor_parallel)]

    return lambda engine: on(engine.world, engine.tensor_parallel)


def _read(engine: _Reader | CriticCopy, batches: _Batches, found: Tensor, read: Callable[[Rollout], Tensor]) -> None:
    """Fill the rows of [N, T] that this rank reports with what the engine reads of them."""
    for indices, batch in batches(engine):
        values = read(batch)
        if engine.reports_rows:
            scatter_rows(found, indices, values)


def _unstacked(found: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """The rows of [wanted, N, T] at their places; none where nothing was wanted."""
    rows = iter(found)
    return [next(rows) if each else None for each in wanted]


def _logprobs(engine: _Reader, batch: Rollout, temperature: float) -> Tensor:
    logprobs: Tensor = engine(batch.input_ids, batch.attention_mask, batch.response_mask, temperature)[0]
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
