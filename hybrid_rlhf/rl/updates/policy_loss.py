"""The actor's loss on a micro-batch: the algorithm's loss, an entropy bonus, the KL where it is a term of the loss,
the divergence from a teacher, the algorithm's further term, and the effect of entropy control on the tokens that it has
selected (rl/rollouts/entropy.py).

All terms are sums over response tokens with the same weights, divided once by the caller. The divergence from a teacher
has those of lengths alone: it is no estimate from the sampled token, so that no correction for the sampler applies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.configs.rl import TeacherConfig
from hybrid_rlhf.configs.sections.algorithm import PolicyGradientConfig, SamplerRatio
from hybrid_rlhf.engines.partition import gathered
from hybrid_rlhf.engines.role_model import Actor, RoleModel
from hybrid_rlhf.functional.distillation import DistillationRule, divergence, with_tail
from hybrid_rlhf.functional.losses import (
    LossSum,
    accepted_completions,
    correction_weights,
    kl_loss,
    length_weights,
    sampler_ratio,
)
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.functional.transfers import moved
from hybrid_rlhf.models.distillation import Teacher
from hybrid_rlhf.models.policy import TeacherTargets
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.algorithms.algorithm import log_ratios
from hybrid_rlhf.rl.images import ImagesOf
from hybrid_rlhf.rl.types import Batch, Rollout

ROUTES_USED = ("routes_used", "routes_recorded")
"""Stats of a loss on completions with recorded experts: number of experts that the routers used, and of all."""


@dataclass(frozen=True)
class MiniBatch:
    """Values of a mini-batch that the loss of its micro-batches needs."""

    tokens: float
    """Response tokens over all ranks, the denominator of the losses."""
    sequences: float
    """Completions over all ranks."""
    kl_coef: float = 0.0
    """Weight of the KL in the loss."""
    kept_tokens: float | None = None
    """Response tokens that the correction keeps, where they are the denominator."""
    extra_tokens: float = 0.0
    """Tokens of the algorithm's `extra_loss` over all ranks; 0 without."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus; None: that of the settings."""
    is_first: bool = False
    """True if no update has been made from the rollout, so that the current log-probs are the old ones."""


@dataclass(frozen=True)
class _Correction:
    """Weights of a micro-batch for the difference between sampler and actor."""

    weights: Tensor
    """[n, t]."""
    cut: Tensor
    """[n, t] bool, tokens whose weight is not their ratio."""
    counts_masked: bool
    """True if tokens of weight 0 stay in the denominators."""


