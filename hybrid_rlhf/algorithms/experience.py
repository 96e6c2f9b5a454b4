"""A rollout as tensors, whole on every rank.

It is small next to a model (a few floats a token), and having it everywhere makes whitening, mini-batches and the
balance of lengths the same whatever the number of ranks.

Shapes: N completions of the rollout over all ranks, T time, right-padded. Tensors speak of the token at their
position: logprobs[n, t] of token t, values[n, t] of the state in which it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.data.loaders import deal
from hybrid_rlhf.functional.masking import masked_mean, masked_sum, masked_var


@dataclass(frozen=True)
class Sequences:
    """Prompts with their completions."""

    input_ids: Tensor
    """[N, T] int64."""
    attention_mask: Tensor
    """[N, T] bool, true on real tokens."""
    response_mask: Tensor
    """[N, T] bool, true on what the actor sampled, stop tokens included; false on observations between its turns."""
    sampled_logprobs: Tensor
    """[N, T] float32, of the actor's whole distribution, as the generator reported them."""
    drawn_logprobs: Tensor
    """[N, T] float32, of what was drawn from; another distribution only where top_p or top_k cut it."""
    stopped: Tensor
    """[N] bool, whether the completion ended by itself."""
    weight_versions: Tensor
    """[N, T] int64, the updates that had made the weights which sampled it; 0 on what was not sampled."""
    turn_rewards: Tensor | None = None
    """[N, T] float32, what an environment gave for each turn, at its last token; none: there is no environment."""

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: tensor for name, tensor in values.items() if tensor is not None}

    @property
    def lengths(self) -> Tensor:
        """[N] int64, real tokens."""
        return self.attention_mask.sum(dim=1)

    def stale_updates(self, weight_version: int) -> float:
        """Updates between the weights that sampled a token and those of a version, a mean over tokens."""
        return float(masked_mean((weight_version - self.weight_versions).float(), mask=self.response_mask))

    def rows(self, indices: Sequence[int | None]) -> Sequences:
        """Some rows, cut to the longest of them; None gives a row of one token, which counts nowhere."""
        device = self.input_ids.device
        index = torch.tensor([0 if i is None else i for i in indices], dtype=torch.long, device=device)
        present = torch.tensor([i is not None for i in indices], dtype=torch.bool, device=device)
        width = max(torch.where(present, self.lengths[index], 1).tolist(), default=1)
        picked = {name: _cut(tensor[index], width) for name, tensor in self.tensors().items()}
        picked["response_mask"] = picked["response_mask"] & present[:, None]
        first = torch.arange(width, device=device) == 0
        picked["attention_mask"] = picked["attention_mask"] & (present[:, None] | first)
        return Sequences(**picked)

    @staticmethod
    def joined(parts: Sequence[Sequences]) -> Sequences:
        """Rows of several, padded to the longest."""
        width = max(part.input_ids.shape[1] for part in parts)
        return Sequences(
            **{name: torch.cat([_padded(getattr(part, name), width) for part in parts]) for name in parts[0].tensors()}
        )


