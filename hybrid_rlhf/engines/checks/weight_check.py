"""The check after each weight sync: the inference weights compute what the training forward computes.

Why after each: the faults that cost the field most are silent (adapters that no rollout uses, a bucket of old weights),
and they may begin with any sync. A few fixed tokens pass through both; the log-probs are compared. Beyond the limit the
run stops, and the error names the first layer whose output differs. Differences below the rounding of log-probs are
found in the weights themselves (element_check.py).

In a mixture of experts rounding may send a token to other experts, which changes its log-prob by more than rounding
does. So before a mixture stops a run, the training forward computes the tokens again with the experts of the inference
weights (models/routers/replay.py), and it must agree on most of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.checks.element_check import WrongElements
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE, agreement_with, probe_hidden, probe_routes
from hybrid_rlhf.models.head_check import FLOAT32_TOLERANCE, probe_tokens
from hybrid_rlhf.models.routers.replay import are_chosen
from hybrid_rlhf.models.structure import layer_list
from hybrid_rlhf.runtime.world import World

_FLOAT32_LAYER_TOLERANCE, _LOW_PRECISION_LAYER_TOLERANCE = 1e-3, 0.05
"""Relative difference of a layer's output that is a fault."""
_QUANTISED_TOLERANCE = 0.5
"""Mean difference in nats allowed for the samples of quantised products. SmolLM2-135M in int8 differs by 0.2."""
_PRODUCT_TOLERANCE, _QUANTISED_LAYER_TOLERANCE = 0.1, 0.2
"""Relative difference of a quantised product from that of its weight, where int8 gives 0.01 and fp8 0.04; and of a
layer's output with such products."""
_LEAST_SAME_EXPERTS = 0.5
"""Fraction of the chosen experts of a mixture on which both routers must agree; rounding changes a few percent."""


def logprob_limit(limit: float | None, *dtypes: torch.dtype, quantised: bool = False) -> float:
    """Largest allowed difference of log-probs, in nats: as set, else by the dtypes of training and generation."""
    if limit is not None:
        return limit
    if quantised:
        return _QUANTISED_TOLERANCE
    return FLOAT32_TOLERANCE if set(dtypes) == {torch.float32} else LOW_PRECISION_TOLERANCE


@dataclass(frozen=True)
class Rerouted:
    """The training forward of `probe_tokens` with given experts."""

    logprobs: Tensor
    """[P - 1]."""
    same_experts: float
    """Fraction of the given experts that the router selects itself; minimum over all mixtures."""


class Probe(Protocol):
    """The training forward of `probe_tokens`, on every rank that checks; they call together."""

    def logprobs(self) -> Tensor:
        """[P - 1] of all tokens except the first."""

    def rerouted(self, routes: Tensor) -> Rerouted:
        """With these experts [P - 1, E, k] of all tokens except the last."""

    def states(self) -> list[Tensor] | None:
        """[P, H] before the first layer and after each; none for a model whose layers are unknown."""


class TrainingProbe:
    """A Probe on the ranks of an engine."""

    def __init__(self, engine: ModelEngine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        """See Probe."""
        ids, counts = self._inputs()
        logprobs: Tensor = self._engine(ids, counts, counts)[0][0, 1:]
        return logprobs

    @torch.no_grad()
    def rerouted(self, routes: Tensor) -> Rerouted:
        """See Probe."""
        ids, counts = self._inputs()
        module: Any = self._engine.module
        routes = functional.pad(routes.to(ids.device), (0, 0, 0, 0, 0, 1), value=-1)
        with module.replay.forced() as own:
            logprobs: Tensor = self._engine(ids, counts, counts, routes=routes[None])[0][0, 1:]
        given = routes[:-1].unbind(1)
        same = [are_chosen(theirs, mine[:-1]) for mine, theirs in zip(own, given, strict=True)]
        return Rerouted(logprobs, min(float(each.float().mean()) for each in same))

    @torch.no_grad()
    def states(self) -> list[Tensor] | None:
        """See Probe."""
        layers = layer_list(self._engine.lm)
        if layers is None:
            return None
        ids, counts = self._inputs()
        states: list[Tensor] = []
        handles = [layers[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].detach()))]
        for layer in layers:
            handles.append(layer.register_forward_hook(lambda _, inputs, output: states.append(_hidden(output))))
        try:
            self._engine(ids, counts, counts)
        finally:
            for handle in handles:
                handle.remove()
        return [state.reshape(-1, state.shape[-1]) for state in states]

    def _inputs(self) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([probe_tokens(self._vocab_size)], device=self._engine.device)
        return ids, torch.ones_like(ids, dtype=torch.bool)


@dataclass(frozen=True)
class _Finding:
    """Of one rank."""

    excess: float
    """Difference beyond the limit, in nats."""
    limit: float
    place: str


