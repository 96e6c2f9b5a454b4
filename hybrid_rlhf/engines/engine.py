"""One model and its optimizer under DeepSpeed.

Why a wrapper: it owns the convention that makes gradients independent of micro-batches and ranks. A loss is a sum,
together with the count that it is divided by over the whole update; DeepSpeed's mean over ranks is undone here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.engines.deepspeed_internals import (
    disable_gradient_allreduce,
    engine_ranks,
    free_weights,
    full_elements,
    full_shape,
    model_step,
    replace_model_step,
    set_grad_norm,
    skip_model_step,
)
from hybrid_rlhf.engines.partition import base_parameters
from hybrid_rlhf.engines.residency.offload import OffloadedWeights
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.models.activation_offload import ActivationOffload
from hybrid_rlhf.models.lora import adapters_off, has_lora
from hybrid_rlhf.models.packing import pads
from hybrid_rlhf.models.structure import layer_list
from hybrid_rlhf.runtime.world import World

Role = Literal["actor", "critic", "reference", "reward", "student", "teacher"]


@dataclass(frozen=True)
class UpdateStats:
    """Result of an optimizer update."""

    lr: float
    grad_norm: float | None
    skipped: bool = False
    """The gradient was not finite: weights, optimizer and schedule are unchanged, on every rank."""


@dataclass(frozen=True)
class EngineFacts:
    """Properties of a model that ranks without it need."""

    parameters: int
    """See ModelEngine."""
    packs: bool
    """See ModelEngine."""
    eos_token_ids: int | list[int] | None = None
    """Tokens that end a completion of a language model, of its generation config."""
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the weights of the base model by name."""
    max_logprob_diff: float = 0.0
    """See HybridEngine."""
    rounds_otherwise: bool = False
    """See HybridEngine."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine trains, and what it offloads."""

    max_grad_norm: float = 0.0
    """Largest gradient norm of a trained model; 0 does not clip."""
    offload_activations: bool = False
    """Keep activations in host memory between forward and backward."""
    offload_weights: bool = False
    """Keep the weights of a frozen model, which is not partitioned, in host memory outside `on_device`."""


