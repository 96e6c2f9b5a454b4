"""A frozen base with which several runs train and sample, each by an adapter of its own.

The loops of the runs are those of runs alone (rl/trainer.py). Where they compute with the actor, they meet: the forward
and backward passes that runs wait for are one packed pass, and the rollouts that they wait for are one batch. A pass is
cut at the log-probs: a run computes the gradient of its loss in the log-probs and entropies of its tokens, and the rest
of the backward pass is again common. Each of several ranks has the base, and computes its share of the rows and prompts
of each run; the same runs are in a pass on all ranks, also where a rank has no rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.adapters.engine import AdapterEngine, AdapterRow
from hybrid_rlhf.engines.adapters.rendezvous import Call, Rendezvous
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import NewTokens, Request
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.models.head_check import require_own_logits
from hybrid_rlhf.models.routers.losses import router_loss
from hybrid_rlhf.runtime.agreement import RankAgreement
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class Forward:
    """A forward pass of a run."""

    rows: list[AdapterRow]
    learns: bool
    """True if a backward pass follows."""
    adapted: bool
    """False: the base model alone."""

    @property
    def order(self) -> int:
        """Passes are computed in this order, so that runs that are behind catch up before others go on."""
        return 2 if self.learns else 1

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True)
class Backward:
    """The backward pass of the last forward pass of a run."""

    gradients: list[Tensor]
    """[2, T] of each row."""
    order = 0


@dataclass(frozen=True)
class Sampling:
    """A rollout of a run."""

    requests: Sequence[Request]
    version: int
    """Number of updates of its adapter."""
    order = 3


@dataclass
class _OpenPass:
    """A forward pass whose backward pass follows."""

    context: contextlib.ExitStack
    outputs: dict[str, list[Tensor]]
    """Log-probs and entropies [2, T] of the rows of each run."""


class SharedBase:
    """The base, its adapters and its inference weights."""

    def __init__(self, agreement: RankAgreement, *, micro_batch_tokens: int, deterministic: bool = False) -> None:
        """Load nothing: the first run does.

        Args:
            agreement: meetings of the ranks.
            micro_batch_tokens: most tokens of a packed pass on a rank, unless a run alone has more.
            deterministic: compute each run apart, so that its results are bit for bit those of training alone.
        """
        self.rendezvous = Rendezvous(agreement)
        self._agreement = agreement
        self._limit = micro_batch_tokens
        self._deterministic = deterministic
        self._engine: AdapterEngine | None = None
        self._generation: GenerationEngine | None = None
        self._keeps_memory = False
        self._versions: dict[str, int] = {}
        """Version of each adapter that samples."""
        self._open: _OpenPass | None = None

    @property
    def engine(self) -> AdapterEngine:
        """The engine of all adapters, after `add`."""
        assert self._engine is not None
        return self._engine

    @property
    def backend(self) -> NativeBackend:
        """The inference weights, after `add`."""
        assert self._generation is not None
        backend = self._generation.backend
        assert isinstance(backend, NativeBackend)
        return backend

    def add(
        self,
        name: str,
        lora: LoraConfig,
        *,
        path: str,
        model: ModelConfig,
        rollout: RolloutConfig,
        seed: int,
        world: World,
    ) -> None:
        """Add the adapter of a run; the first call loads the base.

        Args:
            name: of the run.
            lora: its adapter.
            path: the model, the same in each call.
            model: settings of the model.
            rollout: settings of the inference weights and their memory.
            seed: seed of its first factors.
            world: the ranks.

        Raises:
            UserError: for a model without packed rows or inference weights, one with router losses, or an adapter that
                does not fit.
        """
        # loading may have failed on another rank
        self._agreement.meet(f"adds an adapter to {'a new' if self._engine is None else 'the loaded'} base")
        if self._engine is None:
            engine = AdapterEngine.from_pretrained(path, world=world, model=model)
            kind = type(engine.lm).__name__
            require_own_logits(engine.lm)
            if router_loss(engine.lm, model) is not None:
                raise UserError(
                    f"several runs on one base have no router losses, {kind} has: set model.router_aux_loss_coef and "
                    "model.router_z_loss_coef to 0"
                )
            generation = GenerationEngine.from_model(
                engine.lm,
                max_batch_rows=rollout.max_decode_rows,
                kv_cache_gib=rollout.kv_cache_gib,
                prefill_tokens=rollout.prefill_tokens,
                cuda_graphs=rollout.cuda_graphs,
            )
            if not isinstance(generation.backend, NativeBackend):
                raise UserError(
                    f"several runs on one base sample with inference weights, {kind} has none: train each with a "
                    "command of its own"
                )
            self._engine = engine
            self._generation = generation
            self._keeps_memory = world.device.type == "cpu" or rollout.keep_weights is True
        self.engine.add(name, lora, seed=seed)
        self._set_adapter(name, 0)

    def remove(self, name: str) -> None:
        """Remove the adapter of a run that ends."""
        assert self._generation is not None
        self.engine.remove(name)
        self._generation.remove_adapters([name])

    def compute(self, waiting: Sequence[Call]) -> Sequence[Call]:
        """Answer those calls that are computed together next."""
        order = min(call.argument.order for call in waiting)
        calls = self._together([call for call in waiting if call.argument.order == order])
        try:
            results = self._results({call.function: call.argument for call in calls})
        except Exception as error:  # noqa: BLE001 - raised in the runs
            for call in calls:
                call.error = error
            return calls
        for call in calls:
            call.result = results[call.function]
        return calls

    def _together(self, calls: Sequence[Call]) -> Sequence[Call]:
        """The first calls that one pass computes."""
        first = calls[0].argument
        if self._deterministic:
            return calls[:1]
        if not isinstance(first, Forward):
            return calls
        chosen: list[Call] = []
        tokens = 0
        for call, of_call in zip(calls, self._agreement.largest([call.argument.tokens for call in calls]), strict=True):
            tokens += of_call
            if chosen and (tokens > self._limit or call.argument.adapted != first.adapted):
                break
            chosen.append(call)
        return chosen

    def _results(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result of each run's call; all are of one kind."""
        first = next(iter(arguments.values()))
        if isinstance(first, Backward):
            return self._backward(arguments)
        if isinstance(first, Sampling):
            return self._sampled(arguments)
        self._close_pass()
        with contextlib.ExitStack() as context:
            context.enter_context(torch.set_grad_enabled(first.learns))
            rows = [row for forward in arguments.values() for row in forward.rows]
            packed = iter(context.enter_context(self.engine.packed(rows, adapted=first.adapted)))
            outputs = {name: [next(packed) for _ in forward.rows] for name, forward in arguments.items()}
            if first.learns:
                self._open = _OpenPass(context.pop_all(), outputs)
        return {name: [output.detach() for output in of_run] for name, of_run in outputs.items()}

    def _backward(self, arguments: dict[str, Backward]) -> dict[str, None]:
        opened = self._open
        self._open = None
        assert opened is not None, "a backward pass follows a forward pass"
        outputs = [output for name in arguments for output in opened.outputs[name]]
        with opened.context:
            if outputs:
                gradients = [gradient for backward in arguments.values() for gradient in backward.gradients]
                torch.autograd.backward(outputs, gradients)
        return dict.fromkeys(arguments)

    def _close_pass(self) -> None:
        """End a pass whose runs have ended without a backward pass."""
        if self._open is not None:
            self._open.context.close()
            self._open = None

    def _sampled(self, arguments: dict[str, Sampling]) -> dict[str, list[NewTokens]]:
        """The new tokens of each run's requests, by step."""
        assert self._generation is not None
        owners = {}
        offsets = {}
        offset = 0
        for name, sampling in arguments.items():
            if self._versions[name] != sampling.version:
                self._set_adapter(name, sampling.version)
            offsets[name] = offset
            for request in sampling.requests:
                owners[request] = name
                request.adapter = self._generation.maker.adapters[name]
                request.prompt_index += offset  # no two runs have the same
            offset = 1 + max((request.prompt_index for request in sampling.requests), default=offset - 1)
        results: dict[str, list[NewTokens]] = {name: [] for name in arguments}
        try:
            for new in self.backend.run(list(owners)) if owners else ():
                for name, steps in results.items():
                    steps.append([pair for pair in new if owners[pair[0]] == name])
        finally:
            for request, name in owners.items():
                request.prompt_index -= offsets[name]
            if not self._keeps_memory:
                self.backend.reset()
        return results

    def _set_adapter(self, name: str, version: int) -> None:
        assert self._generation is not None
        self._generation.set_adapter(name, self.engine.factors(name))
        self._versions[name] = version
