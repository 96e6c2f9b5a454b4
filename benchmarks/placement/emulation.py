"""A step of a large job on ranks that sleep: the library runs a tiny model, and each call takes as long as predicted.

Why: the ranks of a test machine share its cores, so more of them do not run faster; sleeping ranks take no core. Real
are all code of the library, its tensors, collectives, threads and waiting; emulated is how long an engine's forward,
backward and step, a weight sync, sampling by a group and the gather of completions take. A rank sleeps for the time
that `planning.costs.Costs` predicts, less the processor time that the tiny model took, when the real call has ended;
so what it has waited for in a collective is not taken off. Work of a rank is divided over its calls by their tokens: a
training forward is charged with its backward, communication of an update with its step. Completion i of a step has the
length that the job gives it, divided by `Emulation.shrink`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from benchmarks.placement.runs import RunTimes, timed_run
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import derive_seed
from hybrid_rlhf.planning.costs import Costs, Work
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class Emulation:
    """What the ranks of a plan sleep, in seconds of the emulated machine; by role as `ModelEngine.role` names it."""

    ranks: Mapping[str, tuple[int, ...]]
    groups: tuple[tuple[int, ...], ...]
    """That sample."""
    reads: Mapping[str, float]
    """Of one forward over a rank's share of the completions."""
    updates: Mapping[str, Work]
    """Of all updates of a rollout."""
    update_count: int
    sampling: tuple[float, ...]
    """Of each group."""
    weight_sync: float
    gather: float
    lengths: tuple[int, ...]
    """Tokens of each completion of the job."""
    shrink: int
    """By which the real completions are shorter."""
    pace: float
    """Seconds that a rank sleeps for a second of the emulated machine."""

    @classmethod
    def of(cls, costs: Costs, plan: StepPlan, *, rows_at_once: int, shrink: int, pace: float) -> Emulation:
        """The emulation of a plan by the costs of its job, whose updates pass over a rollout once."""
        job = costs.job
        names = {role.name: role_name(role.name) for role in job.roles.values()}
        return cls(
            {names[name]: place.ranks for name, place in plan.roles.items() if name != SAMPLER},
            tuple(plan.sampling_groups),
            {names[role.name]: costs.read(role, plan).seconds for role in job.roles.values()},
            {names[role.name]: costs.updates(role, plan) for role in job.roles.values() if role.is_trained},
            job.config.algorithm.mini_batches,
            tuple(work.seconds for work in costs.sampling(plan, rows_at_once=rows_at_once)),
            costs.weight_sync(plan).seconds,
            costs.messages("gather").seconds,
            job.lengths.completions,
            shrink,
            pace,
        )

    @property
    def sync_ranks(self) -> set[int]:
        """That take part in a weight sync."""
        return {*self.ranks["actor"], *(rank for group in self.groups for rank in group)}


def role_name(name: str) -> str:
    """A role of a job as its engine names it: reward models are all "reward"."""
    return name if name in ("actor", "critic", "reference") else "reward"


def run_emulated(world: World, line: Sequence[str], emulation: Emulation) -> RunTimes:
    """A run of the library's RL on this rank, under an emulation."""
    config = parse_config(RLConfig, list(line))
    with _Emulator(emulation, world.rank, config).installed():
        return timed_run(config)


class _Emulator:
    """Takes the place of the engines' public calls on one rank: each runs as it is, then sleeps."""

    def __init__(self, emulation: Emulation, rank: int, config: RLConfig) -> None:
        self._emulation = emulation
        mine = [seconds for group, seconds in zip(emulation.groups, emulation.sampling, strict=True) if rank in group]
        self._sampling = mine[0] if mine else 0.0
        self._weight_sync = emulation.weight_sync if rank in emulation.sync_ranks else 0.0
        steps, count = config.train.max_steps or 0, len(emulation.lengths)
        self._places = {
            derive_seed(config.seed, step, place): place for step in range(1, steps + 1) for place in range(count)
        }
        self._rollout_tokens = 1
        """Of all completions with their prompts."""
        self._in_backward: dict[str, int] = {}
        """By role: tokens of the forward that its next backward belongs to."""
        self._syncing = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """While the library's calls are emulated."""
        with contextlib.ExitStack() as stack:
            for owner, name, wrap in (
                (ModelEngine, "__call__", self._forward),
                (ModelEngine, "backward", self._backward),
                (ModelEngine, "step", self._step),
                (GenerationEngine, "generate", self._generate),
                *((owner, "inference", self._inference) for owner in (HybridEngine, SeparateSampler)),
                (RolloutSampler, "held", self._gather),
            ):
                stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
            yield

    def _sleep(self, seconds: float, *, spent: float = 0.0) -> None:
        """Sleep for emulated seconds, less real ones that the call has taken."""
        time.sleep(max(0.0, seconds * self._emulation.pace - spent))

    def _share(self, role: str, tokens: int) -> float:
        """Of a rank's work of a role, the part of so many tokens."""
        return tokens * len(self._emulation.ranks[role]) / self._rollout_tokens

    def _forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def forward(engine: ModelEngine, ids: torch.Tensor, mask: torch.Tensor, *rest: Any, **named: Any) -> Any:
            start, tokens = time.thread_time(), int(mask.sum())
            found = real(engine, ids, mask, *rest, **named)
            if torch.is_grad_enabled():
                self._in_backward[engine.role] = tokens
            elif not self._syncing:  # a sync's own forwards are part of its time
                seconds = self._emulation.reads[engine.role] * self._share(engine.role, tokens)
                self._sleep(seconds, spent=time.thread_time() - start)
            return found

        return forward

    def _backward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def backward(engine: ModelEngine, total: torch.Tensor, *, count: float) -> None:
            start = time.thread_time()
            real(engine, total, count=count)
            share = self._share(engine.role, self._in_backward[engine.role])
            self._sleep(self._emulation.updates[engine.role].compute * share, spent=time.thread_time() - start)

        return backward

    def _step(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(engine: ModelEngine) -> Any:
            start = time.thread_time()
            found = real(engine)
            seconds = self._emulation.updates[engine.role].wire / self._emulation.update_count
            self._sleep(seconds, spent=time.thread_time() - start)
            return found

        return step

    def _generate(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def generate(engine: GenerationEngine, prompts: Any, sampling: Any, **named: Any) -> Any:
            emulation, start = self._emulation, time.perf_counter()
            engine.stop_token_ids = frozenset()
            lengths = [-(-emulation.lengths[self._places[each.seed]] // emulation.shrink) for each in sampling]
            limited = [replace(each, max_new_tokens=count) for each, count in zip(sampling, lengths, strict=True)]
            found = real(engine, prompts, limited, **named)
            # the ranks of a group enter together, so all of this time is the group's own
            self._sleep(self._sampling, spent=time.perf_counter() - start)
            return found

        return generate

    def _inference(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def inference(sampler: Any, **named: Any) -> Iterator[Any]:
            with self._sync(), contextlib.ExitStack() as stack:
                generation = stack.enter_context(real(sampler, **named))
                inside = stack.pop_all()
            with inside:
                yield generation

        return inference

    @contextlib.contextmanager
    def _sync(self) -> Iterator[None]:
        start, self._syncing = time.thread_time(), True
        try:
            yield
        finally:
            self._syncing = False
        self._sleep(self._weight_sync, spent=time.thread_time() - start)

    def _gather(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*arguments: Any) -> Any:
            rollout = real(*arguments)
            self._rollout_tokens = int(rollout.index.lengths.sum())
            self._sleep(self._emulation.gather)
            return rollout

        return gather