@dataclass(frozen=True)
class Experience:
    """What is learned from: sequences, what the roles said of them, and what the algorithm made of it."""

    sequences: Sequences
    old_logprobs: Tensor
    """[N, T] float32, of the actor that sampled: by the training forward, or, where a rollout makes one update and that
    forward is still to come, by the generator."""
    scores: Tensor
    """[N] float32, of the reward, with penalties, unscaled."""
    rewards: Tensor
    """[N, T] float32, KL-shaped."""
    advantages: Tensor
    """[N, T] float32."""
    ref_logprobs: Tensor | None = None
    """[N, T] float32, of the reference, where there is one."""
    old_values: Tensor | None = None
    """[N, T] float32, of the critic at the time, where there is one."""
    returns: Tensor | None = None
    """[N, T] float32, where there is a critic."""
    clipped: Tensor | None = None
    """[N] bool, whether ppo.score_clip changed the score; none: it is not set."""

    @property
    def kl(self) -> Tensor | None:
        """[N] KL to the reference of each completion, in nats (k1); none: there is no reference."""
        return completion_kl(self.old_logprobs, self.ref_logprobs, self.sequences.response_mask)

    @property
    def explained_variance(self) -> float | None:
        """1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for a constant one; none: no critic."""
        if self.old_values is None or self.returns is None:
            return None
        mask = self.sequences.response_mask
        variance = masked_var(self.returns, mask=mask)
        return float(1 - masked_var(self.returns - self.old_values, mask=mask) / variance.clamp(min=1e-8))

    def rows(self, rows: Sequence[int]) -> Self:
        """Some rows."""
        sequences = self.sequences.rows(rows)
        width = sequences.input_ids.shape[1]
        own = {name: _cut(tensor[list(rows)], width) for name, tensor in self._own().items()}
        return replace(self, sequences=sequences, **own)

    def _own(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sequences"}
        return {name: tensor for name, tensor in values.items() if tensor is not None}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for a checkpoint."""
        return self._own() | under("sequences.", self.sequences.tensors())

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """What `tensors` gave, on a device."""
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        own = {name: tensor for name, tensor in moved.items() if not name.startswith("sequences.")}
        return cls(sequences=Sequences(**taken_from("sequences.", moved)), **own)


@dataclass(frozen=True)
class Layout:
    """Which rows make a mini-batch, and which micro-batches of it are this rank's: [mini-batch][micro-batch][row]."""

    mini_batches: list[list[list[int | None]]]
    counts: list[float]
    """Response tokens of each mini-batch, over all ranks: what its losses are divided by."""
    sizes: list[int]
    """Sequences of each mini-batch, over all ranks."""

    @staticmethod
    def plan(
        sequences: Sequences,
        *,
        mini_batches: int,
        micro_batches: MicroBatches,
        rank: int,
        ranks: int,
        seed: Sequence[int],
        together: int = 1,
    ) -> Layout:
        """Deal shuffled rows into mini-batches, and those by length to ranks; the same on every rank.

        Args:
            sequences: the rollout.
            mini_batches: equal parts.
            micro_batches: what passes at once.
            rank: whose micro-batches to give.
            ranks: how many share each mini-batch.
            seed: keys of the shuffle.
            together: neighbours that stay in one micro-batch.
        """
        lengths, tokens = (
            column.view(-1, together).sum(dim=1).tolist()
            for column in (sequences.lengths, sequences.response_mask.sum(dim=1))
        )
        if micro_batches.rows is not None:
            micro_batches = replace(micro_batches, rows=max(1, micro_batches.rows // together))
        order = np.random.default_rng(list(seed)).permutation(len(lengths)).tolist()
        size = -(-len(order) // mini_batches)
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        dealt = [
            deal(part, [lengths[i] for i in part], rank=rank, ranks=ranks, micro_batches=micro_batches)
            for part in parts
        ]
        return Layout(
            [[_neighbours(units, together) for units in micro] for micro in dealt],
            [float(sum(tokens[i] for i in part)) for part in parts],
            [len(part) * together for part in parts],
        )


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with a prefix to their names, to be kept beside others in a checkpoint."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def taken_from(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that `under` put there, with their own names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def scatter_rows(target: Tensor, indices: Sequence[int | None], values: Tensor) -> None:
    """Write values [n, t] or [n] into rows of target [N, T] or [N]; empty rows are left out."""
    for row, index in enumerate(indices):
        if index is None:
            continue
        if target.dim() == 1:
            target[index] = values[row]
        else:
            target[index, : values.shape[1]] = values[row]


def completion_kl(logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor) -> Tensor | None:
    """[N] KL to the reference of each completion, in nats (k1), of log-probs [N, T]; none: there is no reference."""
    return None if ref_logprobs is None else masked_sum(logprobs - ref_logprobs, mask=mask, dim=1)


def _neighbours(units: Sequence[int | None], together: int) -> list[int | None]:
    """The rows of units of neighbours."""
    return [None if unit is None else unit * together + place for unit in units for place in range(together)]


def _padded(tensor: Tensor, width: int) -> Tensor:
    return pad(tensor, (0, width - tensor.shape[1])) if tensor.dim() == 2 else tensor


def _cut(tensor: Tensor, width: int) -> Tensor:
    return tensor[:, :width] if tensor.dim() == 2 else tensor
