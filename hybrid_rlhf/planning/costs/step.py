"""Seconds of each piece of an RL step on one rank, from dimensions, curves and the rank's share.

Work is compute (slowed where ranks share a host's cores) and wire (collectives, links). Follows what the library runs:
DeepSpeed's ZeRO (arXiv 1910.02054, section 7: stages 0 and 1 reduce gradients once per update, 2 and 3 after each
backward; stage 3 gathers each layer's weights in every forward and backward), and continuous batching, where rows leave
as they finish. All ranks of a role compute equal shares, since rows are sharded by length. To a price, ranks are their
number and that of their hosts, so layouts share prices.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.generation.backends.native import PREFILL_TOKENS
from hybrid_rlhf.models.head_check import PROBE_TOKENS
from hybrid_rlhf.planning.costs.decoding import DecodeSegments
from hybrid_rlhf.planning.costs.passes import ModelPasses, Numbers, PassedTokens
from hybrid_rlhf.planning.curves import Collective, MachineCurves, by_ranks
from hybrid_rlhf.planning.job import COMPUTED_BYTES, LEARNED_BYTES, SAMPLED_BYTES, ModelDimensions, RLJob, RoleJob
from hybrid_rlhf.planning.memo import Memo
from hybrid_rlhf.planning.phase_memory import Cluster
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.runtime.placement import RolePlacement


@dataclass(frozen=True)
class Work:
    """Seconds of a piece of work on each of its ranks."""

    compute: float = 0.0
    wire: float = 0.0
    """In which the rank's processor is free."""

    def __add__(self, other: Work) -> Work:
        return Work(self.compute + other.compute, self.wire + other.wire)

    def __mul__(self, times: float) -> Work:
        return Work(self.compute * times, self.wire * times)

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
        return self.compute + self.wire


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


class _Span(NamedTuple):
    """Ranks as prices see them."""

    ranks: int
    hosts: int
    most_on_a_host: int


@dataclass(frozen=True)
class _MicroBatches:
    """Micro-batches of a rank that passes over some rows."""

    count: int
    each: PassedTokens


class _Engine(NamedTuple):
    """A model that ranks share by ZeRO."""

    sizes: ModelDimensions
    span: _Span
    zero: int
    on_host: bool = False
    """Its weights are offloaded by ZeRO-3."""


