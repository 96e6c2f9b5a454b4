"""Memory of each rank in each phase of an RL step under a plan.

Ranks that hold the same roles need the same memory. A separate sampler keeps its inference weights in all phases, and
with a policy lag also its cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.functional.logprobs import head_chunk_tokens
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.engine_memory import (
    FLOAT32,
    EngineMemory,
    MemoryUse,
    divergence_memory,
    engine_memory,
    split_memory,
)
from hybrid_rlhf.planning.generation_memory import GenerationMemory, InferenceBytes, replayed_bytes, rollout_bytes
from hybrid_rlhf.planning.job import RLJob, RoleJob
from hybrid_rlhf.planning.memo import once, once_for
from hybrid_rlhf.planning.phase_memory import PhaseMemory, largest_misfit, longest_row, micro_batch
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.shapes import BatchShape, ShapedModel
from hybrid_rlhf.runtime.placement import CRITIC_COPY

_RUBRIC_TOKENS = 512
"""Tokens of a judge's question besides the conversation and the answers. An assumption."""


@dataclass(frozen=True)
class PlanMemory:
    """Memory of all ranks in all phases."""

    phases: tuple[PhaseMemory, ...]
    rows_at_once: int
    """Completions that a sampling group decodes together."""

    @property
    def misfit(self) -> PhaseMemory | None:
        """The phase where most memory is missing; None if everything fits."""
        return largest_misfit(self.phases)

    @property
    def peak_bytes(self) -> float:
        """The most that any rank needs in any phase."""
        return max(each.total for each in self.phases)


