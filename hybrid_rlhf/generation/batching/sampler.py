"""Token sampling: one token per row, from logits that may be sharded by vocabulary over tensor-parallel ranks.

A token is drawn by inverting the cumulative distribution at one uniform number, in two levels: first the block of the
vocabulary, then the token in the block. This costs one exponential per logit and no sort. With a sharded vocabulary,
ranks exchange two numbers per row and then the token; only truncation (top_p, top_k, min_p) and penalties gather the
logits. Nothing synchronises with the host.

Kernels compute the same result from an unsharded vocabulary, without a sort (ops/cpu_kernels.py, ops/sampling.py). The
torch code here is their reference, and is used for sharded vocabularies and on CPUs without a compiler.

Cumulative sums are taken over integers: a float `cumsum` has no deterministic kernel on CUDA (pytorch issue 75240), and
torch refuses it under `deterministic: true`. Integer sums do not depend on their order, so a row draws the same token
on every device and in every batch.

Shapes: B rows, V vocabulary, R ranks; logits are [B, V / R] float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.split import share
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops.sampling import draw, gather_vocabulary, truncated
from hybrid_rlhf.generation.ops.sampling_rows import SamplingMode, SamplingRows
from hybrid_rlhf.generation.sampling import MOST_TOP_LOGPROBS
from hybrid_rlhf.runtime.world import World, solo_world


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens [B] int64, and their log-probs [B] float32 under the full distribution and the sampled one."""

    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    top: tuple[Tensor, Tensor] | None = None
    """Most likely tokens [B, k] int64 of the full distribution and their log-probs [B, k] float32; none if no request
    reports them."""

    def stacked(self) -> Tensor:
        """Return all values in one tensor [3 + 2k, B] for the copy to the host; its float64 represents token ids
        exactly."""
        columns = [self.tokens, self.logprobs, self.sampling_logprobs]
        if self.top is not None:
            columns += [column for part in self.top for column in part.unbind(dim=1)]
        return torch.stack([column.double() for column in columns])


class Sampler:
    """Samples tokens; one sampler is used for all steps of a call."""

    def __init__(self, vocab_size: int, mode: SamplingMode, world: World) -> None:
        """Args: size of the vocabulary, sampling features of the requests, and the ranks that shard the vocabulary."""
        self._vocab_size = vocab_size
        self._mode = mode
        self._world = world
        self._mine = share(vocab_size, world.rank, world.size)
        self._kernels = choice.kernels_for(world.device, torch.float32) if world.size == 1 else None

    def __call__(self, logits: Tensor, rows: SamplingRows) -> SampledTokens:
        """Sample the next token of each row and append it to the row."""
        top = self._top(logits, rows) if self._mode.top_logprobs else None  # before kernels may overwrite logits
        if self._kernels is not None:
            tokens, logprobs, sampling_logprobs = self._kernels.sample(logits, rows, self._mode)
            return SampledTokens(tokens, logprobs, sampling_logprobs, top)
        mode = self._mode
        greedy = rows.greedy if self._mode.greedy else None
        if mode.draws_from_all:
            scaled = self._scaled(logits, rows)
            tokens, logprobs = draw(scaled, rows.uniform, greedy, self._mine, self._world)
            sampling_logprobs = logprobs
        else:
            logits = gather_vocabulary(logits, self._vocab_size, self._world)
            masked = truncated(self._scaled(self._penalised(logits, rows), rows), rows, mode)
            whole = range(logits.shape[-1])
            alone = solo_world(logits.device)
            tokens, sampling_logprobs = draw(masked, rows.uniform, greedy, whole, alone)
            raw = torch.log_softmax(self._scaled(logits, rows), dim=-1)
            logprobs = raw.gather(1, tokens[:, None]).squeeze(1)
        rows.append(tokens)
        return SampledTokens(tokens, logprobs, sampling_logprobs, top)

    def _top(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        whole = gather_vocabulary(logits, self._vocab_size, self._world)
        logprobs = torch.log_softmax(self._scaled(whole, rows), dim=-1)
        values, tokens = logprobs.topk(min(MOST_TOP_LOGPROBS, logprobs.shape[-1]), dim=-1)
        return tokens, values

    def _scaled(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return logits / rows.temperature if self._mode.temperature else logits

    def _penalised(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Apply the repetition penalty (arXiv 1909.05858, section 4.1); exclude stop tokens before min_new_tokens."""
        if rows.seen is not None and self._mode.repetition_penalty:
            penalty = rows.repetition_penalty
            logits = torch.where(rows.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self._mode.min_new_tokens:
            stops, early = rows.early_stops
            logits = logits.scatter(1, stops, logits.gather(1, stops).masked_fill(early, -torch.inf))
        return logits