class WeightCheck:
    """Compares inference weights with the training forward, on all ranks that have either."""

    def __init__(
        self, world: World, limit: float | None, *, quantised: bool, remedy: str = "set rollout.backend to module"
    ) -> None:
        """Prepare.

        Args:
            world: the ranks.
            limit: largest difference in nats; none: by the dtype, see `agreement_with`.
            quantised: whether products are.
            remedy: what a user can do, for the message.
        """
        self._world, self._limit, self._quantised, self._remedy = world, limit, quantised, remedy

    @torch.no_grad()
    def __call__(
        self,
        decoder: Decoder | None,
        probe: Probe,
        *,
        updates: int,
        elements: WrongElements | None = None,
    ) -> None:
        """Check a decoder; every rank must call.

        Args:
            decoder: with the current weights; none on a rank that does not sample.
            probe: the training forward, the same on every rank.
            updates: optimizer updates so far, for the message.
            elements: what ElementCheck found; none, on every rank: it was not used.

        Raises:
            UserError: on every rank, when the log-probs differ by more than the limit, or elements of a weight differ.
        """
        expected = probe.logprobs()
        if not bool(expected.isfinite().all()):
            return  # the training weights themselves are not finite, which the loop reports (loop/non_finite.py)
        excess, limit = self._excess(decoder, expected)
        if self._largest(excess) <= 0 or self._agrees_with_its_experts(decoder, probe):
            self._check_products(decoder, updates)
            self._check_elements(elements, updates)
            return
        training = probe.states()
        place = "" if decoder is None else _first_difference(decoder, training)
        worst = max(self._world.all_gather_objects(_Finding(excess, limit, place)), key=lambda finding: finding.excess)
        raise UserError(
            f"inference weights must agree with the training forward to {worst.limit:.3g} nats, they differ by "
            f"{worst.excess + worst.limit:.3g} after the weight sync of update {updates}, first in {worst.place}: "
            f"report the model, or {self._remedy}"
        )

    def _excess(self, decoder: Decoder | None, expected: Tensor) -> tuple[float, float]:
        """Difference of a decoder's log-probs beyond the limit, and the limit."""
        if decoder is None:
            return -math.inf, 0.0
        result = agreement_with(decoder, expected)
        limit = result.tolerance if self._limit is None else self._limit
        return (math.inf if math.isnan(result.measured) else result.measured - limit), limit

    def _agrees_with_its_experts(self, decoder: Decoder | None, probe: Probe) -> bool:
        """Whether the training forward with the experts of a decoder agrees with it, and on most of these experts."""
        routes = None if decoder is None else _routes(decoder)
        routes = next((each for each in self._world.all_gather_objects(routes) if each is not None), None)
        if routes is None:
            return False
        rerouted = probe.rerouted(routes)
        if -self._largest(-rerouted.same_experts) < _LEAST_SAME_EXPERTS:  # of all ranks: a collective follows
            return False
        return self._largest(self._excess(decoder, rerouted.logprobs)[0]) <= 0

    def _check_products(self, decoder: Decoder | None, updates: int) -> None:
        """Compare each quantised product with its weight: a wrong scale of a small part may change log-probs little."""
        if not self._quantised:
            return
        found, place = 0.0, ""
        if decoder is not None and (errors := decoder.quantisation_errors):
            each = torch.stack([*errors.values()]).nan_to_num(math.inf)
            found, place = float(each.max()), [*errors][int(each.argmax())]
        if self._largest(found) <= _PRODUCT_TOLERANCE:
            return
        worst, place = max(self._world.all_gather_objects((found, place)))
        raise UserError(
            f"quantised products must agree with the training weights to {_PRODUCT_TOLERANCE}, they differ by "
            f"{worst:.3g} after the weight sync of update {updates}, most in {place}: report the model, or leave "
            "rollout.quantization out"
        )

    def _check_elements(self, found: WrongElements | None, updates: int) -> None:
        """Raise if a weight was not read as it is trained: an update may change log-probs less than rounding does."""
        if found is None or self._largest(found.excess) <= 0:
            return
        worst = max(self._world.all_gather_objects(found), key=lambda one: one.excess)
        raise UserError(
            f"inference weights must be the training weights with adapters merged in, elements of {worst.name} differ "
            f"after the weight sync of update {updates}: report the model, or {self._remedy}"
        )

    def _largest(self, value: float) -> float:
        """Of all ranks."""
        return float(self._world.all_reduce(torch.tensor(value, device=self._world.device), dist.ReduceOp.MAX))


def _routes(decoder: Decoder) -> Tensor | None:
    """Its experts of `probe_tokens` on the CPU; none where they cannot be those of the training forward."""
    architecture = decoder.architecture
    if not architecture.expert_layers or architecture.experts is None or not architecture.experts.weighs_any_choice:
        return None
    return probe_routes(decoder, probe_tokens(architecture.vocab_size)).cpu()


def _first_difference(decoder: Decoder, expected: list[Tensor] | None) -> str:
    """The first part of the model whose output differs from the training states."""
    if expected is None:
        return "an unknown layer"
    found = probe_hidden(decoder, probe_tokens(decoder.architecture.vocab_size))
    bound = _FLOAT32_LAYER_TOLERANCE if decoder.dtype == torch.float32 else _LOW_PRECISION_LAYER_TOLERANCE
    if decoder.quantisation_errors:
        bound = _QUANTISED_LAYER_TOLERANCE
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        theirs = theirs.to(mine)
        difference = float((mine - theirs).norm() / theirs.norm().clamp(min=1e-12))
        if not difference <= bound:
            return "the embedding" if index == 0 else f"layer {index - 1}"
    return "the head"


def _hidden(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return (output if isinstance(output, Tensor) else output[0]).detach()