class Costs:
    """Prices pieces of work; what a search asks for again is computed once."""

    def __init__(self, job: RLJob, curves: MachineCurves, cluster: Cluster) -> None:
        """Take what is computed, how fast, and on which ranks."""
        self.job = job
        self.curves = curves
        self.cluster = cluster
        self._once = Memo()
        self._bytes = job.dtype.itemsize
        self._dtype = str(job.dtype).removeprefix("torch.")
        self._inference_dtype = str(job.inference_dtype).removeprefix("torch.")

    # Scoring and training

    def read(self, role: RoleJob, plan: StepPlan, *, times: int = 1) -> Work:
        """A role's forward over all completions of a rollout, on each of its ranks."""
        place = plan.roles[role.name]
        engine = self._engine(role, place)
        offloaded = plan.offload_frozen and not role.is_trained
        together = 1 if role.is_trained else place.tensor_parallel
        group_hosts = self._group_hosts(place) if together > 1 else 1

        def price() -> Work:
            if together > 1:
                return self._split_read(role.sizes, engine.span.ranks // together, together, group_hosts)
            batches = self._batches(len(self.job.lengths.completions), engine.span.ranks)
            beside = self._call("read") + self._call("read_token") * batches.each.tokens
            work = (self._forward(engine, batches.each) + Work(beside)) * batches.count
            if offloaded:  # weights travel to the device for each read
                shards = engine.span.ranks if place.zero == 3 else 1
                work += Work(wire=self.curves.host_link(self._bytes * role.sizes.parameters / shards))
            return work

        return self._once(("read", role.name, engine.span, place.zero, together, group_hosts, offloaded), price) * times

    def _split_read(self, sizes: ModelDimensions, groups: int, together: int, hosts: int) -> Work:
        """A frozen role's forward in inference weights; each tensor-parallel group reads its part of the rows."""
        batches = self._batches(len(self.job.lengths.completions), groups)
        passes = self._passes(sizes)
        batch = batches.each
        work = Work(self._call("prefill"))
        work += self._split_layer(passes, batch.tokens, batch.squares, together, hosts) * sizes.layers
        head = passes.head(batch.head_tokens, together=together) + passes.logprobs(batch.head_tokens, together=together)
        work += Work(head)
        return Work(work.compute * self.curves.factor("forward"), work.wire) * batches.count

    def _split_layer(self, passes: ModelPasses, tokens: float, squares: float, together: int, hosts: int) -> Work:
        """A layer of inference weights over so many tokens: a part of its products, and two all-reduces."""
        size = tokens * passes.sizes.hidden * self.job.inference_dtype.itemsize
        exchange = self.curves.collective("all_reduce", ranks=together, size_bytes=size, hosts=hosts)
        return Work(passes.split_layer(tokens, squares, together=together), 2 * exchange)

    def updates(self, role: RoleJob, plan: StepPlan) -> Work:
        """All updates of a learner from one rollout, on each of its ranks."""
        place = plan.roles[role.name]
        offloads = plan.offloads_optimizer(role.name, role.zero)
        engine = self._engine(role, place)
        ranks = engine.span.ranks

        def price() -> Work:
            batches = self._batches(math.ceil(self.job.learned_rows / self.job.config.algorithm.mini_batches), ranks)
            passes = self._forward(engine, batches.each) + self._backward(engine, batches.each)
            passes += Work(self._call("trained_token") * batches.each.tokens)
            passes = Work(passes.compute * by_ranks(self.curves.shared_training, ranks, none=1.0), passes.wire)
            return (passes * batches.count + self._step(engine, offloads=offloads)) * self.job.updates

        return self._once(("updates", role.name, engine.span, place.zero, offloads), price)

    def _engine(self, role: RoleJob, place: RolePlacement) -> _Engine:
        return _Engine(role.sizes, self._span(place.ranks), place.zero, role.zero.offload_parameters)

    def _batches(self, rows: int, ranks: int) -> _MicroBatches:
        lengths = self.job.lengths
        train = self.job.config.train
        mine = math.ceil(rows / ranks)
        at_once = train.micro_batch_size or max(1, int(train.micro_batch_tokens // lengths.mean_row))
        count = math.ceil(mine / at_once)
        each = mine / count
        new_tokens = lengths.mean_row - lengths.prompt_tokens
        return _MicroBatches(
            count, PassedTokens(each * lengths.mean_row, each * new_tokens, each * lengths.mean_square)
        )

    def _from_host(self, engine: _Engine) -> Work:
        """A rank's part of the weights for a pass, where they are on the host."""
        if not engine.on_host or engine.zero < 3:
            return Work()
        return Work(wire=self.curves.host_link(self._bytes * engine.sizes.parameters / engine.span.ranks))

    def _forward(self, engine: _Engine, batch: PassedTokens) -> Work:
        passes = self._passes(engine.sizes)
        work = Work(passes.forward(batch)) + self._gathers("forward", engine, passes.layer(batch))
        work += self._dispatch(engine, batch, passes=1)
        work += self._from_host(engine)
        return Work(work.compute * self.curves.factor("forward"), work.wire)

    def _backward(self, engine: _Engine, batch: PassedTokens) -> Work:
        sizes = engine.sizes
        passes = self._passes(sizes)
        checkpoints = self.job.config.model.gradient_checkpointing
        layer = passes.layer_backward(batch, checkpoints=checkpoints)
        work = Work(passes.backward(batch, checkpoints=checkpoints))
        work += self._gathers("backward", engine, layer) + self._from_host(engine)
        work += self._dispatch(engine, batch, passes=2 if checkpoints else 1)
        if self.job.config.model.activation_offload:  # the input of each layer, to the host and back
            kept = self._bytes * batch.tokens * sizes.hidden
            work += Work(wire=2 * sizes.layers * self.curves.host_link(kept))
        if engine.zero >= 2:
            work += Work(wire=self._parts("reduce_scatter", engine, sizes.trained, experts=self._trained(sizes)))
        return Work(work.compute * self.curves.factor("backward"), work.wire)

    def _step(self, engine: _Engine, *, offloads: bool) -> Work:
        c = self.curves
        span = engine.span
        trained = engine.sizes.trained
        experts = self._trained(engine.sizes)
        mine = trained / span.ranks if engine.zero else trained - experts + experts / self._experts_over(engine)
        compute = self._call("step")
        if offloads:
            compute += c.host_optimizer(mine) + 2 * c.host_link(self._bytes * mine)
        else:
            compute += c.optimizer(mine)
        wire = self._parts("all_reduce", engine, trained, experts=experts) if engine.zero < 2 else 0.0
        if engine.zero in (1, 2):
            wire += self._parts("all_gather", engine, trained, experts=experts)
        return Work(compute * c.factor("optimizer"), wire + by_ranks(c.update, span.ranks, none=0.0))

    def _gathers(self, kind: Literal["forward", "backward"], engine: _Engine, layer_seconds: float) -> Work:
        """What ZeRO-3 adds to a pass and compute does not hide: bookkeeping of each layer, and its weights. Both were
        measured while the ranks share cores, so nothing slows them further."""
        if engine.zero < 3:
            return Work()
        sizes = engine.sizes
        layer = self.curves.gathered_layer(kind, engine.span.ranks)
        layer += self._parts("all_gather", engine, sizes.layer_weights, experts=sizes.experts / sizes.layers)
        exposed = max(0.0, layer - self.curves.overlap * layer_seconds)
        rest = self._collective("all_gather", engine.span, self._bytes * sizes.rest_parameters)
        return Work(wire=sizes.layers * exposed + rest)

    def _experts_over(self, engine: _Engine) -> int:
        """Number of ranks that split the experts of a layer."""
        return self.job.config.model.expert_parallel if engine.sizes.experts else 1

    @staticmethod
    def _trained(sizes: ModelDimensions) -> float:
        """Parameters of experts with gradients."""
        return sizes.experts if sizes.trains_all else 0.0

    def _parts(self, kind: Collective, engine: _Engine, elements: float, *, experts: float) -> float:
        """Seconds of a collective of so many weights, `experts` of them of experts: over all ranks, and, of experts
        that ranks split, over the ranks that have the same ones."""
        span = engine.span
        over = self._experts_over(engine)
        if over == 1:
            return self._collective(kind, span, self._bytes * elements)
        replicas = _Span(span.ranks // over, min(span.hosts, span.ranks // over), 0)
        seconds = self._collective(kind, span, self._bytes * (elements - experts))
        return seconds + self._collective(kind, replicas, self._bytes * experts / over)

    def _dispatch(self, engine: _Engine, batch: PassedTokens, *, passes: int) -> Work:
        """The exchange of tokens with the ranks of their experts, and back; priced as an all-gather in which each rank
        receives as much."""
        if self._experts_over(engine) == 1:
            return Work()
        elements = batch.tokens * engine.sizes.hidden * engine.sizes.choices / engine.sizes.layers
        return Work(wire=2 * passes * engine.sizes.layers * self._gather_among(engine, elements))

    def _gather_among(self, engine: _Engine, elements: float) -> float:
        """Seconds of an all-gather of so many elements by the ranks that split experts."""
        over = self._experts_over(engine)
        hosts = -(-over // engine.span.most_on_a_host)
        return self.curves.collective("all_gather", ranks=over, size_bytes=self._bytes * elements, hosts=hosts)

    # Weight sync and sampling

    def weight_sync(self, plan: StepPlan) -> Work:
        """Filling the inference weights, and the check of them: the sampler's, the actor's, or one after the other.

        Without what `transfer_ahead` covers.
        """
        sizes = self.job.actor.sizes
        actor = plan.roles["actor"]
        sampling = plan.sampling
        c = self.curves
        together = sampling.tensor_parallel
        size = self.job.inference_dtype.itemsize * sizes.parameters
        span = self._span(actor.ranks)

        def price() -> Work:
            entered = Work(self._call("generation")) + self._check(actor, together)
            work = Work()
            if plan.separate:  # ranks send what they have of a weight: nothing is gathered
                work += entered if self._sends_ahead(plan) else entered + self._transfer(plan)
            if not plan.separate or plan.placement.with_actor:
                views = actor.zero < 3 and self.job.device.type == "cuda"
                work += entered + Work(0.0 if views else c.copies(size / together))
                if actor.zero == 3:
                    bucket = self._bytes * sizes.parameters / self._buckets
                    work += Work(wire=self._buckets * self._collective("all_gather", span, bucket))
                else:
                    engine = _Engine(sizes, span, actor.zero)
                    work += Work(wire=self._gather_among(engine, sizes.experts))
            if plan.offload_states:
                states = 12 * sizes.trained / (span.ranks if actor.zero else 1)
                work += Work(wire=2 * c.host_link(states))
            return work * c.factor("weight_sync") + self.messages("weight_sync")

        hosts = self._hosts_of_both(actor.ranks, sampling.ranks)
        shape = (span, actor.zero, self._span(sampling.ranks), sampling.tensor_parallel, hosts)
        kind = (plan.separate, self._sends_ahead(plan), plan.placement.with_actor, plan.offload_states)
        return self._once(("sync", *shape, *kind), price)

    def _check(self, actor: RolePlacement, together: int) -> Work:
        """The check of inference weights: a forward of the actor, and some tokens that a sampling group decodes."""
        sizes = self.job.actor.sizes
        span = self._span(actor.ranks)

        def price() -> Work:
            passes = self._sampler_passes
            decoded = passes.probe(item_bytes=self.job.inference_dtype.itemsize, together=together)
            read = self._forward(_Engine(sizes, span, actor.zero), PassedTokens.of_rows(1, PROBE_TOKENS))
            return read + Work(decoded)

        return self._once(("check", span, actor.zero, together), price)

    def transfer_ahead(self, plan: StepPlan) -> Work | None:
        """The transfer to a separate sampler while the critic learns from the last mini-batch; none where it waits for
        the rollout (SeparateSampler.sync_ahead)."""
        return self._transfer(plan) * self.curves.factor("weight_sync") if self._sends_ahead(plan) else None

    def _sends_ahead(self, plan: StepPlan) -> bool:
        keeps = self.job.config.rollout.keep_weights is not False
        return plan.separate and keeps and not plan.policy_lag and "critic" in self.job.roles

    def _transfer(self, plan: StepPlan) -> Work:
        """Each sampling rank receives its part of each weight; senders share the load."""
        parameters = self.job.actor.sizes.parameters
        together = plan.sampling.tensor_parallel
        sender = self._span(plan.roles["actor"].ranks)
        receiver = self._span(plan.sampling.ranks)
        hosts = self._hosts_of_both(plan.roles["actor"].ranks, plan.sampling.ranks)

        def price() -> Work:
            received = self.job.inference_dtype.itemsize * parameters / together
            sent = received * receiver.ranks / sender.ranks
            wire = max(
                self.curves.transfer(size / self._buckets, hosts=hosts, at_once=span.most_on_a_host)
                for size, span in ((received, receiver), (sent, sender))
            )
            return Work(self.curves.copies(received), self._buckets * wire)

        return self._once(("transfer", sender, receiver, together, hosts), price)

    @property
    def _buckets(self) -> int:
        """Number of buckets in which the actor's weights travel."""
        return max(1, math.ceil(self.job.actor.sizes.parameters / BUCKET_ELEMENTS))

    def sampling(self, plan: StepPlan, *, rows_at_once: int) -> list[Work]:
        """Sampling of each tensor-parallel group.

        Args:
            plan: its sampling ranks.
            rows_at_once: completions that memory lets a group decode together.
        """
        places = plan.sampling_places
        together = plan.sampling.tensor_parallel
        groups = sum(len(place.ranks) // together for place in places)
        hosts = max(self._group_hosts(place) for place in places)
        at_once = min(rows_at_once, len(self._shares(groups)[0]))

        def price() -> list[Work]:
            segments = self._once(
                ("segments", groups, at_once),
                lambda: DecodeSegments.of(
                    self._shares(groups), prompt_tokens=self.job.lengths.prompt_tokens, rows_at_once=at_once
                ),
            )
            decode = self.decode_steps(segments, together, hosts)
            compute, wire = (np.add.reduceat(part * segments.steps, segments.groups) for part in decode)
            work = []
            for group, rows in enumerate(segments.completions):
                prefill = self._prefill(rows, together, hosts)
                rest = Work(rows * self._call("completion"))
                work.append(Work(float(compute[group]), float(wire[group])) + prefill + rest)
            return work

        return self._once(("sampling", together, groups, hosts, at_once), price)

    def _shares(self, groups: int) -> list[list[int]]:
        """Lengths of the completions of each sampling group; the first has most."""

        def share() -> list[list[int]]:
            prompts = self.job.config.rollout.prompts_per_step
            by_prompt = np.asarray(self.job.lengths.completions).reshape(prompts, -1)
            return [by_prompt[group::groups].ravel().tolist() for group in range(groups)]

        return self._once(("shares", groups), share)

    def _prefill(self, rows: int, together: int, hosts: int) -> Work:
        """The prompts of so many completions, once for all completions of a prompt."""
        sizes = self.job.actor.sizes
        lengths = self.job.lengths
        prompts = math.ceil(rows / self.job.config.rollout.sampling.n)
        if not prompts:  # more groups than prompts
            return Work()

        def price() -> Work:
            at_once = max(1, int(PREFILL_TOKENS[self.job.device.type] // max(1.0, lengths.prompt_tokens)))
            batches = math.ceil(prompts / at_once)
            tokens = prompts / batches * lengths.prompt_tokens
            passes = self._sampler_passes
            layer = self._split_layer(passes, tokens, tokens * lengths.prompt_tokens, together, hosts)
            call = self._call("prefill") / sizes.layers
            factor = self.curves.factor("prefill")
            return Work(call + layer.compute * factor, layer.wire) * (batches * sizes.layers)

        return self._once(("prefill", prompts, together, hosts), price)

    @property
    def _sampler_passes(self) -> ModelPasses:
        whole = self.job.config.model.quantization is not None
        return ModelPasses(self.curves, self.job.actor.sizes, self._inference_dtype, whole_products=whole)

    def decode_steps(self, s: DecodeSegments, together: int, hosts: int) -> tuple[Numbers, Numbers]:
        """Seconds of compute and wire of one decoding step of each segment, on groups of so many ranks and hosts."""
        sizes = self.job.actor.sizes
        c = self.curves
        item_bytes = self.job.inference_dtype.itemsize
        passes = self._sampler_passes
        compute = passes.decode_products(s.rows, together=together)
        compute = compute + passes.decode_rest(s.rows, s.context, item_bytes=item_bytes, together=together)
        size = s.rows * sizes.hidden * item_bytes
        exchanged = c.collective("all_reduce", ranks=together, size_bytes=size, hosts=hosts)
        return compute * c.factor("decode"), 2 * sizes.layers * exchanged

    # All ranks

    def rows_to_read(self) -> Work:
        """Rows of a rollout travel to the ranks that read them."""
        return self._exchange(SAMPLED_BYTES) + self.messages("scoring")

    def values_read(self) -> Work:
        """What the roles have read travels back."""
        return self._exchange(COMPUTED_BYTES * len(self.job.roles)) + self.messages("values")

    def rows_to_learn(self) -> Work:
        """Rows of a batch travel to the ranks that learn from them, in every epoch."""
        return self._exchange(LEARNED_BYTES) * self.job.config.algorithm.epochs + self.messages("training")

    def _exchange(self, token_bytes: int) -> Work:
        """Rows of a rollout travel between all ranks: each sends and receives its part."""

        def price() -> Work:
            everyone = self._span(tuple(range(self.cluster.ranks)))
            size = token_bytes * self.job.lengths.tokens / self.cluster.ranks
            return Work(wire=self._collective("all_gather", everyone, size))

        return self._once(("exchange", token_bytes), price)

    def messages(self, phase: str) -> Work:
        """Exchanges of a few bytes between the hosts in a phase of a step; within a host they are part of what
        calibration measures."""
        hosts = self.cluster.hosts
        if hosts == 1:
            return Work()
        counts = MESSAGES[phase]
        reductions = counts.reductions + counts.per_update * self.job.updates
        everyone = self._span(tuple(range(self.cluster.ranks)))
        reduction, gather = (self._collective(kind, everyone, MESSAGE_BYTES) for kind in ("all_reduce", "all_gather"))
        return Work(wire=reductions * reduction + counts.gathers * gather)

    def loop(self, holders: int) -> Work:
        """What a rank does in a step outside its phases; so many ranks hold the rows, each as many."""
        shared = by_ranks(self.curves.shared_loop, self.cluster.ranks, none=1.0)
        held = self.job.lengths.tokens / holders
        return Work(self.curves.loop(held) * shared) + self.messages("loop")

    def _call(self, name: str) -> float:
        return self.curves.calls.get(name, 0.0)

    def _passes(self, sizes: ModelDimensions) -> ModelPasses:
        return ModelPasses(self.curves, sizes, self._dtype)

    def _collective(self, kind: Collective, span: _Span, size: float) -> float:
        return self.curves.collective(kind, ranks=span.ranks, size_bytes=size, hosts=span.hosts)

    def _span(self, ranks: tuple[int, ...]) -> _Span:
        def span() -> _Span:
            on_hosts = Counter(self.cluster.host_of(rank) for rank in ranks)
            return _Span(len(ranks), len(on_hosts), max(on_hosts.values()))

        return self._once(("span", ranks), span)

    def _hosts_of_both(self, some: tuple[int, ...], others: tuple[int, ...]) -> int:
        """The number of hosts that two sets of ranks are on together."""
        return self._once(("hosts", some, others), lambda: self.cluster.hosts_of((*some, *others)))

    def _group_hosts(self, place: RolePlacement) -> int:
        """The most hosts that a tensor-parallel group of a role is on."""
        key = ("group_hosts", place.ranks, place.tensor_parallel)
        return self._once(key, lambda: max(self.cluster.hosts_of(group) for group in place.groups))