class ModelEngine:
    """A role's model: call it to compute, `backward` and `step` to train it."""

    tensor_parallel = 1
    """Ranks that compute the same rows together."""
    reports_rows = True
    """Whether this rank is the one of them whose results count."""

    def __init__(self, role: Role, engine: DeepSpeedEngine, world: World, options: EngineOptions | None = None) -> None:
        self.role: Role = role
        self.world = world
        self._engine = engine
        self._options = options or EngineOptions()
        self._host_weights = self._offloaded_weights() if self._options.offload_weights else None
        if self.is_trained and isinstance(engine.optimizer, torch.optim.Optimizer):
            # Clip here too, so that the norm is known; DeepSpeed's own optimizers report theirs.
            replace_model_step(engine, self._step_if_finite)
        if world.size == 1:
            disable_gradient_allreduce(engine)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        offloads = self._options.offload_activations and torch.is_grad_enabled()
        with engine_ranks(self.world), ActivationOffload() if offloads else contextlib.nullcontext():
            return self._engine(*args, **kwargs)

    def _offloaded_weights(self) -> OffloadedWeights:
        return OffloadedWeights(self.module, self.world.device, layers=layer_list(self.lm) or ())

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Around the computation of a frozen model, whose weights may be offloaded outside."""
        return contextlib.nullcontext() if self._host_weights is None else self._host_weights.on_device()

    def drop_weights(self) -> None:
        """Free the memory of a frozen model, which cannot be used afterwards; DeepSpeed keeps references to it."""
        free_weights(self.module)

    @contextlib.contextmanager
    def reference(self) -> Iterator[ModelEngine]:
        """This engine as its own reference: the base model without its adapters, at no cost in memory.

        Raises:
            ValueError: for a model without adapters.
        """
        if not has_lora(self.lm):
            raise ValueError(
                f"a model needs LoRA adapters to be its own reference, {self.role} has none: load a reference"
            )
        with adapters_off(self.lm):
            yield self

    @property
    def module(self) -> nn.Module:
        """The Policy or Scorer."""
        return self._engine.module  # type: ignore[no-any-return]

    @property
    def deepspeed_engine(self) -> DeepSpeedEngine:
        """With all its states where they train, for use inside this folder."""
        return self._engine

    @property
    def is_trained(self) -> bool:
        """Whether it has an optimizer."""
        return self._engine.optimizer is not None and self._engine.lr_scheduler is not None

    @property
    def lm(self) -> PreTrainedModel:
        """The Hugging Face model inside."""
        return self.module.lm  # type: ignore[return-value]

    @property
    def config(self) -> PreTrainedConfig:
        """Of the Hugging Face model."""
        return self.lm.config

    @property
    def parameters(self) -> int:
        """Number of parameters, those of adapters included."""
        return sum(full_elements(parameter) for parameter in self.module.parameters())

    @property
    def packs(self) -> bool:
        """Whether all layers compute batches without padding; some of other models compute rows x longest tokens."""
        return not pads(self.lm)

    @property
    def facts(self) -> EngineFacts:
        """Properties for the ranks without this model."""
        settings = self.lm.generation_config if self.lm.can_generate() else None
        weights = {name: full_shape(weight) for name, weight in base_parameters(self.lm)}
        return EngineFacts(self.parameters, self.packs, None if settings is None else settings.eos_token_id, weights)

    @property
    def weight_version(self) -> int:
        """Optimizer updates of the current weights."""
        return int(self._engine.global_steps)

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""
        return self.world.device

    def backward(self, total: Tensor, *, count: float) -> None:
        """Add the gradient of total / count.

        Args:
            total: scalar, a sum of losses over this rank's micro-batch.
            count: divisor of the sum over all micro-batches and ranks of this update.
        """
        # DeepSpeed averages over ranks; multiplied by their number, that is a sum.
        with engine_ranks(self.world):
            self.deepspeed_engine.backward(total * (self.world.size / max(count, 1.0)), scale_wrt_gas=False)

    def with_router_losses(self, loss: LossSum, weights: Tensor) -> LossSum:
        """A loss with those of the routers in the last forward, if the model has them (models/routers/losses.py).

        Args:
            loss: of the micro-batch.
            weights: [B], the share of each sequence in the loss's count.
        """
        found = getattr(self.module, "router_losses", None)
        return loss if found is None else found.added_to(loss, weights)

    @property
    def router_agreement(self) -> Tensor | None:
        """[2] float64, of the last forward: recorded choices of experts that its routers used, and all recorded ones
        (models/routers/replay.py); none: it had none."""
        replay = getattr(self.module, "replay", None)
        return None if replay is None else replay.agreement

    def step(self) -> UpdateStats:
        """Apply the accumulated gradient, step the schedule, clear the gradient."""
        lr = float(self._engine.get_lr()[0])
        with engine_ranks(self.world):
            self.deepspeed_engine.step()
        norm = self._engine.get_global_grad_norm()
        skipped = not self._engine.was_step_applied()
        return UpdateStats(lr=lr, grad_norm=None if norm is None else float(norm), skipped=skipped)

    def _step_if_finite(self, lr_kwargs: dict[str, Any] | None) -> None:
        """The update of a plain float32 engine; DeepSpeed's own would apply a gradient that is not finite."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        set_grad_norm(self._engine, float(norm))
        if not norm.isfinite():
            skip_model_step(self._engine)
            return
        if 0.0 < self._options.max_grad_norm < float(norm):  # below it, clipping would multiply all gradients by 1
            torch.nn.utils.clip_grads_with_norm_(parameters, self._options.max_grad_norm, norm)
        model_step(self._engine, lr_kwargs)


class AbsentEngine:
    """Placeholder for a role's model on a rank that does not have it; it has the model's facts and cannot compute."""

    def __init__(self, role: Role, world: World, facts: EngineFacts) -> None:
        self.role: Role = role
        self.world = world
        self.facts = facts
        self.parameters, self.packs = facts.parameters, facts.packs
        self.weight_version = 0
        """Optimizer updates of the current weights, as of the last synchronization."""
