"""One model and its optimizer under DeepSpeed.

Why a wrapper: it owns the one convention that keeps gradients independent of micro-batches and ranks. A loss arrives
as a sum with the count it is to be divided by over the whole update; DeepSpeed's mean over ranks is undone here, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.engines.host_weights import HostWeights
from hybrid_rlhf.models.activation_offload import ActivationOffload
from hybrid_rlhf.models.lora import adapters_off, has_lora
from hybrid_rlhf.models.packing import packs
from hybrid_rlhf.runtime.world import World

Role = Literal["actor", "critic", "reference", "reward", "student", "teacher"]


@dataclass(frozen=True)
class UpdateStats:
    """What an optimizer update did."""

    lr: float
    grad_norm: float | None
    skipped: bool = False
    """The gradient was not finite: weights, optimizer and schedule are as they were, on every rank."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine trains, and where what it holds lives."""

    max_grad_norm: float = 0.0
    """What gradients are clipped to, where it trains; 0 does not clip."""
    offload_activations: bool = False
    """They wait for backward in host memory."""
    offload_weights: bool = False
    """They are on the device inside `on_device` only; for a frozen model that is not partitioned."""


class ModelEngine:
    """A role's model: call it to compute, `backward` and `step` to train it."""

    def __init__(self, role: Role, engine: DeepSpeedEngine, world: World, options: EngineOptions | None = None) -> None:
        self.role: Role = role
        self.world = world
        self._engine = engine
        self._options = options or EngineOptions()
        self._host_weights = HostWeights(engine.module, world.device) if self._options.offload_weights else None
        if self.learns and isinstance(engine.optimizer, torch.optim.Optimizer):
            # It clips here too, so that the norm is known; DeepSpeed's own optimizers report theirs.
            engine._take_model_step = self._update_unless_infinite
            engine.clip_fp32_gradients = lambda: None
        if world.size == 1:
            # It would still copy all gradients into buckets and back.
            engine.buffered_allreduce_fallback = lambda *_, **__: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if self._options.offload_activations and torch.is_grad_enabled():
            with ActivationOffload():
                return self._engine(*args, **kwargs)
        return self._engine(*args, **kwargs)

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Where a frozen model computes; it is somewhere else outside if it is offloaded."""
        return contextlib.nullcontext() if self._host_weights is None else self._host_weights.on_device()

    def drop_weights(self) -> None:
        """Free the memory of a frozen model, which nothing may be asked of again: DeepSpeed never lets go of one."""
        for parameter in self.module.parameters():
            for tensor in (parameter, getattr(parameter, "ds_tensor", None)):
                if tensor is not None:
                    tensor.data = tensor.data.new_empty(0)

    @contextlib.contextmanager
    def reference(self) -> Iterator[ModelEngine]:
        """This engine as its own reference: the base model under the adapters, at no cost in memory.

        Raises:
            ValueError: without adapters there is no base model to go back to.
        """
        if not has_lora(self.lm):
            raise ValueError("only a model with LoRA can be its own reference")
        with adapters_off(self.lm):
            yield self

    @property
    def module(self) -> nn.Module:
        """The Policy or Scorer."""
        return self._engine.module  # type: ignore[no-any-return]

    @property
    def deepspeed_engine(self) -> DeepSpeedEngine:
        """For this folder alone."""
        return self._engine

    @property
    def learns(self) -> bool:
        """Whether it has an optimizer."""
        return self._engine.optimizer is not None and self._engine.lr_scheduler is not None

    @property
    def lm(self) -> PreTrainedModel:
        """The Hugging Face model inside."""
        return self.module.lm  # type: ignore[return-value]

    @property
    def parameters(self) -> int:
        """Of the model, those of adapters included."""
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self.module.parameters())

    @property
    def packs(self) -> bool:
        """Whether its batches pass without padding; others count tokens as rows x longest."""
        return packs(self.lm)

    @property
    def device(self) -> torch.device:
        """Where batches must lie."""
        return self.world.device

    def backward(self, total: Tensor, *, count: float) -> None:
        """Add the gradient of total / count.

        Args:
            total: scalar, a sum of losses over this rank's micro-batch.
            count: what the sum over all micro-batches and ranks of this update is divided by.
        """
        # DeepSpeed averages over ranks; times the ranks, that is a sum.
        self._engine.backward(total * (self.world.size / max(count, 1.0)), scale_wrt_gas=False)

    def step(self) -> UpdateStats:
        """Apply the accumulated gradient, move the schedule on, clear the gradient."""
        lr = float(self._engine.get_lr()[0])
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        skipped = not self._engine.was_step_applied()
        return UpdateStats(lr=lr, grad_norm=None if norm is None else float(norm), skipped=skipped)

    def _update_unless_infinite(self, lr_kwargs: dict[str, Any] | None) -> None:
        """DeepSpeed's update of a plain float32 engine, which would take a gradient that is not finite."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._engine._global_grad_norm = float(norm)
        if not norm.isfinite():
            self._engine.zero_grad()
            self._engine._step_applied = False
            self._engine.skipped_steps += 1
            self._engine.global_steps += 1
            return
        if 0.0 < self._options.max_grad_norm < float(norm):  # below it all gradients would be multiplied by 1
            torch.nn.utils.clip_grads_with_norm_(parameters, self._options.max_grad_norm, norm)
        DeepSpeedEngine._take_model_step(self._engine, lr_kwargs)
