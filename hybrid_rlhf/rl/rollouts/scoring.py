"""Values that the roles compute for sampled completions: scores and penalties, then log-probs and values.

Old log-probs come from the training forward over the same micro-batches as the first epoch, so that the first
mini-batch has a ratio of exactly 1. Those of the first update come from its own forward where nothing before it needs
them: always with a single update. Source: PPO's ratio is relative to the weights before the first update (arXiv
1707.06347, section 3). Other passes have no backward and take larger micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.algorithm import AlgorithmConfig, PenaltiesConfig
from hybrid_rlhf.engines.role_model import Reader, RoleModel
from hybrid_rlhf.functional.masking import row_sums
from hybrid_rlhf.models.policy import values_before
from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.rl.mini_batches import MiniBatchPlan, MiniBatchPlanner
from hybrid_rlhf.rl.rewards import CompletionTexts, Reward
from hybrid_rlhf.rl.roles.roles import Roles
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.teaching import Teaching
from hybrid_rlhf.rl.sharing import row_values
from hybrid_rlhf.rl.types import ROUTER_AGREEMENT, Rollout
from hybrid_rlhf.runtime.background import BackgroundCall
from hybrid_rlhf.runtime.world import shared_user_errors


class RolloutScorer:
    """Scores completions by the reward, and reads them with actor, reference, teacher and critic."""

    def __init__(
        self,
        roles: Roles,
        sampler: RolloutSampler,
        *,
        algorithm: AlgorithmConfig,
        planner: MiniBatchPlanner,
        scaling: ScoreScaling,
        teaching: Teaching | None = None,
    ) -> None:
        """Take the roles, the settings and the teachers; the settings of sampling, the tokenizer and the timers are the
        sampler's."""
        self._roles = roles
        self._config = sampler.config
        self._tokenizer = sampler.tokenizer
        self._timers = sampler.timers
        self._algorithm = algorithm
        self._planner = planner
        self._scaling = scaling
        self._world = roles.world
        self._teaching = teaching

    def score(
        self,
        prompts: Sequence[Mapping[str, Any]],
        rollout: Rollout,
        *,
        first: int = 0,
        greedy: bool = False,
        refill: bool = False,
        evaluates: bool = False,
    ) -> Rollout:
        """Add scores and penalties; completions that the reward drops are left out.

        Args:
            prompts: rows of the data, the same on every rank.
            rollout: completions of this rank, with the indices of their prompts in `groups`; those of one prompt are
                adjacent.
            first: place in the step of the first prompt.
            greedy: true if the last completion of each prompt is greedy; its score becomes the greedy score of the
                others, and a prompt is dropped if its greedy completion is.
            refill: true if the step has other completions, so that all of these may be dropped.
            evaluates: true if no step trains on the prompts: the scores are not counted in running statistics
                (algorithm.score_scaling).

        Raises:
            UserError: on every rank, for a reward component without a usable score.
        """
        plan = self._planner.plan(rollout)
        index = plan.index
        reward = self._roles.reward
        reads_ref = self._algorithm.uses_reference and self._roles.reference_beside_rewards
        with self._timers("scoring"):
            readers = [self._reader_of_reference] if reads_ref else []
            reading = _Reading(plan, rollout, readers, reward)
            ref: dict[str, dict[int, Tensor]] = {"ref_logprobs": {}}
            report = reward(
                reading.rows,
                len(index),
                reading.micro_batches_on,
                lambda rows: CompletionTexts.read(prompts, rows, self._tokenizer),
                self._roles.images_of,
                may_drop_all=refill,
                beside=lambda: ref.update(self._read_reference(reading) if reads_ref else {}),
            )
            width = rollout.input_ids.shape[1]
            ref_logprobs = index.collect(ref, width=width)["ref_logprobs"] if reads_ref else None
        scores = report.scores[index.mine]
        if rollout.turn_rewards is not None:
            scores = scores + row_sums(rollout.turn_rewards)
        if self._teaching is not None:
            rollout = self._teaching.assigned(prompts, rollout)
        rollout = replace(rollout, components={name: of[index.mine] for name, of in report.components.items()})
        accepted = torch.ones(len(index), dtype=torch.bool)
        accepted[report.dropped] = False
        kept = accepted[index.mine]
        _, prompt, counts = rollout.groups.unique(return_inverse=True, return_counts=True)
        last = counts.cumsum(0) - 1  # the greedy completion of each prompt
        if greedy:
            kept &= accepted[index.mine][last][prompt]
            kept &= ~torch.zeros_like(kept).index_fill(0, last, True)
        columns = torch.stack([scores, rollout.has_score.float(), kept.float()], dim=1)
        of_all, has_score, counted = index.gather(columns).T.contiguous()
        if self._scaling.follows_scores and not evaluates:
            self._scaling.observe(of_all[has_score.bool() & counted.bool()])
        penalties = self._scaling.unit * score_penalties(
            rollout,
            self._algorithm.penalties,
            max_new_tokens=self._config.sampling.max_new_tokens,
            scores_std=self._scaling.scaled_std(of_all[has_score.bool() & accepted]),
        )
        scored = replace(
            rollout,
            groups=first + rollout.groups,
            scores=scores,
            penalties=penalties,
            ref_logprobs=ref_logprobs,
            metrics={**report.metrics, **episode_metrics(rollout, self._world)},
        )
        if greedy:
            scored = replace(scored, greedy_scores=scores[last][prompt], greedy_penalties=penalties[last][prompt])
        return scored if bool(accepted.all()) and not greedy else scored.select(kept)

    @property
    def weight_version(self) -> int:
        """Number of updates of the actor's weights."""
        return self._roles.actor.weight_version

    @torch.no_grad()
    def compute_logprobs(self, rollout: Rollout, plan: MiniBatchPlan, *, defers: bool = False) -> Rollout:
        """Add the log-probs of actor, reference and teacher and the critic's values, in the micro-batches of a plan.

        With `defers`, the actor reads the first mini-batch only where something needs it before the first update;
        else the generation engine's log-probs are in place of its own, and there is no entropy.

        The actor does not read a rollout that makes one update: its log-probs come with that update's forward, and the
        generation engine's replace them until then. It does read where older weights or other arithmetic sampled and a
        KL to reference or teacher needs the actor's log-probs, or where a loss divides by the tokens that a correction
        keeps.

        Recorded routes are dropped where they are only compared, as later forwards have other weights.
        """
        roles = self._roles
        index = plan.index
        metrics = dict(rollout.metrics)
        reads_ref = self._algorithm.uses_reference and rollout.ref_logprobs is None
        stale = bool(index.gather(rollout.staleness(self.weight_version))[:, 0].any())
        teaching = None if self._teaching is None or self._teaching.config.reads_whole else self._teaching
        reads_old = self._algorithm.actor_scores_rollout(
            other_sampler=roles.actor.rounds_otherwise or stale, has_teacher=teaching is not None
        )
        has_critic = roles.critic is not None
        defers = defers and reads_old and self._algorithm.defers_old_logprobs
        defers = defers and teaching is None and rollout.routes is None
        agreement = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        readers = [
            *([self._reader_of_reference] if reads_ref else []),
            *([self._reader_of_values] if has_critic else []),
        ]
        with self._timers("scoring"):
            reading = _Reading(plan, rollout, readers, trained=roles.actor if reads_old else None, skips_first=defers)
            read = rollout.as_taught()
            served = None if teaching is None else teaching.served
            answers = None if served is None else BackgroundCall(lambda: served(read), device=torch.device("cpu"))
            lessons = [] if teaching is None else self._lessons(teaching, rollout, read, plan)
            # Roles on disjoint ranks read at the same time, so no rank waits for another before it has read all.
            if has_critic:  # first, so that the critic's ranks are free for the actor in the meantime
                self._reader_of_values.sync()
            computed: dict[str, dict[int, Tensor]] = {}
            if reads_ref:
                computed |= self._read_reference(reading)
            taught: dict[int, Tensor] = {}
            for model, lesson in lessons:
                taught |= self._read_frozen(lesson, model, "taught", teaching)["taught"]
            if reads_old:
                computed |= self._read_actor(reading, agreement)
            if has_critic:
                computed |= self._read_critic(reading)
            columns: dict[str, Any] = {"old_logprobs": rollout.sampled_logprobs}
            columns |= index.collect(computed, width=rollout.input_ids.shape[1])
            if teaching is not None:
                found = index.collect({"taught": taught}, width=read.input_ids.shape[1])["taught"]
                with shared_user_errors(self._world):
                    found = found if answers is None else answers.result()
                columns |= teaching.split(found, rollout) | {"teachers": None, "teacher_prompts": None}
            if defers:
                first = {*plan.rows_of(0)}
                own = torch.tensor([row not in first for row in index.mine], dtype=torch.bool)
                columns["old_logprobs"] = torch.where(own[:, None], columns["old_logprobs"], rollout.sampled_logprobs)
                del columns["entropy"]
            rollout = replace(rollout, **columns)
            if reads_old and rollout.routes is not None:
                used, recorded = self._world.all_reduce(agreement).tolist()
                metrics |= {ROUTER_AGREEMENT: used / recorded} if recorded else {}
        keeps_routes = self._config.routing_replay or not reads_old
        return replace(rollout, routes=rollout.routes if keeps_routes else None, metrics=metrics)

    @property
    def _reader_of_reference(self) -> Reader:
        """The model that computes the reference's log-probs, or its ranks."""
        return self._roles.actor if self._roles.reference is None else self._roles.reference

    @property
    def _reader_of_values(self) -> Reader:
        """The model that computes values, or its ranks."""
        copy = self._roles.critic_copy
        reader = self._roles.critic if copy is None else copy
        assert reader is not None
        return reader

    def _read_reference(self, reading: _Reading) -> dict[str, dict[int, Tensor]]:
        """The reference's log-probs of this rank's rows, without entries on a rank without the reference."""
        reference = self._roles.reference
        if reference is not None:
            return self._read_frozen(reading, reference, "ref_logprobs")
        with self._roles.actor.reference() as base:
            return reading.values(base, self._logprobs_of(base), "ref_logprobs")

    def _lessons(
        self, teaching: Teaching, rollout: Rollout, read: Rollout, plan: MiniBatchPlan
    ) -> list[tuple[RoleModel, _Reading]]:
        """The teachers with the rows that each reads, of the rollout as taught. Every rank calls."""
        if read is not rollout:
            plan = self._planner.plan(read)
        one = torch.zeros(len(rollout), dtype=torch.long)
        teacher_of = plan.index.gather(one if rollout.teachers is None else rollout.teachers).tolist()
        lessons = []
        for number, model in enumerate(teaching.models):
            parts = [[row for row in part if teacher_of[row] == number] for part in plan.rows]
            mine = replace(plan, rows=[part for part in parts if part])
            lessons.append((model, _Reading(mine, read, [model])))
        return lessons

    def _read_frozen(
        self, reading: _Reading, model: Reader, name: str, teaching: Teaching | None = None
    ) -> dict[str, dict[int, Tensor]]:
        """A frozen language model's log-probs of this rank's rows, with its likely tokens, without entries on a rank
        without it."""
        with model.on_device():
            return reading.values(model, self._logprobs_of(model, teaching), name)

    def _read_actor(self, reading: _Reading, agreement: Tensor) -> dict[str, dict[int, Tensor]]:
        """The actor's log-probs and entropy of this rank's rows, without entries on a rank without the actor. Adds to
        `agreement` [2] how many of the recorded experts its routers used, and of how many."""
        actor = self._roles.actor
        temperature = self._config.sampling.temperature

        def read(batch: Rollout) -> tuple[Tensor, Tensor]:
            values = actor(
                batch.input_ids,
                batch.attention_mask,
                batch.response_mask,
                temperature,
                routes=batch.padded_routes,
                images=self._roles.images_of(batch),
            )
            if actor.router_agreement is not None:
                agreement.add_(actor.router_agreement)
            return values

        return reading.values(actor, read, "old_logprobs", "entropy", micro_batches=reading.as_trained)

    def _read_critic(self, reading: _Reading) -> dict[str, dict[int, Tensor]]:
        """Values of this rank's rows, without entries on a rank without critic."""
        reader = self._reader_of_values

        def read(batch: Rollout) -> tuple[Tensor]:
            images = self._roles.images_of(batch)
            return (values_before(reader(batch.input_ids, batch.attention_mask, images=images)),)

        return reading.values(reader, read, "old_values")

    def _logprobs_of(self, engine: Reader, teaching: Teaching | None = None) -> Callable[[Rollout], tuple[Tensor, ...]]:
        temperature = self._config.sampling.temperature
        images_of = self._roles.images_of
        asked = {} if teaching is None or teaching.top is None else {"top": teaching.top}
        return lambda batch: engine(
            batch.input_ids, batch.attention_mask, batch.response_mask, temperature, images=images_of(batch), **asked
        )[:1]


