"""Token sampling: one token per row, from logits that may be sharded over tensor-parallel ranks by vocabulary.

A token is drawn by inverting the cumulative distribution at one uniform number, in two levels: first the block of the
vocabulary, then the token in the block. A row costs one exponential per entry and no sort. With a sharded vocabulary,
ranks exchange two numbers per row and then the token; only truncation (top_p, top_k, min_p) and penalties gather the
logits. Nothing synchronises with the host.

Kernels compute the same from a whole vocabulary, without a sort (model/cpu_kernels.py, model/kernels/sampling.py). What
is here in torch is their reference, and serves sharded vocabularies and CPUs without a compiler.

Cumulative sums are taken over integers: a float `cumsum` has no deterministic kernel on CUDA (pytorch issue 75240), and
torch refuses it under `deterministic: true`. Integer sums do not depend on their order, so a row draws the same token
on every device and in every batch.

Shapes: B rows, V vocabulary, R ranks; logits are [B, V / R] float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_rlhf.generation.batching.decode_batch import DecodeBatch, SamplingMode
from hybrid_rlhf.generation.model.layers import kernels_for
from hybrid_rlhf.generation.sampling import MOST_TOP_LOGPROBS
from hybrid_rlhf.generation.weights.split import share
from hybrid_rlhf.runtime.world import World, solo_world

_BLOCK = 128
_UNIT = 2.0**52
"""Integer value of a probability of 1; sums up to it are exact in float64."""


@dataclass(frozen=True)
class SampledTokens:
    """Tokens [B] int64 and their log-probs [B] float32: of the full distribution, and of the one sampled from."""

    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    top: tuple[Tensor, Tensor] | None = None
    """The most likely tokens [B, k] int64 and their log-probs [B, k] float32, of the full distribution; none where no
    request reports them."""

    def stacked(self) -> Tensor:
        """[3 + 2k, B] float64, to copy to the host at once; float64 represents every token id exactly."""
        columns = [self.tokens, self.logprobs, self.sampling_logprobs]
        if self.top is not None:
            columns += [column for part in self.top for column in part.unbind(dim=1)]
        return torch.stack([column.double() for column in columns])


class Sampler:
    """Samples tokens; one sampler serves all steps of a call."""

    def __init__(self, vocab_size: int, mode: SamplingMode, world: World) -> None:
        """Args: size of the vocabulary, what the requests need, and the tensor-parallel ranks that shard it."""
        self._vocab_size, self._mode, self._world = vocab_size, mode, world
        self._mine = share(vocab_size, world.rank, world.size)
        self._kernels = kernels_for(world.device, torch.float32) if world.size == 1 else None

    def __call__(self, logits: Tensor, rows: DecodeBatch) -> SampledTokens:
        """Sample the next token of each row and append it to the row."""
        top = self._top(logits, rows) if self._mode.top_logprobs else None  # before kernels may overwrite logits
        if self._kernels is not None:
            drawn = SampledTokens(*self._kernels.sample(logits, rows, self._mode))
            return replace(drawn, top=top)
        mode, greedy = self._mode, rows.greedy if self._mode.greedy else None
        if mode.draws_from_all:
            scaled = self._scaled(logits, rows)
            tokens, logprobs = draw(scaled, rows.uniform, greedy, self._mine, self._world)
            sampling_logprobs = logprobs
        else:
            logits = gather_vocabulary(logits, self._vocab_size, self._world)
            truncated = _truncated(self._scaled(self._penalised(logits, rows), rows), rows, mode)
            whole, alone = range(logits.shape[-1]), solo_world(logits.device)
            tokens, sampling_logprobs = draw(truncated, rows.uniform, greedy, whole, alone)
            raw = torch.log_softmax(self._scaled(logits, rows), dim=-1)
            logprobs = raw.gather(1, tokens[:, None]).squeeze(1)
        rows.append(tokens)
        return SampledTokens(tokens, logprobs, sampling_logprobs, top)

    def _top(self, logits: Tensor, rows: DecodeBatch) -> tuple[Tensor, Tensor]:
        whole = gather_vocabulary(logits, self._vocab_size, self._world)
        logprobs = torch.log_softmax(self._scaled(whole, rows), dim=-1)
        values, tokens = logprobs.topk(min(MOST_TOP_LOGPROBS, logprobs.shape[-1]), dim=-1)
        return tokens, values

    def _scaled(self, logits: Tensor, rows: DecodeBatch) -> Tensor:
        return logits / rows.temperature if self._mode.temperature else logits

    def _penalised(self, logits: Tensor, rows: DecodeBatch) -> Tensor:
        """Apply the repetition penalty (arXiv 1909.05858, section 4.1); exclude stop tokens before min_new_tokens."""
        if rows.seen is not None and self._mode.repetition_penalty:
            penalty = rows.repetition_penalty
            logits = torch.where(rows.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self._mode.min_new_tokens:
            stops, early = rows.early_stops
            logits = logits.scatter(1, stops, logits.gather(1, stops).masked_fill(early, -torch.inf))
        return logits


def gather_vocabulary(logits: Tensor, vocab_size: int, world: World) -> Tensor:
    """Gather logits [B, V / R] to [B, V]."""
    if world.size == 1:
        return logits
    shares = [share(vocab_size, rank, world.size) for rank in range(world.size)]
    widest = max(map(len, shares))
    parts = world.all_gather(torch.nn.functional.pad(logits, (0, widest - logits.shape[-1])))
    return torch.cat([part[..., : len(mine)] for part, mine in zip(parts, shares, strict=True)], dim=-1)


def draw(
    logits: Tensor, uniforms: Tensor, greedy: Tensor | None, vocabulary: range, world: World
) -> tuple[Tensor, Tensor]:
    """Sample one token per row from the softmax of logits.

    Args:
        logits: [B, V / R] float32, of this rank's part of the vocabulary; -inf is never drawn.
        uniforms: [B] float64 in [0, 1).
        greedy: [B] bool, rows that take the most likely token; none: no row does.
        vocabulary: token ids of this rank's part.
        world: the tensor-parallel ranks.

    Returns:
        tokens [B] int64 and their log-probs [B] float32, the same on every rank.
    """
    probs, mass = torch.softmax(logits, dim=-1), _log_mass(logits, world)
    cumulative = running_sums(_block_sums(probs))
    # Each rank's share of the total mass, and where this rank's part begins.
    shares = cumulative[:, -1:] if mass is None else mass.softmax(dim=0).transpose(0, 1)
    before = shares[:, : world.rank].sum(dim=-1)
    target = uniforms * shares.sum(dim=-1)
    rank_of = (running_sums(shares) <= target[:, None]).sum(dim=-1).clamp_(max=world.size - 1)
    index = _invert(probs, cumulative, (target - before) / shares[:, world.rank] * cumulative[:, -1])
    if greedy is not None:
        index, rank_of = _most_likely(logits, index, rank_of, greedy, world)
    chosen = probs.gather(1, index[:, None]).squeeze(1).log()
    if mass is None:
        return index, chosen
    mine = rank_of == world.rank
    logprob = chosen.double() + mass[world.rank] - mass.logsumexp(dim=0)
    sent = torch.stack([(index + vocabulary.start).double(), logprob]).where(mine, 0.0)
    tokens, logprobs = world.all_reduce(sent)
    return tokens.long(), logprobs.float()


def running_sums(probs: Tensor) -> Tensor:
    """Cumulative sums [..., n] float64 of probabilities, with a resolution of 2^-52.

    The result does not depend on the order of summation. A row must sum to 1 at most, up to rounding.
    """
    units = (probs * _UNIT).long()  # a power of two: exact
    return torch.cumsum(units, dim=-1, out=units).double().div_(_UNIT)


def _log_mass(logits: Tensor, world: World) -> Tensor | None:
    """Log-sum-exp of each rank's logits [R, B] float64; none for a single rank, where the softmax is enough."""
    return None if world.size == 1 else world.all_gather(logits.double().logsumexp(dim=-1))


