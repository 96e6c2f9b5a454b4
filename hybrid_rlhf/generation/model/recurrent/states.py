"""States of recurrent layers, read and written by steps that mix decoding rows with chunks of prompts.

A running request has a slot with its states in all recurrent layers: the last inputs of the convolution, in the dtype
of the weights, and the recurrent state in float32. A chunk of a prompt continues from the states of the chunk before
it. The first chunk starts from zero, so slots need not be cleared. Slots are selected by indices on the device, so a
CUDA graph works for any rows. Slot 0 is used by unused rows.

The tokens of chunks are arranged in blocks of equal size, which are computed together; only states pass from block to
block. Blocks are ordered by their index in the sequence, and sequences by their number of blocks, so that each round of
this pass is a slice.

On a GPU, kernels (ops/) read and write the states in place: the convolution of all tokens, and the recurrence of
decoding rows.

Shapes: T tokens, B decoding rows, n chunks, N blocks of L tokens, C channels, W kernel size of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.architecture.model_description import Activation, ModelDescription
from hybrid_rlhf.generation.architecture.recurrence import Recurrence
from hybrid_rlhf.generation.model.attention import Chunks, DecodeRows
from hybrid_rlhf.generation.ops.convolution import StepSequences
from hybrid_rlhf.generation.ops.recurrence import Rule
from hybrid_rlhf.generation.ops.rows import ACTIVATIONS, concatenated
from hybrid_rlhf.generation.transfers import to_device

BLOCK = 64
"""Maximum number of tokens per block. Work within a block grows with its square, the number of passes falls with it."""


class StateCache:
    """The states of all slots in all recurrent layers: [layers, slots, ...]."""

    def __init__(
        self,
        architecture: ModelDescription,
        kind: Recurrence,
        *,
        units: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: ModuleType | None = None,
    ) -> None:
        conv, memory = kind.state_shapes(units)
        layers = sorted(architecture.recurrent_layers)
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._kernels = kernels
        self.conv = torch.zeros(len(layers), slots, *conv, dtype=dtype, device=device)
        self.memory = torch.zeros(len(layers), slots, *memory, dtype=torch.float32, device=device)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.conv.shape[1]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the convolution states and the recurrent states of a layer, each [slots, ...]."""
        return self.conv[self._places[layer]], self.memory[self._places[layer]]

    def copy(self, pairs: Sequence[tuple[int, int]], *, source: StateCache | None = None) -> None:
        """Copy slots, given as (source, target), within this cache or from `source`."""
        if not pairs:
            return
        source_cache = source or self
        sources, targets = to_device(pairs, self.conv.device).unbind(dim=1)
        self.conv[:, targets] = source_cache.conv[:, sources]
        self.memory[:, targets] = source_cache.memory[:, sources]

    def step(self, rows: DecodeRows | None, chunks: Chunks | None = None) -> StepStates:
        """Return the states of a step, whose tokens are those of the rows, then those of each chunk."""
        slots = None if rows is None else rows.slots
        device = self.conv.device
        layout = None if chunks is None else _Layout.of(chunks, self.conv.shape[2], device)
        if self._kernels is None:
            return StepStates(self, slots, layout)
        batch = 0 if slots is None else len(slots)
        starts, lengths, chunk_slots = (
            ([], [], None) if chunks is None else (chunks.starts, chunks.lengths, chunks.slots)
        )
        together = concatenated([part for part in (slots, chunk_slots) if part is not None])
        return StepStates(self, slots, layout, self._kernels, StepSequences.of(together, batch, starts, lengths))


def state_bytes(kind: Recurrence, *, layers: int, units: int, dtype: torch.dtype) -> int:
    """Bytes of a slot on a rank with `units` units."""
    conv, memory = (torch.Size(shape).numel() for shape in kind.state_shapes(units))
    return layers * (conv * dtype.itemsize + memory * torch.float32.itemsize)


