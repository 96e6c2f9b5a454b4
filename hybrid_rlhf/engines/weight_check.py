"""Check after each weight sync that the inference weights agree with the training forward.

Why after each sync: the most expensive faults are silent (adapters that are not merged, a bucket of old weights), and
may begin with any sync. The log-probs of a few fixed tokens are computed by both and compared. Beyond the limit the run
stops, and the error names the first layer whose output differs.

In a mixture of experts, rounding may send a token to other experts, which changes its log-prob by more than rounding.
Before a mixture stops a run, the training forward therefore computes the tokens again with the experts of the inference
weights (models/routers/replay.py). Its own router must agree with most of these experts.

Elements of the weights that a sync reads are also compared with the trained model and its adapters. Why in addition:
one update changes log-probs by less than the rounding of bfloat16 or int8. Adapters that are not merged, or a bucket of
old weights, would pass the first check until the policies have drifted apart. Elements are exact: without adapters they
must be equal; with adapters, their difference is compared with the change that the adapters make. Deviation: an adapter
whose change is rounded away in the dtype of the weights changes no element, so its absence is not detected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.partition import BaseWeight
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.functional.logprobs import FLOAT32_TOLERANCE
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE, agreement_with, probe_hidden, probe_routes
from hybrid_rlhf.models.four_bit import FourBitWeight
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.lora import merged_elements
from hybrid_rlhf.models.routers.replay import are_chosen
from hybrid_rlhf.models.structure import layer_list
from hybrid_rlhf.runtime.world import World

ELEMENTS = 512
"""Number of elements compared per weight; of stacked experts, on average at least `_ELEMENTS_PER_EXPERT` each."""
_ELEMENTS_PER_EXPERT = 16
_MISSED = 0.1
"""Allowed fraction of the adapters' change that may be missing, since whole products are summed in another order."""
_ROUNDED = 8.0
"""Number of elements that may be rounded to the next value for the same reason."""


@dataclass(frozen=True)
class WrongElements:
    """The weight with the largest excess."""

    name: str
    excess: float
    """Sum of absolute differences, minus the allowed sum. At most 0: no element is wrong."""


class ElementCheck:
    """Compares the weights of a sync as they are read."""

    def __init__(self, weights: Sequence[BaseWeight]) -> None:
        """Args: the weights of the trained model."""
        self._weights = {weight.name: weight for weight in weights}
        self._excess: dict[str, Tensor] = {}

    def __call__(
        self, weights: Iterable[BaseWeight], *, seed: int
    ) -> Iterator[tuple[BaseWeight, Tensor | FourBitWeight]]:
        """Compare weights while they are gathered; yields each weight and its value in generation. 4-bit weights are
        not compared, as generation reads them where training does.

        Args:
            weights: all weights of one sync, gathered.
            seed: selects the elements; use a different one for each sync.
        """
        self._excess = {}
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            value = weight.sampled()
            if isinstance(value, Tensor):
                self._excess[weight.name] = self._compare(weight.name, value, generator)
            yield weight, value

    @property
    def worst(self) -> WrongElements:
        """Weight with the largest excess in the last sync."""
        excess = torch.stack([*self._excess.values()])
        place = int(excess.argmax())
        return WrongElements([*self._excess][place], float(excess[place]))

    @torch.no_grad()
    def _compare(self, name: str, value: Tensor, generator: torch.Generator) -> Tensor:
        """Return the excess of a weight (WrongElements), a float64 scalar."""
        weight = self._weights[name]
        if weight.split is not None:
            value = weight.split.local(value)
        experts = len(value) if value.dim() == 3 else 0
        draws = torch.rand(max(ELEMENTS, experts * _ELEMENTS_PER_EXPERT), generator=generator, dtype=torch.float64)
        places = (draws * value.numel()).long().to(value.device)
        elements = value.take(places).double()
        base = weight.parameter.detach().take(places)
        if weight.adapter is None:
            return (elements - base.double()).abs().sum().nan_to_num(0.0)
        expected = merged_elements(weight.adapter, base, places=places, shape=value.shape).double()
        rounding = torch.finfo(value.dtype).eps * expected.abs().mean()
        allowed = _MISSED * (expected - base.double()).abs().sum() + _ROUNDED * rounding
        return ((elements - expected).abs().sum() - allowed).nan_to_num(0.0)


