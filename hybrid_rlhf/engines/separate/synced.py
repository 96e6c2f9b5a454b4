"""Inference weights on some ranks that follow a model trained on other ranks.

The receiving ranks have no training model. All ranks exchange their versions before each use, and the weights are sent
if versions differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.engine import Role
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.engines.separate.broadcast import SyncRanks, TrainedModel, WeightBroadcast, compare_checksums
from hybrid_rlhf.engines.tower_copy import TowerCopy
from hybrid_rlhf.generation.architecture.hugging_face import NotDescribed
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.quantisation import Quantization
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, DescribeModel, InferenceWeights
from hybrid_rlhf.runtime.world import World, shared_user_errors

_CHECKED_SYNCS = 2
"""Number of first syncs that are checked by checksums."""


@dataclass(frozen=True)
class _State:
    """Record that all ranks exchange before a sync."""

    version: int
    """Version of the trained weights, or of the received ones; -1: they must be sent again."""
    trains: bool
    needs_all: bool
    """True if this rank receives, and has no weights that it can update in place."""


class SyncedWeights:
    """Keeps inference weights equal to the trained weights of other ranks."""

    def __init__(
        self,
        trained: RoleModel,
        *,
        ranks: SyncRanks,
        group: World | None,
        key: str,
        describe: DescribeModel = DescribedModel.of,
        dtype: torch.dtype | None = None,
        in_place: bool = True,
        quantization: Quantization | None = None,
        check_weights: bool = False,
        release: Callable[[], None] = lambda: None,
        has_images: bool = False,
    ) -> None:
        """Describe the model, and plan the inference weights. Every rank of the union makes this call.

        Args:
            trained: the model.
            ranks: the training and the receiving ranks.
            group: tensor-parallel group of this rank; none on a rank that does not receive.
            key: config key that is named in errors.
            describe: describes the model.
            dtype: dtype of the inference weights; none: that of training.
            in_place: as in InferenceWeights.
            quantization: as in InferenceWeights.
            check_weights: faults.check_weights of the config.
            release: releases the users of the decoder, before another decoder replaces it.
            has_images: the receiving ranks also need the tower for images.

        Raises:
            UserError: on every rank, when the model has no inference weights for such groups.
        """
        self._trained = trained
        self._ranks = ranks
        self._check_weights = check_weights
        self._release_users = release
        with shared_user_errors(ranks.union), _named_in_errors(key, trained.role):
            model = TrainedModel.of(trained.lm, describe, sends_tower=has_images) if trained.world.is_main else None
        self.model: TrainedModel = ranks.of_source(model)
        self.dtype = dtype or self.model.dtype
        self._inference: InferenceWeights | None = None
        with shared_user_errors(ranks.union), _named_in_errors(key, trained.role):
            if group is not None:
                self._inference = InferenceWeights(
                    self.model.described, world=group, dtype=self.dtype, in_place=in_place, quantization=quantization
                )
        self._broadcast = WeightBroadcast(ranks, self.model)
        self.tower: TowerCopy | None = None
        """The tower on a rank that receives; none: it is not sent."""
        if group is not None and self.model.tower is not None:
            self.tower = TowerCopy(self.model.tower, group.device)
        self.decoder: Decoder | None = None
        """Decoder of the weights that arrived last."""
        self.version = -1
        """Number of optimizer updates of the weights at the last exchange."""
        self.syncs = 0
        """Number of syncs so far."""
        self._held_version = -1

    def current(self, verify: Callable[[Decoder | None], None]) -> Decoder | None:
        """Return the decoder of the current weights; None on a rank that does not receive. Every rank of the union
        makes this call.

        Args:
            verify: called on every rank after a sync, before the weights are used.

        Raises:
            UserError: on every rank, when the weights arrived damaged, or ranks have made different updates.
        """
        trained = self._trained
        trains = trained.world.is_member
        updates_in_place = self._inference is None or (self._inference.in_place and self.decoder is not None)
        states = self._ranks.union.all_gather_objects(
            _State(trained.weight_version if trains else self._held_version, trains, not updates_in_place)
        )
        self.version = self._agreed_version(states)
        if any(state.version != self.version for state in states):
            self._sync(everything=any(state.needs_all for state in states))
            verify(self.decoder)
        return self.decoder

    def _with_tower(self, received: Iterator[tuple[str, Tensor, bool]]) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the weights that arrive, and copy those of the tower."""
        for name, weight, persistent in received:
            if self.tower is not None:
                self.tower.take(name, weight)
            yield name, weight, persistent

    def force(self) -> None:
        """Receive the weights at the next use even if the version is the same. Every rank that receives makes this
        call."""
        self._held_version = -1

    def release(self) -> None:
        """Release the inference weights. Users of the decoder keep theirs."""
        self.decoder = None
        self.force()

    def _agreed_version(self, states: list[_State]) -> int:
        """Return the version of the training ranks."""
        versions = {
            rank: state.version for rank, state in zip(self._ranks.union.members, states, strict=True) if state.trains
        }
        first = versions[self._ranks.source]
        for rank, version in versions.items():
            if version != first:
                raise UserError(
                    f"ranks of the {self._trained.role} must have made the same updates, rank {self._ranks.source} "
                    f"has made {first}, rank {rank} {version}: resume from a checkpoint"
                )
        return first

    def _sync(self, *, everything: bool) -> None:
        self.syncs += 1
        checked = self._check_weights or self.syncs <= _CHECKED_SYNCS
        if self._trained.world.is_member:
            self._broadcast.send(self._trained.lm, everything=everything, checked=checked)
        if self._inference is not None:
            self._held_version = -1  # not valid until the weights are complete
            if not self._inference.in_place:
                self._release_users()
                self.decoder = None
            received = self._broadcast.receive(everything=everything, checked=checked)
            self.decoder = self._inference.build(self._with_tower(received))
            self._held_version = self.version
        if checked:
            compare_checksums(self._ranks, self._broadcast.checksums, update=self.version)


@contextlib.contextmanager
def _named_in_errors(key: str, role: Role) -> Iterator[None]:
    """Context that raises UserError, with the config key, for a model without inference weights."""
    try:
        yield
    except NotDescribed as error:
        raise UserError(
            f"{key} needs inference weights, the {role}'s model has none ({error}): leave {key} out"
        ) from error
