"""What inference weights compute of a short prompt, compared with what the model computes.

Why a check at start-up: inference weights that are wrong for a model would let it train on samples of another. One
short prompt is enough; a difference above the tolerance stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows
from hybrid_rlhf.generation.model.cache import CacheLayout
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.ops.sampling import gather_vocabulary
from hybrid_rlhf.models.head_check import LogitAgreement, agreement, probe_tokens

LOW_PRECISION_TOLERANCE = 0.1
"""Mean difference in nats allowed for the probe's log-probs in bfloat16 and float16; more where logits are large."""
QUANTISED_TOLERANCE = 1.0
"""The same with quantised products. SmolLM2-135M in int8 differs by 0.37 on the probe, after some training by 0.5."""
PROBE_DECODED = 2
"""Tokens of the probe that pass one by one: each reads all weights, as the rest does at once."""


def probe_logprobs(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Log-probs [P - 1] float32 of all tokens except the first."""
    logits = probe_logits(decoder, tokens)
    return token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device))


@torch.inference_mode()
def probe_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits [P - 1, V] float32 after all tokens except the last: the first by prefill, the others token by token."""
    hidden = torch.cat(_probe_steps(_Probe(decoder, tokens), len(tokens) - 1))
    return gather_vocabulary(decoder.logits(hidden), decoder.architecture.vocab_size, decoder.world)


@torch.inference_mode()
def probe_routes(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Experts [P - 1, E, k] int64 of the same tokens in each mixture."""
    probe = _Probe(decoder, tokens, records_routes=True)
    steps, mixtures = len(_probe_steps(probe, len(tokens) - 1)), len(decoder.architecture.expert_layers)
    found = [torch.stack(probe.routes[step * mixtures : (step + 1) * mixtures], dim=1) for step in range(steps)]
    return torch.cat(found).long()


def _probe_steps(probe: _Probe, tokens: int) -> list[Tensor]:
    """Hidden states of so many tokens: of a prefill, and of each that is decoded after it."""
    places = range(tokens - PROBE_DECODED, tokens)
    return [probe.prefill(places.start), *map(probe.decode, places)]


@torch.inference_mode()
def probe_hidden(decoder: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Hidden states [P, H] before the first layer and after each, by one prefill."""
    observed: list[Tensor] = []
    _Probe(decoder, tokens).prefill(len(tokens), observe=observed.append)
    return observed


class _Probe:
    """One sequence, with a cache and states of its own."""

    def __init__(self, decoder: Decoder, tokens: Sequence[int], *, records_routes: bool = False) -> None:
        self.routes: list[Tensor] = []
        """Experts [T, k] of each mixture in each step, if they are recorded."""
        self._records_routes = records_routes
        device, layout = decoder.world.device, CacheLayout.of(decoder.architecture, decoder.split, len(tokens))
        cache = decoder.new_cache(layout, pages=layout.pages_of(len(tokens), computed_together=len(tokens)))
        self._pages = torch.arange(cache.pages, dtype=torch.int32, device=device).view(layout.tables, 1, -1)
        self._decoder, self._states = decoder, decoder.new_states(1)
        self._attention = Attention(
            decoder.architecture, decoder.split, cache, capacity_tokens=len(tokens), kernels=decoder.kernels
        )
        self._ids, self._places = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)

    def prefill(self, tokens: int, *, observe: Callable[[Tensor], None] | None = None) -> Tensor:
        """Hidden states [tokens, H] of the first tokens."""
        return self._hidden(slice(tokens), None, Chunks(self._pages, [0], [tokens], self._places[:1]), observe)

    def decode(self, place: int) -> Tensor:
        """Hidden states [1, H] of one more token."""
        one = slice(place, place + 1)
        return self._hidden(one, DecodeRows(self._pages, self._places[one], place + 1, self._places[:1]))

    def _hidden(
        self,
        part: slice,
        rows: DecodeRows | None,
        chunks: Chunks | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        states = None if self._states is None else self._states.step(rows, chunks)
        attend = self._attention.step(rows, chunks)
        routes = self.routes if self._records_routes else None
        places = self._places[part]
        return self._decoder.hidden(self._ids[part], places, attend, states=states, observe=observe, routes=routes)


def agreement_with(decoder: Decoder, expected: Tensor) -> LogitAgreement:
    """Compare a decoder with log-probs [P - 1] under the training forward, of all `probe_tokens` except the first."""
    tokens = probe_tokens(decoder.architecture.vocab_size)
    logits, quantised = probe_logits(decoder, tokens), bool(decoder.quantisation_errors)
    return agreement(
        token_logprobs(logits, labels=torch.tensor(tokens[1:], device=logits.device)),
        expected,
        # int8 rounds by 1/127 of the largest value, bfloat16 by 1/128
        torch.bfloat16 if quantised else decoder.dtype,
        low_precision=QUANTISED_TOLERANCE if quantised else LOW_PRECISION_TOLERANCE,
        magnitude=float(logits.abs().amax(dim=-1).mean()),
    )


def check_inference_weights(decoder: Decoder, expected: Tensor) -> None:
    """Compare a decoder with the training forward on `probe_tokens`.

    Args:
        decoder: to check.
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