_FLOAT32_LAYER_TOLERANCE = 1e-3
"""Relative difference of a layer's output in float32 above which the layer is named as wrong."""
_LOW_PRECISION_LAYER_TOLERANCE = 0.05
"""The same in bfloat16 and float16."""
_QUANTISED_TOLERANCE = 0.5
"""Allowed mean difference of log-probs with quantised products, in nats. SmolLM2-135M in int8 differs by 0.2."""
_PRODUCT_TOLERANCE = 0.1
"""Allowed relative difference of a quantised product from the exact one (int8 differs by 0.01, fp8 by 0.04)."""
_QUANTISED_LAYER_TOLERANCE = 0.2
"""Allowed relative difference of a layer's output with quantised products."""
_LEAST_SAME_EXPERTS = 0.5
"""Minimum fraction of a mixture's chosen experts on which both routers agree; rounding changes a few percent."""


def logprob_limit(limit: float | None, *dtypes: torch.dtype, quantised: bool = False) -> float:
    """Return the allowed mean difference of log-probs, in nats: as set, else by the dtypes of training and
    generation."""
    if limit is not None:
        return limit
    if quantised:
        return _QUANTISED_TOLERANCE
    return FLOAT32_TOLERANCE if set(dtypes) == {torch.float32} else LOW_PRECISION_TOLERANCE


class Rerouted(NamedTuple):
    """Result of the training forward of `probe_tokens` with forced experts."""

    logprobs: Tensor
    """[P - 1] log-probs of all tokens except the first."""
    same_experts: float
    """Fraction of the forced experts that the router also selects; minimum over all mixtures."""


