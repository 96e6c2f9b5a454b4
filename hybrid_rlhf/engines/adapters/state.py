"""The state of an AdapterActor in checkpoints, which are those of a run with LoRA alone on its base, without ZeRO: of
several ranks each writes a part of it, and any number of them reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from hybrid_rlhf.engines.adapters.actor import AdapterActor
from hybrid_rlhf.engines.saved.fragments import named_tensors
from hybrid_rlhf.models.fragment_files import WEIGHT, Fragment, SavedFragments

_STATES = {WEIGHT: "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""The states of an adapter by kind of fragment."""


class AdapterState:
    """Reads and writes the adapter, its optimizer and its counters."""

    def __init__(self, actor: AdapterActor) -> None:
        self.world = actor.world
        self._actor = actor
        self._adapter = actor.engine.adapter(actor.name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank writes, by name."""
        return named_tensors(fragment.share for fragment in self._fragments())

    def numbers(self) -> dict[str, Any]:
        """Return the counters, as JSON values."""
        steps = self._adapter.steps
        return {
            "zero_stage": 0,
            "optimizer_steps": steps,
            "schedule": {"last_epoch": steps},
            "counters": {"global_steps": self._actor.weight_version, "skipped_steps": self._actor.skipped},
            "loss_scale": {},
        }

    def restore(self, files: list[Path], numbers: dict[str, Any]) -> None:
        """Restore a state that an adapter beside others, or a run with LoRA alone, has written.

        Raises:
            UserError: when the files belong to another model.
        """
        fragments = list(self._fragments())
        SavedFragments(files).fill(fragments)
        for kind, state in _STATES.items():
            for fragment, (_, part) in zip(fragments, self._adapter.named(state), strict=True):
                part.copy_(fragment.tensors[kind].view(part.shape))
        self._adapter.steps = numbers["optimizer_steps"]
        self._actor.skipped = numbers["counters"]["skipped_steps"]

    def _fragments(self) -> Iterator[Fragment]:
        """Copies of the factors and their averages, with the names that peft gives them in a model."""
        named = {kind: dict(self._adapter.named(state)) for kind, state in _STATES.items()}
        for name in named[WEIGHT]:
            tensors = {kind: parts[name].clone().flatten() for kind, parts in named.items()}
            of_peft = f"lm.{name.removesuffix('.weight')}.default.weight"
            yield Fragment(of_peft, 0, tensors, copy=self.world.rank, copies=self.world.size)
