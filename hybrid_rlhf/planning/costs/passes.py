"""Seconds of a model's passes on one rank, from its dimensions and the curves of a machine; no communication.

Calibration fits the curves to times of small models, predictions sum values of these curves: here is what both mean by
a layer, a head and a decoding step. Factors that correct predictions are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hybrid_rlhf.generation.weights.probe import PROBE_DECODED
from hybrid_rlhf.models.head_check import PROBE_TOKENS
from hybrid_rlhf.planning.curves import MachineCurves, Surface
from hybrid_rlhf.planning.job import ModelDimensions

ATTENTION_BACKWARD = 2.5
"""Operations of an attention's backward over its forward's: five products instead of two (FlashAttention-2)."""
DECODE_PRODUCTS = 4
"""Products of a layer of inference weights: queries with keys and values, output, gate with up, down."""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PassedTokens:
    """What passes through a model at once."""

    tokens: float
    head_tokens: float
    """Those whose log-probs are computed."""
    squares: float
    """Squared row lengths, summed."""

    @classmethod
    def of_rows(cls, rows: float, length: float) -> PassedTokens:
        """Equal rows, with log-probs of all tokens."""
        return cls(rows * length, rows * length, rows * length**2)


@dataclass(frozen=True)
class ModelPasses:
    """A model on a machine."""

    curves: MachineCurves
    sizes: ModelDimensions
    dtype: torch.dtype
    """Data type of its weights."""
    ranks: int = 1
    """Tensor-parallel ranks, of which each has a part of the inference weights."""
    whole_products: bool = False
    """These ranks compute whole products, as with 4-bit weights."""

    def _product(self, surfaces: Mapping[str, Surface]) -> Surface:
        """Those of a kind of products that are of this data type."""
        return surfaces[str(self.dtype).removeprefix("torch.")]

    # Modules that train

    def products(self, tokens: float) -> float:
        """Seconds of the matrix products of a layer's forward."""
        s = self.sizes
        part = s.layer_weights * s.active / s.products
        return s.products * self._product(self.curves.products)(part, tokens)

    def attention(self, squares: float) -> float:
        """Seconds of the attention of a layer's forward: two products, of which causality takes half."""
        return self.curves.attention(2.0 * self.sizes.attention_width * squares / self.ranks)

    def layer(self, batch: PassedTokens) -> float:
        """A forward of a layer."""
        rest = self.curves.layer(batch.tokens * self.sizes.hidden)
        return self.products(batch.tokens) + self.attention(batch.squares) + rest

    def layer_backward(self, batch: PassedTokens, *, checkpoints: bool = False) -> float:
        """A backward of a layer, with its forward where activations are not kept."""
        seconds = self._backward_products * self.products(batch.tokens)
        seconds += ATTENTION_BACKWARD * self.attention(batch.squares)
        seconds += self.curves.layer_backward(batch.tokens * self.sizes.hidden)
        return seconds + (self.layer(batch) if checkpoints else 0.0)

    def head(self, tokens: float) -> float:
        """The product of the head; none for a scorer."""
        s = self.sizes
        if not s.vocabulary:
            return 0.0
        return self._product(self.curves.products)(s.vocabulary * s.hidden / self.ranks, tokens)

    def logprobs(self, tokens: float) -> float:
        """From logits to log-probs, or their gradient."""
        return self.curves.head(tokens * self.sizes.vocabulary / self.ranks) / 2

    def forward(self, batch: PassedTokens) -> float:
        """A whole forward."""
        seconds = self.curves.calls.get("forward", 0.0) + self.sizes.layers * self.layer(batch)
        return seconds + self.head(batch.head_tokens) + self.logprobs(batch.head_tokens)

    def backward(self, batch: PassedTokens, *, checkpoints: bool = False) -> float:
        """A whole backward."""
        seconds = self.curves.calls.get("backward", 0.0)
        seconds += self.sizes.layers * self.layer_backward(batch, checkpoints=checkpoints)
        return seconds + self._backward_products * self.head(batch.head_tokens) + self.logprobs(batch.head_tokens)

    @property
    def _backward_products(self) -> int:
        """Products of a backward over those of a forward; where a weight is frozen, its gradient is not computed."""
        return 2 if self.sizes.trains_all else 1

    # Inference weights

    @property
    def _parts(self) -> int:
        """Number of ranks that divide a product of a layer."""
        return 1 if self.whole_products else self.ranks

    def split_layer(self, tokens: float, squares: float) -> float:
        """A layer over whole rows: a prefill, or a frozen model that reads."""
        s, c = self.sizes, self.curves
        part = s.layer_weights * s.active / DECODE_PRODUCTS / self._parts
        seconds = DECODE_PRODUCTS * self._product(c.products)(part, tokens)
        return seconds + self.attention(squares) + c.layer(tokens * s.hidden)

    def probe(self) -> float:
        """The tokens of the check after a weight sync: a prefill, then some one by one."""
        tokens = PROBE_TOKENS - PROBE_DECODED
        one = np.ones(1)
        seconds = self.sizes.layers * self.split_layer(tokens, tokens**2)
        return seconds + PROBE_DECODED * float(self.decode(one, one * PROBE_TOKENS)[0])

    def decode(self, rows: Numbers, context: Numbers) -> Numbers:
        """Decoding steps of so many rows with a mean number of tokens."""
        s, c = self.sizes, self.curves
        cache = c.cache_reads(rows * context * s.cache_width * self.dtype.itemsize / self.ranks)
        return self.decode_products(rows) + (s.layers * (cache + c.decode_layer(rows * s.hidden)) + c.decode_step(rows))

    def decode_products(self, rows: Numbers) -> Numbers:
        """Products of the layers and the head in decoding steps of so many rows."""
        s = self.sizes
        products = self._product(self.curves.decode_products)
        part = s.layer_weights / DECODE_PRODUCTS / self._parts
        if s.active < 1:
            passed = rows * s.active  # of the weights, with repetitions by the experts of several rows
            seconds = np.asarray([products(part * min(1.0, share), max(1.0, share)) for share in passed])
        else:
            seconds = products(part, rows)
        return s.layers * DECODE_PRODUCTS * seconds + products(s.vocabulary * s.hidden / self.ranks, rows)