class TrainingProbe:
    """The training forward of `probe_tokens`. All ranks that check call its methods together."""

    def __init__(self, engine: RoleModel, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        """Return the log-probs [P - 1] of all tokens except the first."""
        ids, counts = self._inputs()
        logprobs: Tensor = self._engine(ids, counts, counts)[0][0, 1:]
        return logprobs

    @torch.no_grad()
    def rerouted(self, routes: Tensor) -> Rerouted:
        """Return the result with experts [P - 1, E, k] forced for all tokens except the last."""
        ids, counts = self._inputs()
        module: Any = self._engine.module
        routes = functional.pad(routes.to(ids.device), (0, 0, 0, 0, 0, 1), value=-1)
        with module.replay.forced() as chosen:
            logprobs: Tensor = self._engine(ids, counts, counts, routes=routes[None])[0][0, 1:]
        forced = routes[:-1].unbind(1)
        same = [are_chosen(theirs, mine[:-1]) for mine, theirs in zip(chosen, forced, strict=True)]
        return Rerouted(logprobs, min(float(agrees.float().mean()) for agrees in same))

    @torch.no_grad()
    def states(self) -> list[Tensor] | None:
        """Return hidden states [P, H] before the first layer and after each; None if the layers are unknown."""
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
        # ranks that split the weights compute the rows of all of them, and each has the same
        return [state.reshape(-1, state.shape[-1])[: ids.numel()] for state in states]

    def _inputs(self) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([probe_tokens(self._vocab_size)], device=self._engine.device)
        return ids, torch.ones_like(ids, dtype=torch.bool)


_ALWAYS_CHECKED = 2
"""Number of first syncs that are checked: the first builds the inference weights, the second writes into them."""


class WeightCheck:
    """Compares inference weights with the training forward, on all ranks that have one of them."""

    def __init__(
        self,
        world: World,
        limit: float | None,
        *,
        quantised: bool,
        every: int = 1,
        remedy: str = "set rollout.backend to module",
    ) -> None:
        """Configure the check.

        Args:
            world: the ranks.
            limit: largest mean difference of log-probs in nats; none: by dtype, see `agreement_with`.
            quantised: the products of layers are quantised.
            every: number of syncs of which one is checked; the first two always are.
            remedy: the fix in the error message.
        """
        self._world = world
        self.limit = limit
        """Largest mean difference of log-probs in nats; none: by dtype."""
        self._quantised = quantised
        self._every = every
        self._syncs = 0
        self._remedy = remedy

    def is_due(self) -> bool:
        """Count a sync; returns true if it is to be checked. Every rank must make this call."""
        self._syncs += 1
        return self._syncs <= _ALWAYS_CHECKED or self._syncs % self._every == 0

    @torch.no_grad()
    def __call__(
        self,
        decoder: Decoder | None,
        probe: TrainingProbe,
        *,
        updates: int,
        elements: WrongElements | None = None,
    ) -> None:
        """Check a decoder. Every rank must make this call.

        Args:
            decoder: with the current weights; none on a rank that does not sample.
            probe: the training forward, the same on every rank.
            updates: optimizer updates so far, for the message.
            elements: result of ElementCheck; none, on every rank: it was not used.

        Raises:
            UserError: on every rank, when the log-probs differ by more than the limit, or elements of a weight differ.
        """
        expected = probe.logprobs()
        if not bool(expected.isfinite().all()):
            return  # the training weights are not finite, which the loop reports (loop/non_finite.py)
        excess, limit = self._excess(decoder, expected)
        if self._largest(excess) <= 0 or self._agrees_with_its_experts(decoder, probe):
            self._check_products(decoder, updates)
            self._check_elements(elements, updates)
            return
        training = probe.states()
        place = "" if decoder is None else _first_difference(decoder, training)
        excess, limit, place = max(self._world.all_gather_objects((excess, limit, place)))
        raise UserError(
            f"inference weights must agree with the training forward to {limit:.3g} nats, they differ by "
            f"{excess + limit:.3g} after the weight sync of update {updates}, first in {place}: report the model, or "
            f"{self._remedy}"
        )

    def _excess(self, decoder: Decoder | None, expected: Tensor) -> tuple[float, float]:
        """Return the difference of a decoder's log-probs minus the limit, and the limit."""
        if decoder is None:
            return -math.inf, 0.0
        result = agreement_with(decoder, expected)
        limit = result.tolerance if self.limit is None else self.limit
        return (math.inf if math.isnan(result.measured) else result.measured - limit), limit

    def _agrees_with_its_experts(self, decoder: Decoder | None, probe: TrainingProbe) -> bool:
        """True if the training forward agrees with a decoder when it uses its experts, and its router with most of
        these."""
        routes = None if decoder is None else _routes(decoder)
        routes = next((of_rank for of_rank in self._world.all_gather_objects(routes) if of_rank is not None), None)
        if routes is None:
            return False
        rerouted = probe.rerouted(routes)
        # minimum over all ranks, since a collective follows
        if -self._largest(-rerouted.same_experts) < _LEAST_SAME_EXPERTS:
            return False
        return self._largest(self._excess(decoder, rerouted.logprobs)[0]) <= 0

    def _check_products(self, decoder: Decoder | None, updates: int) -> None:
        """Raise UserError if a quantised product is inexact: a wrong scale of a small part may hardly change
        log-probs."""
        if not self._quantised:
            return
        largest = 0.0
        place = ""
        if decoder is not None and (errors := decoder.quantisation_errors):
            errors_of_products = torch.stack([*errors.values()]).nan_to_num(math.inf)
            largest = float(errors_of_products.max())
            place = [*errors][int(errors_of_products.argmax())]
        if self._largest(largest) <= _PRODUCT_TOLERANCE:
            return
        worst, place = max(self._world.all_gather_objects((largest, place)))
        raise UserError(
            f"quantised products must agree with the training weights to {_PRODUCT_TOLERANCE}, they differ by "
            f"{worst:.3g} after the weight sync of update {updates}, most in {place}: report the model, or leave "
            "rollout.quantization out"
        )

    def _check_elements(self, wrong: WrongElements | None, updates: int) -> None:
        """Raise UserError if elements of a weight differ: an update may change log-probs by less than rounding."""
        if wrong is None or self._largest(wrong.excess) <= 0:
            return
        worst = max(self._world.all_gather_objects(wrong), key=lambda of_rank: of_rank.excess)
        raise UserError(
            f"inference weights must be the training weights with adapters merged in, elements of {worst.name} differ "
            f"after the weight sync of update {updates}: report the model, or {self._remedy}"
        )

    def _largest(self, value: float) -> float:
        """Return the maximum over all ranks."""
        return float(self._world.all_reduce(torch.tensor(value, device=self._world.device), dist.ReduceOp.MAX))


def _routes(decoder: Decoder) -> Tensor | None:
    """Return a decoder's experts for `probe_tokens` on the CPU; None if they cannot be forced in the training
    forward."""
    architecture = decoder.architecture
    if not architecture.expert_layers or architecture.experts is None or not architecture.experts.weighs_any_choice:
        return None
    return probe_routes(decoder, probe_tokens(architecture.vocab_size)).cpu()


def _first_difference(decoder: Decoder, expected: list[Tensor] | None) -> str:
    """Name the first part of the model whose output differs from the training states."""
    if expected is None:
        return "an unknown layer"
    states = probe_hidden(decoder, probe_tokens(decoder.architecture.vocab_size))
    bound = _FLOAT32_LAYER_TOLERANCE if decoder.dtype == torch.float32 else _LOW_PRECISION_LAYER_TOLERANCE
    if decoder.quantisation_errors:
        bound = _QUANTISED_LAYER_TOLERANCE
    for index, (mine, theirs) in enumerate(zip(states, expected, strict=True)):
        theirs = theirs.to(mine)
        difference = float((mine - theirs).norm() / theirs.norm().clamp(min=1e-12))
        if not difference <= bound:
            return "the embedding" if index == 0 else f"layer {index - 1}"
    return "the head"


def _hidden(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return (output if isinstance(output, Tensor) else output[0]).detach()
