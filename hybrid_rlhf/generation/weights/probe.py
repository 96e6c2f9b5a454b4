"""Check of inference weights against the model on a short prompt.

Why at start-up: with wrong inference weights, a model would train on samples of another distribution. One short prompt
is enough; a difference above the tolerance stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import LogprobAgreement, agreement, token_logprobs
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows
from hybrid_rlhf.generation.model.cache import CacheLayout
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.images import image_tokens, rotated_positions, two_way_spans
from hybrid_rlhf.generation.ops.sampling import gather_vocabulary
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.vision import EncodedImages

LOW_PRECISION_TOLERANCE = 0.1
"""Allowed mean difference of the probe's log-probs in bfloat16 and float16, in nats; more if logits are large."""
QUANTISED_TOLERANCE = 1.0
"""Allowed mean difference with quantised products. SmolLM2-135M in int8 differs by 0.37, after some training by 0.5."""
PROBE_DECODED = 2
"""Number of tokens of the probe that are decoded one by one; each reads all weights, so there are few."""


def probe_logprobs(decoder: Decoder, tokens: Sequence[int], images: EncodedImages | None = None) -> Tensor:
    """Return the log-probs [P - 1] float32 of all P tokens except the first, computed as `probe_logits`."""
    logits = probe_logits(decoder, tokens, images)
    return token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device))


@torch.inference_mode()
def probe_logits(decoder: Decoder, tokens: Sequence[int], images: EncodedImages | None = None) -> Tensor:
    """Return logits [P - 1, V] float32 after all tokens but the last: first ones by prefill, the others, which are no
    image tokens, token by token."""
    hidden = _Probe(decoder, tokens, images).run(len(tokens) - 1)
    return gather_vocabulary(decoder.logits(hidden), decoder.architecture.vocab_size, decoder.world)


@torch.inference_mode()
def probe_routes(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Return the experts [P - 1, E, k] int64 of all tokens but the last in each mixture, computed as `probe_logits`."""
    probe = _Probe(decoder, tokens, records_routes=True)
    probe.run(len(tokens) - 1)
    return probe.cache.routes_of(probe.pages[0, 0], len(tokens) - 1).long()


@torch.inference_mode()
def probe_hidden(decoder: Decoder, tokens: Sequence[int], images: EncodedImages | None = None) -> list[Tensor]:
    """Return the hidden states [P, H] before the first layer and after each layer, by one prefill."""
    observed: list[Tensor] = []
    _Probe(decoder, tokens, images).prefill(len(tokens), observe=observed.append)
    return observed


class _Probe:
    """One sequence, with a separate cache and states."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: Sequence[int],
        images: EncodedImages | None = None,
        *,
        records_routes: bool = False,
    ) -> None:
        device = decoder.world.device
        layout = CacheLayout.of(decoder.architecture, decoder.split, len(tokens), records_routes=records_routes)
        pages = layout.pages_of(len(tokens), computed_together=len(tokens))
        self.cache = decoder.new_cache(layout, pages=pages)
        self.pages = torch.arange(pages, dtype=torch.int32, device=device).view(layout.tables, 1, -1)
        self._decoder = decoder
        self._images = images
        self._states = decoder.new_states(1)
        self._attention = Attention(
            decoder.architecture, decoder.split, self.cache, capacity_tokens=len(tokens), kernels=decoder.kernels
        )
        self._ids = torch.tensor(tokens, device=device)
        self._places = torch.arange(len(tokens), device=device)

    def run(self, tokens: int) -> Tensor:
        """Return the hidden states [tokens, H] of the first tokens, the last PROBE_DECODED of them decoded."""
        places = range(tokens - PROBE_DECODED, tokens)
        return torch.cat([self.prefill(places.start), *map(self._decode, places)])

    def prefill(self, tokens: int, *, observe: Callable[[Tensor], None] | None = None) -> Tensor:
        """Return the hidden states [tokens, H] of the first tokens."""
        spans = two_way_spans([(self._images, 0, tokens)])
        chunks = Chunks(self.pages, [0], [tokens], self._places[:1], spans)
        return self._hidden(slice(0, tokens), None, chunks, observe)

    def _decode(self, place: int) -> Tensor:
        """Return the hidden state [1, H] of the token at index `place`."""
        part = slice(place, place + 1)
        return self._hidden(part, DecodeRows(self.pages, self._places[part], place + 1, self._places[:1]))

    def _hidden(
        self,
        part: slice,
        rows: DecodeRows | None,
        chunks: Chunks | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        device = self._ids.device
        parts = [(self._images, part.start, part.stop)]
        return self._decoder.hidden(
            self._ids[part],
            self._places[part],
            self._attention,
            states=self._states,
            rows=rows,
            chunks=chunks,
            observe=observe,
            rotated=rotated_positions(parts, device) if self._decoder.architecture.has_axes else None,
            images=image_tokens(parts, device),
        )


def agreement_with(
    decoder: Decoder, expected: Tensor, prompt: tuple[Sequence[int], EncodedImages | None] | None = None
) -> LogprobAgreement:
    """Compare a decoder with log-probs [P - 1] under the training forward of all tokens but the first of a prompt with
    images, by default of `probe_tokens`."""
    tokens, images = prompt or (probe_tokens(decoder.architecture.vocab_size), None)
    logits = probe_logits(decoder, tokens, images)
    quantised = bool(decoder.quantisation_errors)
    return agreement(
        token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device)),
        expected=expected,
        # int8 rounds by 1/127 of the largest value, bfloat16 by 1/128
        dtype=torch.bfloat16 if quantised else decoder.dtype,
        low_precision=QUANTISED_TOLERANCE if quantised else LOW_PRECISION_TOLERANCE,
        magnitude=float(logits.masked_fill(logits == -torch.inf, 0.0).abs().amax(dim=-1).mean()),  # of banned tokens
    )


def check_inference_weights(decoder: Decoder, expected: Tensor) -> None:
    """Compare a decoder with the training forward on `probe_tokens`.

    Args:
        decoder: decoder to check.
        expected: [P - 1] log-probs under the training forward, of all tokens except the first.

    Raises:
        UserError: when they differ by more than the tolerance.
    """
    result = agreement_with(decoder, expected)
    if not result.holds:
        raise UserError(
            f"inference weights must agree with the training forward to {result.tolerance:.3g} nats, they differ by "
            f"{result.measured:.3g}: set rollout.backend to module (GenerationEngine: backend='module') and "
            "report the model"
        )
