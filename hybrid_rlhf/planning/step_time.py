"""Seconds of an RL step under a plan: a roofline of each phase, plus its messages.

A rank's work is a number of operations, of bytes of memory traffic, and of launches. On a GPU these overlap, so the
work takes the longest of them (the roofline, Williams et al. 2009, with the launches as a third line); on a CPU they
follow one another, and the ranks of a host share its cores. Collectives add bytes over the link and the latency of
their messages, but for the part of ZeRO-3's gathers that hides behind the layers (arXiv 1910.02054, section 7).

Roles on the same ranks take turns, roles on disjoint ranks compute at once, and a phase ends when its last rank is
done. A step is the sum of its phases; with a policy lag, a separate sampler works during all other phases.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.generation.backends.native import PREFILL_TOKENS
from hybrid_rlhf.generation.weights.probe import PROBE_DECODED
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import LEARNED_BYTES, SAMPLED_BYTES, ModelDimensions, RLJob
from hybrid_rlhf.planning.machine import Machine
from hybrid_rlhf.planning.memo import once, once_for
from hybrid_rlhf.planning.micro_batches import LAYER_LAUNCHES
from hybrid_rlhf.planning.plans import LEARNERS, StepPlan

PHASES = ("weight_sync", "generation", "scoring", "training", "other")
"""Named as the metrics `time/*_seconds`."""
PASSES_ACHIEVED = 0.6
"""Part of the rate of large products that whole passes reach: training reports 0.4 to 0.55 of the peak (Megatron-LM,
arXiv 2104.04473, table 1), and large products reach 0.85 of it."""
MEMORY_ACHIEVED = 0.7
LINK_ACHIEVED = 0.75
"""Parts of the peaks of a data sheet that copies and collectives reach; an assumption."""
HOST_ADAM_PER_SECOND = 1.2e9
"""Parameters that AdamW updates in the memory of a host; an assumption."""
BACKWARD_LAUNCHES = 100
"""Operations of a layer's backward: with eager layers on an H200 it took the host 2.6 times as long as the forward."""
BATCH_LAUNCHES = 300
"""Operations of a micro-batch outside the layers: packing, head, log-probs, copies to and from the host."""
READ_LAUNCHES = 600
"""Operations of a role's forward over a rollout outside its micro-batches."""
UPDATE_LAUNCHES, UPDATE_LAYER_LAUNCHES = 400, 100
"""Operations of an optimizer step, and for each layer."""
ZERO_LAUNCHES, ZERO_MESSAGES = 1000, 6
"""Further operations and small all-reduces of an optimizer step under ZeRO: partitions, overflow, norm."""
ZERO3_LAUNCHES, ZERO3_MESSAGES = 200, 16
"""Further operations and messages of a layer whose weights ZeRO-3 gathers and releases."""
DECODE_LAUNCHES = 90
"""Operations of a decoding step outside the layers, which a GPU runs as one CUDA graph."""
DECODE_LAYER_LAUNCHES = 12
"""Operations of a layer of inference weights."""
SYNC_LAUNCHES = 1000
"""Operations of a weight sync outside its passes."""
STEP_LAUNCHES = 2000
TOKENS_PER_LAUNCH = 40
"""Operations of a step outside its phases, and tokens of a rollout that take as long as one more."""
LAYER_PASSES = 16
"""Reads and writes of the hidden states in a layer beyond its products."""
LOGIT_BYTES = 12
"""Memory traffic of a float32 logit."""
OVERLAP = 0.8
"""Part of a layer's time on a GPU behind which the gather of the next layer hides."""
MESSAGES = {"weight_sync": 2, "generation": 4, "scoring": 4, "training": 8, "other": 12}
"""Collectives of a few bytes of all ranks; training has one more for each update."""
_STATE_BYTES, _UPDATED_BYTES = 12, 30
"""Bytes of a trained weight's float32 master and moments, and memory traffic of its update."""
_Number = TypeVar("_Number", float, npt.NDArray[np.float64])


def tree_depth(ranks: int) -> int:
    """Messages one after the other in a broadcast to a number of ranks."""
    return math.ceil(math.log2(max(1, ranks)))


