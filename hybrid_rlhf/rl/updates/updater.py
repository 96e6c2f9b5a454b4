"""Optimizer updates of the actor and, where there is one, the critic, from one rollout.

Source: Ouyang et al. 2022 (arXiv 2203.02155), section 3.5; the N details.
Deviations: each loss is divided once by the response tokens of its whole mini-batch, over all ranks; the PTX loss by
its own tokens, so that ptx_coef is relative to a mean loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hybrid_rlhf.configs.rl import TeacherConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.engine import UpdateStats
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.functional.losses import LossSum, ppo_value_loss, sft_loss
from hybrid_rlhf.functional.transfers import moved
from hybrid_rlhf.loop.loss_sums import RunningSums, global_count
from hybrid_rlhf.loop.non_finite import rows_with_non_finite_loss
from hybrid_rlhf.models.policy import values_before
from hybrid_rlhf.models.routers.losses import ROUTER_METRICS
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.metrics import difference_metrics
from hybrid_rlhf.rl.mini_batches import MiniBatchPlan
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.sharing import LocalRows, RowIndex, row_values
from hybrid_rlhf.rl.types import ROUTER_AGREEMENT, Batch, Rollout, TrainedTokens
from hybrid_rlhf.rl.updates.policy_loss import ROUTES_USED, MiniBatch, PolicyLoss
from hybrid_rlhf.rl.updates.ptx import PtxBatches
from hybrid_rlhf.runtime.world import World


class LastLogprobs:
    """Collects the log-probs of each row in its last update; each rank has the rows that it computed."""

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}
        self._added: list[tuple[Sequence[int | None], Tensor]] = []
        """Micro-batches since `_fetch`, on the device."""
        self._lengths = torch.zeros(0)
        self._known: set[int] = set()
        """Rows with an update, over all ranks."""

    @classmethod
    def from_tensors(cls, shards: Sequence[Mapping[str, Tensor]], world: World) -> Self | None:
        """The log-probs from what each rank stored of `tensors()`; None if there are none."""
        restored = cls()
        for rank, shard in enumerate(shards):
            rows = shard["rows"].tolist() if shard else []
            restored._known.update(rows)
            if rank % world.size == world.rank and rows:
                restored._values |= dict(zip(rows, shard["values"].split(shard["lengths"].tolist()), strict=True))
        return restored if restored._known else None

    def tensors(self) -> dict[str, Tensor]:
        """The log-probs of this rank's rows, one row after the other; {} without rows."""
        self._fetch()
        if not self._values:
            return {}
        values = list(self._values.values())
        lengths = torch.tensor([len(of_row) for of_row in values])
        return {"rows": torch.tensor(list(self._values)), "lengths": lengths, "values": torch.cat(values)}

    def begin(self, rows: Sequence[int]) -> None:
        """Begin an update of these rows, over all ranks: discard the log-probs of their earlier updates."""
        self._fetch()
        for row in rows:
            self._values.pop(row, None)
        self._known.update(rows)

    def add(self, rows: Sequence[int | None], logprobs: Tensor, lengths: Tensor) -> None:
        """Store the log-probs [n, t] of a micro-batch of this rank, from the lengths [N] of all rows."""
        self._added.append((rows, logprobs))
        self._lengths = lengths

    def _fetch(self) -> None:
        self._values |= row_values(self._added, self._lengths)
        self._added = []

    def collect(self, index: RowIndex, *, width: int) -> Tensor:
        """[n, T] log-probs of the rows that this rank holds, 0 in rows without an update. Every rank calls."""
        self._fetch()
        return index.collect({"logprobs": self._values}, width=width)["logprobs"]

    def fill(self, rollout: Rollout, index: RowIndex) -> Rollout:
        """The rollout with these log-probs as the old ones of their rows. Every rank calls."""
        assert rollout.old_logprobs is not None
        known = torch.tensor([row in self._known for row in index.mine], dtype=torch.bool)
        found = self.collect(index, width=rollout.input_ids.shape[1])
        return replace(rollout, old_logprobs=torch.where(known[:, None], found, rollout.old_logprobs))

    def ratios(self, old_logprobs: Tensor, index: RowIndex) -> Tensor:
        """[n, T] p(last update) / p(before the updates), NaN in rows without an update; every rank calls."""
        ratios = (self.collect(index, width=old_logprobs.shape[1]) - old_logprobs).exp()
        unknown = torch.tensor([row not in self._known for row in index.mine], dtype=torch.bool)
        return ratios.masked_fill(unknown[:, None], torch.nan)


