"""Seconds of each piece of an RL step on its ranks, from dimensions, curves and a plan.

All ranks of a role compute equal shares, since rows are sharded by length. What prices know of ranks is their number
and that of their hosts, so layouts share prices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.generation.backends.native import PREFILL_TOKENS
from hybrid_rlhf.models.head_check import PROBE_TOKENS
from hybrid_rlhf.planning.costs.decoding import DecodeSegments
from hybrid_rlhf.planning.costs.engine import Engine
from hybrid_rlhf.planning.costs.inference import InferenceGroup
from hybrid_rlhf.planning.costs.passes import ModelPasses, PassedTokens
from hybrid_rlhf.planning.costs.work import Span, Work
from hybrid_rlhf.planning.curves import MachineCurves, by_ranks
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import COMPUTED_BYTES, LEARNED_BYTES, SAMPLED_BYTES, RLJob, RoleJob
from hybrid_rlhf.planning.memo import once, once_for
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.runtime.placement import RolePlacement


class Messages(NamedTuple):
    """Numbers of exchanges of a few bytes that all ranks make in a phase of a step."""

    reductions: int = 0
    per_update: int = 0
    """Reductions of each update."""
    gathers: int = 0
    """All-gathers, and broadcasts, which take as long: after one, the receivers are late."""


MESSAGES = {
    "weight_sync": Messages(reductions=2),  # the check of the inference weights
    "gather": Messages(gathers=4),  # columns and lengths of the completions, as objects
    "scoring": Messages(gathers=2),  # which rows a rank reads, and their bytes
    "values": Messages(reductions=1, gathers=1),  # scores; bytes of the values
    "training": Messages(reductions=2, per_update=1, gathers=6),  # metrics, rows; in each update, signals
    "loop": Messages(reductions=8, gathers=4),  # signals, whitening; scores and metrics of all rows
}
"""Counted in tests/planning/test_messages.py."""
MESSAGE_BYTES = 64
_STATE_BYTES = 12
"""Bytes of a trained weight's float32 master and moments."""


