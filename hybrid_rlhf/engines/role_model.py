"""Interface of the models of an RL step, the same on ranks that have a model and on ranks that do not.

Code for all ranks reads and trains through it: a rank without the model has no rows of it (`world` is without this
process), so it computes nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.engines.engine import EngineFacts, Role, UpdateStats
from hybrid_rlhf.engines.operations import Operations
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.runtime.world import World


class Reader(Protocol):
    """A model that computes rows."""

    world: World
    """Ranks that have the model; this process may not be one of them."""
    tensor_parallel: int
    """Number of ranks that compute the same rows together."""
    reports_rows: bool
    """True if the results of this rank count, among those that compute the same rows."""

    @property
    def shares_prefixes(self) -> bool:
        """True if the common tokens of rows that begin alike are computed once. On every rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the model's forward. Only ranks that have the model make this call."""

    def sync(self) -> None:
        """Bring the weights up to date with those that train elsewhere. Every rank of the run makes this call."""

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Context for computations with a frozen model, whose weights may be offloaded outside it."""


class RoleModel(Reader, Protocol):
    """The model of a role, which an optimizer may train. Members without a remark are for ranks that have it."""

    role: Role

    @property
    def facts(self) -> EngineFacts:
        """Properties of the model. On every rank."""

    @property
    def operations(self) -> Operations:
        """What training it computes. On every rank."""

    @property
    def packs(self) -> bool:
        """True if all layers compute batches without padding. On every rank."""

    @property
    def weight_version(self) -> int:
        """Number of optimizer updates of the weights; on a rank without the model, as last noted. On every rank."""

    @property
    def device(self) -> torch.device:
        """Device that it computes on. On every rank."""

    @property
    def module(self) -> nn.Module:
        """The wrapped Policy or Scorer."""

    @property
    def lm(self) -> PreTrainedModel:
        """The Hugging Face model inside the module."""

    @property
    def config(self) -> PreTrainedConfig:
        """Config of the Hugging Face model."""

    @property
    def router_agreement(self) -> Tensor | None:
        """As in ModelEngine."""

    @property
    def saved_rows(self) -> list[int]:
        """As in ModelEngine."""

    def reference(self) -> contextlib.AbstractContextManager[Reader]:
        """Context of the base model without its adapters. On every rank."""

    def note_version(self, version: int) -> None:
        """Note the number of updates, on a rank without the model; no effect on others. On every rank."""

    def with_router_losses(self, loss: LossSum, weights: Tensor) -> LossSum:
        """As in ModelEngine."""

    def backward(self, total: Tensor, *, count: float) -> None:
        """Add the gradient of total / count, as in ModelEngine."""

    def step(self) -> UpdateStats:
        """Apply the accumulated gradient, step the schedule, and clear the gradient."""


class Actor(RoleModel, SamplingEngine, Protocol):
    """The actor, which may also sample."""

    rounds_otherwise: bool
    """True if log-probs are computed with a different precision in sampling than in training, on any ranks."""


class AbsentEngine:
    """A RoleModel on a rank that does not have the model."""

    tensor_parallel = 1
    reports_rows = False
    router_agreement = None

    def __init__(self, role: Role, world: World, facts: EngineFacts) -> None:
        """Args: the role, the ranks that have its model, and the model's facts."""
        self.role: Role = role
        self.world = world
        self.device = world.device
        """Device of this rank."""
        self.facts = facts
        self.operations = facts.operations
        self.packs = facts.packs
        self.shares_prefixes = facts.shares_prefixes
        self.weight_version = 0
        """Number of optimizer updates of the weights, as last noted."""

    def note_version(self, version: int) -> None:
        """Note the number of updates."""
        self.weight_version = version

    def sync(self) -> None:
        """Do nothing: there are no weights."""

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def reference(self) -> contextlib.AbstractContextManager[Reader]:
        """Return a context of this placeholder."""
        return contextlib.nullcontext(self)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"only ranks {list(self.world.members)} have the {self.role}, this one does not")

    __call__ = with_router_losses = backward = step = _refuse
    module: Any = property(_refuse)
    saved_rows: Any = property(_refuse)
    lm: Any = property(_refuse)
    config: Any = property(_refuse)
