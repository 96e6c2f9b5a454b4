"""PPO with a critic: one rollout, several updates of actor and critic.

Source: Schulman et al. 2017 (arXiv 1707.06347); Ouyang et al. 2022 (arXiv 2203.02155), section 3.5; the N details.
Deviations: each loss is divided once by the response tokens of its whole mini-batch, over all ranks; the PTX loss by
its own tokens, so that ptx_coef is relative to a mean loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hybrid_rlhf.algorithms.experience import Experience, Layout, scatter_rows
from hybrid_rlhf.algorithms.policy_loss import MiniBatch, PolicyLoss, rows_like
from hybrid_rlhf.algorithms.rollout import Roles
from hybrid_rlhf.algorithms.sums import RunningSums, global_count
from hybrid_rlhf.configs.ppo import AlgorithmConfig, RolloutConfig
from hybrid_rlhf.data.collation import TokenBatch
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.engine import UpdateStats
from hybrid_rlhf.functional.losses import LossSum, ppo_value_loss, sft_loss
from hybrid_rlhf.models.policy import values_before


@dataclass(frozen=True)
class UpdateReport:
    """What the updates from one rollout did."""

    metrics: dict[str, float]
    trained_tokens: float
    """Real tokens that passed through the critic in training, over all ranks."""
    experience: Experience
    """What was learned from; with the training forward's log-probs in any case."""


class PPOUpdater:
    """Updates actor and critic from experience."""

    def __init__(
        self,
        roles: Roles,
        config: AlgorithmConfig,
        *,
        rollout: RolloutConfig,
        average: WeightAverage | None = None,
        ptx_batches: Iterator[list[TokenBatch]] | None = None,
    ) -> None:
        """Take the roles and what is mixed in.

        Args:
            roles: actor and critic learn.
            config: the algorithm's constants.
            rollout: how completions were sampled; the actor's log-probs are taken at its temperature.
            average: the actor's moving average, moved after each update.
            ptx_batches: this rank's micro-batches of pretraining text, one list an update.
        """
        self._roles = roles
        self._config = config
        self.policy_loss = PolicyLoss(
            roles.actor, config, temperature=rollout.temperature, max_tokens=rollout.max_new_tokens
        )
        self._average = average
        self._ptx = ptx_batches
        self._world = roles.actor.world

    def update(
        self, experience: Experience, layouts: list[Layout], *, kl_coef: float = 0.0, train_actor: bool = True
    ) -> UpdateReport:
        """Go over a rollout, one layout an epoch.

        Args:
            experience: to learn from.
            layouts: of the epochs.
            kl_coef: of the KL in the loss, if it is there.
            train_actor: whether the actor learns too, or the critic alone.
        """
        sums = _Sums(self._world.device)
        stats: dict[str, UpdateStats] = {}
        logprobs = torch.zeros_like(experience.old_logprobs) if self._config.updates_once and train_actor else None
        updates = 0
        for micro_batches, mini_batch in self._mini_batches(layouts, kl_coef):
            if train_actor:
                seen = sums.policy.total("approxkl")
                stats["actor"] = self._update_actor(experience, micro_batches, mini_batch, sums, logprobs)
            stats["critic"] = self._update_critic(experience, micro_batches, mini_batch.tokens, sums.value)
            updates += 1
            if train_actor and self._is_too_far(sums.policy.total("approxkl") - seen, mini_batch.tokens):
                break
        if logprobs is not None:
            experience = replace(experience, old_logprobs=self._world.all_reduce(logprobs))
        trained = float(experience.sequences.lengths.sum()) * updates / len(layouts[0].mini_batches)
        return UpdateReport(self._metrics(sums, stats, updates), trained, experience)

    def value_loss(self, experience: Experience, indices: list[int | None]) -> LossSum:
        """The critic's loss on a micro-batch."""
        batch = experience.sequences.rows(indices)
        mask = batch.response_mask
        return ppo_value_loss(
            values_before(self._roles.critic(batch.input_ids, batch.attention_mask)),
            old_values=rows_like(experience.old_values, indices, mask),
            returns=rows_like(experience.returns, indices, mask),
            mask=mask,
            clip=self._config.value_clip,
        )

    def _mini_batches(
        self, layouts: list[Layout], kl_coef: float
    ) -> Iterator[tuple[list[list[int | None]], MiniBatch]]:
        for layout in layouts:
            for micro_batches, count, size in zip(layout.mini_batches, layout.counts, layout.sizes, strict=True):
                yield micro_batches, MiniBatch(count, size, kl_coef)

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
        sums: _Sums,
        logprobs: torch.Tensor | None,
    ) -> UpdateStats:
        actor = self._roles.actor
        for indices in micro_batches:
            loss, current = self.policy_loss(experience, indices, mini_batch)
            actor.backward(loss.total, count=mini_batch.tokens)
            sums.policy.add(loss)
            if logprobs is not None:
                scatter_rows(logprobs, indices, current)
        if self._ptx is not None:
            batches = next(self._ptx)
            ptx_count = global_count(sum(int(batch.loss_mask.sum()) for batch in batches), self._world)
            for batch in batches:
                predicted, _ = actor(batch.input_ids, batch.attention_mask, batch.loss_mask)
                loss = sft_loss(predicted, mask=batch.loss_mask)
                actor.backward(self._config.ptx_coef * loss.total, count=ptx_count)
                sums.ptx.add(loss)
        stats = actor.step()
        if self._average is not None:
            self._average.update()
        return stats

    def _update_critic(
        self, experience: Experience, micro_batches: list[list[int | None]], count: float, sums: RunningSums
    ) -> UpdateStats:
        for indices in micro_batches:
            loss = self.value_loss(experience, indices)
            self._roles.critic.backward(loss.total, count=count)
            sums.add(loss)
        return self._roles.critic.step()

    def _metrics(self, sums: _Sums, stats: dict[str, UpdateStats], updates: int) -> dict[str, float]:
        value = sums.value.means(self._world)
        metrics = {"loss/value": value["loss"], "val/clipfrac": value["clipfrac"], "ppo/updates": float(updates)}
        if "actor" in stats:
            means = sums.policy.means(self._world)
            metrics |= {name: means[key] for name, key in _POLICY_METRICS.items() if key in means}
        if self._ptx is not None and "actor" in stats:
            metrics["loss/ptx"] = sums.ptx.means(self._world)["loss"]
        for role, last in stats.items():
            metrics["lr" if role == "actor" else f"{role}/lr"] = last.lr
            if last.grad_norm is not None:
                metrics[f"{role}/grad_norm"] = last.grad_norm
        return metrics


class _Sums:
    """Of a rollout's updates."""

    def __init__(self, device: torch.device) -> None:
        self.policy, self.value, self.ptx = RunningSums(device), RunningSums(device), RunningSums(device)


_POLICY_METRICS = {
    "loss/policy": "loss",
    "policy/approxkl": "approxkl",
    "policy/clipfrac": "clipfrac",
    "policy/entropy": "entropy",
    "val/ratio": "ratio",
    "policy/kl": "kl",
    "rollout/correction_mean": "correction",
}