@dataclass(frozen=True)
class _MiniBatchRows:
    """A mini-batch on a rank."""

    rows: list[int]
    """Numbers of its rows, over all ranks."""
    micro_batches: dict[World, list[list[int | None]]]
    """Numbers of the rows in this rank's micro-batches, by the ranks that share the rows."""
    local: LocalRows[Batch]
    """The rows that this rank computes."""
    lengths: Tensor
    """[N] tokens of all rows of the rollout."""
    inputs: MiniBatch


class SkippedRows(NamedTuple):
    """Skipped updates, and their rows."""

    roles: list[str]
    """Roles whose gradient was not finite on any rank."""
    rows: Rollout
    """Rows that this rank computed and that may have caused it."""
    numbers: list[int]
    """Numbers of these rows."""


@dataclass(frozen=True)
class UpdateReport:
    """Result of the updates from one rollout."""

    metrics: dict[str, float]
    trained_tokens: TrainedTokens
    """Over all ranks."""
    operations: float
    """Floating-point operations of all updates, over all ranks."""
    batch: Batch
    """The batch, with old log-probs from the training forward in any case."""
    skipped: SkippedRows | None
    """None if no update was skipped."""
    ratios: torch.Tensor | None = None
    """[n, T], ratio of each token in its last update; None unless requested, and if the algorithm has no ratios."""


class Progress:
    """Number of updates made from one rollout, with their loss sums."""

    def __init__(self, device: torch.device) -> None:
        self.updates = 0
        self.sums = {name: RunningSums(device) for name in ("policy", "value", "ptx")}
        self.stats: dict[str, UpdateStats] = {}
        self.skipped: dict[str, list[int]] = {}
        """Rows of this rank that may have caused a skipped update, by each role whose gradient was not finite."""
        self.last: LastLogprobs | None = None
        """Log-probs of the updates so far, if an algorithm or a report needs them."""

    def record_skipped(
        self,
        engine: RoleModel,
        micro_batches: list[list[int | None]],
        losses: list[torch.Tensor],
    ) -> None:
        """Record the rows that may have caused a skipped update. Every rank of the engine calls."""
        rows = rows_with_non_finite_loss(micro_batches, losses, world=engine.world)
        self.skipped.setdefault(engine.role, []).extend(rows)

    def state_dict(self, roles: Roles) -> dict[str, Any]:
        """State for a checkpoint; every rank calls, and gets the same."""
        world = roles.world
        sums = {name: part.state_dict() for name, part in self.sums.items()}
        skipped = world.all_gather_objects(self.skipped)
        return {
            "updates": self.updates,
            "skipped": {
                role: [of_rank.get(role, []) for of_rank in skipped] for role in sorted({*chain.from_iterable(skipped)})
            },
            "sums": world.all_gather_objects(sums),
            "ranks": {role: [*learner.world.members] for role, learner in roles.learners.items()},
            "stats": world.merge_dicts({role: asdict(last) for role, last in self.stats.items()}),
        }

    def load_state_dict(self, state: Mapping[str, Any], roles: Roles) -> None:
        """Restore the state of a checkpoint; if the ranks have changed, the first rank of a role takes all its sums."""
        by_rank: list[dict[str, dict[str, float]]] = state["sums"]
        self.updates = state["updates"]
        here = {role: learner for role, learner in roles.learners.items() if learner.world.is_member}
        self.skipped = {
            role: [row for rows in of_ranks[here[role].world.rank :: here[role].world.size] for row in rows]
            for role, of_ranks in state["skipped"].items()
            if role in here
        }
        self.stats = {role: UpdateStats(**stats) for role, stats in state["stats"].items() if role in here}
        for name, part in self.sums.items():
            role = "critic" if name == "value" else "actor"
            if role not in here:
                continue
            if list(here[role].world.members) == state["ranks"].get(role):
                part.load_state_dict(by_rank[roles.world.rank][name])
            else:
                share = 1.0 if here[role].world.is_main else 0.0
                names = {key for values in by_rank for key in values[name]}
                part.load_state_dict(
                    {key: share * sum(values[name].get(key, 0.0) for values in by_rank) for key in names}
                )


