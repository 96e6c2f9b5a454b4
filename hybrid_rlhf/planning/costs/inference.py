"""Seconds of inference weights on a tensor-parallel group: reading rows, a prefill, decoding steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_rlhf.planning.costs.passes import ModelPasses, Numbers
from hybrid_rlhf.planning.costs.work import Work
from hybrid_rlhf.planning.curves import Size


@dataclass(frozen=True)
class InferenceGroup:
    """A model of whose inference weights each rank of a group has a part."""

    passes: ModelPasses
    hosts: int

    def prefill(self, prompts: int, prompt_tokens: float, *, at_once: int) -> Work:
        """Prefills of prompts of a length, so many at once."""
        passes = self.passes
        layers = passes.sizes.layers
        batches = math.ceil(prompts / at_once)
        tokens = prompts / batches * prompt_tokens
        layer = self._layer(tokens, tokens * prompt_tokens)
        call = passes.curves.calls.get("prefill", 0.0) / layers
        return Work(call + layer.compute * passes.curves.factor("prefill"), layer.wire) * (batches * layers)

    def decode(self, rows: Numbers, context: Numbers) -> tuple[Numbers, Numbers]:
        """Seconds of compute and wire of decoding steps, by rows and their mean number of tokens."""
        passes = self.passes
        compute = passes.decode(rows, context) * passes.curves.factor("decode")
        return compute, 2 * passes.sizes.layers * self._all_reduce(rows)

    def _layer(self, tokens: float, squares: float) -> Work:
        """A layer: a part of its products, and two all-reduces."""
        return Work(self.passes.split_layer(tokens, squares), 2 * self._all_reduce(tokens))

    def _all_reduce(self, tokens: Size) -> Size:
        """Seconds of an all-reduce of the hidden states of so many tokens."""
        passes = self.passes
        size = tokens * passes.sizes.hidden * passes.dtype.itemsize
        return passes.curves.collective("all_reduce", ranks=passes.ranks, size_bytes=size, hosts=self.hosts)
