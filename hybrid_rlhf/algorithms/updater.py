"""One rollout, several updates of the actor and, where there is one, the critic.

Source: Ouyang et al. 2022 (arXiv 2203.02155), section 3.5; the N details.
Deviations: each loss is divided once by the response tokens of its whole mini-batch, over all ranks; the PTX loss by
its own tokens, so that ptx_coef is relative to a mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hybrid_rlhf.algorithms.experience import Experience, Layout, scatter_rows
from hybrid_rlhf.algorithms.nonfinite import rows_to_blame
from hybrid_rlhf.algorithms.on_policy import OnPolicyAlgorithm
from hybrid_rlhf.algorithms.policy_loss import MiniBatch, PolicyLoss, rows_like
from hybrid_rlhf.algorithms.ptx import PtxBatches
from hybrid_rlhf.algorithms.roles import Roles
from hybrid_rlhf.algorithms.sums import RunningSums, global_count
from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.engine import ModelEngine, UpdateStats
from hybrid_rlhf.functional.losses import LossSum, ppo_value_loss, sft_loss
from hybrid_rlhf.models.policy import values_before
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class UpdateReport:
    """What the updates from one rollout did."""

    metrics: dict[str, float]
    trained_tokens: float
    """Real tokens of the mini-batches that were learned from, over all ranks."""
    experience: Experience
    """What was learned from; with the training forward's log-probs in any case."""


class _Sums:
    """Of a rollout's updates."""

    def __init__(self, device: torch.device) -> None:
        self.policy, self.value, self.ptx = RunningSums(device), RunningSums(device), RunningSums(device)