class _Reading:
    """A pass of models over a rollout: the rows that this rank reads, in the micro-batches of a plan."""

    def __init__(
        self,
        plan: MiniBatchPlan,
        rollout: Rollout,
        readers: Sequence[Reader],
        reward: Reward | None = None,
        *,
        trained: Reader | None = None,
        skips_first: bool = False,
    ) -> None:
        """Bring the rows of all readers, and of a reward, to this rank. Every rank calls.

        `trained` reads in the micro-batches of its updates, without the first mini-batch if `skips_first`.
        """
        self.as_trained: list[list[int | None]] = []
        if trained is not None:
            read = replace(plan, rows=plan.rows[1:]) if skips_first else plan
            place = trained.world, trained.tensor_parallel, trained.shares_prefixes
            self.as_trained = read.micro_batches(*place, as_trained=True)
        self.micro_batches_on = functools.cache(plan.micro_batches)
        self.lengths = plan.index.lengths
        rewarded = [] if reward is None else reward.micro_batches(self.micro_batches_on)
        self.rows = plan.index.fetch(rollout, chain(rewarded, self.as_trained, *map(self._numbers, readers)))

    def values(
        self,
        reader: Reader,
        read: Callable[[Rollout], tuple[Tensor, ...]],
        *names: str,
        micro_batches: Sequence[list[int | None]] | None = None,
    ) -> dict[str, dict[int, Tensor]]:
        """The named values [n, t] that `read` returns of a micro-batch, or [n, t, k] of one name, by row, of the rows
        that this rank reports; None: the micro-batches of a reader that is not trained. They come to the host by one
        copy at the end."""
        parts = self._numbers(reader) if micro_batches is None else micro_batches
        # [n, t, names]
        found = [(numbers, torch.stack(read(self.rows(numbers)), dim=2).flatten(2)) for numbers in parts]
        of_rows = row_values(found if reader.reports_rows else [], self.lengths)
        if len(names) == 1:
            return {names[0]: {number: values.squeeze(1) for number, values in of_rows.items()}}
        return {
            name: {number: values[:, place] for number, values in of_rows.items()} for place, name in enumerate(names)
        }

    def _numbers(self, reader: Reader) -> list[list[int | None]]:
        return self.micro_batches_on(reader.world, reader.tensor_parallel, reader.shares_prefixes)


def score_penalties(
    rollout: Rollout, config: PenaltiesConfig | None, *, max_new_tokens: int, scores_std: float
) -> Tensor:
    """Penalties that are subtracted from scaled scores, for a missing end and for length, [N] float32.

    Source: the EOS trick of N+ details, for scores of standard deviation 1; overlong shaping, DAPO (arXiv 2503.14476,
    eq. 13).

    Args:
        rollout: the N completions.
        config: the penalties; None: no penalty.
        max_new_tokens: longest completion.
        scores_std: standard deviation of the rollout's scaled scores, the penalty for a missing end where that is
            "auto".
    """
    if config is None:
        return torch.zeros(len(rollout))
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