class MemoryModel:
    """Estimates plans."""

    def __init__(self, job: RLJob, machine: Device) -> None:
        """Estimate plans of a job on a machine."""
        self._job = job
        self.machine = machine

    def __call__(self, plan: StepPlan) -> PlanMemory:
        """The memory of a plan."""
        memory: list[PhaseMemory] = []
        rows: list[int] = []
        for names, ranks in plan.placement.ranks_by_roles.items():
            phases, at_once = self._phases(plan, names)
            memory += [replace(phase, ranks=ranks) for phase in phases]
            rows += at_once
        return PlanMemory(tuple(memory), min(rows, default=1))

    @once_for(lambda self, plan, name: self._engine_key(self._job.roles[name], plan))
    def of_role(self, plan: StepPlan, name: str) -> tuple[float, float]:
        """Device bytes that a role holds permanently, and those that it adds while it reads or trains."""
        role = self._job.roles[name]
        passes = (False, True) if role.is_trained else (False,)
        added = max(self._passing(role, plan, backward=backward).device for backward in passes)
        return self._engine(role, plan).held.device, added

    def _phases(self, plan: StepPlan, names: tuple[str, ...]) -> tuple[list[PhaseMemory], list[int]]:
        """The phases of a rank that holds some roles, and, if it samples, the completions decoded at once."""
        job = self._job
        roles = [job.roles[name] for name in names if name in job.roles]
        if CRITIC_COPY in names:
            roles.append(replace(job.roles["critic"], name=CRITIC_COPY, optimizer=None, bound_to=None))
        base = sum((self._engine(role, plan).held for role in roles), MemoryUse())
        if "actor" in names and job.config.actor.ema_decay:
            actor = plan.roles["actor"]
            base += MemoryUse(host=FLOAT32 * job.actor.sizes.trained / (len(actor.ranks) if actor.zero == 3 else 1))
        samples = plan.sampler in names
        groups = len(plan.sampling.groups) if samples else None
        likely = 0 if job.config.teacher is None else job.config.teacher.top_k
        held = rollout_bytes(
            _shapes(job.actor), job.config.rollout, groups=groups, ranks=self.machine.ranks, likely_tokens=likely
        )
        base += MemoryUse(host=held)
        judges = self._judges() if samples else {}
        for judge in judges.values():
            base += MemoryUse(inference=judge.weights(stage=0, gathers=False, in_use=True).weights)
        phases: list[PhaseMemory] = []
        rows = []
        if samples:
            generation, kept, at_once = self._generation(plan, base)
            phases.append(generation)
            rows.append(at_once)
            base += kept
        phases += self._reads(plan, names, roles, base)
        phases += [self._judging(name, judge, plan, base) for name, judge in judges.items()]
        for role in roles:
            if role.is_trained:
                need = base + self._passing(role, plan, backward=True)
                tower = self._engine(role, plan).of_tower(self._batch(role, plan, backward=True))
                phases.append(PhaseMemory(f"{role.name} training", need, self.machine, tower=tower))
        return phases or [PhaseMemory("idle", base, self.machine)], rows

    def _reads(
        self, plan: StepPlan, names: tuple[str, ...], roles: list[RoleJob], base: MemoryUse
    ) -> Iterator[PhaseMemory]:
        copied = CRITIC_COPY in plan.roles  # whose values take the place of the critic's
        idle = ("actor",) * (not self._job.actor_reads) + ("critic",) * copied
        reads = [self._passing(role, plan, backward=False) for role in roles if role.name not in idle]
        if copied and {"critic", CRITIC_COPY} & {*names}:  # before the first of them reads
            sent = _bucket_elements(_shapes(self._job.roles["critic"]))
            reads.append(MemoryUse(buffers=sent * self._job.dtype.itemsize))
        if reads:
            yield PhaseMemory("scoring", base + max(reads, key=lambda use: use.device), self.machine)

    @once
    def _judges(self) -> dict[str, GenerationMemory]:
        """The judges in the run, whose questions have all completions at their maximum length."""
        job = self._job
        parts = {part.label: part.judge for part in job.config.reward.named}
        return {
            name: GenerationMemory(model, _questions(job.config.rollout, judge), job.dtype, job.device)
            for name, model in job.judges.items()
            if (judge := parts[name]) is not None
        }

    def _judging(self, name: str, judge: GenerationMemory, plan: StepPlan, base: MemoryUse) -> PhaseMemory:
        """The phase of a judge, with its keys and values as buffers: they do not stay, as those of a sampler may."""
        groups = len(plan.sampling.groups)
        need = judge.sampling(
            base, InferenceBytes(0.0, 0.0), self.machine, ranks=groups, records_routes=False
        ).phase.need
        need = replace(need, cache=base.cache, buffers=need.buffers + need.cache - base.cache)
        return PhaseMemory(f"{name} scoring", need, self.machine)

    def _generation(self, plan: StepPlan, base: MemoryUse) -> tuple[PhaseMemory, MemoryUse, int]:
        """The phase, the part of its memory that stays in other phases, and the completions decoded at once."""
        job, actor = self._job, plan.roles["actor"]
        rollout = job.config.rollout
        ranks = sum(map(len, plan.sampling.groups))
        if rollout.vllm is not None and rollout.vllm.urls:  # servers with memory of their own
            rows = -(-rollout.prompts_per_step * rollout.sampling.n // ranks)
            return PhaseMemory("generation", base, self.machine), MemoryUse(), rows
        memory = self._sampler(plan.sampling.tensor_parallel, plan.separate)
        gathers = actor.zero == 3 and (len(actor.ranks) > 1 or job.actor.zero.offload_parameters)
        # a vLLM server on the rank's device has copies of the weights
        in_use = plan.separate or rollout.vllm is not None
        inference = memory.weights(stage=actor.zero, gathers=gathers, in_use=in_use)
        if plan.separate:
            sent = _bucket_elements(_shapes(job.actor)) * job.dtype.itemsize
            inference = replace(inference, building=inference.building + sent)
        residency = plan.residency(job)[plan.sampler]
        if residency.visits("optimizer"):
            movable = self._engine(job.actor, plan).movable
            base += MemoryUse(optimizer=-movable, host=movable)
        sampling = memory.sampling(base, inference, self.machine, ranks=ranks)
        cache = sampling.cache
        kept = MemoryUse()
        if residency.stays("inference weights"):
            kept += MemoryUse(inference=inference.weights)
        if residency.stays("KV cache"):
            buffers = sampling.step_buffers if plan.overlaps(job) else 0.0
            kept += MemoryUse(cache=cache.cache_bytes, buffers=buffers)
        # rows take pages as they grow, so more rows of mean length than of full length have room
        at_once = min(cache.rows, int(cache.full_length_rows * longest_row(rollout) / job.lengths.mean_row))
        return sampling.phase, kept, max(1, at_once)

    @once
    def _sampler(self, tensor_parallel: int, separate: bool) -> GenerationMemory:
        """The actor on a rank that samples."""
        job = self._job
        outlives_steps = separate or job.config.environment is not None
        lag = job.config.rollout.max_lag if outlives_steps else 0  # else as many rows as a step has
        rollout = replace(job.config.rollout, tensor_parallel=tensor_parallel, max_lag=lag, recompute_kv=False)
        return GenerationMemory(_shapes(job.actor), rollout, job.inference_dtype, job.device)

    def _engine_key(self, role: RoleJob, plan: StepPlan) -> tuple[object, ...]:
        """Key of a role's engine memory, which is the same for all plans with this key."""
        place = plan.roles[role.name]
        offloads = (plan.offloads_optimizer(role.name, role.zero), plan.offload_frozen)
        return role.name, len(place.ranks), place.zero, place.tensor_parallel, *offloads

    @once_for(_engine_key)
    def _engine(self, role: RoleJob, plan: StepPlan) -> EngineMemory:
        job = self._job
        place = plan.roles[role.name]
        if role.name == CRITIC_COPY:
            return split_memory(_shapes(role), dtype=job.dtype, ranks=place.tensor_parallel, device=job.device)
        residency = plan.residency(job)[role.name]
        zero = residency.zero(place.zero)
        engine = engine_memory(
            _shapes(role), zero, role.optimizer, dtype=job.dtype, ranks=len(place.ranks), overrides=job.overrides
        )
        if role.bound_to is not None:
            own = engine.held.weights * role.sizes.trained / role.sizes.parameters
            engine = replace(engine, held=replace(engine.held, weights=own))
        return engine.with_weights_on_host() if residency.visits("weights") else engine

    @once_for(lambda self, role, plan, *, backward: (backward, self._engine_key(role, plan)))
    def _passing(self, role: RoleJob, plan: StepPlan, *, backward: bool) -> MemoryUse:
        """Memory that an engine adds while it trains or reads; in training the actor replays recorded experts."""
        batch = self._batch(role, plan, backward=backward)
        engine = self._engine(role, plan)
        use = engine.training(batch) if backward else engine.forward(batch)
        if backward and role.name == "actor":
            routes = replayed_bytes(_shapes(role), self._job.config.rollout)
            use += MemoryUse(buffers=routes * batch.tokens)
            teacher = self._job.config.teacher
            if teacher is not None and teacher.reads_whole:
                use += divergence_memory(_shapes(role), trains_head=self._job.config.actor.lora is None)
            elif teacher is not None and teacher.top_k:  # several labels of a state are not for the kernels of the head
                size, dtype = _shapes(role).config.vocab_size, self._job.dtype
                chunk = head_chunk_tokens(size, device_type=self._job.device.type, dtype=dtype)
                use += MemoryUse(buffers=FLOAT32 * chunk * size)
        return use

    def _batch(self, role: RoleJob, plan: StepPlan, *, backward: bool) -> BatchShape:
        job, config = self._job, self._job.config
        place = plan.roles[role.name]
        readers = len(place.ranks) if role.is_trained else len(place.groups)
        reads_as_trained = role.name == "actor" and not job.reads_own_reference
        new, prefix = config.rollout.sampling.max_new_tokens, config.rollout.max_prompt_tokens
        sharing = job.sharing(prefix, new)
        return micro_batch(
            config.train,
            config.model,
            -(-job.learned_rows // (config.algorithm.mini_batches * readers)),
            longest_row(config.rollout),
            device=job.device.type,
            head_tokens=new,
            prefix=prefix if sharing > 1 else 0,
            sharing=sharing,
            backward=backward or reads_as_trained,
            alike=config.learned_per_prompt,
            image_tokens=prefix,
        )


def _questions(rollout: RolloutConfig, judge: JudgeConfig) -> RolloutConfig:
    """The questions of a step to a judge, as prompts of a rollout."""
    n = rollout.sampling.n
    answers, questions = {"score": (1, n), "rank_group": (n, 1), "pairwise": (2, math.comb(n, 2))}[judge.mode]
    if judge.against_column:
        questions = n
    orders = 2 if judge.both_orders and answers > 1 else 1
    return RolloutConfig(
        prompts_per_step=rollout.prompts_per_step * max(1, questions) * orders,
        max_prompt_tokens=rollout.max_prompt_tokens + answers * rollout.sampling.max_new_tokens + _RUBRIC_TOKENS,
        sampling=SamplingParams(max_new_tokens=judge.in_run.max_new_tokens),
        cuda_graphs=False,
    )


def _bucket_elements(model: ShapedModel) -> int:
    """Elements of the weights that a weight sync to other ranks broadcasts at once."""
    return min(BUCKET_ELEMENTS, model.elements.all)


def _shapes(role: RoleJob) -> ShapedModel:
    assert role.model is not None, "memory is planned for roles with shapes only"
    return role.model
