"""One model and its optimizer under DeepSpeed.

Why a wrapper: it makes gradients independent of the division into micro-batches and ranks. A loss is a sum, with the
count of the whole update as its divisor. DeepSpeed's mean over ranks is undone here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.engines.deepspeed_internals import (
    allocate_gradients,
    disable_gradient_allreduce,
    end_scale_search_quietly,
    engine_ranks,
    free_weights,
    full_shape,
    has_whole_gradients,
    is_partitioned,
    model_step,
    muon_on_cpu,
    release_gradients,
    replace_model_step,
    searches_loss_scale,
    set_grad_norm,
    skip_model_step,
)
from hybrid_rlhf.engines.operations import Operations, training_operations
from hybrid_rlhf.engines.partition import base_parameters
from hybrid_rlhf.engines.residency.offload import OffloadedWeights
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.generation.image_loading import ModelImages
from hybrid_rlhf.models.activation_offload import ActivationOffload
from hybrid_rlhf.models.lora import adapters_off, has_lora
from hybrid_rlhf.models.packing import pads, saved_rows, shares_prefixes
from hybrid_rlhf.models.structure import layer_list
from hybrid_rlhf.models.vision import FeatureCache, Images
from hybrid_rlhf.models.weight_split import SplitRanks, split_of
from hybrid_rlhf.runtime.world import World

Role = Literal["actor", "critic", "reference", "reward", "student", "teacher"]


@dataclass(frozen=True)
class UpdateStats:
    """Result of an optimizer update."""

    lr: float
    grad_norm: float | None
    skipped: bool = False
    """True if the gradient was not finite; weights, optimizer and schedule are then unchanged on every rank."""
    searches_scale: bool = False
    """True if the loss scale of float16 can fall further, which is then no fault of the rows."""

    @property
    def is_fault(self) -> bool:
        """True if the update was skipped for another reason than the search for the loss scale."""
        return self.skipped and not self.searches_scale


@dataclass(frozen=True)
class EngineFacts:
    """Properties of a model for ranks that do not have it."""

    packs: bool
    """True if all layers compute batches without padding."""
    shares_prefixes: bool = False
    """As in ModelEngine."""
    operations: Operations = Operations()
    """What training it computes; none of a frozen model."""
    eos_token_ids: int | list[int] | None = None
    """EOS tokens of a language model's generation config."""
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the weights of the base model by name."""
    max_logprob_diff: float = 0.0
    """As in HybridEngine."""
    rounds_otherwise: bool = False
    """As in HybridEngine."""


@dataclass(frozen=True)
class EngineOptions:
    """Clipping and offloading of an engine."""

    max_grad_norm: float = 0.0
    """Gradient norm to which a trained model is clipped; 0: no clipping."""
    offload_activations: bool = False
    """Keep activations in host memory between forward and backward."""
    offload_weights: bool = False
    """Keep the weights of a frozen, unpartitioned model in host memory outside `on_device`."""
    muon: bool = False
    """Muon trains the model."""
    tensor_ranks: SplitRanks | None = None
    """Groups of the engine's ranks under tensor parallelism."""
    images: ModelImages | None = None
    """Reads the images of rows."""


