"""Seconds of a model's passes on one rank, from its dimensions and the curves of a machine; no communication.

Calibration fits the curves to times of small models, predictions sum values of these curves: here is what both mean by
a layer, a head and a decoding step. Factors that correct predictions are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid_rlhf.generation.weights.probe import PROBE_DECODED
from hybrid_rlhf.models.head_check import PROBE_TOKENS
from hybrid_rlhf.planning.curves import MachineCurves
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
    dtype: str
    """Data type of its weights, as the curves name it."""
    whole_products: bool = False
    """Tensor-parallel ranks compute whole products, as with 4-bit weights."""

    # Modules that train

    def products(self, tokens: float) -> float:
        """Seconds of the matrix products of a layer's forward."""
        s = self.sizes
        part = s.layer_weights * s.active / s.products
        return s.products * self.curves.products[self.dtype](part, tokens)

    def attention(self, squares: float, *, together: int = 1) -> float:
        """Seconds of the attention of a layer's forward: two products, of which causality takes half."""
        return self.curves.attention(2.0 * self.sizes.attention_width * squares / together)

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

    def head(self, tokens: float, *, together: int = 1) -> float:
        """The product of the head; none for a scorer."""
        s = self.sizes
        return self.curves.products[self.dtype](s.vocabulary * s.hidden / together, tokens) if s.vocabulary else 0.0

    def logprobs(self, tokens: float, *, together: int = 1) -> float:
        """From logits to log-probs, or their gradient."""
        return self.curves.head(tokens * self.sizes.vocabulary / together) / 2

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

    # Inference weights, of which each of some ranks has a part

    def split_layer(self, tokens: float, squares: float, *, together: int = 1) -> float:
        """A layer over whole rows: a prefill, or a frozen model that reads."""
        s, c = self.sizes, self.curves
        part = s.layer_weights * s.active / DECODE_PRODUCTS / (1 if self.whole_products else together)
        seconds = DECODE_PRODUCTS * c.products[self.dtype](part, tokens)
        return seconds + self.attention(squares, together=together) + c.layer(tokens * s.hidden)

    def probe(self, *, item_bytes: int, together: int = 1) -> float:
        """The tokens of the check after a weight sync: a prefill, then some one by one."""
        tokens = PROBE_TOKENS - PROBE_DECODED
        one = np.ones(1)
        seconds = self.sizes.layers * self.split_layer(tokens, tokens**2, together=together)
        step = self.decode_products(one, together=together)
        step = step + self.decode_rest(one, one * PROBE_TOKENS, item_bytes=item_bytes, together=together)
        return seconds + PROBE_DECODED * float(step[0])

    def decode_products(self, rows: Numbers, *, together: int = 1) -> Numbers:
        """Products of the layers and the head in decoding steps of so many rows."""
        s = self.sizes
        products = self.curves.decode_products[self.dtype]
        part = s.layer_weights / DECODE_PRODUCTS / (1 if self.whole_products else together)
        if s.active < 1:
            passed = rows * s.active  # of the weights, with repetitions by the experts of several rows
            seconds = np.asarray([products(part * min(1.0, share), max(1.0, share)) for share in passed])
        else:
            seconds = products(part, rows)
        return s.layers * DECODE_PRODUCTS * seconds + products(s.vocabulary * s.hidden / together, rows)

    def decode_rest(self, rows: Numbers, context: Numbers, *, item_bytes: int, together: int = 1) -> Numbers:
        """What else decoding steps take, by rows and their mean number of tokens."""
        s, c = self.sizes, self.curves
        cache = c.cache_reads(rows * context * s.cache_width * item_bytes / together)
        return s.layers * (cache + c.decode_layer(rows * s.hidden)) + c.decode_step(rows)
