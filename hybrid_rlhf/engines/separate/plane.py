"""Inference weights on some ranks that follow a model trained on other ranks.

The receiving ranks have no training model; the first training rank describes it to them. All ranks exchange their
layouts once, and their versions before each transfer. Weights are sent if versions differ. A transfer may run in a
thread while the main thread computes with other models, so these ranks have a process group that nothing else uses.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.engines.separate.layout import HeldWeights, Interval, NeededWeights, TrainedModel
from hybrid_rlhf.engines.separate.received import ReceivedWeights
from hybrid_rlhf.engines.separate.routes import RoutePlan
from hybrid_rlhf.engines.separate.transfer import WeightTransfer, compare_checksums
from hybrid_rlhf.generation.architecture.hugging_face import NotDescribed
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.quantisation import Quantization
from hybrid_rlhf.generation.weights.inference_weights import DescribedModel, DescribeModel, InferenceWeights
from hybrid_rlhf.runtime.background import BackgroundCall, SideStream
from hybrid_rlhf.runtime.world import World, shared_user_errors

T = TypeVar("T")
_CHECKED_SYNCS = 2
"""Number of first syncs that are checked by checksums."""


@dataclass(frozen=True)
class PlaneSettings:
    """Settings of a WeightPlane."""

    role: Role
    key: str
    """Config key that is named in errors."""
    describe: DescribeModel = DescribedModel.of
    dtype: torch.dtype | None = None
    """Dtype of the inference weights; none: that of training."""
    in_place: bool = True
    """As in InferenceWeights."""
    quantization: Quantization | None = None
    check_weights: bool = False
    """faults.check_weights of the config."""


@dataclass
class TransferTimes:
    """Times of a transfer during other work, on this rank; set at its end."""

    seconds: float = 0.0
    waited: float = 0.0
    """Part of `seconds` after the end of the other work."""

    @property
    def metrics(self) -> dict[str, float]:
        """Times by the names of the log."""
        hidden = max(0.0, self.seconds - self.waited)
        return {"time/hidden_weight_sync_seconds": hidden, "time/weight_wait_seconds": self.waited}


@dataclass(frozen=True)
class _Introduction:
    """Record that all ranks exchange at the start."""

    host: str
    held: Mapping[str, Interval] | None
    """Intervals of a rank that trains the model; none on other ranks."""
    model: TrainedModel | None
    """Description of the model, from the first training rank; none on other ranks."""


@dataclass(frozen=True)
class _State:
    """Record that all ranks exchange before a transfer."""

    version: int
    """Version of the trained weights, or of the received ones; -1: this rank has no weights."""
    lacks_frozen: bool = False
    forces: bool = False
    """True if other weights may have the same version."""


class WeightPlane:
    """Keeps inference weights equal to the trained weights of other ranks."""

    def __init__(
        self,
        trained: ModelEngine | None,
        settings: PlaneSettings,
        *,
        union: World,
        group: World | None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Plan transfers of all weights and of trained weights only. Every rank of `union` must make this call.

        Args:
            trained: engine of the model; none on ranks that do not train it.
            settings: settings of the plane.
            union: training and receiving ranks, in a process group that nothing else uses.
            group: tensor-parallel group of this rank; none on a rank that does not receive.
            release: releases the users of the decoder, before another decoder replaces it.

        Raises:
            UserError: on every rank of `union`, when the model has no inference weights for such groups.
        """
        self._trained = trained
        self._settings = settings
        self._union = union
        self._release_users = release
        self._held = None if trained is None else HeldWeights(trained.lm, trained.world)
        with shared_user_errors(union):
            model = self._described(trained) if trained is not None and trained.world.is_main else None
        introductions = union.all_gather_objects(
            _Introduction(socket.gethostname(), None if self._held is None else self._held.intervals, model)
        )
        self._sources = [rank for rank, of_rank in enumerate(introductions) if of_rank.held is not None]
        (self.model,) = (of_rank.model for of_rank in introductions if of_rank.model is not None)
        self.dtype = settings.dtype or self.model.dtype
        self._inference: InferenceWeights | None = None
        with shared_user_errors(union):
            needs = None if group is None else self._plan_inference_weights(group)
        needed = {rank: need for rank, need in enumerate(union.all_gather_objects(needs)) if need is not None}
        dtypes = next(iter(needed.values())).dtypes
        self._transfers = self._plan_transfers(introductions, needed, dtypes)
        """Transfers by `everything`: of all weights (true), and of trained weights only (false)."""
        self._received: ReceivedWeights | None = None
        if self._inference is not None:
            self._received = ReceivedWeights(dtypes, union.device, in_place=self._inference.in_place)
        self.decoder: Decoder | None = None
        """Decoder of the weights that arrived last."""
        self.version = -1
        """Number of optimizer updates of the weights at the last exchange."""
        self.syncs = 0
        """Number of transfers so far."""
        self.sent_bytes = 0
        """Bytes that this rank sent in the last transfer."""
        self._held_version = -1
        self._forces = False
        self._unverified: WeightTransfer | None = None
        self._stream = SideStream(union.device)

    def _plan_inference_weights(self, group: World) -> NeededWeights:
        settings = self._settings
        try:
            self._inference = InferenceWeights(
                self.model.described,
                world=group,
                dtype=self.dtype,
                in_place=settings.in_place,
                quantization=settings.quantization,
            )
        except NotDescribed as error:
            raise self._unsupported(error) from error
        return NeededWeights.of(self.model, self._inference, self.dtype)

    def _plan_transfers(
        self,
        introductions: Sequence[_Introduction],
        needed: Mapping[int, NeededWeights],
        dtypes: Mapping[str, torch.dtype],
    ) -> dict[bool, WeightTransfer]:
        plan = RoutePlan(
            {rank: of_rank.held for rank, of_rank in enumerate(introductions) if of_rank.held is not None},
            {rank: need.runs for rank, need in needed.items()},
            [of_rank.host for of_rank in introductions],
        )
        transfers = {}
        for everything in (True, False):
            buckets = plan.buckets(self.model.weights, everything=everything, bucket_elements=BUCKET_ELEMENTS)
            transfers[everything] = WeightTransfer(self._union, buckets, dtypes)
        return transfers

    def _described(self, trained: ModelEngine) -> TrainedModel:
        try:
            return TrainedModel.of(trained.lm, self._settings.describe)
        except NotDescribed as error:
            raise self._unsupported(error) from error

    def _unsupported(self, reason: NotDescribed) -> UserError:
        key = self._settings.key
        return UserError(
            f"{key} needs inference weights, the {self._settings.role}'s model has none ({reason}): leave {key} out"
        )

    def current(self, verify: Callable[[Decoder | None], None]) -> Decoder | None:
        """Return the decoder of the current weights; None on a rank that does not receive. Every rank must make this
        call.

        Args:
            verify: called on every rank after a transfer, before the weights are used.

        Raises:
            UserError: on every rank, when the weights arrived damaged, or ranks have made different updates.
        """
        self._update()
        if self._unverified is not None:
            if self._checked:
                compare_checksums(self._union, self._unverified.checksums, update=self.version)
            verify(self.decoder)
            self._unverified = None
        return self.decoder

    @contextlib.contextmanager
    def ahead(self) -> Iterator[TransferTimes]:
        """Context in which weights are transferred while other models compute. Every rank must enter.

        A rank may leave when its part of the transfer is complete. `current` verifies the weights later.
        """
        queued = self._stream.position()
        times = TransferTimes()

        def transfer() -> float:
            start = time.perf_counter()
            with self._stream.after(queued):
                self._update()
            return time.perf_counter() - start

        call = BackgroundCall(transfer, device=self._union.device)
        yield times
        start = time.perf_counter()
        times.seconds = call.result()
        times.waited = time.perf_counter() - start

    def force(self) -> None:
        """Make the next update transfer the weights even if the version is the same. Needed only on training ranks."""
        self._forces = True

    def of_trained(self, value: T | None) -> T | None:
        """Broadcast the value of the first training rank; returns it on every rank."""
        return self._union.broadcast_object(value, source=self._sources[0])

    def release(self) -> None:
        """Release the inference weights. Users of the decoder keep theirs."""
        self.decoder = None
        self._held_version = -1

    @property
    def _checked(self) -> bool:
        """True if the last transfer has checksums."""
        return self._settings.check_weights or self.syncs <= _CHECKED_SYNCS

    def _update(self) -> None:
        """Transfer the weights if they have changed."""
        trained = self._trained
        received = self._received
        states = self._union.all_gather_objects(
            _State(
                self._held_version if trained is None else trained.weight_version,
                received is not None and not received.has_frozen,
                self._forces,
            )
        )
        self._forces = False
        self.version = self._agreed_version(states)
        if any(state.forces or state.version != self.version for state in states):
            self._transfer(self._transfers[any(state.lacks_frozen for state in states)])

    def _agreed_version(self, states: list[_State]) -> int:
        versions = {rank: states[rank].version for rank in self._sources}
        first = self._sources[0]
        role = self._settings.role
        for rank, version in versions.items():
            if version != versions[first]:
                first_rank = self._union.members[first]
                differing_rank = self._union.members[rank]
                raise UserError(
                    f"ranks of the {role} must have made the same updates, rank {first_rank} has made "
                    f"{versions[first]}, rank {differing_rank} {version}: resume from a checkpoint"
                )
        return versions[first]

    def _transfer(self, transfer: WeightTransfer) -> None:
        self.syncs += 1
        self._held_version = -1  # not valid until the weights are complete
        if self._held is not None:
            transfer.send(self._held, checked=self._checked)
        if self._inference is not None and self._received is not None:
            if not self._inference.in_place:
                self._release_users()
                self.release()
            self.decoder = self._inference.build(self._received.assembled(transfer.receive(checked=self._checked)))
            self._held_version = self.version
        self.sent_bytes = transfer.sent_bytes
        self._unverified = transfer