def _most_likely(logits: Tensor, index: Tensor, rank_of: Tensor, greedy: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """Rank-local index [B] and rank [B] of the most likely token on greedy rows, of the drawn one on others."""
    top, best = logits.max(dim=-1)
    winner = world.all_gather(top).argmax(dim=0)
    return torch.where(greedy, best, index), torch.where(greedy, winner, rank_of)


def _block_sums(probs: Tensor) -> Tensor:
    """Sums [B, blocks] over blocks of 128 tokens; the last block may be shorter."""
    whole = probs.shape[-1] // _BLOCK * _BLOCK
    sums = [probs[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(dim=-1)] if whole else []
    return torch.cat([*sums, probs[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)


def _invert(probs: Tensor, cumulative: Tensor, wanted: Tensor) -> Tensor:
    """Index at which the cumulative sum of probs [B, V] exceeds wanted [B]; an entry above 0 if there is one.

    Args:
        probs: [B, V].
        cumulative: [B, blocks] float64, cumulative sums of its blocks.
        wanted: [B] float64; clamped below the total.
    """
    end = cumulative[:, -1]
    wanted = torch.minimum(wanted, torch.nextafter(end, torch.zeros_like(end))).clamp_(min=0)[:, None]
    block = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = torch.arange(_BLOCK, device=probs.device)
    places = block * _BLOCK + inside
    weights = probs.gather(1, places.clamp(max=probs.shape[-1] - 1)).masked_fill(places >= probs.shape[-1], 0.0)
    place = torch.searchsorted(running_sums(weights), wanted - before, right=True)
    # A block summed in another order may differ in the last digit: do not go past the last entry with weight.
    last = ((weights > 0) * (inside + 1)).argmax(dim=1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last)).squeeze(1)


def _truncated(logits: Tensor, rows: DecodeBatch, mode: SamplingMode) -> Tensor:
    """Logits [B, V], -inf for tokens that top_k, then top_p, then min_p exclude (the order of Hugging Face)."""
    if mode.top_k_top_p:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        place = torch.arange(logits.shape[-1], device=logits.device)
        beyond = (rows.top_k > 0) & (place >= rows.top_k)
        probs = ordered.masked_fill(beyond, -torch.inf).softmax(dim=-1)
        # The smallest set that reaches top_p: exclude a token if those before it reach it already.
        beyond |= (rows.top_p < 1) & (running_sums(probs) - probs >= rows.top_p)
        beyond[:, 0] = False
        logits = logits.masked_fill(beyond.scatter(1, index, beyond), -torch.inf)
    if mode.min_p:
        probs = logits.softmax(dim=-1)
        logits = logits.masked_fill(probs < rows.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
    return logits