class Costs:
    """Prices of the pieces of a step."""

    def __init__(self, job: RLJob, curves: MachineCurves, cluster: Cluster) -> None:
        """Take what is computed, how fast, and on which ranks."""
        self.job = job
        self.curves = curves
        self.cluster = cluster

    # Scoring and training

    @once_for(lambda self, role, plan: (role.name, self._seen(plan.roles[role.name]), plan.offload_frozen))
    def read(self, role: RoleJob, plan: StepPlan) -> Work:
        """A role's forward over all completions of a rollout, on each of its ranks."""
        place = plan.roles[role.name]
        rows = len(self.job.lengths.completions)
        engine = self._engine(role, place)
        count, batch = self._micro_batches(rows, engine.span.ranks)
        beside = self._call("read") + self._call("read_token") * batch.tokens
        work = (engine.forward(batch) + Work(beside)) * count
        if plan.offload_frozen and not role.is_trained:  # weights travel to the device for each read
            shards = engine.span.ranks if place.zero == 3 else 1
            work += Work(wire=self.curves.host_link(self.job.dtype.itemsize * role.sizes.parameters / shards))
        return work

    @once_for(
        lambda self, role, plan: (
            role.name,
            self._seen(plan.roles[role.name]),
            plan.offloads_optimizer(role.name, role.zero),
        )
    )
    def updates(self, role: RoleJob, plan: StepPlan) -> Work:
        """All updates of a learner from one rollout, on each of its ranks."""
        job = self.job
        engine = self._engine(role, plan.roles[role.name])
        ranks = engine.span.ranks
        count, batch = self._micro_batches(math.ceil(job.learned_rows / job.config.algorithm.mini_batches), ranks)
        passes = engine.forward(batch) + engine.backward(batch) + Work(self._call("trained_token") * batch.tokens)
        passes = Work(passes.compute * by_ranks(self.curves.shared_training, ranks, none=1.0), passes.wire)
        step = engine.step(offloads=plan.offloads_optimizer(role.name, role.zero))
        return (passes * count + step) * job.updates

    def _engine(self, role: RoleJob, place: RolePlacement) -> Engine:
        on_host = role.zero.offload_parameters
        return Engine(self.job, self.curves, role.sizes, self._span(place.ranks), place.zero, on_host)

    def _micro_batches(self, rows: int, parts: int) -> tuple[int, PassedTokens]:
        """Number of micro-batches of one of the parts of some rows, and each of them."""
        lengths = self.job.lengths
        train = self.job.config.train
        mine = math.ceil(rows / parts)
        at_once = train.micro_batch_size or max(1, int(train.tokens_on(self.job.device.type) // lengths.mean_row))
        count = math.ceil(mine / at_once)
        each = mine / count
        new_tokens = lengths.mean_row - lengths.prompt_tokens
        return count, PassedTokens(each * lengths.mean_row, each * new_tokens, each * lengths.mean_square)

    # Weight sync

    @once_for(
        lambda self, plan: (
            self._seen(plan.roles["actor"]),
            self._ways(plan),
            plan.separate,
            plan.offload_states,
            plan.policy_lag,
        )
    )
    def weight_sync(self, plan: StepPlan) -> Work:
        """Filling the inference weights, and the check of them."""
        job = self.job
        sizes = job.actor.sizes
        actor = plan.roles["actor"]
        span = self._span(actor.ranks)
        entered = Work(self._call("generation")) + self._check(span, actor.zero, plan.sampling.tensor_parallel)
        work = Work()
        if plan.separate:  # ranks send what they have of a weight: nothing is gathered
            work += entered + self._transfer(plan)
        else:
            views = actor.zero < 3 and job.device.type == "cuda"
            work += entered + Work(0.0 if views else self.curves.copies(self._sampled_bytes(plan)))
            if actor.zero == 3:
                bucket = job.dtype.itemsize * sizes.parameters / self._buckets
                work += Work(wire=self._buckets * span.exchange(self.curves, "all_gather", bucket))
            else:
                work += Work(wire=Engine(job, self.curves, sizes, span, actor.zero).gather_experts(sizes.experts))
        if plan.offload_states:
            states = _STATE_BYTES * sizes.trained / (span.ranks if actor.zero else 1)
            work += Work(wire=2 * self.curves.host_link(states))
        return work * self.curves.factor("weight_sync") + self.messages("weight_sync")

    @once
    def _check(self, span: Span, zero: int, tensor_parallel: int) -> Work:
        """The check of inference weights: a forward of the actor, and some tokens that a sampling group decodes."""
        engine = Engine(self.job, self.curves, self.job.actor.sizes, span, zero)
        decoded = Work(self._sampler_passes(tensor_parallel).probe())
        return engine.forward(PassedTokens.of_rows(1, PROBE_TOKENS)) + decoded

    def _ways(self, plan: StepPlan) -> tuple[Span, Span, int, int]:
        """What the transfer's price knows of the ranks that send and receive."""
        actor = plan.roles["actor"].ranks
        sampling = plan.sampling
        hosts = self._hosts((*actor, *sampling.ranks))
        return self._span(actor), self._span(sampling.ranks), sampling.tensor_parallel, hosts

    @once_for(lambda self, plan: self._ways(plan))
    def _transfer(self, plan: StepPlan) -> Work:
        """Each sampling rank receives its part of each weight; senders share the load."""
        sender, receiver, _, hosts = self._ways(plan)
        received = self._sampled_bytes(plan)
        sent = received * receiver.ranks / sender.ranks
        wire = max(
            self.curves.transfer(size / self._buckets, hosts=hosts, at_once=span.most_on_a_host)
            for size, span in ((received, receiver), (sent, sender))
        )
        return Work(self.curves.copies(received), self._buckets * wire)

    def _sampled_bytes(self, plan: StepPlan) -> float:
        """Bytes of the inference weights of a rank that samples."""
        job = self.job
        return job.inference_dtype.itemsize * job.actor.sizes.parameters / plan.sampling.tensor_parallel

    @property
    def _buckets(self) -> int:
        """Number of buckets in which the actor's weights travel."""
        return max(1, math.ceil(self.job.actor.sizes.parameters / BUCKET_ELEMENTS))

    # Sampling

    def sampling(self, plan: StepPlan, *, rows_at_once: int) -> list[Work]:
        """Sampling of each tensor-parallel group.

        Args:
            plan: its sampling ranks.
            rows_at_once: completions that memory lets a group decode together.
        """
        groups = plan.sampling_groups
        at_once = min(rows_at_once, len(self._shares(len(groups))[0]))
        return self._sampling(len(groups), plan.sampling.tensor_parallel, self._most_hosts(groups), at_once)

    def sampler(self, tensor_parallel: int, hosts: int) -> InferenceGroup:
        """A group of so many ranks on so many hosts that samples."""
        return InferenceGroup(self._sampler_passes(tensor_parallel), hosts)

    def _sampler_passes(self, tensor_parallel: int) -> ModelPasses:
        job = self.job
        whole = job.config.model.quantization is not None
        return ModelPasses(self.curves, job.actor.sizes, job.inference_dtype, tensor_parallel, whole_products=whole)

    @once
    def _sampling(self, groups: int, tensor_parallel: int, hosts: int, at_once: int) -> list[Work]:
        segments = self._segments(groups, at_once)
        decode = self.sampler(tensor_parallel, hosts).decode(segments.rows, segments.context)
        compute, wire = (np.add.reduceat(part * segments.steps, segments.groups) for part in decode)
        work = []
        for group, rows in enumerate(segments.completions):
            prefill = self._prefill(rows, tensor_parallel, hosts)
            rest = Work(rows * self._call("completion"))
            work.append(Work(float(compute[group]), float(wire[group])) + prefill + rest)
        return work

    @once
    def _segments(self, groups: int, at_once: int) -> DecodeSegments:
        return DecodeSegments.of(
            self._shares(groups), prompt_tokens=self.job.lengths.prompt_tokens, rows_at_once=at_once
        )

    @once
    def _shares(self, groups: int) -> list[list[int]]:
        """Lengths of the completions of each sampling group; the first has most."""
        prompts = self.job.config.rollout.prompts_per_step
        by_prompt = np.asarray(self.job.lengths.completions).reshape(prompts, -1)
        return [by_prompt[group::groups].ravel().tolist() for group in range(groups)]

    @once
    def _prefill(self, rows: int, tensor_parallel: int, hosts: int) -> Work:
        """The prompts of so many completions, once for all completions of a prompt."""
        prompts = math.ceil(rows / self.job.config.rollout.sampling.n)
        if not prompts:  # more groups than prompts
            return Work()
        tokens = self.job.lengths.prompt_tokens
        at_once = max(1, int(PREFILL_TOKENS[self.job.device.type] // max(1.0, tokens)))
        return self.sampler(tensor_parallel, hosts).prefill(prompts, tokens, at_once=at_once)

    # All ranks

    def rows_to_read(self) -> Work:
        """Rows of a rollout travel to the ranks that read them."""
        return self._all_rows(SAMPLED_BYTES) + self.messages("scoring")

    def values_read(self) -> Work:
        """What the roles have read travels back."""
        return self._all_rows(COMPUTED_BYTES * len(self.job.roles)) + self.messages("values")

    def rows_to_learn(self) -> Work:
        """Rows of a batch travel to the ranks that learn from them, in every epoch."""
        return self._all_rows(LEARNED_BYTES) * self.job.config.algorithm.epochs + self.messages("training")

    def messages(self, phase: str) -> Work:
        """Exchanges of a few bytes between the hosts in a phase of a step; within a host they are part of what
        calibration measures."""
        if self.cluster.hosts == 1:
            return Work()
        counts = MESSAGES[phase]
        reductions = counts.reductions + counts.per_update * self.job.updates
        reduction = self._everyone.exchange(self.curves, "all_reduce", MESSAGE_BYTES)
        gather = self._everyone.exchange(self.curves, "all_gather", MESSAGE_BYTES)
        return Work(wire=reductions * reduction + counts.gathers * gather)

    def loop(self, holders: int) -> Work:
        """What a rank does in a step outside its phases; so many ranks hold the rows, each as many."""
        shared = by_ranks(self.curves.shared_loop, self.cluster.ranks, none=1.0)
        held = self.job.lengths.tokens / holders
        return Work(self.curves.loop(held) * shared) + self.messages("loop")

    @once
    def _all_rows(self, token_bytes: int) -> Work:
        """Rows of a rollout travel between all ranks: each sends and receives its part."""
        size = token_bytes * self.job.lengths.tokens / self.cluster.ranks
        return Work(wire=self._everyone.exchange(self.curves, "all_gather", size))

    # Ranks, and fixed seconds

    @property
    def _everyone(self) -> Span:
        return self._span(self.cluster.everyone)

    @once
    def _seen(self, place: RolePlacement) -> tuple[Span, int, int, int]:
        """What prices know of the ranks of a role."""
        return self._span(place.ranks), place.zero, place.tensor_parallel, self._most_hosts(place.groups)

    @once
    def _span(self, ranks: tuple[int, ...]) -> Span:
        on_hosts = Counter(self.cluster.host_of(rank) for rank in ranks)
        return Span(len(ranks), len(on_hosts), max(on_hosts.values()))

    def _most_hosts(self, groups: Iterable[tuple[int, ...]]) -> int:
        """The most hosts that one of some groups is on."""
        return max(self._hosts(group) for group in groups)

    @once
    def _hosts(self, ranks: tuple[int, ...]) -> int:
        return self.cluster.hosts_of(ranks)

    def _call(self, name: str) -> float:
        """Fixed seconds of a call."""
        return self.curves.calls.get(name, 0.0)
