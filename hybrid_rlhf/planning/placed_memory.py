"""Memory of each rank in each phase of an RL step under a plan.

Ranks that hold the same roles need the same memory. Micro-batches between one row and the largest take memory linear in
their rows (an upper bound), unless they are measured one by one. A separate sampler keeps its inference weights in all
phases, and with a policy lag its cache too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.ds_config import deepspeed_config
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.engines.residency.rules import RoleResidency
from hybrid_rlhf.planning.engine_memory import FLOAT32, EngineMemory, MemoryUse, engine_memory, split_memory
from hybrid_rlhf.planning.generation_memory import route_bytes
from hybrid_rlhf.planning.job import RLJob, RoleJob
from hybrid_rlhf.planning.phase_memory import Device, PhaseMemory, RankMemory, micro_batch
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan
from hybrid_rlhf.planning.sampling_memory import InferenceBytes, inference_bytes, sampling_memory
from hybrid_rlhf.planning.shapes import BatchShape, ShapedModel
from hybrid_rlhf.runtime.placement import CRITIC_COPY, RolePlacement


@dataclass(frozen=True)
class PlanMemory:
    """Memory of all ranks in all phases."""

    phases: tuple[RankMemory, ...]
    rows_at_once: int
    """Completions that a sampling group decodes together."""

    @property
    def misfit(self) -> RankMemory | None:
        """Where most is missing; none: everything fits."""
        missing = [each for each in self.phases if not each.phase.fits]
        return max(missing, key=lambda each: each.phase.total, default=None)

    @property
    def peak_bytes(self) -> float:
        """The most that any rank needs in any phase."""
        return max(each.phase.total for each in self.phases)


class MemoryModel:
    """Estimates plans; what a search asks for again is computed once."""

    def __init__(
        self, job: RLJob, *, device_bytes: float, host_bytes: float | None = None, exact: bool = False
    ) -> None:
        """Estimate plans of a job.

        Args:
            job: what is computed.
            device_bytes: memory of a rank's device.
            host_bytes: a rank's share of its host's; none: not known.
            exact: measure each micro-batch, for few plans.
        """
        self._job = job
        self._exact = exact
        self._device = Device(job.device, 1, device_bytes, host_bytes)
        self._engines: dict[tuple[object, ...], EngineMemory] = {}
        self._uses: dict[tuple[object, ...], MemoryUse] = {}
        """What engines add with a micro-batch."""
        self._inference: dict[tuple[int, int, bool, bool], InferenceBytes] = {}
        self._classes: dict[tuple[object, ...], tuple[tuple[PhaseMemory, ...], int | None]] = {}

    @property
    def device_bytes(self) -> float:
        """Memory of a rank's device."""
        return self._device.device_bytes

    def __call__(self, plan: StepPlan) -> PlanMemory:
        """The memory of a plan."""
        memory: list[RankMemory] = []
        rows = None
        for names, ranks in _alike(tuple((name, role.ranks) for name, role in plan.roles.items())):
            phases, at_once = self._of_class(plan, names)
            memory += [RankMemory(ranks, phase) for phase in phases]
            rows = at_once if rows is None else min(rows, at_once or rows)
        return PlanMemory(tuple(memory), rows or 1)

    def of_role(self, plan: StepPlan, name: str) -> tuple[float, float]:
        """Bytes of a device that a role holds, and that it adds while it reads or trains."""
        role = self._job.roles[name]
        uses = [self._reading(role, plan)] + ([self._training(role, plan)] if role.is_trained else [])
        return self._engine(role, plan).held.device, max(use.device for use in uses)

    def _of_class(self, plan: StepPlan, names: tuple[str, ...]) -> tuple[tuple[PhaseMemory, ...], int | None]:
        sampling = (plan.samplers, sum(len(place.ranks) for place in plan.sampling_places))
        offloads = (plan.offload_frozen, plan.offload_states, plan.offload_optimizer)
        shares = tuple(
            (name, len(plan.roles[name].ranks), plan.roles[name].zero, plan.roles[name].tensor_parallel)
            for name in names
        )
        copied = (plan.roles["critic"], plan.roles[CRITIC_COPY]) if CRITIC_COPY in plan.roles else None
        key = (shares, plan.policy_lag, offloads, sampling, copied)
        if key not in self._classes:
            self._classes[key] = self._phases(plan, names)
        return self._classes[key]

    def _phases(self, plan: StepPlan, names: tuple[str, ...]) -> tuple[tuple[PhaseMemory, ...], int | None]:
        job = self._job
        roles = [job.roles[name] for name in names if name in job.roles]
        if CRITIC_COPY in names:
            roles.append(replace(job.roles["critic"], name=CRITIC_COPY, optimizer=None, bound_to=None))
        base = sum((self._engine(role, plan).held for role in roles), MemoryUse())
        if "actor" in names and job.config.actor.ema_decay:
            actor = plan.roles["actor"]
            base += MemoryUse(host=FLOAT32 * job.actor.sizes.trained / (len(actor.ranks) if actor.zero == 3 else 1))
        base += MemoryUse(host=route_bytes(_shapes(job.actor), job.config.rollout)[0])
        found: list[PhaseMemory] = []
        rows = None
        sampler = next((name for name in plan.samplers if name in names), None)
        if sampler is not None:
            generation, kept, rows = self._generation(plan, sampler, base)
            found.append(generation)
            base += kept
        found += self._reads(plan, names, roles, base)
        for role in roles:
            if role.is_trained:
                need = base + self._training(role, plan)
                if role.name == "critic" and plan.separate and {"actor", "sampler"} & {*names} and not plan.policy_lag:
                    sent = min(BUCKET_ELEMENTS, _shapes(job.actor).elements.all)
                    need += MemoryUse(buffers=2.0 * sent * job.inference_dtype.itemsize)  # weights travel meanwhile
                found.append(PhaseMemory(f"{role.name} training", need, self._device))
        return tuple(found) or (PhaseMemory("idle", base, self._device),), rows

    def _reads(
        self, plan: StepPlan, names: tuple[str, ...], roles: list[RoleJob], base: MemoryUse
    ) -> Iterator[PhaseMemory]:
        reads = [self._reading(role, plan) for role in roles if self._reads_rows(role, plan)]
        if CRITIC_COPY in plan.roles and {"critic", CRITIC_COPY} & {*names}:  # before the first of them reads
            sent = _travelling(_shapes(self._job.roles["critic"]), plan, "critic", CRITIC_COPY)
            reads.append(MemoryUse(buffers=sent * self._job.dtype.itemsize))
        if reads:
            yield PhaseMemory("scoring", base + max(reads, key=lambda use: use.device), self._device)

    def _reads_rows(self, role: RoleJob, plan: StepPlan) -> bool:
        """True if a role reads completions before the updates."""
        if role.name == "actor":
            return bool(self._job.actor_reads(lag=plan.policy_lag))
        return role.name != "critic" or CRITIC_COPY not in plan.roles

    def _generation(self, plan: StepPlan, sampler: str, base: MemoryUse) -> tuple[PhaseMemory, MemoryUse, int]:
        """The phase, what of it remains in other phases, and the completions decoded at once."""
        job = self._job
        place = plan.sampling
        actor = plan.roles["actor"]
        model = _shapes(job.actor)
        dtype = job.inference_dtype
        separate = sampler == SAMPLER
        inference = self._inference_bytes(place.tensor_parallel, actor, in_use=separate)
        copies = 0.0
        if plan.policy_lag and not separate:  # each rollout is sampled from weights of its own
            copies = plan.policy_lag * self._inference_bytes(place.tensor_parallel, actor, in_use=True).weights
        if separate:
            sent = _travelling(model, plan, "actor", SAMPLER) * dtype.itemsize
            inference = replace(inference, building=inference.building + sent)
        residency = plan.residency(job)[sampler]
        if residency.visits("optimizer"):
            movable = self._engine(job.actor, plan).movable
            base += MemoryUse(optimizer=-movable, host=movable)
        rollout = replace(job.config.rollout, tensor_parallel=place.tensor_parallel, async_sampling=None)
        ranks = sum(len(each.ranks) for each in plan.sampling_places)
        sampling = sampling_memory(
            model, rollout, base, inference, self._device, ranks=ranks, dtype=dtype, copies=copies
        )
        cache = sampling.cache
        kept = MemoryUse()
        if residency.stays("inference weights"):
            kept += MemoryUse(inference=copies or inference.weights)
        if residency.stays("KV cache"):
            buffers = sampling.step_buffers if plan.policy_lag else 0.0
            kept += MemoryUse(cache=cache.cache_bytes, buffers=buffers)
        # rows take pages as they grow, so more rows of mean length than of full length have room
        longest = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
        rows = min(cache.rows, int(cache.full_length_rows * longest / job.lengths.mean_row))
        return sampling.phase, kept, max(1, rows)

    def _inference_bytes(self, together: int, actor: RolePlacement, *, in_use: bool) -> InferenceBytes:
        job = self._job
        gathers = actor.zero == 3 and (len(actor.ranks) > 1 or job.actor.zero.offload_parameters)
        key = (together, actor.zero, gathers, in_use)
        if key not in self._inference:
            self._inference[key] = inference_bytes(
                _shapes(job.actor),
                replace(job.config.rollout, tensor_parallel=together),
                stage=actor.zero,
                gathers=gathers,
                dtype=job.inference_dtype,
                device=job.device,
                in_use=in_use,
            )
        return self._inference[key]

    def _engine(self, role: RoleJob, plan: StepPlan) -> EngineMemory:
        key = self._engine_key(role, plan)
        if key not in self._engines:
            self._engines[key] = self._built(role, plan.roles[role.name], plan.residency(self._job)[role.name])
        return self._engines[key]

    @staticmethod
    def _engine_key(role: RoleJob, plan: StepPlan) -> tuple[object, ...]:
        """What decides the memory of a role's engine."""
        place = plan.roles[role.name]
        settings = (plan.offloads_optimizer(role.name, role.zero), plan.offload_frozen)
        return role.name, len(place.ranks), place.zero, place.tensor_parallel, *settings

    def _built(self, role: RoleJob, place: RolePlacement, residency: RoleResidency) -> EngineMemory:
        if not role.is_trained and (place.tensor_parallel > 1 or role.name == CRITIC_COPY):
            job = self._job
            return split_memory(_shapes(role), dtype=job.dtype, ranks=place.tensor_parallel, device=job.device)
        config = residency.frozen_zero(place.zero)
        if role.is_trained:
            config = ZeroConfig(
                stage=place.zero,
                offload_optimizer=residency.at("optimizer", "updates") == "host",
                offload_parameters=residency.at("weights", "updates") == "host",
            )
        json = deepspeed_config(
            zero=config, dtype=self._job.dtype, optimizer=role.optimizer, overrides=self._job.overrides
        )
        engine = engine_memory(_shapes(role), json["zero_optimization"], dtype=self._job.dtype, ranks=len(place.ranks))
        if role.bound_to is not None:
            own = engine.held.weights * role.sizes.trained / role.sizes.parameters
            engine = replace(engine, held=replace(engine.held, weights=own))
        return engine.with_weights_on_host() if residency.visits("weights") else engine

    def _training(self, role: RoleJob, plan: StepPlan) -> MemoryUse:
        return self._passing(role, plan, self._trained)

    def _reading(self, role: RoleJob, plan: StepPlan) -> MemoryUse:
        return self._passing(role, plan, self._read)

    def _passing(
        self, role: RoleJob, plan: StepPlan, use: Callable[[RoleJob, EngineMemory, BatchShape], MemoryUse]
    ) -> MemoryUse:
        """What an engine adds with its micro-batch."""
        key = (use.__name__, *self._engine_key(role, plan), batch := self._batch(role, plan))
        if key not in self._uses:
            self._uses[key] = use(role, self._engine(role, plan), batch)
        return self._uses[key]

    def _trained(self, role: RoleJob, engine: EngineMemory, batch: BatchShape) -> MemoryUse:
        each = route_bytes(_shapes(role), self._job.config.rollout)[1] if role.name == "actor" else 0
        routes = MemoryUse(buffers=each * batch.rows * batch.length)
        return routes + self._at(engine.training, batch)

    def _read(self, role: RoleJob, engine: EngineMemory, batch: BatchShape) -> MemoryUse:
        return self._at(engine.forward, batch)

    def _at(self, use: Callable[[BatchShape], MemoryUse], batch: BatchShape) -> MemoryUse:
        if self._exact:
            return use(batch)
        one, most = self._both()
        return _between(use(one), use(most), batch.rows, most.rows)

    def _batch(self, role: RoleJob, plan: StepPlan) -> BatchShape:
        job = self._job
        place = plan.roles[role.name]
        readers = len(place.ranks) if role.is_trained else len(place.groups)
        parts = job.config.algorithm.mini_batches * readers
        return self._micro_batch(-(-job.learned_rows // parts))

    def _both(self) -> tuple[BatchShape, BatchShape]:
        """A row, and as many as the settings allow: what is measured."""
        return self._micro_batch(1), self._micro_batch(self._job.learned_rows)

    def _micro_batch(self, rows: int) -> BatchShape:
        rollout = self._job.config.rollout
        train = self._job.config.train
        new = rollout.sampling.max_new_tokens
        return micro_batch(train, rows, rollout.max_prompt_tokens + new, head_tokens=new)


@lru_cache(maxsize=1024)
def _alike(places: tuple[tuple[str, tuple[int, ...]], ...]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Ranks with the same roles."""
    held: dict[int, tuple[str, ...]] = defaultdict(tuple)
    for name, ranks in places:
        for rank in ranks:
            held[rank] += (name,)
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in sorted(held):
        alike[held[rank]].append(rank)
    return [(names, tuple(ranks)) for names, ranks in alike.items()]


def _between(one: MemoryUse, most: MemoryUse, rows: int, most_rows: int) -> MemoryUse:
    """Memory of so many rows, between that of one and that of most."""
    share = (rows - 1) / (most_rows - 1) if most_rows > 1 else 0.0
    return MemoryUse(**{name: low + share * (getattr(most, name) - low) for name, low in vars(one).items()})


def _travelling(model: ShapedModel, plan: StepPlan, trained: str, copy: str) -> float:
    """Elements of weights that a rank sends or receives at once: those of two buckets, or of all."""
    senders = len(plan.roles[trained].ranks)
    place = plan.roles[copy]
    parts = -(-len(place.ranks) // senders) / place.tensor_parallel
    return parts * min(2 * BUCKET_ELEMENTS, model.elements.all)


def _shapes(role: RoleJob) -> ShapedModel:
    assert role.model is not None, "memory is planned for roles with shapes only"
    return role.model