class Progress:
    """How far the updates from one rollout are, and what they have summed up."""

    def __init__(self, device: torch.device) -> None:
        self.updates = 0
        self.sums = _Sums(device)
        self.stats: dict[str, UpdateStats] = {}
        self.skipped: dict[str, list[int]] = {}
        """By role whose update was skipped because a gradient was not finite: rows of this rank to blame for it."""

    def blame(self, role: str, micro_batches: list[list[int | None]], losses: list[torch.Tensor]) -> None:
        """Note the rows of a skipped update that are to blame for it."""
        self.skipped.setdefault(role, []).extend(rows_to_blame(micro_batches, losses))

    def state_dict(self, world: World) -> dict[str, Any]:
        """What a checkpoint keeps; every rank calls, and gets the same."""
        sums = {name: part.state_dict() for name, part in vars(self.sums).items()}
        return {
            "updates": self.updates,
            "skipped": {role: world.all_gather_objects(rows) for role, rows in self.skipped.items()},
            "sums": world.all_gather_objects(sums),
            "stats": {role: asdict(stats) for role, stats in self.stats.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Go on from a checkpoint; on another number of ranks the first takes all that was summed."""
        by_rank: list[dict[str, dict[str, float]]] = state["sums"]
        self.updates = state["updates"]
        mine = slice(world.rank, None, world.size)
        self.skipped = {role: [row for rows in told[mine] for row in rows] for role, told in state["skipped"].items()}
        self.stats = {role: UpdateStats(**stats) for role, stats in state["stats"].items()}
        for name, part in vars(self.sums).items():
            if len(by_rank) == world.size:
                part.load_state_dict(by_rank[world.rank][name])
            else:
                names = by_rank[0][name]
                share = 1.0 if world.is_main else 0.0
                part.load_state_dict({key: share * sum(told[name].get(key, 0.0) for told in by_rank) for key in names})


class Updater:
    """Updates actor and critic from experience."""

    def __init__(
        self,
        roles: Roles,
        algorithm: OnPolicyAlgorithm,
        *,
        rollout: RolloutConfig,
        average: WeightAverage | None = None,
        ptx_batches: PtxBatches | None = None,
    ) -> None:
        """Take the roles and what is mixed in.

        Args:
            roles: the actor learns, and the critic if there is one.
            algorithm: whose loss the actor has.
            rollout: how completions were sampled; the actor's log-probs are taken at its temperature.
            average: the actor's moving average, moved after each update.
            ptx_batches: this rank's micro-batches of pretraining text, one list an update.
        """
        self._roles = roles
        self._config = algorithm.config
        self.policy_loss = PolicyLoss(
            roles.actor, algorithm, temperature=rollout.temperature, max_tokens=rollout.max_new_tokens
        )
        self._average = average
        self.ptx = ptx_batches
        self._world = roles.actor.world

    def update(
        self,
        experience: Experience,
        layouts: list[Layout],
        *,
        kl_coef: float = 0.0,
        train_actor: bool = True,
        progress: Progress | None = None,
        between: Callable[[Progress], None] = lambda progress: None,
    ) -> UpdateReport:
        """Go over a rollout, one layout an epoch.

        Args:
            experience: to learn from.
            layouts: of the epochs.
            kl_coef: of the KL in the loss, if it is there.
            train_actor: whether the actor learns too, or the critic alone.
            progress: of updates that were made before, from this experience.
            between: called before each update.
        """
        progress = progress or Progress(self._world.device)
        sums, stats = progress.sums, progress.stats
        comes = train_actor and not self._config.reads_old_logprobs
        logprobs = torch.zeros_like(experience.old_logprobs) if comes else None
        for number, (micro_batches, mini_batch) in enumerate(self._mini_batches(experience, layouts, kl_coef)):
            if number < progress.updates:
                continue
            between(progress)
            if train_actor:
                seen = sums.policy.total("approxkl")
                stats["actor"] = self._update_actor(experience, micro_batches, mini_batch, progress, logprobs)
            if self._roles.critic is not None:
                stats["critic"] = self._update_critic(
                    self._roles.critic, experience, micro_batches, mini_batch.tokens, progress
                )
            progress.updates += 1
            if train_actor and self._is_too_far(sums.policy.total("approxkl") - seen, mini_batch.tokens):
                break
        if logprobs is not None:
            experience = replace(experience, old_logprobs=self._world.all_reduce(logprobs))
        trained = float(experience.sequences.lengths.sum()) * progress.updates / len(layouts[0].mini_batches)
        return UpdateReport(self._metrics(progress), trained, experience)

    def value_loss(self, critic: ModelEngine, experience: Experience, indices: list[int | None]) -> LossSum:
        """The critic's loss on a micro-batch."""
        assert experience.old_values is not None and experience.returns is not None
        batch = experience.sequences.rows(indices)
        mask = batch.response_mask
        return ppo_value_loss(
            values_before(critic(batch.input_ids, batch.attention_mask)),
            old_values=rows_like(experience.old_values, indices, mask),
            returns=rows_like(experience.returns, indices, mask),
            mask=mask,
            clip=self._config.value_clip,
        )

    def _mini_batches(
        self, experience: Experience, layouts: list[Layout], kl_coef: float
    ) -> Iterator[tuple[list[list[int | None]], MiniBatch]]:
        kept = None if self._config.masked_tokens_count else self.policy_loss.kept(experience).sum(dim=1)
        for layout in layouts:
            for micro_batches, count, size in zip(layout.mini_batches, layout.counts, layout.sizes, strict=True):
                rows = [row for micro in micro_batches for row in micro if row is not None]
                kept_tokens = None if kept is None else global_count(float(kept[rows].sum()), self._world)
                yield micro_batches, MiniBatch(count, size, kl_coef, kept_tokens)

    def _is_too_far(self, approxkl: torch.Tensor, tokens: float) -> bool:
        """Whether the mini-batch ends the passes over the rollout; the same on every rank."""
        if self._config.target_approxkl is None:
            return False
        return float(self._world.all_reduce(approxkl)) / max(tokens, 1.0) > self._config.target_approxkl

    def _update_actor(
        self,
        experience: Experience,
        micro_batches: list[list[int | None]],
        mini_batch: MiniBatch,
        progress: Progress,
        logprobs: torch.Tensor | None,
    ) -> UpdateStats:
        actor, sums = self._roles.actor, progress.sums
        losses = []
        for indices in micro_batches:
            loss, current = self.policy_loss(experience, indices, mini_batch)
            actor.backward(loss.total, count=mini_batch.tokens)
            sums.policy.add(loss)
            losses.append(loss.total.detach())
            if logprobs is not None:
                scatter_rows(logprobs, indices, current)
        if self.ptx is not None:
            batches = next(self.ptx)
            ptx_count = global_count(sum(int(batch.loss_mask.sum()) for batch in batches), self._world)
            for batch in batches:
                predicted, _ = actor(batch.input_ids, batch.attention_mask, batch.loss_mask)
                loss = sft_loss(predicted, mask=batch.loss_mask)
                actor.backward(self._config.ptx_coef * loss.total, count=ptx_count)
                sums.ptx.add(loss)
        stats = actor.step()
        if stats.skipped:
            progress.blame("actor", micro_batches, losses)
        elif self._average is not None:
            self._average.update()
        return stats

    def _update_critic(
        self, critic: ModelEngine, experience: Experience, micro_batches: list[list[int | None]], count: float,
        progress: Progress,
    ) -> UpdateStats:  # fmt: skip
        losses = []
        for indices in micro_batches:
            loss = self.value_loss(critic, experience, indices)
            critic.backward(loss.total, count=count)
            progress.sums.value.add(loss)
            losses.append(loss.total.detach())
        stats = critic.step()
        if stats.skipped:
            progress.blame("critic", micro_batches, losses)
        return stats

    def _metrics(self, progress: Progress) -> dict[str, float]:
        sums, stats = progress.sums, progress.stats
        metrics = {"rollout/updates": float(progress.updates)}
        if "critic" in stats:
            value = sums.value.means(self._world)
            metrics |= {"loss/value": value["loss"], "val/clipfrac": value["clipfrac"]}
        if "actor" in stats:
            means = sums.policy.means(self._world)
            metrics |= {name: means[key] for name, key in _POLICY_METRICS.items() if key in means}
        if self.ptx is not None and "actor" in stats:
            metrics["loss/ptx"] = sums.ptx.means(self._world)["loss"]
        for role, last in stats.items():
            metrics["lr" if role == "actor" else f"{role}/lr"] = last.lr
            if last.grad_norm is not None:
                metrics[f"{role}/grad_norm"] = last.grad_norm
        return metrics


_POLICY_METRICS = {
    "loss/policy": "loss",
    "policy/approxkl": "approxkl",
    "policy/clipfrac": "clipfrac",
    "policy/entropy": "entropy",
    "val/ratio": "ratio",
    "policy/kl": "kl",
    "rollout/correction_mean": "correction",
}