class ModelEngine:
    """The model of a role. Call it to compute; call `backward` and `step` to train it."""

    tensor_parallel = 1
    """Number of ranks that compute the same rows together."""
    reports_rows = True
    """True if the results of this rank count, among those that compute the same rows."""

    def __init__(self, role: Role, engine: DeepSpeedEngine, world: World, options: EngineOptions) -> None:
        self.role: Role = role
        self.world = world
        self._engine = engine
        self._options = options
        self._host_weights: OffloadedWeights | None = None
        if options.offload_weights:
            self._host_weights = OffloadedWeights(self.module, world.device, layers=layer_list(self.lm) or ())
        if self.is_trained and isinstance(engine.optimizer, torch.optim.Optimizer):
            # Clip here, so that the norm is known; DeepSpeed's own optimizers report it.
            self._parts = {parameter: split_of(parameter).parts for parameter in self.module.parameters()}
            """Number of parts of each parameter on different ranks."""
            replace_model_step(engine, self._step_if_finite)
        end_scale_search_quietly(engine)
        if world.size == 1:
            disable_gradient_allreduce(engine)

    def __call__(
        self, *args: Any, images: Images | Sequence[Sequence[ImageReference]] | None = None, **kwargs: Any
    ) -> Any:
        """Run the forward of the wrapped module, with rows on the host or the device and the images of each row."""
        if images is not None:
            kwargs["images"] = (
                images if isinstance(images, Images) else self.images.loader.images(images, self._feature_cache)
            )
        offloads = self._options.offload_activations and torch.is_grad_enabled()
        with self._ranks(), ActivationOffload() if offloads else contextlib.nullcontext():
            return self._engine(*args, device=self.device, **kwargs)

    def sync(self) -> None:
        """Do nothing: its weights are those that train, or never change."""

    def note_version(self, version: int) -> None:
        """Do nothing: DeepSpeed counts the updates."""

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Context for computations with a frozen model, whose weights may be offloaded outside it."""
        return contextlib.nullcontext() if self._host_weights is None else self._host_weights.on_device()

    def drop_weights(self) -> None:
        """Free the weights of a frozen model, to which DeepSpeed keeps references. The model cannot be used
        afterwards."""
        free_weights(self.module.parameters())

    @contextlib.contextmanager
    def reference(self) -> Iterator[ModelEngine]:
        """Use this engine as its own reference: the base model without its adapters, without extra memory.

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
    def images(self) -> ModelImages:
        """Reads the images of rows."""
        assert self._options.images is not None, "build_engine gives it"
        return self._options.images

    @functools.cached_property
    def _feature_cache(self) -> FeatureCache | None:
        """The states of images that the tower has computed; None if it changes, or ranks must compute together."""
        return None if any(map(is_partitioned, self.module.parameters())) else self.images.cache

    @property
    def module(self) -> nn.Module:
        """The wrapped Policy or Scorer."""
        return self._engine.module  # type: ignore[no-any-return]

    @property
    def deepspeed_engine(self) -> DeepSpeedEngine:
        """The DeepSpeed engine, with all its states on the training device. For use inside this folder."""
        return self._engine

    @property
    def is_trained(self) -> bool:
        """True if the model has an optimizer."""
        return self._engine.optimizer is not None and self._engine.lr_scheduler is not None

    @property
    def lm(self) -> PreTrainedModel:
        """The Hugging Face model inside the module."""
        return self.module.lm  # type: ignore[return-value]

    @property
    def config(self) -> PreTrainedConfig:
        """Config of the Hugging Face model."""
        return self.lm.config

    @functools.cached_property
    def operations(self) -> Operations:
        """What training it computes."""
        return training_operations(self.lm) if self.is_trained else Operations()

    @property
    def packs(self) -> bool:
        """True if all layers compute batches without padding; else some layers compute rows x longest tokens."""
        return not pads(self.lm)

    @property
    def shares_prefixes(self) -> bool:
        """True if the common tokens of rows that begin alike are computed once."""
        return shares_prefixes(self.lm)

    @property
    def saved_rows(self) -> list[int]:
        """Tokens of the prefixes that the last forward did not compute again, one number for each time."""
        return saved_rows(self.lm)

    @property
    def facts(self) -> EngineFacts:
        """Properties of the model for ranks that do not have it."""
        settings = self.lm.generation_config if self.lm.can_generate() else None
        weights = {name: full_shape(weight) for name, weight in base_parameters(self.lm)}
        eos = None if settings is None else settings.eos_token_id
        return EngineFacts(self.packs, self.shares_prefixes, self.operations, eos, weights)

    @property
    def weight_version(self) -> int:
        """Number of optimizer updates of the current weights."""
        return int(self._engine.global_steps)

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        return self.world.device

    def backward(self, total: Tensor, *, count: float) -> None:
        """Add the gradient of total / count.

        Args:
            total: scalar, sum of losses over this rank's micro-batch.
            count: divisor of the sum over all micro-batches and ranks of this update.
        """
        # DeepSpeed averages over the ranks with the same weights; multiplied by their number, this is a sum.
        tensor_ranks = self._options.tensor_ranks
        averaged = self.world.size if tensor_ranks is None else tensor_ranks.replicas.size
        allocate_gradients(self.deepspeed_engine)
        with self._ranks():
            self.deepspeed_engine.backward(total * (averaged / max(count, 1.0)), scale_wrt_gas=False)

    def with_router_losses(self, loss: LossSum, weights: Tensor) -> LossSum:
        """Add the router losses of the last forward to a loss, if the model has any (models/routers/losses.py).

        Args:
            loss: loss of the micro-batch.
            weights: [B], share of each sequence in the count of the loss.
        """
        router_losses = getattr(self.module, "router_losses", None)
        return loss if router_losses is None else router_losses.added_to(loss, weights)

    @property
    def router_agreement(self) -> Tensor | None:
        """[2] float64, for the last forward: number of recorded expert choices that its routers also made, and number
        of all recorded choices (models/routers/replay.py); None if there were no recorded choices."""
        replay = getattr(self.module, "replay", None)
        return None if replay is None else replay.agreement

    def step(self) -> UpdateStats:
        """Apply the accumulated gradient, step the schedule, and clear the gradient."""
        lr = float(self._engine.get_lr()[0])
        allocate_gradients(self.deepspeed_engine)
        searches_scale = searches_loss_scale(self._engine)
        on_cpu = self._options.muon and self.world.device.type == "cpu"
        with self._ranks(), muon_on_cpu() if on_cpu else contextlib.nullcontext():
            self.deepspeed_engine.step()
        release_gradients(self._engine)
        # with Muon under ZeRO, DeepSpeed's norm is that of the updates, except of whole gradients
        is_of_gradients = self._engine.zero_optimization_stage() == 0 or has_whole_gradients(self._engine)
        reports = not self._options.muon or is_of_gradients
        norm = self._engine.get_global_grad_norm() if reports else None
        return UpdateStats(
            lr=lr,
            grad_norm=None if norm is None else float(norm),
            skipped=not self._engine.was_step_applied(),
            searches_scale=searches_scale,
        )

    def _ranks(self) -> contextlib.AbstractContextManager[None]:
        """Context in which DeepSpeed uses the ranks of this engine."""
        return engine_ranks(self.world, self._options.tensor_ranks)

    def _step_if_finite(self, lr_kwargs: dict[str, Any] | None) -> None:
        """Update a plain float32 engine unless the gradient is not finite; DeepSpeed's update would apply it anyway."""
        norm = self._grad_norm()
        set_grad_norm(self._engine, float(norm))
        if not norm.isfinite():
            skip_model_step(self._engine)
            return
        # below the limit, clipping would multiply all gradients by 1
        if 0.0 < self._options.max_grad_norm < float(norm):
            torch.nn.utils.clip_grads_with_norm_(self._parts, self._options.max_grad_norm, norm)
        model_step(self._engine, lr_kwargs)

    def _grad_norm(self) -> Tensor:
        """Return the norm of the gradients of a plain float32 engine, with those of the parts of other ranks."""
        grads: dict[int, list[Tensor]] = {1: []}
        for parameter, parts in self._parts.items():
            if parameter.grad is not None:
                grads.setdefault(parts, []).append(parameter.grad)
        total = torch.nn.utils.get_total_norm(grads.pop(1))
        for parts, of_parts in grads.items():  # each part's gradient is on size / parts ranks
            square = self.world.all_reduce(torch.nn.utils.get_total_norm(of_parts).square())
            total = (total.square() + square * parts / self.world.size).sqrt()
        return total
