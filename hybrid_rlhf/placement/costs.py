"""Seconds of each piece of an RL step on one rank, from dimensions, curves and the rank's share.

Work is compute (slowed where ranks share a host's cores) and wire (collectives, links). Follows what the library runs:
DeepSpeed's ZeRO (arXiv 1910.02054, section 7: stages 0 and 1 reduce gradients once per update, 2 and 3 after each
backward; stage 3 gathers each layer's weights in every forward and backward), and continuous batching, where rows leave
as they finish. All ranks of a role compute equal shares, since rows are sharded by length.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybrid_rlhf.configs.sections.placement import RolePlacement
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.generation.backends.native import PREFILL_TOKENS
from hybrid_rlhf.placement.curves import Collective, MachineCurves
from hybrid_rlhf.placement.job import ModelDimensions, RLJob, RoleJob
from hybrid_rlhf.placement.plans import Cluster, StepPlan

ATTENTION_BACKWARD = 2.5
"""Operations of an attention's backward over its forward's: five products instead of two (FlashAttention-2)."""
DECODE_PRODUCTS = 4
"""Products of a layer of inference weights: queries with keys and values, output, gate with up, down."""
CHECKED_TOKENS = 16
"""Tokens that pass through both models in the check after a weight sync."""
_MOST_BUNDLES = 256
"""Rows of a group that decoding is simulated with; more are bundled."""
_T = TypeVar("_T")


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


@dataclass(frozen=True)
class _Batches:
    """Micro-batches of a rank that passes over some rows."""

    count: int
    tokens: float
    """Of each."""
    head_tokens: float
    squares: float
    """Squared row lengths, summed over each."""


@dataclass(frozen=True)
class _Segments:
    """Decoding steps of the sampling groups with a constant number of rows, one group after the other."""

    rows: npt.NDArray[np.float64]
    context: npt.NDArray[np.float64]
    """Mean tokens per row, the prompt included."""
    steps: npt.NDArray[np.float64]
    groups: list[int]
    """Where the segments of each group begin."""
    completions: list[int]
    """Of each group."""


class Costs:
    """Prices pieces of work; what a search asks for again is computed once."""

    def __init__(self, job: RLJob, curves: MachineCurves, cluster: Cluster) -> None:
        """Take what is computed, how fast, and on which ranks."""
        self.job, self.curves, self.cluster = job, curves, cluster
        self._known: dict[tuple[object, ...], object] = {}
        self._bytes, self._dtype = job.dtype.itemsize, str(job.dtype).removeprefix("torch.")

    # Scoring and training

    def read(self, role: RoleJob, plan: StepPlan, *, times: int = 1) -> Work:
        """A role's forward over all completions of a rollout, on each of its ranks."""
        place = plan.roles[role.name]
        offloaded = plan.offload_frozen and not role.is_trained

        def price() -> Work:
            if not role.is_trained and place.tensor_parallel > 1:
                return self._split_read(role.sizes, place)
            batches = self._batches(len(self.job.lengths.completions), len(place.ranks))
            work = self._forward(role.sizes, batches, place.ranks, place.zero) * batches.count
            if offloaded:  # weights travel to the device for each read
                shards = len(place.ranks) if place.zero == 3 else 1
                work += Work(wire=self.curves.host_link(self._bytes * role.sizes.parameters / shards))
            return work

        split = 1 if role.is_trained else place.tensor_parallel
        return self._once((role.name, place.ranks, place.zero, split, offloaded, "read"), price) * times

    def _split_read(self, sizes: ModelDimensions, place: RolePlacement) -> Work:
        """A frozen role's forward in inference weights; each tensor-parallel group reads its part of the rows."""
        together, hosts = place.tensor_parallel, max(self.cluster.hosts_of(group) for group in place.groups)
        batches = self._batches(len(self.job.lengths.completions), len(place.groups))
        layer = self._split_layer(sizes, batches.tokens, batches.squares, together, hosts, self._dtype)
        work = Work(self.curves.calls.get("prefill", 0.0)) + layer * sizes.layers
        if sizes.vocabulary:
            head = self._product(sizes.vocabulary * sizes.hidden / together, batches.head_tokens)
            work += Work(head + self.curves.head(batches.head_tokens * sizes.vocabulary / together) / 2)
        return Work(work.compute * self.curves.factor("forward"), work.wire) * batches.count

    def _split_layer(
        self, sizes: ModelDimensions, tokens: float, squares: float, together: int, hosts: int, dtype: str
    ) -> Work:
        """A layer of inference weights over so many tokens: a part of its products, and two all-reduces."""
        c, part = self.curves, sizes.layer_weights * sizes.active / DECODE_PRODUCTS / together
        layer = DECODE_PRODUCTS * float(c.products[dtype](part, tokens))
        layer += c.attention(self._attention_operations(sizes, squares) / together)
        layer += c.layer(tokens * sizes.hidden)
        return Work(layer, 2 * self._over(together, hosts, tokens * sizes.hidden))

    def updates(self, role: RoleJob, plan: StepPlan) -> Work:
        """All updates of a learner from one rollout, on each of its ranks."""
        place, offloads = plan.roles[role.name], plan.offloads_optimizer(role.name, role.zero)
        algorithm = self.job.config.algorithm
        made = algorithm.epochs * algorithm.mini_batches

        def price() -> Work:
            batches = self._batches(math.ceil(self.job.learned_rows / algorithm.mini_batches), len(place.ranks))
            passes = self._forward(role.sizes, batches, place.ranks, place.zero)
            passes += self._backward(role.sizes, batches, place.ranks, place.zero)
            return (passes * batches.count + self._step(role.sizes, place.ranks, place.zero, offloads)) * made

        return self._once((role.name, place.ranks, place.zero, offloads, "updates"), price)

    def _batches(self, rows: int, ranks: int) -> _Batches:
        lengths, train = self.job.lengths, self.job.config.train
        mine = math.ceil(rows / ranks)
        at_once = train.micro_batch_size or max(1, int(train.micro_batch_tokens // lengths.mean_row))
        count = math.ceil(mine / at_once)
        each = mine / count
        new_tokens = lengths.mean_row - lengths.prompt_tokens
        return _Batches(count, each * lengths.mean_row, each * new_tokens, each * lengths.mean_square)

    def _forward(self, sizes: ModelDimensions, batches: _Batches, ranks: tuple[int, ...], zero: int) -> Work:
        layer = self._layer(sizes, batches)
        compute = self.curves.calls.get("forward", 0.0) + sizes.layers * layer
        if sizes.vocabulary:
            compute += self._product(sizes.vocabulary * sizes.hidden, batches.head_tokens)
            compute += self.curves.head(batches.head_tokens * sizes.vocabulary) / 2
        work = Work(compute) + self._gathers(sizes, layer, ranks, zero)
        return Work(work.compute * self.curves.factor("forward"), work.wire)

    def _backward(self, sizes: ModelDimensions, batches: _Batches, ranks: tuple[int, ...], zero: int) -> Work:
        c, passes = self.curves, 2 if sizes.trains_all else 1
        part = sizes.layer_weights * sizes.active / sizes.products
        layer = passes * sizes.products * self._product(part, batches.tokens)
        layer += ATTENTION_BACKWARD * c.attention(self._attention_operations(sizes, batches.squares))
        layer += c.layer_backward(batches.tokens * sizes.hidden)
        if self.job.config.model.gradient_checkpointing:
            layer += self._layer(sizes, batches)
        compute = c.calls.get("backward", 0.0) + sizes.layers * layer
        if sizes.vocabulary:
            compute += passes * self._product(sizes.vocabulary * sizes.hidden, batches.head_tokens)
            compute += c.head(batches.head_tokens * sizes.vocabulary) / 2
        work = Work(compute) + self._gathers(sizes, layer, ranks, zero)
        if zero >= 2:
            work += Work(wire=self._collective("reduce_scatter", ranks, self._bytes * sizes.trained))
        return Work(work.compute * c.factor("backward"), work.wire)

    def _step(self, sizes: ModelDimensions, ranks: tuple[int, ...], zero: int, offloads: bool) -> Work:
        c, mine, size = self.curves, sizes.trained / (len(ranks) if zero else 1), self._bytes * sizes.trained
        compute = c.calls.get("step", 0.0)
        if offloads:
            compute += c.host_optimizer(mine) + 2 * c.host_link(self._bytes * mine)
        else:
            compute += c.optimizer(mine)
        wire = self._collective("all_reduce", ranks, size) if zero < 2 else 0.0
        if zero in (1, 2):
            wire += self._collective("all_gather", ranks, size)
        return Work(compute * c.factor("optimizer"), wire)

    def _layer(self, sizes: ModelDimensions, batches: _Batches) -> float:
        """Seconds of a layer's forward."""
        part = sizes.layer_weights * sizes.active / sizes.products
        seconds = sizes.products * self._product(part, batches.tokens)
        seconds += self.curves.attention(self._attention_operations(sizes, batches.squares))
        return seconds + self.curves.layer(batches.tokens * sizes.hidden)

    def _attention_operations(self, sizes: ModelDimensions, squares: float) -> float:
        return 2.0 * sizes.attention_width * squares  # two products, of which causality takes half

    def _product(self, weight: float, rows: float) -> float:
        return float(self.curves.products[self._dtype](weight, rows))

    def _gathers(self, sizes: ModelDimensions, layer_seconds: float, ranks: tuple[int, ...], zero: int) -> Work:
        """What ZeRO-3 adds to a pass and compute does not hide: bookkeeping of each layer, and its weights."""
        if zero < 3:
            return Work()
        call = self.curves.calls.get("gathered_layer", 0.0)
        layer = call + self._collective("all_gather", ranks, self._bytes * sizes.layer_weights)
        exposed = max(0.0, layer - self.curves.overlap * layer_seconds)
        rest = self._collective("all_gather", ranks, self._bytes * sizes.rest_parameters)
        call = min(call, exposed)
        return Work(sizes.layers * call, sizes.layers * (exposed - call) + rest)

    # Weight sync and sampling

    def weight_sync(self, plan: StepPlan) -> Work:
        """Filling the inference weights, and the check of them."""
        sizes, actor, c = self.job.actor.sizes, plan.roles["actor"], self.curves
        size = self.job.inference_dtype.itemsize * sizes.parameters

        def price() -> Work:
            sampling = plan.sampling
            copied = size / sampling.tensor_parallel
            if not plan.separate and actor.zero < 3 and self.job.device.type == "cuda":
                copied = 0.0  # inference weights are views
            work = Work(c.calls.get("generation", 0.0) + c.copies(copied), 0.0)
            if actor.zero == 3:
                work += Work(wire=self._bucketed("all_gather", actor.ranks, self._bytes * sizes.parameters))
            if plan.separate:
                work += Work(wire=self._transfer(plan, size))
            check = _Batches(1, CHECKED_TOKENS, CHECKED_TOKENS, CHECKED_TOKENS**2)
            work += self._forward(sizes, check, actor.ranks, actor.zero) * 2
            if plan.offload_states:
                states = 12 * sizes.trained / (len(actor.ranks) if actor.zero else 1)
                work += Work(wire=2 * c.host_link(states))
            return work * c.factor("weight_sync")

        return self._once((actor, plan.sampling, plan.separate, plan.offload_states, "sync"), price)

    def _transfer(self, plan: StepPlan, size: float) -> float:
        """Seconds in which each sampling rank receives its part of each weight; senders share the load."""
        actor, sampling = plan.roles["actor"], plan.sampling
        hosts = self.cluster.hosts_of(tuple(sorted({*actor.ranks, *sampling.ranks})))
        received = size / sampling.tensor_parallel
        sent = received * len(sampling.ranks) / len(actor.ranks)
        buckets = max(1, math.ceil(self.job.actor.sizes.parameters / BUCKET_ELEMENTS))
        part = max(received, sent) / buckets
        return buckets * self.curves.collective("transfer", ranks=2, size_bytes=part, hosts=hosts)

    def _bucketed(self, kind: Collective, ranks: tuple[int, ...], size: float) -> float:
        buckets = max(1, math.ceil(size / (self._bytes * BUCKET_ELEMENTS)))
        return buckets * self._collective(kind, ranks, size / buckets)

    def sampling(self, plan: StepPlan, *, rows_at_once: int) -> list[Work]:
        """Sampling of each tensor-parallel group.

        Args:
            plan: its sampling ranks.
            rows_at_once: completions that memory lets a group decode together.
        """
        place, groups = plan.sampling, plan.sampling_groups
        hosts = max(self.cluster.hosts_of(group) for group in groups)

        def price() -> list[Work]:
            segments = self._once(
                ("segments", len(groups), rows_at_once), lambda: self._segments(len(groups), rows_at_once)
            )
            decode = self._decode_steps(segments, place.tensor_parallel, hosts)
            compute, wire = (np.add.reduceat(part * segments.steps, segments.groups) for part in decode)
            work = []
            for group, rows in enumerate(segments.completions):
                prefill = self._prefill(rows, place.tensor_parallel, hosts)
                rest = Work(rows * self.curves.calls.get("completion", 0.0))
                work.append(Work(float(compute[group]), float(wire[group])) + prefill + rest)
            return work

        return self._once((place.tensor_parallel, len(groups), hosts, rows_at_once, "sampling"), price)

    def _prefill(self, rows: int, together: int, hosts: int) -> Work:
        """The prompts of so many completions, once for all completions of a prompt."""
        sizes, lengths = self.job.actor.sizes, self.job.lengths
        per_prompt = self.job.config.rollout.sampling.n
        prompts = math.ceil(rows / per_prompt)
        if not prompts:  # more groups than prompts
            return Work()
        at_once = max(1, int(PREFILL_TOKENS[self.job.device.type] // max(1.0, lengths.prompt_tokens)))
        batches = math.ceil(prompts / at_once)
        tokens = prompts / batches * lengths.prompt_tokens
        layer = self._split_layer(sizes, tokens, tokens * lengths.prompt_tokens, together, hosts, self._inference_dtype)
        call = self.curves.calls.get("prefill", 0.0) / sizes.layers
        return Work(call + layer.compute * self.curves.factor("prefill"), layer.wire) * (batches * sizes.layers)

    def _decode_steps(
        self, s: _Segments, together: int, hosts: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Seconds of compute and wire of one decoding step of each segment."""
        sizes, c, inference_bytes = self.job.actor.sizes, self.curves, self.job.inference_dtype.itemsize
        products = c.decode_products[self._inference_dtype]
        reached = np.minimum(1.0, s.rows * sizes.active)  # of the weights, by the experts of any row
        part = sizes.layer_weights / DECODE_PRODUCTS / together
        if sizes.active < 1:
            seconds = np.asarray(
                [
                    products(part * share, rows * sizes.active / share)
                    for share, rows in zip(reached, s.rows, strict=True)
                ]
            )
        else:
            seconds = products.each(part, s.rows)
        cache = s.rows * s.context * sizes.cache_width * inference_bytes / together
        layer = DECODE_PRODUCTS * seconds + c.cache_reads.each(cache) + c.decode_layer.each(s.rows * sizes.hidden)
        head = products.each(sizes.vocabulary * sizes.hidden / together, s.rows)
        compute = (sizes.layers * layer + head + c.decode_step.each(s.rows)) * c.factor("decode")
        exchanged = np.asarray([self._over(together, hosts, rows * sizes.hidden) for rows in s.rows])
        return compute, 2 * sizes.layers * exchanged

    def _over(self, together: int, hosts: int, elements: float) -> float:
        """An all-reduce of hidden states within a tensor-parallel group."""
        size = elements * self.job.inference_dtype.itemsize
        return self.curves.collective("all_reduce", ranks=together, size_bytes=size, hosts=hosts)

    @property
    def _inference_dtype(self) -> str:
        return str(self.job.inference_dtype).removeprefix("torch.")

    def _segments(self, groups: int, rows_at_once: int) -> _Segments:
        rollout = self.job.config.rollout
        by_prompt = np.asarray(self.job.lengths.completions).reshape(rollout.prompts_per_step, -1)
        parts: list[list[tuple[float, float, float]]] = []
        counts = []
        for group in range(groups):
            mine = by_prompt[group::groups].ravel()
            counts.append(len(mine))
            parts.append(decode_segments(mine.tolist(), self.job.lengths.prompt_tokens, rows_at_once) or [(0, 0, 0)])
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])]).tolist()
        rows, context, steps = np.asarray([segment for part in parts for segment in part], dtype=np.float64).T
        return _Segments(rows, context, steps, starts, counts)

    # All ranks

    def exchange(self, elements_per_token: float, *, kind: Collective) -> Work:
        """A collective of all ranks over a number for each token of the rollout's completions."""
        tokens = self.job.lengths.mean_row * len(self.job.lengths.completions)
        everyone = tuple(range(self.cluster.ranks))
        return Work(wire=self._collective(kind, everyone, 4 * elements_per_token * tokens))

    def _collective(self, kind: Collective, ranks: tuple[int, ...], size: float) -> float:
        return self.curves.collective(kind, ranks=len(ranks), size_bytes=size, hosts=self.cluster.hosts_of(ranks))

    def _once(self, key: tuple[object, ...], price: Callable[[], _T]) -> _T:
        if key not in self._known:
            self._known[key] = price()
        return self._known[key]  # type: ignore[return-value]


def decode_segments(lengths: list[int], prompt_tokens: float, rows_at_once: int) -> list[tuple[float, float, float]]:
    """Decoding of completions in the order given: at most so many rows at once, the next joins where one finishes.

    Returns:
        (rows, mean tokens of a row, steps) of each stretch in which no row joins or leaves.
    """
    bundle = max(1, math.ceil(len(lengths) / _MOST_BUNDLES))
    waiting = [max(lengths[start : start + bundle]) for start in range(0, len(lengths), bundle)]
    weights = [len(lengths[start : start + bundle]) for start in range(0, len(lengths), bundle)]
    order = list(range(len(waiting)))[::-1]
    active: list[tuple[int, int, int]] = []
    """(end, begin, bundle) of the rows that are decoded."""
    now, running, begun, found = 0, 0, 0.0, []
    while order or active:
        while order and (not active or running + weights[order[-1]] <= rows_at_once):
            place = order.pop()
            heapq.heappush(active, (now + waiting[place], now, place))
            running += weights[place]
            begun += weights[place] * now
        end = active[0][0]
        if end > now:
            age = (now + end) / 2 - begun / running
            found.append((float(running), prompt_tokens + age, float(end - now)))
        now = end
        while active and active[0][0] == now:
            _, begin, place = heapq.heappop(active)
            running -= weights[place]
            begun -= weights[place] * begin
    return found