@dataclass(frozen=True)
class _Layout:
    """Arrangement of the T tokens of chunks in blocks."""

    slots: Tensor
    """[n] slots of the chunks, ordered by decreasing number of blocks, as is `fresh`."""
    fresh: Tensor
    """[n] bool, true if the chunk is the first of its sequence."""
    places: Tensor
    """[T] index of each token in the blocks [N * L]."""
    blocks: int
    size: int
    rounds: list[slice]
    window_tokens: Tensor
    """[T] index of each token in the inputs of the convolution, where each chunk follows its W - 1 earlier inputs."""
    windows: Tensor
    """[n, W - 1] indices of the inputs before each chunk. `next_windows` are those of its last inputs."""
    next_windows: Tensor

    @classmethod
    def of(cls, chunks: Chunks, before: int, device: torch.device) -> _Layout:
        """Args: the chunks, W - 1, and the device of the indices."""
        assert chunks.slots is not None
        lengths = torch.tensor(chunks.lengths)
        size = min(BLOCK, max(chunks.lengths))
        counts = -(-lengths // size)
        order = counts.argsort(descending=True, stable=True)
        rank = order.argsort()
        sizes = (counts[None, :] > torch.arange(int(counts.max()))[:, None]).sum(dim=1)  # blocks of each round
        ends = sizes.cumsum(0)
        index = torch.arange(len(lengths)).repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        token = torch.arange(len(index)) - starts[index]
        block = (ends - sizes)[token // size] + rank[index]
        windows = (starts + torch.arange(len(lengths)) * before)[order, None] + torch.arange(before)
        return cls(
            chunks.slots[to_device(order, device)],
            to_device((torch.tensor(chunks.starts) == 0)[order], device),
            to_device(block * size + token % size, device),
            int(ends[-1]),
            size,
            [slice(end - count, end) for end, count in zip(ends.tolist(), sizes.tolist(), strict=True)],
            to_device(torch.arange(len(index)) + (index + 1) * before, device),
            to_device(windows, device),
            to_device(windows + lengths[order, None], device),
        )

    def states(self, store: Tensor) -> Tensor:
        """Return copies of the states [n, ...] before the chunks; zeros for the first chunk of a sequence."""
        fresh = self.fresh.view(-1, *[1] * (store.dim() - 1))
        return store[self.slots].masked_fill_(fresh, 0.0)

    def in_blocks(self, tokens: Tensor) -> Tensor:
        """Arrange [T, ...] in blocks [N, L, ...], zero after the ends of sequences."""
        padded = tokens.new_zeros(self.blocks * self.size, *tokens.shape[1:])
        return padded.index_copy_(0, self.places, tokens).unflatten(0, (self.blocks, self.size))


@dataclass(frozen=True)
class StepStates:
    """States of one step. Values that are the same in all layers are computed once."""

    cache: StateCache
    slots: Tensor | None
    """[B] slots of decoding rows; None without rows."""
    layout: _Layout | None
    """Arrangement of the tokens of chunks; None without chunks."""
    kernels: ModuleType | None = None
    sequences: StepSequences | None = None
    """Sequences as the kernels read them; None without kernels."""

    @property
    def _batch(self) -> int:
        return 0 if self.slots is None else len(self.slots)

    def convolve(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
    ) -> Tensor:
        """Causal convolution of each channel of x [T, C] with weight [C, 1, W] and bias [C], then an activation.

        The last inputs become the state of the layer.
        """
        store, _ = self.cache.of_layer(layer)
        if self.kernels is not None:
            mixed: Tensor = self.kernels.convolve(x, weight, bias, store, self.sequences, activation)
            return mixed
        parts = []
        if self.slots is not None:
            window = torch.cat([store[self.slots], x[: self._batch, None]], dim=1)
            store.index_copy_(0, self.slots, window[:, 1:])
            mixed = (window.float() * weight[:, 0].t().float()).sum(dim=1)
            parts.append((mixed if bias is None else mixed + bias.float()).to(x.dtype))
        if self.layout is not None:
            inputs = x.new_empty(len(x) - self._batch + self.layout.windows.numel(), x.shape[1])
            inputs[self.layout.window_tokens] = x[self._batch :]
            inputs[self.layout.windows] = self.layout.states(store)
            store.index_copy_(0, self.layout.slots, inputs[self.layout.next_windows])
            mixed = functional.conv1d(inputs.t()[None], weight, bias, groups=len(weight))[0].t()
            parts.append(mixed[self.layout.window_tokens - store.shape[1]])
        mixed = concatenated(parts)
        return mixed if activation is None else ACTIVATIONS[activation](mixed)

    def scan(self, layer: int, rule: Rule, *inputs: Tensor) -> Tensor:
        """Return outputs [T, ...] float32 of a recurrence over a layer's inputs [T, ...]; updates the states of the
        layer."""
        _, store = self.cache.of_layer(layer)
        if self.kernels is None or rule.kernel is None:
            return self._scan(store, rule, inputs, self.slots)
        parts = []
        if self.slots is not None:
            parts.append(rule.kernel(store, self.slots, *(tokens[: self._batch] for tokens in inputs)))
        if self.layout is not None:
            parts.append(self._scan(store, rule, [tokens[self._batch :] for tokens in inputs], None))
        return concatenated(parts)

    def _scan(self, store: Tensor, rule: Rule, layer_inputs: Sequence[Tensor], slots: Tensor | None) -> Tensor:
        """Compute `scan` in torch, for rows in these slots and for all chunks."""
        inputs = rule.inputs(*layer_inputs)
        parts = []
        batch = 0 if slots is None else len(slots)
        if slots is not None:
            state = store[slots]
            parts.append(rule.step(state, *(tokens[:batch] for tokens in inputs)))
            store.index_copy_(0, slots, state)
        if self.layout is not None:
            state = self.layout.states(store)
            blocks = [self.layout.in_blocks(tokens[batch:]) for tokens in inputs]
            mixed = rule.blocks(state, self.layout.rounds, *blocks)
            parts.append(mixed.flatten(0, 1)[self.layout.places])
            store.index_copy_(0, self.layout.slots, state)
        out = concatenated(parts)
        return out if rule.skip is None else out + rule.skip(*layer_inputs)
