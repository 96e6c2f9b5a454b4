"""The matrix products of a model's linear layers, alone: what a step could take at the least.

On a CPU each is timed in torch's own form (MKL) and in oneDNN's, which this project trains and generates with: which is
faster depends on the processor and on the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hybrid_rlhf.functional.operations import onednn_linear
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.runtime.world import solo_world

Sizes = Sequence[tuple[int, int]]
"""Tokens of a pass, and of these with the head."""


class Times(NamedTuple):
    """Seconds of the same products."""

    torch: float
    """In torch's form."""
    fastest: float
    """In the faster form of each direction."""


class Products:
    """The matrix products of a Llama, on rows of noise; what shares its input is one product."""

    def __init__(self, lm: PreTrainedModel, rows: int, *, outputs: int) -> None:
        """Take the weights of a model, and noise for up to `rows` tokens and `outputs` rows of the head."""
        self._weights = []
        for layer in lm.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            self._weights += [qkv, attention.o_proj.weight, up, mlp.down_proj.weight]
        self._head = lm.get_output_embeddings().weight
        self._noise = {width: torch.randn(rows, width, device=lm.device) for w in self._weights for width in w.shape}
        self._outputs = torch.randn(outputs, len(self._head), device=lm.device)
        self._forms = [self._plain]
        self._backward_forms: list[Callable[[Tensor, Tensor], Tensor]] = [linear]
        if lm.device.type == "cpu":
            decoder = decoder_of(lm, world=solo_world(lm.device), dtype=torch.float32)
            assert decoder is not None, "a Llama has an inference layout"
            packed = decoder._weights
            self._packed = [product for w in packed.layers for product in (w.qkv, w.o, w.up, w.down)]
            self._packed_head = packed.head
            self._forms.append(self._by_packed)
            self._backward_forms.append(onednn_linear)

    def times(self, *, forward: Sizes, backward: Sizes = ()) -> Times:
        """Of passes one after the other; backward is two products for each: the input's gradient, and the weight's."""
        there = [_timed(partial(form, forward)) for form in self._forms]
        back = [_timed(partial(self._backward, form, backward)) for form in self._backward_forms]
        return Times(there[0] + back[0], min(there) + min(back))

    def _plain(self, sizes: Sizes) -> None:
        for rows, outputs in sizes:
            for weight in self._weights:
                linear(self._noise[weight.shape[1]][:rows], weight)
            if outputs:
                linear(self._noise[self._head.shape[1]][:outputs], self._head)

    def _by_packed(self, sizes: Sizes) -> None:
        for rows, outputs in sizes:
            for weight, product in zip(self._weights, self._packed, strict=True):
                product(self._noise[weight.shape[1]][:rows])
            if outputs:
                self._packed_head(self._noise[self._head.shape[1]][:outputs])

    def _backward(self, form: Callable[[Tensor, Tensor], Tensor], sizes: Sizes) -> None:
        for rows, outputs in sizes:
            products = [(self._noise[w.shape[0]][:rows], w) for w in self._weights]
            products += [(self._outputs[:outputs], self._head)] if outputs else []
            for gradient, weight in products:
                form(gradient, weight.t())
                form(gradient.t(), self._noise[weight.shape[1]][: len(gradient)].t())


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
