"""The check after each weight sync: the inference weights compute what the training forward computes.

Why after each: the faults that cost the field most are silent (adapters that no rollout uses, a bucket of old weights),
and they may begin with any sync. A few fixed tokens pass through both; the log-probs are compared. Beyond the limit the
run stops, and the error names the first layer whose output differs.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.conversion import (
    LOW_PRECISION_TOLERANCE,
    agreement_with,
    probe_hidden,
)
from hybrid_rlhf.models.head_check import FLOAT32_TOLERANCE, probe_tokens
from hybrid_rlhf.models.structure import layer_list

_FLOAT32_LAYER_TOLERANCE, _LOW_PRECISION_LAYER_TOLERANCE = 1e-3, 0.05
"""Relative difference of a layer's output that is a fault."""
_QUANTISED_TOLERANCE = 0.5
"""Mean difference in nats allowed for the samples of quantised products. SmolLM2-135M in int8 differs by 0.2."""
_PRODUCT_TOLERANCE, _QUANTISED_LAYER_TOLERANCE = 0.1, 0.2
"""Relative difference of a quantised product from that of its weight, where int8 gives 0.01 and fp8 0.04; and of a
layer's output with such products."""


def logprob_limit(limit: float | None, *dtypes: torch.dtype, quantised: bool = False) -> float:
    """Largest allowed difference of log-probs, in nats: as set, else by the dtypes of training and generation."""
    if limit is not None:
        return limit
    if quantised:
        return _QUANTISED_TOLERANCE
    return FLOAT32_TOLERANCE if set(dtypes) == {torch.float32} else LOW_PRECISION_TOLERANCE


class WeightCheck:
    """Compares the inference weights of an engine with its training forward."""

    def __init__(self, engine: ModelEngine, limit: float | None) -> None:
        """Args: the engine, and the largest difference in nats (none: by the dtype, see `agreement_with`)."""
        self._engine, self._limit = engine, limit

    @torch.no_grad()
    def __call__(self, decoder: Decoder, *, updates: int) -> None:
        """Check a decoder; every rank of the engine must call.

        Args:
            decoder: with the current weights.
            updates: optimizer updates so far, for the message.

        Raises:
            UserError: on every rank, when the log-probs differ by more than the limit.
        """
        engine, tokens = self._engine, probe_tokens(decoder.architecture.vocab_size)
        ids = torch.tensor([tokens], device=engine.device)
        counts = torch.ones_like(ids, dtype=torch.bool)
        expected = engine(ids, counts, counts)[0][0, 1:]
        if not bool(expected.isfinite().all()):
            return  # the training weights themselves are not finite, which the loop reports (loop/non_finite.py)
        result = agreement_with(decoder, expected)
        limit = result.tolerance if self._limit is None else self._limit
        excess = math.inf if math.isnan(result.measured) else result.measured - limit
        worst = float(engine.world.all_reduce(torch.tensor(excess, device=engine.device), dist.ReduceOp.MAX))
        if worst <= 0:
            self._check_products(decoder, updates)
            return
        place = self._first_difference(decoder, ids)
        raise UserError(
            f"inference weights must agree with the training forward to {limit:.3g} nats, they differ by "
            f"{worst + limit:.3g} after the weight sync of update {updates}, first in {place}: report the model, or "
            "set rollout.backend to module"
        )

    def _check_products(self, decoder: Decoder, updates: int) -> None:
        """Compare each quantised product with its weight: a wrong scale of a small part may change log-probs little."""
        errors = decoder.quantisation_errors
        if not errors:
            return
        found = torch.stack([*errors.values()]).nan_to_num(math.inf)
        place = [*errors][int(found.argmax())]
        worst = float(self._engine.world.all_reduce(found.max(), dist.ReduceOp.MAX))
        if worst > _PRODUCT_TOLERANCE:
            raise UserError(
                f"quantised products must agree with the training weights to {_PRODUCT_TOLERANCE}, they differ by "
                f"{worst:.3g} after the weight sync of update {updates}, on this rank most in {place}: report the "
                "model, or leave rollout.quantization out"
            )

    def _first_difference(self, decoder: Decoder, ids: Tensor) -> str:
        """The first part of the model whose output differs."""
        layers = layer_list(self._engine.lm)
        if layers is None:
            return "an unknown layer"
        expected = self._training_states(layers, ids)
        found = probe_hidden(decoder, ids[0].tolist())
        bound = _FLOAT32_LAYER_TOLERANCE if decoder.dtype == torch.float32 else _LOW_PRECISION_LAYER_TOLERANCE
        if decoder.quantisation_errors:
            bound = _QUANTISED_LAYER_TOLERANCE
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            difference = float((mine - theirs.to(mine)).norm() / theirs.norm().clamp(min=1e-12))
            if not difference <= bound:
                return "the embedding" if index == 0 else f"layer {index - 1}"
        return "the head"

    def _training_states(self, layers: nn.ModuleList, ids: Tensor) -> list[Tensor]:
        """[P, H] before the first layer and after each, in the training forward."""
        states: list[Tensor] = []
        handles = [layers[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].detach()))]
        for layer in layers:
            handles.append(layer.register_forward_hook(lambda _, inputs, output: states.append(_hidden(output))))
        counts = torch.ones_like(ids, dtype=torch.bool)
        try:
            self._engine(ids, counts, counts)
        finally:
            for handle in handles:
                handle.remove()
        return [state.reshape(-1, state.shape[-1]) for state in states]


def _hidden(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return (output if isinstance(output, Tensor) else output[0]).detach()