class PolicyLoss:
    """Computes the actor's loss on micro-batches."""

    def __init__(
        self,
        actor: Actor,
        algorithm: Algorithm,
        *,
        temperature: float,
        max_tokens: int,
        images_of: ImagesOf = lambda rollout: None,
        teacher: TeacherConfig | None = None,
        teaches: RoleModel | None = None,
    ) -> None:
        """Take the actor, the algorithm, the rollout's temperature and longest completion, the images of rows, and the
        settings of distillation, with the teacher if it reads the micro-batches."""
        self._actor = actor
        self._images_of = images_of
        self._algorithm = algorithm
        self._config = algorithm.config
        entropy = algorithm.entropy
        self._change_coef = entropy.coef if entropy is not None and entropy.method == "kl_cov" else None
        """Weight of the log-ratios of selected tokens; None: selected tokens have no policy gradient."""
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._teacher = teacher
        self._teaches = teaches

    def __call__(self, batch: Batch, mini_batch: MiniBatch) -> tuple[LossSum, Tensor]:
        """The loss on a micro-batch [n, t], which is on the host, and the current log-probs [n, t] without gradient."""
        config = self._config
        rollout = batch.rollout
        actor = self._actor
        normalization = config.loss_normalization if isinstance(config, PolicyGradientConfig) else "token"
        weights_of = partial(
            length_weights,
            normalization=normalization,
            tokens=mini_batch.tokens,
            sequences=mini_batch.sequences,
            max_tokens=self._max_tokens,
        )
        with self._targets(rollout, weights_of) as asked:
            logprobs, entropy, *distance = actor(
                rollout.input_ids,
                rollout.attention_mask,
                rollout.response_mask,
                self._temperature,
                routes=rollout.padded_routes,
                images=self._images_of(rollout),
                **asked,
            )
        batch = batch.for_loss(actor.device)
        rollout = batch.rollout
        mask = rollout.response_mask
        if self._teacher is not None and (kind := self._teacher.divergence) and rollout.teacher_top is not None:
            likely, logprobs = with_tail(logprobs[..., 1:]), logprobs[..., 0]
            apart = divergence(likely, teacher=with_tail(rollout.teacher_top), kind=kind, beta=self._teacher.beta)
            distance = [masked_sum(weights_of(mask) * apart, mask=mask), masked_sum(apart.detach(), mask=mask)]
        current = logprobs.detach()
        compared: dict[str, Tensor] = {}
        if config.reads_sampler:
            if mini_batch.is_first:
                compared = {name: column.sum() for name, column in rollout.sampler_differences(current).items()}
        elif not config.reads_old_logprobs or (mini_batch.is_first and config.defers_old_logprobs):
            rollout = replace(rollout, old_logprobs=current)
            batch = replace(batch, rollout=rollout)
        correction = self._correction(rollout)
        weights = weights_of(
            mask,
            kept=None if correction is None or correction.counts_masked else correction.weights,
            kept_tokens=mini_batch.kept_tokens,
        )
        stats = compared
        if (agreement := actor.router_agreement) is not None:
            stats |= dict(zip(ROUTES_USED, agreement, strict=True))
        if correction is not None:
            weights = weights * correction.weights
            stats["correction"] = masked_sum(correction.weights, mask=mask)
            stats["correction_squares"] = masked_sum(correction.weights.square(), mask=mask)
            stats["correction_cut"] = masked_sum(correction.cut.float(), mask=mask)
        tokens_per_completion = mini_batch.tokens / max(mini_batch.sequences, 1)
        selected = batch.selected
        learned = weights if selected is None or self._change_coef else weights * ~selected
        loss = self._algorithm.loss(logprobs, batch, weights=learned, tokens_per_completion=tokens_per_completion)
        total = loss.total
        if selected is not None and self._change_coef:
            change = log_ratios(logprobs, rollout).abs() * selected
            total = total + self._change_coef * masked_sum(weights * change, mask=mask)
        entropy_coef = config.entropy_coef if mini_batch.entropy_coef is None else mini_batch.entropy_coef
        if entropy_coef:
            total = total - entropy_coef * masked_sum(weights * entropy, mask=mask)
        if config.kl is not None and config.kl.where == "loss" and rollout.ref_logprobs is not None:
            assert config.kl.estimator != "k1" and rollout.old_logprobs is not None
            kl = kl_loss(
                logprobs,
                old_logprobs=rollout.old_logprobs,
                ref_logprobs=rollout.ref_logprobs,
                estimator=config.kl.estimator,
            )
            total = total + mini_batch.kl_coef * masked_sum(weights * kl, mask=mask)
            stats["kl"] = masked_sum(kl.detach(), mask=mask)
        if mini_batch.extra_tokens:
            total = total + self._algorithm.extra_loss(
                logprobs,
                rollout,
                weights=None if correction is None else correction.weights,
                tokens=mini_batch.tokens,
                counted=mini_batch.extra_tokens,
            )
        if distance and self._teacher is not None:
            total = total + self._teacher.coef * distance[0]
            stats["teacher"] = distance[1]
        stats["entropy"] = masked_sum(entropy.detach(), mask=mask)
        loss = LossSum(total, loss.count, {**loss.stats, **stats})
        return actor.with_router_losses(loss, mask.sum(dim=1)), current

    @contextlib.contextmanager
    def _targets(self, rollout: Rollout, weights_of: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Any]]:
        """What the actor's forward is asked besides log-probs for the divergence from a teacher."""
        if self._teaches is None or self._teacher is None or (kind := self._teacher.divergence) is None:
            yield {} if rollout.teacher_tokens is None else {"candidates": rollout.teacher_tokens}
            return
        read = rollout.as_taught()
        module = self._teaches.module
        assert isinstance(module, Teacher)
        with torch.no_grad():
            hidden = self._teaches(
                read.input_ids, read.attention_mask, read.response_mask, images=self._images_of(rollout)
            )
        temperature = self._temperature
        rule = DistillationRule(kind, self._teacher.beta, temperature)
        weights = weights_of(rollout.response_mask).expand(rollout.response_mask.shape) / temperature**2
        with gathered(module.head.parameters()):
            yield {"targets": TeacherTargets(hidden, module.head, rule, moved(weights, self._actor.device))}

    def kept(self, rollout: Rollout) -> Tensor:
        """[N, T] bool, the response tokens that algorithm.correction does not mask."""
        correction = self._correction(rollout)
        return rollout.response_mask if correction is None else rollout.response_mask & (correction.weights > 0)

    def _correction(self, rollout: Rollout) -> _Correction | None:
        """Weights for the difference between sampler and actor; None without a correction."""
        config = self._algorithm.correction
        if config is None:
            return None
        mask = rollout.response_mask

        def ratio_of(kind: SamplerRatio) -> Tensor:
            assert rollout.old_logprobs is not None
            return sampler_ratio(rollout.old_logprobs, sampler_logprobs=rollout.drawn_logprobs, mask=mask, of=kind)

        ratio = ratio_of(config.ratio)
        low, clip = config.bounds
        weights = correction_weights(ratio, how=config.method, clip=clip, low=low)
        if config.reject is not None:
            low, high = config.reject.bounds
            weights = weights * accepted_completions(ratio_of(config.reject.ratio), mask=mask, low=low, high=high)
        return _Correction(weights, weights != ratio, config.count_masked)
