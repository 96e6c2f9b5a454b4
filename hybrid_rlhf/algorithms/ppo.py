"""PPO with a critic: one rollout, several updates of actor and critic.

Source: Schulman et al. 2017 (arXiv 1707.06347); Ouyang et al. 2022 (arXiv 2203.02155), section 3.5; the N details.
Deviations: each loss is divided once by the response tokens of its whole mini-batch, over all ranks; the PTX loss by
its own tokens, so that ptx_coef is relative to a mean loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybrid_rlhf.algorithms.experience import Experience, Layout
from hybrid_rlhf.algorithms.rollout import Roles
from hybrid_rlhf.algorithms.sums import RunningSums, global_count
from hybrid_rlhf.configs.ppo import AlgorithmConfig
from hybrid_rlhf.data.collation import TokenBatch
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.engine import UpdateStats
from hybrid_rlhf.functional.losses import LossSum, ppo_policy_loss, ppo_value_loss, sft_loss
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.models.policy import values_before


@dataclass(frozen=True)
class UpdateReport:
    """What the updates from one rollout did."""

    metrics: dict[str, float]
    trained_tokens: float
    """Real tokens that passed through the actor in training, over all ranks."""


class PPOUpdater:
    """Updates actor and critic from experience."""

    def __init__(
        self,
        roles: Roles,
        config: AlgorithmConfig,
        *,
        temperature: float,
        average: WeightAverage | None = None,
        ptx_batches: Iterator[list[TokenBatch]] | None = None,
    ) -> None:
        """Take the roles and what is mixed in.

        Args:
            roles: actor and critic learn.
            config: the algorithm's constants.
            temperature: of the rollout; the actor's log-probs are taken at it.
            average: the actor's moving average, moved after each update.
            ptx_batches: this rank's micro-batches of pretraining text, one list an update.
        """
        self._roles = roles
        self._config = config
        self._temperature = temperature
        self._average = average
        self._ptx = ptx_batches
        self._world = roles.actor.world

    def update(self, experience: Experience, layouts: list[Layout]) -> UpdateReport:
        """Go over a rollout, one layout an epoch."""
        device = self._world.device
        policy, value, ptx = RunningSums(device), RunningSums(device), RunningSums(device)
        stats: dict[str, UpdateStats] = {}
        for layout in layouts:
            for micro_batches, count in zip(layout.mini_batches, layout.counts, strict=True):
                stats["actor"] = self._update_actor(experience, micro_batches, count, policy, ptx)
                stats["critic"] = self._update_critic(experience, micro_batches, count, value)
        means, value_means = policy.means(self._world), value.means(self._world)
        metrics = {
            "loss/policy": means["loss"],
            "loss/value": value_means["loss"],
            "policy/approxkl": means["approxkl"],
            "policy/clipfrac": means["clipfrac"],
            "policy/entropy": means["entropy"],
            "val/ratio": means["ratio"],
            "val/clipfrac": value_means["clipfrac"],
            "lr": stats["actor"].lr,
            "critic/lr": stats["critic"].lr,
        }
        for role, last in stats.items():
            if last.grad_norm is not None:
                metrics[f"{role}/grad_norm"] = last.grad_norm
        if self._ptx is not None:
            metrics["loss/ptx"] = ptx.means(self._world)["loss"]
        return UpdateReport(metrics, float(experience.sequences.lengths.sum()) * len(layouts))

    def policy_loss(self, experience: Experience, indices: list[int | None]) -> LossSum:
        """The actor's loss on a micro-batch, entropy bonus included."""
        config = self._config
        batch = experience.sequences.rows(indices)
        mask = batch.response_mask
        logprobs, entropy = self._roles.actor(batch.input_ids, batch.attention_mask, mask, self._temperature)
        loss = ppo_policy_loss(
            logprobs,
            old_logprobs=_like(experience.old_logprobs, indices, mask),
            advantages=_like(experience.advantages, indices, mask),
            mask=mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        entropy_sum = masked_sum(entropy, mask=mask)
        total = loss.total - config.entropy_coef * entropy_sum if config.entropy_coef else loss.total
        return LossSum(total, loss.count, {**loss.stats, "entropy": entropy_sum.detach()})

    def value_loss(self, experience: Experience, indices: list[int | None]) -> LossSum:
        """The critic's loss on a micro-batch."""
        batch = experience.sequences.rows(indices)
        mask = batch.response_mask
        return ppo_value_loss(
            values_before(self._roles.critic(batch.input_ids, batch.attention_mask)),
            old_values=_like(experience.old_values, indices, mask),
            returns=_like(experience.returns, indices, mask),
            mask=mask,
            clip=self._config.value_clip,
        )

    def _update_actor(
        self,
        experience: Experience,
        micro_batches: list[list[int | None]],
        count: float,
        sums: RunningSums,
        ptx_sums: RunningSums,
    ) -> UpdateStats:
        actor = self._roles.actor
        for indices in micro_batches:
            loss = self.policy_loss(experience, indices)
            actor.backward(loss.total, count=count)
            sums.add(loss)
        if self._ptx is not None:
            batches = next(self._ptx)
            ptx_count = global_count(sum(int(batch.loss_mask.sum()) for batch in batches), self._world)
            for batch in batches:
                logprobs, _ = actor(batch.input_ids, batch.attention_mask, batch.loss_mask)
                loss = sft_loss(logprobs, mask=batch.loss_mask)
                actor.backward(self._config.ptx_coef * loss.total, count=ptx_count)
                ptx_sums.add(loss)
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


def _like(tensor: torch.Tensor, indices: list[int | None], mask: torch.Tensor) -> torch.Tensor:
    """Rows of tensor [N, T], cut to the width of mask."""
    index = torch.tensor([0 if i is None else i for i in indices], device=tensor.device)
    return tensor[index, : mask.shape[1]]