class Span(NamedTuple):
    """A group of ranks, as collectives see it."""

    ranks: int
    hosts: int
    most_on_a_host: int


class Seconds(NamedTuple):
    """Time of a rank: of its own work, and of messages."""

    local: float = 0.0
    wire: float = 0.0


class Rows(NamedTuple):
    """A rank's part of the rows of a rollout."""

    batches: int
    """Micro-batches."""
    tokens: float
    head_tokens: float
    """Tokens whose log-prob is computed."""
    squares: float
    """Sum of the squared row lengths."""


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step in the long run."""

    step_seconds: float
    phases: Mapping[str, float]
    """Seconds of each phase; they overlap if the next rollout is sampled during training."""


class StepTimer:
    """Predicts steps of a job on a machine."""

    def __init__(self, job: RLJob, machine: Machine, cluster: Cluster) -> None:
        """Take the work, the speed of a rank, and the ranks on their hosts."""
        self.job = job
        self.machine = machine
        self.cluster = cluster
        self._model = job.config.model

    def __call__(self, plan: StepPlan, *, rows_at_once: int) -> StepTime:
        """The time of a step.

        Args:
            plan: of the step.
            rows_at_once: completions for which a sampling group has memory.
        """
        job, spans = self.job, {name: self._span(role.ranks) for name, role in plan.roles.items()}
        reads, updates = {}, {}
        for name, role in job.roles.items():
            times = job.actor_reads if name == "actor" else 1
            zero = plan.roles[name].zero
            reads[name] = self._read(name, spans[name], zero, times, plan.offload_frozen and not role.is_trained)
            if role.is_trained:
                updates[name] = self._updates(name, spans[name], zero, plan.offloads_optimizer(name, role.zero))
        actor, sampler = plan.roles["actor"], plan.sampler
        together = plan.sampling.tensor_parallel
        group = self._span(plan.sampling.ranks[:together])
        union = self._span(tuple(sorted({*actor.ranks, *plan.sampling.ranks}))) if plan.separate else None
        synced = self._weight_sync(spans["actor"], actor.zero, together, union, plan.offload_states)
        sampled = self._sampling(len(plan.sampling.groups), group, min(rows_at_once, len(job.lengths.completions)))
        frozen = {name: seconds for name, seconds in reads.items() if name not in LEARNERS}
        learners = {name: seconds for name, seconds in reads.items() if name in LEARNERS}
        phases = {
            "weight_sync": self._stage(plan, {sampler: synced}),
            "generation": self._stage(plan, {sampler: sampled}),
            "scoring": self._stage(plan, frozen) + self._stage(plan, learners),
            "training": self._stage(plan, updates),
            "other": self._other,
        }
        phases = {name: seconds + self._messages[name] for name, seconds in phases.items()}
        sampling = phases["weight_sync"] + phases["generation"]
        rest = sum(phases.values()) - sampling
        return StepTime(max(sampling, rest) if plan.overlaps(job) else sampling + rest, phases)

    def _stage(self, plan: StepPlan, taken: Mapping[str, Seconds]) -> float:
        """Time until the last rank is done, where each rank does the work of its roles in turn."""
        loads = []
        for names, ranks in self.classes(plan):
            mine = [taken[name] for name in names if name in taken]
            loads.append((ranks, sum(each.local for each in mine), sum(each.wire for each in mine)))
        if self.machine.cores is None:
            return max(local + wire for _, local, wire in loads)
        seconds = done = 0.0
        for _, local, _ in sorted(loads, key=lambda load: load[1]):  # ranks that still compute share the cores
            computing = sum(ranks for ranks, other, _ in loads if other >= local) / self.cluster.hosts
            seconds += (local - done) * max(1.0, computing / self.machine.cores)
            done = local
        return seconds + max(wire for _, _, wire in loads)

    @once_for(lambda self, plan: tuple((name, role.ranks) for name, role in plan.roles.items()))
    def classes(self, plan: StepPlan) -> list[tuple[tuple[str, ...], int]]:
        """The roles of ranks that hold the same ones, and the number of these ranks."""
        return [(names, len(ranks)) for names, ranks in plan.placement.ranks_by_roles.items()]

    # A rank's work

    def _local(self, operations: _Number, traffic: _Number, launches: float) -> _Number:
        """Time of operations, bytes of memory traffic and launches."""
        machine = self.machine
        parts: list[_Number] = [
            operations / (1e12 * machine.tflops * PASSES_ACHIEVED),
            traffic / (1e9 * machine.memory_gb_per_second * MEMORY_ACHIEVED),
            traffic * 0.0 + 1e-6 * launches * machine.launch_microseconds,
        ]
        return sum(parts) if machine.type == "cpu" else reduce(np.maximum, parts)  # type: ignore[return-value]

    def _rows(self, rows: int, parts: int) -> Rows:
        """One of the parts of a number of rows."""
        lengths, train = self.job.lengths, self.job.config.train
        mine = math.ceil(rows / parts)
        completion = lengths.mean_row - lengths.prompt_tokens
        saved = 1.0 - 1.0 / self.job.sharing(lengths.prompt_tokens, completion)  # part of the prompts
        row, square = lengths.mean_row - saved * lengths.prompt_tokens, lengths.prompt_tokens**2
        at_once = train.micro_batch_size or max(1, int(train.tokens_on(self.job.device.type) // row))
        squares = mine * (lengths.mean_square - saved * square)
        return Rows(math.ceil(mine / at_once), mine * row, mine * completion, squares)

    @once
    def _read(self, name: str, span: Span, zero: int, times: int, on_host: bool) -> Seconds:
        """Forwards over a rank's part of the rollout; `on_host`: the weights travel to the device for each of them."""
        local, wire = self._pass(name, span, zero, self._rows(len(self.job.lengths.completions), span.ranks))
        local += self._local(0.0, 0.0, READ_LAUNCHES)
        if on_host:
            shards = span.ranks if zero == 3 else 1
            wire += self._to_host(self.job.dtype.itemsize * self.job.roles[name].sizes.parameters / shards)
        return Seconds(times * local, times * wire)

    @once
    def _updates(self, name: str, span: Span, zero: int, on_host: bool) -> Seconds:
        """All updates of a learner from one rollout; `on_host`: of optimizer states in host memory."""
        job, sizes = self.job, self.job.roles[name].sizes
        rows = self._rows(math.ceil(job.learned_rows / job.config.algorithm.mini_batches), span.ranks)
        passes = [self._pass(name, span, zero, rows, backward=backward) for backward in (False, True)]
        mine = sizes.trained / (span.ranks if zero else 1)
        launches = UPDATE_LAUNCHES + UPDATE_LAYER_LAUNCHES * sizes.layers + ZERO_LAUNCHES * (zero > 0)
        local = self._local(0.0, 0.0 if on_host else _UPDATED_BYTES * mine, launches)
        wire = 2 * self._to_host(job.dtype.itemsize * mine) + mine / HOST_ADAM_PER_SECOND if on_host else 0.0
        # stages 0 and 1 reduce once per update, stages 1 and 2 gather the updated weights
        wire += (2, 3, 1, 0)[zero] * self._weights(span, sizes, sizes.trained)
        wire += self.exchange(span, 0.0, messages=2 * ZERO_MESSAGES * (zero > 0))
        total = [Seconds(local, wire), *passes]
        return Seconds(*(job.updates * sum(each) for each in zip(*total, strict=True)))

    def _pass(self, name: str, span: Span, zero: int, rows: Rows, *, backward: bool = False) -> Seconds:
        """Forwards of micro-batches, or backwards with the forwards that checkpointing repeats."""
        role, size = self.job.roles[name], self.job.dtype.itemsize
        sizes = role.sizes
        forwards = float(self._model.gradient_checkpointing) if backward else 1.0
        # the gradients of inputs and of weights; those of frozen weights are not computed
        passes = forwards + (1.0 + sizes.trains_all if backward else 0.0)
        launches = LAYER_LAUNCHES * forwards + BACKWARD_LAUNCHES * backward + ZERO3_LAUNCHES * (zero == 3)
        traffic = rows.batches * size * sizes.parameters + rows.head_tokens * sizes.vocabulary * LOGIT_BYTES
        traffic += rows.tokens * sizes.layers * sizes.hidden * size * LAYER_PASSES
        local = self._local(
            passes * _operations(sizes, rows),
            passes * traffic,
            rows.batches * (launches * sizes.layers + BATCH_LAUNCHES),
        )
        wire = 0.0
        if zero == 3:
            gather = self._weights(span, sizes, sizes.parameters, messages=ZERO3_MESSAGES * sizes.layers)
            wire += max(0.0, rows.batches * gather - OVERLAP * local * (self.machine.type == "cuda"))
            wire += rows.batches * self._to_host(size * sizes.parameters / span.ranks) * role.zero.offload_parameters
        if backward and zero >= 2:
            wire += rows.batches * self._weights(span, sizes, sizes.trained)
        hidden = size * rows.tokens * sizes.hidden
        if backward and self._model.activation_offload:  # the input of each layer, to the host and back
            wire += 2 * self._to_host(sizes.layers * hidden)
        if sizes.choices and self._model.expert_parallel > 1:  # tokens to the ranks of their experts, and back
            times = 2 * max(1.0, forwards + backward)
            wire += times * self.exchange(span, hidden * sizes.choices, messages=rows.batches * sizes.layers)
        return Seconds(local, wire)

    # Messages

    def exchange(self, span: Span, size: float, *, messages: float = 1.0) -> float:
        """An all-gather or a reduce-scatter of bytes; an all-reduce is both. `messages`: calls that share the bytes."""
        if span.ranks == 1:
            return 0.0
        machine = self.machine
        rate, latency = machine.link_gb_per_second, machine.link_latency_microseconds
        rate *= 1.0 if machine.measured else LINK_ACHIEVED
        if span.hosts > 1:  # the ranks of a host share its network cards
            between = machine.hosts_gb_per_second * min(1.0, span.most_on_a_host / machine.cards_per_host)
            between *= 1.0 if machine.network_source == "measured" else LINK_ACHIEVED
            rate, latency = min(rate, between), machine.hosts_latency_microseconds
        moved = (span.ranks - 1) / span.ranks * size
        return moved / (1e9 * rate) + 1e-6 * messages * tree_depth(span.ranks) * latency

    def _weights(self, span: Span, sizes: ModelDimensions, elements: float, *, messages: float = 1.0) -> float:
        """An exchange of weights or gradients; of split experts, only by the ranks that have the same ones."""
        split = min(sizes.experts, elements) * (1 - 1 / self._model.expert_parallel)
        return self.exchange(span, self.job.dtype.itemsize * (elements - split), messages=messages)

    def _to_host(self, size: float) -> float:
        """Bytes between a GPU and the memory of its host."""
        return size / (1e9 * self.machine.host_link_gb_per_second * LINK_ACHIEVED)

    @cached_property
    def _messages(self) -> dict[str, float]:
        """Collectives of a few bytes in each phase, and the rows of a rollout, which travel between all ranks."""
        span, algorithm = self._span(self.cluster.everyone), self.job.config.algorithm
        message = 2 * self.exchange(span, 0.0)
        found = {name: count * message for name, count in MESSAGES.items()}
        found["training"] += self.job.updates * message
        token = 2 * SAMPLED_BYTES + algorithm.epochs * LEARNED_BYTES
        found["other"] += self.exchange(span, token * self.job.lengths.tokens / span.ranks)
        return found

    @cached_property
    def _other(self) -> float:
        """Time of a step outside its phases."""
        shared = max(1.0, self.cluster.ranks_per_host / (self.machine.cores or math.inf))
        tokens = self.job.lengths.tokens / self.cluster.ranks
        return shared * self._local(0.0, 0.0, STEP_LAUNCHES + tokens / TOKENS_PER_LAUNCH)

    # Sampling

    @once
    def _weight_sync(self, span: Span, zero: int, parts: int, union: Span | None, states_on_host: bool) -> Seconds:
        """Filling the inference weights of the actor's ranks, or of a union of these and a sampler's, and the check."""
        sizes = self.job.actor.sizes
        buckets = math.ceil(sizes.parameters / BUCKET_ELEMENTS)
        size = self.job.inference_dtype.itemsize * sizes.parameters
        launches = SYNC_LAUNCHES + LAYER_LAUNCHES * sizes.layers + BATCH_LAUNCHES
        views = zero < 3 and self.machine.type == "cuda" and union is None
        local = self._local(0.0, 0.0 if views else 2 * size / parts, launches + PROBE_DECODED * self._decode_launches)
        wire = self._weights(span, sizes, sizes.parameters, messages=buckets) if zero == 3 else 0.0
        wire += 0.0 if union is None else self.exchange(union, size, messages=buckets)
        if states_on_host:
            wire += 2 * self._to_host(_STATE_BYTES * sizes.trained / (span.ranks if zero else 1))
        return Seconds(local, wire)

    @property
    def _decode_launches(self) -> float:
        """Launches of a decoding step."""
        layers = DECODE_LAYER_LAUNCHES * self.job.actor.sizes.layers
        return DECODE_LAUNCHES + (layers if self.machine.type == "cpu" else 0)

    @once
    def _sampling(self, groups: int, group: Span, at_once: int) -> Seconds:
        """Sampling by the slowest of the tensor-parallel groups."""
        prompts = self.job.config.rollout.prompts_per_step
        lengths = np.asarray(self.job.lengths.completions).reshape(prompts, -1)
        shares = (lengths[place::groups].ravel() for place in range(min(groups, prompts)))
        return max((self._group(share, group, at_once) for share in shares), key=sum)

    def _group(self, lengths: npt.NDArray[np.int_], span: Span, at_once: int) -> Seconds:
        """Prefill and decoding by one group: rows leave as they finish, and waiting ones take their place."""
        job, sizes = self.job, self.job.actor.sizes
        size, at_once = job.inference_dtype.itemsize, max(1, min(at_once, len(lengths)))
        parts = 1 if self._model.quantization else span.ranks  # 4-bit weights are not split
        steps = np.arange(int(lengths.max()))
        unfinished = len(lengths) - np.searchsorted(np.sort(lengths), steps, side="right")
        rows = np.append(np.minimum(unfinished, at_once), at_once)
        counts = np.append(np.ones(len(steps)), np.maximum(unfinished - at_once, 0).sum() / at_once)
        context = job.lengths.prompt_tokens + np.append(steps, lengths.mean() / 2)
        products = sizes.layers * sizes.layer_weights * sizes.active + sizes.vocabulary * sizes.hidden
        weights = size * sizes.parameters / parts
        cache = sizes.layers * rows * context * sizes.cache_width * size / span.ranks
        logits = rows * sizes.vocabulary * LOGIT_BYTES / span.ranks
        read = weights * np.minimum(1.0, rows * sizes.active) + cache + logits  # of the experts, those of some row
        local = float(counts @ self._local(2.0 * rows * products / parts, read, self._decode_launches))
        prompts = len(lengths) / job.config.rollout.sampling.n
        tokens = prompts * job.lengths.prompt_tokens
        calls = math.ceil(tokens / PREFILL_TOKENS[job.device.type])
        passed = Rows(calls, tokens, prompts, tokens * job.lengths.prompt_tokens)
        launches = calls * (DECODE_LAYER_LAUNCHES * sizes.layers + BATCH_LAUNCHES)
        local += self._local(_operations(sizes, passed) / parts, calls * weights, launches)
        sums = 2 * sizes.layers  # all-reduces of a pass over the hidden states
        hidden = sums * sizes.hidden * size * (float(counts @ rows) + tokens)
        return Seconds(local, 2 * self.exchange(span, hidden, messages=sums * (float(counts.sum()) + calls)))

    @once
    def _span(self, ranks: tuple[int, ...]) -> Span:
        on_hosts = Counter(map(self.cluster.host_of, ranks))
        return Span(len(ranks), len(on_hosts), max(on_hosts.values()))


def _operations(sizes: ModelDimensions, rows: Rows) -> float:
    """Operations of a forward: products of layers and head, and causal attention."""
    layers = sizes.layers * (sizes.layer_weights * sizes.active * rows.tokens + sizes.attention_width * rows.squares)
    return 2.0 * (layers + sizes.vocabulary * sizes.hidden * rows.head_tokens)