class Updater:
    """Updates actor and critic from batches."""

    def __init__(
        self,
        roles: Roles,
        algorithm: Algorithm,
        *,
        rollout: RolloutConfig,
        average: WeightAverage | None = None,
        ptx_batches: PtxBatches | None = None,
        ptx_coef: float = 0.0,
        teacher: TeacherConfig | None = None,
    ) -> None:
        """Take the roles, the algorithm and the pretraining text.

        Args:
            roles: the actor and, if there is one, the critic are trained.
            algorithm: gives the actor's loss.
            rollout: how completions are sampled; the actor's log-probs are taken at its temperature.
            average: the actor's moving average, updated after each update.
            ptx_batches: this rank's micro-batches of pretraining text, one list per update.
            ptx_coef: weight of the pretraining loss.
            teacher: settings of on-policy distillation.
        """
        self._roles = roles
        self._world = roles.world
        self._algorithm = algorithm
        self._config = algorithm.config
        self._correction = algorithm.correction
        self.policy_loss = PolicyLoss(
            roles.actor,
            algorithm,
            temperature=rollout.sampling.temperature,
            max_tokens=rollout.sampling.max_new_tokens,
            images_of=roles.images_of,
            teacher=teacher,
            teaches=roles.teachers["teacher"] if teacher is not None and teacher.reads_whole else None,
        )
        self.average = average
        self.ptx = ptx_batches
        self._ptx_coef = ptx_coef

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the actor has the averaged weights; does nothing on a rank without them."""
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    def update(
        self,
        batch: Batch,
        plans: Sequence[MiniBatchPlan],
        *,
        kl_coef: float = 0.0,
        entropy_coef: float | None = None,
        train_actor: bool = True,
        progress: Progress | None = None,
        keeps_ratios: bool = False,
        between: Callable[[Batch, Progress], None] = lambda batch, progress: None,
    ) -> UpdateReport:
        """Pass over a batch once per plan. Every rank of the run calls, and updates the roles that it has; on disjoint
        ranks actor and critic learn at the same time.

        Args:
            batch: the batch to learn from, of which each rank gives the rows that it holds.
            plans: mini-batches of each epoch, of the batch's rollout.
            kl_coef: coefficient of the KL, where it is a term of the loss.
            entropy_coef: coefficient of the entropy bonus; None: that of the settings.
            train_actor: true to train actor and critic, false to train the critic alone.
            progress: updates made from this batch before the run was interrupted.
            keeps_ratios: true to report the ratio of each token.
            between: called before each update, with the batch as the later updates read it.

        Raises:
            ValueError: if the plans have completions that are not learned from (`Rollout.learned`).
        """
        progress = progress or Progress(self._world.device)
        rollout = batch.rollout
        fills_first = train_actor and self._config.defers_old_logprobs
        knows_old = self._config.reads_old_logprobs or self._config.reads_sampler
        computes_old = train_actor and not knows_old
        keeps_ratios = keeps_ratios and train_actor and knows_old
        if progress.last is None and (computes_old or keeps_ratios):
            progress.last = LastLogprobs()
        last = progress.last
        index = plans[0].index
        rows = [row for number in range(len(plans[0].rows)) for row in plans[0].rows_of(number)]
        if rollout.learned is not None and not bool(index.gather(rollout.learned)[rows].all()):
            raise ValueError("plans must have no completions that are not learned from: plan the batch's rollout")
        done = progress.updates
        for epoch, plan in enumerate(plans):
            for number, mini_batch in enumerate(self._mini_batches(batch, plan, kl_coef, entropy_coef)):
                if epoch * len(plan.rows) + number < done:
                    continue
                between(batch, progress)
                is_first = epoch == number == 0
                first = LastLogprobs() if fills_first and is_first else None
                kept = [each for each in (first, last) if each is not None]
                if is_first:
                    mini_batch = replace(mini_batch, inputs=replace(mini_batch.inputs, is_first=True))
                goes_on = self._update_once(mini_batch, progress, kept, train_actor=train_actor)
                if first is not None:
                    batch = replace(batch, rollout=first.fill(batch.rollout, index))
                if not goes_on:
                    break
            else:
                continue
            break
        rollout = batch.rollout
        assert rollout.old_logprobs is not None
        self._roles.synchronize_versions()
        ratios = last.ratios(rollout.old_logprobs, index) if last is not None and keeps_ratios else None
        if last is not None and computes_old:
            batch = replace(batch, rollout=last.fill(rollout, index))
        passes = progress.updates / len(plans[0].rows)
        learners = [learner for role, learner in self._roles.learners.items() if train_actor or role != "actor"]
        lengths, head_tokens = index.lengths[rows], float(index.responses[rows].sum())
        needed = sum(each.operations.of_rows(lengths, head_tokens=head_tokens) for each in learners) * passes
        saved = [progress.sums[name].total(stat) for name in ("policy", "value") for stat in _SAVED]
        of_policy, saved_by_policy, of_value, saved_by_value = self._world.all_reduce(torch.stack(saved)).tolist()
        shared = of_policy if train_actor else of_value
        return UpdateReport(
            self._metrics(progress),
            TrainedTokens(float(lengths.sum()) * passes - shared, shared, passes),
            needed - saved_by_policy - saved_by_value,
            batch,
            self._skipped(progress, rollout, index),
            ratios,
        )

    def _update_once(
        self, mini_batch: _MiniBatchRows, progress: Progress, kept: Sequence[LastLogprobs], *, train_actor: bool
    ) -> bool:
        """Update the roles that this rank has; False if the actor has gone too far for another update."""
        policy_sums = progress.sums["policy"]
        actor = self._roles.actor
        critic = self._roles.critic
        for each in kept:
            each.begin(mini_batch.rows)
        seen = policy_sums.total("approxkl")
        if train_actor and actor.world.is_member:
            progress.stats["actor"] = self._update_actor(actor, mini_batch, progress, kept)
        if critic is not None and critic.world.is_member:
            progress.stats["critic"] = self._update_critic(critic, mini_batch, progress)
        progress.updates += 1
        change = policy_sums.total("approxkl") - seen
        return not (train_actor and self._exceeds_target(change, mini_batch.inputs.tokens))

    def value_loss(self, critic: RoleModel, batch: Batch) -> LossSum:
        """The critic's loss on a micro-batch."""
        rollout = batch.rollout
        images = self._roles.images_of(rollout)
        values = values_before(critic(rollout.input_ids, rollout.attention_mask, images=images))
        batch = batch.for_loss(critic.device)
        rollout = batch.rollout
        returns = batch.returns
        assert rollout.old_values is not None and returns is not None
        return ppo_value_loss(
            values,
            old_values=rollout.old_values,
            returns=returns,
            mask=rollout.response_mask,
            clip=self._algorithm.value_clip,
        )

    def _mini_batches(
        self, batch: Batch, plan: MiniBatchPlan, kl_coef: float, entropy_coef: float | None
    ) -> Iterator[_MiniBatchRows]:
        """The mini-batches of an epoch, whose rows come to the ranks that compute them at its beginning."""
        counted = self._correction is None or self._correction.count_masked
        kept = batch.rollout.response_mask if counted else self.policy_loss.kept(batch.rollout)
        kept_per_row = None if counted else plan.index.gather(kept.sum(dim=1))
        extra = self._algorithm.extra_tokens(batch.rollout)
        extra_per_row = None if extra is None else plan.index.gather((extra & kept).sum(dim=1))
        learners = {role.world for role in self._roles.learners.values() if role.world.is_member}
        parts = {world: plan.mini_batches(world) for world in learners}
        local = plan.index.fetch(batch, chain.from_iterable(chain.from_iterable(parts.values())))
        for number, (tokens, sequences) in enumerate(zip(plan.tokens, plan.sequences, strict=True)):
            rows = plan.rows_of(number)
            kept_tokens = None if kept_per_row is None else float(kept_per_row[rows].sum())
            extra_tokens = 0.0 if extra_per_row is None else float(extra_per_row[rows].sum())
            inputs = MiniBatch(tokens, sequences, kl_coef, kept_tokens, extra_tokens, entropy_coef)
            micro_batches = {world: of_world[number] for world, of_world in parts.items()}
            yield _MiniBatchRows(rows, micro_batches, local, plan.index.lengths, inputs)

    def _exceeds_target(self, approxkl: torch.Tensor, tokens: float) -> bool:
        """Return True if the mini-batch's mean approxkl exceeds the target, which ends the updates; the same on every
        rank."""
        if self._config.target_kl is None:
            return False
        return float(self._world.all_reduce(approxkl)) / max(tokens, 1.0) > self._config.target_kl

    def _update_actor(
        self,
        actor: RoleModel,
        mini_batch: _MiniBatchRows,
        progress: Progress,
        kept: Sequence[LastLogprobs],
    ) -> UpdateStats:
        sums = progress.sums
        micro_batches = mini_batch.micro_batches[actor.world]
        losses = []
        for rows in micro_batches:
            loss, current = self.policy_loss(mini_batch.local(rows), mini_batch.inputs)
            loss = _with_saved(loss, actor)
            actor.backward(loss.total, count=mini_batch.inputs.tokens)
            sums["policy"].add(loss)
            losses.append(loss.total.detach())
            for each in kept:
                each.add(rows, current, mini_batch.lengths)
        if self.ptx is not None:
            texts = next(self.ptx)
            ptx_count = global_count(sum(int(text.loss_mask.sum()) for text in texts), actor.world)
            for text in texts:
                predicted, _ = actor(text.input_ids, text.attention_mask, text.loss_mask, images=text.images)
                loss = sft_loss(predicted, mask=moved(text.loss_mask, actor.device))
                actor.backward(self._ptx_coef * loss.total, count=ptx_count)
                sums["ptx"].add(loss)
        stats = actor.step()
        if stats.is_fault:
            progress.record_skipped(actor, micro_batches, losses)
        if self.average is not None and not stats.skipped:
            self.average.update()
        return stats

    def _update_critic(
        self,
        critic: RoleModel,
        mini_batch: _MiniBatchRows,
        progress: Progress,
    ) -> UpdateStats:
        micro_batches = mini_batch.micro_batches[critic.world]
        losses = []
        for rows in micro_batches:
            loss = _with_saved(self.value_loss(critic, mini_batch.local(rows)), critic)
            critic.backward(loss.total, count=mini_batch.inputs.tokens)
            progress.sums["value"].add(loss)
            losses.append(loss.total.detach())
        stats = critic.step()
        if stats.is_fault:
            progress.record_skipped(critic, micro_batches, losses)
        return stats

    def _skipped(self, progress: Progress, rollout: Rollout, index: RowIndex) -> SkippedRows | None:
        """The roles with a skipped update on any rank, with the rows that this rank computed for them."""
        roles = sorted(self._world.merge_dicts(dict.fromkeys(progress.skipped)))
        if not roles:
            return None
        numbers = sorted({*chain.from_iterable(progress.skipped.values())})
        return SkippedRows(roles, index.fetch(rollout, [numbers])(numbers), numbers)

    def _metrics(self, progress: Progress) -> dict[str, float]:
        """Metrics of the updates, the same on every rank."""
        return {"rollout/updates": float(progress.updates)} | self._world.merge_dicts(self._own_metrics(progress))

    def _own_metrics(self, progress: Progress) -> dict[str, float]:
        """Metrics of the roles whose first rank this is; every rank of a role calls."""
        sums = progress.sums
        metrics = dict[str, float]()
        for role, last in progress.stats.items():
            world = self._roles.learners[role].world
            role_metrics = {"lr" if role == "actor" else f"{role}/lr": last.lr}
            if last.grad_norm is not None:
                role_metrics[f"{role}/grad_norm"] = last.grad_norm
            if role == "critic":
                value = sums["value"].means(world)
                role_metrics |= {"loss/value": value["loss"], "val/clipfrac": value["clipfrac"]}
            else:
                means = sums["policy"].means(world)
                role_metrics |= {name: means[key] for name, key in _POLICY_METRICS.items() if key in means}
                used, recorded = (means.get(name, 0.0) for name in ROUTES_USED)
                role_metrics |= {ROUTER_AGREEMENT: used / recorded} if recorded else {}
                role_metrics |= difference_metrics({name: mean * means["count"] for name, mean in means.items()})
                if squares := means.get("correction_squares"):
                    role_metrics["rollout/effective_samples"] = means["correction"] ** 2 / squares
                if self.ptx is not None:
                    role_metrics["loss/ptx"] = sums["ptx"].means(world)["loss"]
            metrics |= role_metrics if world.is_main else {}
        return metrics


_SAVED = ("shared_tokens", "saved_operations")
"""Stats of a loss: tokens and operations that its forward did not repeat."""


def _with_saved(loss: LossSum, learner: RoleModel) -> LossSum:
    """A loss with the stats of the last forward."""
    tokens = learner.saved_rows
    values = float(sum(tokens)), learner.operations.of_rows(torch.tensor(tokens), head_tokens=0.0)
    saved = torch.tensor(values, dtype=torch.float64).unbind()
    return LossSum(loss.total, loss.count, {**loss.stats, **dict(zip(_SAVED, saved, strict=True))})


_POLICY_METRICS = {
    "loss/policy": "loss",
    "policy/approxkl": "approxkl",
    "policy/clipfrac": "clipfrac",
    "policy/entropy": "entropy",
    "val/ratio": "ratio",
    "policy/kl": "kl",
    "teacher/divergence": "teacher",
    "rollout/correction_mean": "correction",
    "rollout/correction_cut": "correction_cut",
    **{f"actor/{name}": name for name in ROUTER_METRICS},
}
