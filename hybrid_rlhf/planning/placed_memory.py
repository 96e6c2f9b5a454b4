"""Memory of each rank in each phase of an RL step under a plan.

Ranks that hold the same roles need the same memory. Micro-batches between one row and the largest take memory linear in
their rows (an upper bound), unless they are measured one by one. A separate sampler keeps its inference weights in all
phases, and with a policy lag its cache too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.engines.residency.rules import RoleResidency
from hybrid_rlhf.planning.engine_memory import FLOAT32, EngineMemory, MemoryUse, engine_memory, split_memory
from hybrid_rlhf.planning.generation_memory import GenerationMemory, InferenceBytes, replayed_bytes, rollout_bytes
from hybrid_rlhf.planning.job import RLJob, RoleJob
from hybrid_rlhf.planning.memo import Memo
from hybrid_rlhf.planning.phase_memory import Device, PhaseMemory, micro_batch
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan
from hybrid_rlhf.planning.shapes import BatchShape, ShapedModel
from hybrid_rlhf.runtime.placement import CRITIC_COPY, RolePlacement


@dataclass(frozen=True)
class PlanMemory:
    """Memory of all ranks in all phases."""

    phases: tuple[PhaseMemory, ...]
    rows_at_once: int
    """Completions that a sampling group decodes together."""

    @property
    def misfit(self) -> PhaseMemory | None:
        """Where most is missing; none: everything fits."""
        missing = [each for each in self.phases if not each.fits]
        return max(missing, key=lambda each: each.total, default=None)

    @property
    def peak_bytes(self) -> float:
        """The most that any rank needs in any phase."""
        return max(each.total for each in self.phases)


class MemoryModel:
    """Estimates plans; what a search asks for again is computed once."""

    def __init__(self, job: RLJob, machine: Device, *, exact: bool = False) -> None:
        """Estimate plans of a job on a machine; `exact`: measure each micro-batch, for few plans."""
        self._job = job
        self._exact = exact
        self.machine = machine
        self._once = Memo()

    def __call__(self, plan: StepPlan) -> PlanMemory:
        """The memory of a plan."""
        memory: list[PhaseMemory] = []
        rows = None
        for names, ranks in _alike(tuple((name, role.ranks) for name, role in plan.roles.items())):
            phases, at_once = self._of_class(plan, names)
            memory += [replace(phase, ranks=ranks) for phase in phases]
            rows = at_once if rows is None else min(rows, at_once or rows)
        return PlanMemory(tuple(memory), rows or 1)

    def of_role(self, plan: StepPlan, name: str) -> tuple[float, float]:
        """Bytes of a device that a role holds, and that it adds while it reads or trains."""
        role = self._job.roles[name]
        passes = (False, True) if role.is_trained else (False,)
        added = max(self._passing(role, plan, backward=backward).device for backward in passes)
        return self._engine(role, plan).held.device, added

    def _of_class(self, plan: StepPlan, names: tuple[str, ...]) -> tuple[tuple[PhaseMemory, ...], int | None]:
        sampling = (plan.samplers, sum(len(place.ranks) for place in plan.sampling_places))
        offloads = (plan.offload_frozen, plan.offload_states, plan.offload_optimizer)
        shares = tuple(
            (name, len(plan.roles[name].ranks), plan.roles[name].zero, plan.roles[name].tensor_parallel)
            for name in names
        )
        copied = (plan.roles["critic"], plan.roles[CRITIC_COPY]) if CRITIC_COPY in plan.roles else None
        key = (shares, plan.policy_lag, offloads, sampling, copied)
        return self._once(key, lambda: self._phases(plan, names))

    def _phases(self, plan: StepPlan, names: tuple[str, ...]) -> tuple[tuple[PhaseMemory, ...], int | None]:
        job = self._job
        roles = [job.roles[name] for name in names if name in job.roles]
        if CRITIC_COPY in names:
            roles.append(replace(job.roles["critic"], name=CRITIC_COPY, optimizer=None, bound_to=None))
        base = sum((self._engine(role, plan).held for role in roles), MemoryUse())
        if "actor" in names and job.config.actor.ema_decay:
            actor = plan.roles["actor"]
            base += MemoryUse(host=FLOAT32 * job.actor.sizes.trained / (len(actor.ranks) if actor.zero == 3 else 1))
        groups = len(plan.sampling_groups) if any(name in names for name in plan.samplers) else None
        held = rollout_bytes(_shapes(job.actor), job.config.rollout, groups=groups, ranks=self.machine.ranks)
        base += MemoryUse(host=held)
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
                need = base + self._passing(role, plan, backward=True)
                if role.name == "critic" and plan.separate and {"actor", "sampler"} & {*names} and not plan.policy_lag:
                    sent = min(BUCKET_ELEMENTS, _shapes(job.actor).elements.all)
                    need += MemoryUse(buffers=2.0 * sent * job.inference_dtype.itemsize)  # weights travel meanwhile
                found.append(PhaseMemory(f"{role.name} training", need, self.machine))
        return tuple(found) or (PhaseMemory("idle", base, self.machine),), rows

    def _reads(
        self, plan: StepPlan, names: tuple[str, ...], roles: list[RoleJob], base: MemoryUse
    ) -> Iterator[PhaseMemory]:
        reads = [self._passing(role, plan, backward=False) for role in roles if self._reads_rows(role, plan)]
        if CRITIC_COPY in plan.roles and {"critic", CRITIC_COPY} & {*names}:  # before the first of them reads
            sent = _travelling(_shapes(self._job.roles["critic"]), plan, "critic", CRITIC_COPY)
            reads.append(MemoryUse(buffers=sent * self._job.dtype.itemsize))
        if reads:
            yield PhaseMemory("scoring", base + max(reads, key=lambda use: use.device), self.machine)

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
        rollout = replace(job.config.rollout, tensor_parallel=place.tensor_parallel, async_sampling=None)
        ranks = sum(len(each.ranks) for each in plan.sampling_places)
        if rollout.vllm is not None and rollout.vllm.urls:  # servers with memory of their own
            rows = -(-rollout.prompts_per_step * rollout.sampling.n // ranks)
            return PhaseMemory("generation", base, self.machine), MemoryUse(), rows
        memory = GenerationMemory(model, rollout, dtype, job.device)
        # a vLLM server on the rank's device has copies of the weights
        inference = self._inference_bytes(memory, actor, in_use=separate or rollout.vllm is not None)
        copies = 0.0
        if plan.policy_lag and not separate:  # each rollout is sampled from weights of its own
            copies = plan.policy_lag * self._inference_bytes(memory, actor, in_use=True).weights
        if separate:
            sent = _travelling(model, plan, "actor", SAMPLER) * dtype.itemsize
            inference = replace(inference, building=inference.building + sent)
        residency = plan.residency(job)[sampler]
        if residency.visits("optimizer"):
            movable = self._engine(job.actor, plan).movable
            base += MemoryUse(optimizer=-movable, host=movable)
        sampling = memory.sampling(base, inference, self.machine, ranks=ranks, copies=copies)
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

    def _inference_bytes(self, memory: GenerationMemory, actor: RolePlacement, *, in_use: bool) -> InferenceBytes:
        gathers = actor.zero == 3 and (len(actor.ranks) > 1 or self._job.actor.zero.offload_parameters)
        key = ("inference", memory.rollout.tensor_parallel, actor.zero, gathers, in_use)
        return self._once(key, lambda: memory.weights(stage=actor.zero, gathers=gathers, in_use=in_use))

    def _engine(self, role: RoleJob, plan: StepPlan) -> EngineMemory:
        def build() -> EngineMemory:
            return self._built(role, plan.roles[role.name], plan.residency(self._job)[role.name])

        return self._once(self._engine_key(role, plan), build)

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
        engine = engine_memory(
            _shapes(role),
            config,
            role.optimizer,
            dtype=self._job.dtype,
            ranks=len(place.ranks),
            overrides=self._job.overrides,
        )
        if role.bound_to is not None:
            own = engine.held.weights * role.sizes.trained / role.sizes.parameters
            engine = replace(engine, held=replace(engine.held, weights=own))
        return engine.with_weights_on_host() if residency.visits("weights") else engine

    def _passing(self, role: RoleJob, plan: StepPlan, *, backward: bool) -> MemoryUse:
        """What an engine adds while it trains or reads; in training the actor replays recorded experts."""
        batch = self._batch(role, plan)

        def measured() -> MemoryUse:
            engine = self._engine(role, plan)
            measure = engine.training if backward else engine.forward
            if self._exact:
                use = measure(batch)
            else:  # a row and as many as the settings allow are measured
                most = self._micro_batch(self._job.learned_rows)
                use = _between(measure(self._micro_batch(1)), measure(most), batch.rows, most.rows)
            if backward and role.name == "actor":
                routes = replayed_bytes(_shapes(role), self._job.config.rollout)
                use += MemoryUse(buffers=routes * batch.rows * batch.length)
            return use

        return self._once((backward, *self._engine_key(role, plan), batch), measured)

    def _batch(self, role: RoleJob, plan: StepPlan) -> BatchShape:
        job = self._job
        place = plan.roles[role.name]
        readers = len(place.ranks) if role.is_trained else len(place.groups)
        parts = job.config.algorithm.mini_batches * readers
        return self._micro_batch(-(-job.learned_rows // parts))

    def _micro_batch(self, rows: int) -> BatchShape:
        rollout = self._job.config.rollout
        train = self._job.config.train
        new = rollout.sampling.max_new_tokens
        return micro_batch(train, self._job.config.model, rows, rollout.max_prompt_tokens + new, head_tokens=new)


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
