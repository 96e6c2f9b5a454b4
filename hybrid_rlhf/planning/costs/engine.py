"""Seconds of a model that ranks share by ZeRO: a forward, a backward and an optimizer step on each of them.

Follows DeepSpeed's ZeRO (arXiv 1910.02054, section 7): stages 0 and 1 reduce gradients once per update, 2 and 3 after
each backward; stage 3 gathers each layer's weights in every forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rlhf.planning.costs.passes import ModelPasses, PassedTokens
from hybrid_rlhf.planning.costs.work import Span, Work
from hybrid_rlhf.planning.curves import Collective, MachineCurves, by_ranks
from hybrid_rlhf.planning.job import ModelDimensions, RLJob


@dataclass(frozen=True)
class Engine:
    """A model on the ranks that share it."""

    job: RLJob
    curves: MachineCurves
    sizes: ModelDimensions
    span: Span
    zero: int
    on_host: bool = False
    """Its weights are offloaded by ZeRO-3."""

    def forward(self, batch: PassedTokens) -> Work:
        """A forward of a rank's micro-batch."""
        passes = self._passes
        work = Work(passes.forward(batch)) + self._gathers("forward", passes.layer(batch))
        work += self._dispatch(batch, passes=1)
        work += self._from_host()
        return Work(work.compute * self.curves.factor("forward"), work.wire)

    def backward(self, batch: PassedTokens) -> Work:
        """A backward of a rank's micro-batch, with the forward of layers whose activations are not kept."""
        sizes = self.sizes
        passes = self._passes
        checkpoints = self.job.config.model.gradient_checkpointing
        work = Work(passes.backward(batch, checkpoints=checkpoints))
        work += self._gathers("backward", passes.layer_backward(batch, checkpoints=checkpoints))
        work += self._from_host()
        work += self._dispatch(batch, passes=2 if checkpoints else 1)
        if self.job.config.model.activation_offload:  # the input of each layer, to the host and back
            kept = self._bytes * batch.tokens * sizes.hidden
            work += Work(wire=2 * sizes.layers * self.curves.host_link(kept))
        if self.zero >= 2:
            work += Work(wire=self._exchange("reduce_scatter", sizes.trained, experts=sizes.trained_experts))
        return Work(work.compute * self.curves.factor("backward"), work.wire)

    def step(self, *, offloads: bool) -> Work:
        """An optimizer step; `offloads`: of states on the host."""
        sizes = self.sizes
        experts = sizes.trained_experts
        if self.zero:
            mine = sizes.trained / self.span.ranks
        else:
            mine = sizes.trained - experts + experts / self._ranks_of_experts
        compute = self.curves.calls.get("step", 0.0)
        if offloads:
            compute += self.curves.host_optimizer(mine) + 2 * self.curves.host_link(self._bytes * mine)
        else:
            compute += self.curves.optimizer(mine)
        wire = self._exchange("all_reduce", sizes.trained, experts=experts) if self.zero < 2 else 0.0
        if self.zero in (1, 2):
            wire += self._exchange("all_gather", sizes.trained, experts=experts)
        beside = by_ranks(self.curves.update, self.span.ranks, none=0.0)
        return Work(compute * self.curves.factor("optimizer"), wire + beside)

    def gather_experts(self, elements: float) -> float:
        """Seconds of an all-gather of so many elements by the ranks that split experts."""
        ranks = self._ranks_of_experts
        hosts = -(-ranks // self.span.most_on_a_host)
        return self.curves.collective("all_gather", ranks=ranks, size_bytes=self._bytes * elements, hosts=hosts)

    @property
    def _passes(self) -> ModelPasses:
        return ModelPasses(self.curves, self.sizes, self.job.dtype)

    @property
    def _bytes(self) -> int:
        return self.job.dtype.itemsize

    @property
    def _ranks_of_experts(self) -> int:
        """Number of ranks that split the experts of a layer."""
        return self.job.config.model.expert_parallel if self.sizes.experts else 1

    def _gathers(self, kind: Literal["forward", "backward"], layer_seconds: float) -> Work:
        """What ZeRO-3 adds to a pass and compute does not hide: bookkeeping of each layer, and its weights. Both were
        measured while the ranks share cores, so nothing slows them further."""
        if self.zero < 3:
            return Work()
        sizes = self.sizes
        layer = self.curves.gathered_layer(kind, self.span.ranks)
        layer += self._exchange("all_gather", sizes.layer_weights, experts=sizes.experts / sizes.layers)
        exposed = max(0.0, layer - self.curves.overlap * layer_seconds)
        rest = self.span.exchange(self.curves, "all_gather", self._bytes * sizes.rest_parameters)
        return Work(wire=sizes.layers * exposed + rest)

    def _from_host(self) -> Work:
        """A rank's part of the weights for a pass, where they are on the host."""
        if not self.on_host or self.zero < 3:
            return Work()
        return Work(wire=self.curves.host_link(self._bytes * self.sizes.parameters / self.span.ranks))

    def _dispatch(self, batch: PassedTokens, *, passes: int) -> Work:
        """The exchange of tokens with the ranks of their experts, and back; priced as an all-gather in which each rank
        receives as much."""
        sizes = self.sizes
        elements = batch.tokens * sizes.hidden * sizes.choices / sizes.layers
        return Work(wire=2 * passes * sizes.layers * self.gather_experts(elements))

    def _exchange(self, kind: Collective, elements: float, *, experts: float) -> float:
        """Seconds of a collective of so many weights, `experts` of them of experts: over all ranks, and, of experts
        that ranks split, over the ranks that have the same ones."""
        span = self.span
        split = self._ranks_of_experts
        if split == 1:
            return span.exchange(self.curves, kind, self._bytes * elements)
        replicas = Span(span.ranks // split, min(span.hosts, span.ranks // split), 0)
        seconds = span.exchange(self.curves, kind, self._bytes * (elements - experts))
        return seconds + replicas.exchange(self.curves, kind, self._bytes * experts / split)
