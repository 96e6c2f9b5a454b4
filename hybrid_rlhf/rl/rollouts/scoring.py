"""Values that the roles compute for sampled completions: scores and penalties, then log-probs and values.

Old log-probs come from the training forward over the same micro-batches as the first epoch, so that the first
mini-batch has a ratio of exactly 1. With a single update they come from the forward of that update.
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
"""A rank's micro-batches for a role: row indices of the rollout, and these rows."""


class RolloutScorer:
    """Scores completions by the reward, and reads them with actor, reference and critic."""

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
        self._roles = roles
        self._algorithm = algorithm
        self._config = sampling
        self._planner = planner
        self._scaling = scaling
        self._tokenizer = tokenizer
        self._timers = timers
        self._world = roles.world

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
            rollout: the same number of completions of each prompt, those of one prompt adjacent; or with `samples` any
                number, and the indices of their prompts in `groups`.
            first: place in the step of the first prompt.
            greedy: true if the last completion of each prompt is greedy; its score becomes the greedy score of the
                others, and a prompt is dropped if its greedy completion is.
            refill: true if the step has other completions, so that all of these may be dropped.

        Raises:
            UserError: on every rank, for a reward component without a usable score.
        """
        plan = self._planner.plan(rollout)
        ref = None
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
        count = len(rollout)
        device = self._world.device
        accepted = torch.ones(count, dtype=torch.bool, device=device)
        accepted[report.dropped] = False
        samples = count // len(prompts)
        row = torch.arange(count, device=device)
        prompt = rollout.places(len(prompts))
        scores = report.scores
        if rollout.turn_rewards is not None:
            scores = scores + row_sums(rollout.turn_rewards)
        penalties = score_penalties(
            rollout,
            self._algorithm.penalties,
            max_new_tokens=self._config.sampling.max_new_tokens,
            scores_std=self._scaling.scaled_std(scores[accepted]),
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
            return scored.select(accepted)
        last = row % samples == samples - 1
        scored = replace(scored, greedy_scores=scores[last][prompt], greedy_penalties=penalties[last][prompt])
        return scored.select(accepted & accepted[last][prompt] & ~last)

    @property
    def weight_version(self) -> int:
        """Number of updates of the actor's weights."""
        return self._roles.actor.weight_version

    @torch.no_grad()
    def compute_logprobs(self, rollout: Rollout, plan: MiniBatchPlan) -> Rollout:
        """Add the actor's and the reference's log-probs and the critic's values, in the micro-batches of a plan.

        The actor does not read a rollout that makes one update: its log-probs come with that update's forward, and the
        generation engine's replace them until then. It does read where older weights or other arithmetic sampled and a
        KL to the reference needs the actor's log-probs, or where a loss divides by the tokens that a correction keeps.

        Recorded routes are dropped where they are only compared, as later forwards have other weights.
        """
        roles = self._roles
        metrics = dict(rollout.metrics)
        reads_ref = self._algorithm.uses_reference and rollout.ref_logprobs is None
        other_sampler = roles.actor.rounds_otherwise or self._is_stale(rollout)
        reads_old = self._algorithm.actor_scores_rollout(other_sampler=other_sampler)
        wanted = [reads_ref, reads_old, reads_old, roles.critic is not None]
        batches = _batches(rollout, plan)
        agreement = RouterAgreement(self._world.device)
        # Roles on disjoint ranks read at the same time, so no rank waits for another before it has read all.
        outputs = torch.zeros(4, *rollout.input_ids.shape, device=self._world.device)
        with self._timers("scoring"):
            if roles.critic_copy is not None:
                roles.critic_copy.sync()  # first, so that the critic's ranks are free for the actor in the meantime
            if reads_ref:
                self._read_reference(batches, outputs[0])
            if reads_old:
                self._read_actor(batches, outputs[1], outputs[2], agreement)
            if roles.critic is not None:
                self._read_critic(batches, outputs[3])
            # each row of each tensor is filled by one rank and zero on the others
            summed = iter(self._world.all_reduce(outputs[wanted]) if any(wanted) else outputs[:0])
            ref, old, entropy, values = (next(summed) if is_wanted else None for is_wanted in wanted)
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
        """Return True if older weights sampled any token; broadcast from the first rank, as collectives depend on
        it."""
        return self._world.broadcast_object(bool(rollout.stale_updates(self.weight_version)))

    def _read_reference(self, batches: _Batches, output: Tensor) -> None:
        """Fill this rank's rows of the reference's log-probs [N, T]; nothing on a rank without the reference."""
        actor = self._roles.actor
        reference = self._roles.reference
        if reference is None and isinstance(actor, ModelEngine):
            with actor.reference() as base:
                _read(base, batches, output, self._logprobs_of(base))
        if isinstance(reference, _Reader):
            with reference.on_device():
                _read(reference, batches, output, self._logprobs_of(reference))

    def _read_actor(self, batches: _Batches, logprobs: Tensor, entropy: Tensor, agreement: RouterAgreement) -> None:
        actor = self._roles.actor
        temperature = self._config.sampling.temperature
        if not isinstance(actor, ModelEngine):
            return
        for indices, batch in batches(actor):
            rows_read = actor(
                batch.input_ids, batch.attention_mask, batch.response_mask, temperature, routes=batch.padded_routes
            )
            agreement.add(actor)
            if actor.reports_rows:
                for whole, values in zip((logprobs, entropy), rows_read, strict=True):
                    scatter_rows(whole, indices, values)

    def _read_critic(self, batches: _Batches, output: Tensor) -> None:
        copy = self._roles.critic_copy
        reader = self._roles.critic if copy is None else copy
        if isinstance(reader, ModelEngine | CriticCopy) and reader.world.is_member:
            _read(reader, batches, output, lambda batch: values_before(reader(batch.input_ids, batch.attention_mask)))

    def _logprobs_of(self, engine: _Reader) -> Callable[[Rollout], Tensor]:
        temperature = self._config.sampling.temperature
        return lambda batch: engine(batch.input_ids, batch.attention_mask, batch.response_mask, temperature)[0]


def _batches(rollout: Rollout, plan: MiniBatchPlan) -> _Batches:
    """This rank's micro-batches for a role, cut once for all roles on the same ranks."""

    @functools.cache
    def on(world: World, tensor_parallel: int) -> list[tuple[list[int | None], Rollout]]:
        return [(indices, rollout.rows(indices)) for indices in plan.micro_batches(world, tensor_parallel)]

    return lambda engine: on(engine.world, engine.tensor_parallel)


def _read(engine: _Reader | CriticCopy, batches: _Batches, output: Tensor, read: Callable[[Rollout], Tensor]) -> None:
    """Fill the rows of `output` [N, T] that this rank reports with `read(batch)`."""
    for indices, batch in batches(engine):
        values = read(batch)
        if engine.reports_rows:
            scatter_rows(output, indices, values)


def score_penalties(
    rollout: Rollout, config: PenaltiesConfig | None, *, max_new_tokens: int, scores_std: float
) -> Tensor:
    """Penalties that are subtracted from scores, for a missing end and for length, [N] float32.

    Source: the EOS trick of N+ details, for scores of standard deviation 1; overlong shaping, DAPO (arXiv 2503.14476,
    eq. 13).

    Args:
        rollout: the N completions.
        config: the penalties; None: no penalty.
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
