"""Token sampling on a GPU in two to four launches, without a sort of the vocabulary.

The first launch weighs blocks of the vocabulary: the highest score of a block and the sum of its exponentials. The last
one chooses the block, the token in it, and its log-probs, and appends it to its row. Truncation takes two more between
them, each of which reads the vocabulary once at most, a program per block. One counts and weighs scores by their
distance from the highest, in bins of less than half a percent of it, and so finds the bins in which the bounds of top_k
and top_p are. The other collects what is in these bins and weighs the blocks again with what is above them; the last
program of a row finds the bounds exactly among what was collected, and adds what they leave. Scores that are too low
for a bound, by the highest scores of the blocks (top_k) or by the weight of all (top_p), are not counted, and blocks
that have no others are not read. So the vocabulary is read three times at most, and one block of it to draw.

Where more than `CANDIDATES` scores are in these bins, the bounds are found in the whole row instead, which its last
program then reads up to a hundred times: if that many scores are nearly equal, as in an untrained model, or if top_k is
that large and top_p is given too.

What is in torch is the reference, and serves sharded vocabularies. Masses are added up and compared as integers, and
float sums have a fixed order, so a row draws the same token in every batch. Nothing synchronises with the host; shapes
depend on the batch size alone.

Shapes: B rows, V vocabulary, C blocks of a row. Columns of the tables are those of sampling_rows.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.architecture.split import share
from hybrid_rlhf.generation.ops.sampling_rows import SamplingMode, SamplingRows
from hybrid_rlhf.generation.ops.triton_language import tl, triton
from hybrid_rlhf.runtime.world import World

_SUMMED_TOKENS = 128
"""Tokens of a block of the reference."""
_UNITS_OF_ONE = 2.0**52
"""Integer value of a probability of 1 in the reference; sums up to it are exact in float64."""
_BLOCK = 1024
_MOST_TOKENS = 1 << 21
"""Largest vocabulary whose weights can be added up as integers."""
_STOPS = 6
"""First column of stop tokens."""
CANDIDATES = 4096
"""Most scores of a row that are collected."""
_UNIT = tl.constexpr(2.0**42)
"""Integer of a weight of 1, the largest: 2^21 of them can be added up."""
_BINS = tl.constexpr(4096)
"""Of scores by their distance from the highest, 256 in each octave; the first has all below 2^-9, the last from 2^7."""
_DIGITS = tl.constexpr(15)
"""Bits of a distance that its bin leaves out."""
_FIRST_BIN = tl.constexpr((118 << 8) - 1)
"""Bits of a distance of 2^-9, without those, less one."""
_ARRIVED, _COLLECTED, _LOW, _HIGH, _COUNT, _WEIGHT, _BY_TOP_K = map(tl.constexpr, range(7))
"""Columns of a row's table behind the counts and weights of its bins: programs that are done; how many scores are
collected; the first and the last bin of what is unsure; count and weight of the bins before them; whether top_k
excludes a token."""
_COLUMNS = 2 * 4096 + 8


def gather_vocabulary(logits: Tensor, vocab_size: int, world: World) -> Tensor:
    """Gather logits [B, V / R] to [B, V]."""
    if world.size == 1:
        return logits
    shares = [share(vocab_size, rank, world.size) for rank in range(world.size)]
    widest = max(map(len, shares))
    parts = world.all_gather(functional.pad(logits, (0, widest - logits.shape[-1])))
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
    units = (probs * _UNITS_OF_ONE).long()  # a power of two: exact
    return torch.cumsum(units, dim=-1, out=units).double().div_(_UNITS_OF_ONE)


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
    whole = probs.shape[-1] // _SUMMED_TOKENS * _SUMMED_TOKENS
    sums = [probs[:, :whole].unflatten(-1, (-1, _SUMMED_TOKENS)).sum(dim=-1)] if whole else []
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
    inside = torch.arange(_SUMMED_TOKENS, device=probs.device)
    places = block * _SUMMED_TOKENS + inside
    weights = probs.gather(1, places.clamp(max=probs.shape[-1] - 1)).masked_fill(places >= probs.shape[-1], 0.0)
    place = torch.searchsorted(running_sums(weights), wanted - before, right=True)
    # A block summed in another order may differ in the last digit: do not go past the last entry with weight.
    last = ((weights > 0) * (inside + 1)).argmax(dim=1, keepdim=True)
    return (block * _SUMMED_TOKENS + torch.minimum(place, last)).squeeze(1)


def truncated(logits: Tensor, rows: SamplingRows, mode: SamplingMode) -> Tensor:
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


@triton.jit
def _weigh_kernel(
    logits,
    integers,
    floats,
    seen,
    scores,
    tops,
    sums,
    all_tops,
    all_sums,
    table,
    vocabulary,
    integer_columns,
    float_columns,
    blocks,
    BLOCK: tl.constexpr,
    SCORES: tl.constexpr,
    PENALTY: tl.constexpr,
    STOPS: tl.constexpr,
    CLEARED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Highest score and sum of exponentials of a block; with SCORES those of penalised scores too, which are stored.

    Also clears the table of the row, CLEARED columns by each block.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    if CLEARED:
        column = block * CLEARED + tl.arange(0, CLEARED)
        tl.store(table + row * COLUMNS + column, tl.zeros([CLEARED], tl.int64), mask=column < COLUMNS)
    logit = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
    divisor = tl.load(floats + row * float_columns).to(tl.float32)
    _store_weights(tl.div_rn(logit, divisor), all_tops + row * blocks + block, all_sums + row * blocks + block)
    if SCORES:
        if PENALTY:
            penalty = tl.load(floats + row * float_columns + 3).to(tl.float32)
            known = tl.load(seen + row * vocabulary + token, mask=inside, other=0) != 0
            logit = tl.where(known, tl.where(logit > 0, tl.div_rn(logit, penalty), logit * penalty), logit)
        own = integers + row * integer_columns
        early = tl.load(own + 2) < tl.load(own + 5)
        for place in range(STOPS):
            logit = tl.where(early & (token == tl.load(own + 6 + place)), float("-inf"), logit)
        score = tl.div_rn(logit, divisor)
        tl.store(scores + row * vocabulary + token, score, mask=inside)
        _store_weights(score, tops + row * blocks + block, sums + row * blocks + block)


@triton.jit
def _store_weights(score, top_at, sum_at):
    top = tl.max(score, 0)
    tl.store(top_at, top)
    tl.store(sum_at, _sum_of_exponentials(score, top))


@triton.jit
def _sum_of_exponentials(score, top):
    return tl.sum(tl.exp(score - tl.where(top == float("-inf"), 0.0, top)), 0)


@triton.jit
def _in_order(bits):
    """Bits of floats as integers in the order of the floats, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _units(weight):
    """Weights of at most 1 as integers."""
    return (tl.where(weight == weight, weight, 0.0).to(tl.float64) * _UNIT).to(tl.int64)


@triton.jit
def _weights_of_blocks(tops, sums, blocks, place):
    """The highest scores of the blocks of a row, that of the row, and the weights of its blocks relative to it."""
    each = tl.load(tops + place, mask=place < blocks, other=float("-inf"))
    top = tl.max(each, 0)
    return each, top, tl.load(sums + place, mask=place < blocks, other=0.0) * tl.exp(each - top)


@triton.jit
def _bin(score, top):
    """The bin of a score; a higher score has no later one."""
    distance = tl.maximum(top - score, 0.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((distance >> _DIGITS) - _FIRST_BIN, 0), _BINS - 1)


@triton.jit
def _limits(integers, floats, row, vocabulary, integer_columns, float_columns):
    """top_k of a row, at least V where it excludes nothing, and top_p."""
    top_k = tl.load(integers + row * integer_columns + 3).to(tl.int32)
    return tl.where(top_k > 0, top_k, vocabulary), tl.load(floats + row * float_columns + 1).to(tl.float32)


@triton.jit
def _lowest_needed(each, top, total, top_k, top_p, vocabulary, blocks):
    """A score below which top_k, or else top_p, excludes all."""
    lowest = tl.full([], float("-inf"), tl.float32)
    if top_k < vocabulary:
        if top_k <= blocks:  # as many blocks have a score from there on
            low, high = top - 128.0, top
            for _ in range(12):
                middle = (low + high) / 2
                enough = tl.sum((each >= middle).to(tl.int32), 0) >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            lowest = tl.where(tl.sum((each >= low).to(tl.int32), 0) >= top_k, low, lowest)
    elif top_p <= 0.9999:  # all tokens below together weigh less than what top_p excludes
        lowest = top + tl.log((1.0 - top_p) * total.to(tl.float32) / (2.0 * vocabulary))
    return lowest


@triton.jit
def _count_kernel(
    scores,
    integers,
    floats,
    tops,
    sums,
    table,
    vocabulary,
    integer_columns,
    float_columns,
    blocks,
    BLOCK: tl.constexpr,
    C_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Counts and weighs the scores of a block by bins; the last program of a row finds the bins of its bounds."""
    row, block, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, C_PAD)
    top_k, top_p = _limits(integers, floats, row, vocabulary, integer_columns, float_columns)
    each, top, weights = _weights_of_blocks(tops + row * blocks, sums + row * blocks, blocks, place)
    total, table = tl.sum(weights.to(tl.float64), 0), table + row * COLUMNS
    if (top_k < vocabulary) | (top_p < 1.0):
        lowest = _lowest_needed(each, top, total, top_k, top_p, vocabulary, blocks)
        if tl.load(tops + row * blocks + block) >= lowest:
            token = block * BLOCK + tl.arange(0, BLOCK)
            score = tl.load(scores + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
            counted, at = (score >= lowest) & (score > float("-inf")), table + _bin(score, top)
            tl.atomic_add(at, tl.full([BLOCK], 1, tl.int64), mask=counted, sem="relaxed")
            tl.atomic_add(at + _BINS, _units(tl.exp(score - top)), mask=counted, sem="relaxed")
    state = table + 2 * _BINS
    tl.debug_barrier()  # all threads have counted before one of them says so
    if tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel") == blocks - 1:
        bin = tl.arange(0, _BINS)
        counts = tl.cumsum(tl.load(table + bin, cache_modifier=".cg"), 0)
        units = tl.cumsum(tl.load(table + _BINS + bin, cache_modifier=".cg"), 0)
        by_top_k = tl.sum((counts < top_k).to(tl.int32), 0)
        by_top_p = tl.sum((units.to(tl.float64) < top_p * (total * _UNIT)).to(tl.int32), 0)
        by_top_k = tl.where(top_k < vocabulary, by_top_k, _BINS)
        by_top_p = tl.where(top_p < 1.0, by_top_p, _BINS)
        high = tl.where(by_top_k < _BINS, by_top_k, by_top_p)
        low = tl.where((by_top_k < _BINS) & (top_p < 1.0), 0, high)  # top_p is of what top_k leaves
        before = bin == low - 1
        tl.store(state + _LOW, low.to(tl.int64))
        tl.store(state + _HIGH, high.to(tl.int64))
        tl.store(state + _COUNT, tl.sum(tl.where(before, counts, 0), 0))
        tl.store(state + _WEIGHT, tl.sum(tl.where(before, units, 0), 0))
        tl.store(state + _BY_TOP_K, (by_top_k < _BINS).to(tl.int64))
        tl.store(state + _ARRIVED, tl.zeros([], tl.int64))


@triton.jit
def _above(found, size, top, bound, BLOCK: tl.constexpr):
    """Scores above a bound: how many, and their weight."""
    count, units = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        score = tl.load(found + place, mask=place < size, other=float("-inf"))
        count += (score > bound).to(tl.int64)
        units += tl.where(score > bound, _units(tl.exp(score - top)), 0)
    return tl.sum(count, 0), tl.sum(units, 0)


@triton.jit
def _lowest_bound(found, size, top, most_tokens, most_units, BLOCK: tl.constexpr):
    """The lowest bound with fewer than `most_tokens` scores above it, and less than `most_units`."""
    least = _in_order(tl.full([], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    most = _in_order(top.to(tl.int32, bitcast=True)).to(tl.int64)
    for _ in range(32):
        if least < most:
            middle = (least + most) >> 1
            bound = _in_order(middle.to(tl.int32)).to(tl.float32, bitcast=True)
            count, units = _above(found, size, top, bound, BLOCK)
            holds = (count < most_tokens) & (units.to(tl.float64) < most_units)
            most = tl.where(holds, middle, most)
            least = tl.where(holds, least, middle + 1)
    return _in_order(least.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _tokens_at(found_tokens, place, size, COLLECTED: tl.constexpr):
    """Tokens of the scores at places: collected ones, or those of the whole row."""
    if COLLECTED:
        return tl.load(found_tokens + place, mask=place < size, other=0)
    return place


@triton.jit
def _last_of_equals(found, found_tokens, size, bound, equals, vocabulary, BLOCK: tl.constexpr, COLLECTED: tl.constexpr):
    """The last token that is left of those with the score of the bound, of which the first `equals` are."""
    least, most = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + vocabulary - 1
    for _ in range(21):
        if least < most:
            middle, count = (least + most) // 2, tl.zeros([BLOCK], tl.int32)
            for first in range(0, size, BLOCK):
                place = first + tl.arange(0, BLOCK)
                score = tl.load(found + place, mask=place < size, other=float("nan"))
                token = _tokens_at(found_tokens, place, size, COLLECTED)
                count += ((score == bound) & (token <= middle)).to(tl.int32)
            enough = tl.sum(count, 0) >= equals
            most = tl.where(enough, middle, most)
            least = tl.where(enough, least, middle + 1)
    return least


@triton.jit
def _bound_row(
    found,
    found_tokens,
    size,
    count_before,
    units_before,
    state,
    top,
    total,
    top_k,
    top_p,
    min_p,
    units,
    bounds,
    lasts,
    vocabulary,
    BLOCK: tl.constexpr,
    MIN_P: tl.constexpr,
    COLLECTED: tl.constexpr,
):
    """The lowest score that top_k and top_p leave, and the last token that has it and is left; adds what is left of the
    unsure bins to the weights of blocks."""
    by_top_k = tl.load(state + _BY_TOP_K) != 0
    most_tokens = tl.where(by_top_k, top_k.to(tl.int64), vocabulary + 1) - count_before
    bound, equals = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int64) + vocabulary
    wanted = top_p * (total * _UNIT)
    if by_top_k:
        bound = _lowest_bound(found, size, top, most_tokens, float("inf"), BLOCK)
        count, weight = _above(found, size, top, bound, BLOCK)
        equals = most_tokens - count
        wanted = top_p * (weight + equals * _units(tl.exp(bound - top))).to(tl.float64)
    if top_p < 1.0:
        fewest = bound
        bound = _lowest_bound(found, size, top, most_tokens, wanted - units_before.to(tl.float64), BLOCK)
        _, weight = _above(found, size, top, bound, BLOCK)
        each, missing = _units(tl.exp(bound - top)).to(tl.float64), wanted - (units_before + weight).to(tl.float64)
        needed = tl.where(each > 0, tl.ceil(missing / each), 1.0)
        equals = tl.where(bound > fewest, vocabulary, equals)
        equals = tl.maximum(tl.minimum(needed, equals.to(tl.float64)), 1.0).to(tl.int64)
    last = _last_of_equals(found, found_tokens, size, bound, equals, vocabulary, BLOCK, COLLECTED)
    low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        score = tl.load(found + place, mask=place < size, other=float("-inf"))
        token, bin, weight = _tokens_at(found_tokens, place, size, COLLECTED), _bin(score, top), tl.exp(score - top)
        kept = ((score > bound) | ((score == bound) & (token <= last))) & (bin >= low) & (bin <= high)
        if MIN_P:
            kept &= weight >= min_p
        tl.atomic_add(units + token // BLOCK, _units(weight), mask=kept & (place < size), sem="relaxed")
    tl.store(bounds, bound)
    tl.store(lasts, last)


@triton.jit
def _truncate_kernel(
    scores,
    integers,
    floats,
    tops,
    sums,
    table,
    found,
    found_tokens,
    units,
    bounds,
    lasts,
    vocabulary,
    integer_columns,
    float_columns,
    blocks,
    BLOCK: tl.constexpr,
    C_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    BOUNDS: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """Weighs a block without what truncation excludes, in integers, and collects what is in the unsure bins, MOST at
    most; the last program of a row decides over these."""
    row, block, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, C_PAD)
    _, top, weights = _weights_of_blocks(tops + row * blocks, sums + row * blocks, blocks, place)
    best, min_p = tl.load(tops + row * blocks + block), tl.load(floats + row * float_columns + 2).to(tl.float32)
    state = table + row * COLUMNS + 2 * _BINS
    found, found_tokens = found + row * MOST, found_tokens + row * MOST
    scores, units = scores + row * vocabulary, units + row * blocks
    if BOUNDS:
        low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
        left = _bin(best, top) <= high
    else:
        left = tl.exp(best - top) >= min_p
    own = tl.zeros([], tl.int64)
    if left:
        token = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + token, mask=token < vocabulary, other=float("-inf"))
        kept, weight = score > float("-inf"), tl.exp(score - top)
        if BOUNDS:
            bin = _bin(score, top)
            unsure = kept & (bin >= low) & (bin <= high)
            count = tl.cumsum(unsure.to(tl.int32), 0)
            at = tl.atomic_add(state + _COLLECTED, tl.max(count, 0).to(tl.int64), sem="relaxed") + count - 1
            tl.store(found + at, score, mask=unsure & (at < MOST))
            tl.store(found_tokens + at, token, mask=unsure & (at < MOST))
            kept &= bin < low
        if MIN_P:
            kept &= weight >= min_p
        own = tl.sum(tl.where(kept, _units(weight), 0), 0)
    tl.store(units + block, own)
    if BOUNDS:
        tl.debug_barrier()  # all threads have collected before one of them says so
        if tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel") == blocks - 1:
            top_k, top_p = _limits(integers, floats, row, vocabulary, integer_columns, float_columns)
            total, collected = tl.sum(weights.to(tl.float64), 0), tl.load(state + _COLLECTED, cache_modifier=".cg")
            bounds, lasts = bounds + row, lasts + row
            zero = tl.zeros([], tl.int64)
            if high == _BINS:
                tl.store(bounds, float("-inf"))
                tl.store(lasts, vocabulary)
            elif collected <= MOST:
                count, weight = tl.load(state + _COUNT), tl.load(state + _WEIGHT)
                given = (found, found_tokens, collected.to(tl.int32), count, weight)
                _bound_row(
                    *given, state, top, total, top_k, top_p, min_p, units, bounds, lasts, vocabulary, BLOCK, MIN_P, True
                )
            else:
                given = (scores, found_tokens, vocabulary, zero, zero)
                _bound_row(
                    *given,
                    state,
                    top,
                    total,
                    top_k,
                    top_p,
                    min_p,
                    units,
                    bounds,
                    lasts,
                    vocabulary,
                    BLOCK,
                    MIN_P,
                    False,
                )


@triton.jit
def _draw_kernel(
    logits,
    integers,
    floats,
    seen,
    scores,
    tops,
    sums,
    all_tops,
    all_sums,
    block_units,
    bounds,
    lasts,
    tokens,
    logprobs,
    sampling_logprobs,
    vocabulary,
    integer_columns,
    float_columns,
    blocks,
    BLOCK: tl.constexpr,
    C_PAD: tl.constexpr,
    SCORES: tl.constexpr,
    SEEN: tl.constexpr,
    BOUNDS: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """The token of a row at which the running sum of weights exceeds uniform * total; appends it to the row."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, C_PAD)
    integers, floats = integers + row * integer_columns, floats + row * float_columns
    logits, divisor = logits + row * vocabulary, tl.load(floats).to(tl.float32)
    if SCORES:
        block_tops, top, weights = _weights_of_blocks(tops + row * blocks, sums + row * blocks, blocks, place)
    else:
        block_tops, top, weights = _weights_of_blocks(all_tops + row * blocks, all_sums + row * blocks, blocks, place)
    units, mass = _units(weights), tl.sum(weights, 0)
    if BOUNDS or MIN_P:
        units = tl.load(block_units + row * blocks + place, mask=place < blocks, other=0)
        mass = tl.where(mass == mass, (tl.sum(units, 0).to(tl.float64) / _UNIT).to(tl.float32), mass)
    drawn = tl.load(integers + 2)
    uniform = tl.load(floats + tl.minimum(4 + drawn, float_columns - 1))
    total = tl.sum(units, 0)
    wanted = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    greedy = tl.load(integers + 4) != 0
    block = tl.sum((tl.cumsum(units, 0) <= wanted).to(tl.int32), 0)
    block = tl.where(greedy, tl.min(tl.where(block_tops == top, place, C_PAD), 0), block)
    block = tl.minimum(block, blocks - 1)
    wanted -= tl.sum(tl.where(place < block, units, 0), 0)
    inside = tl.arange(0, BLOCK)
    token = block * BLOCK + inside
    if SCORES:
        score = tl.load(scores + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    else:
        logit = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(logit, divisor)
    if BOUNDS:
        bound = tl.load(bounds + row)
        score = tl.where((score > bound) | ((score == bound) & (token <= tl.load(lasts + row))), score, float("-inf"))
    weight = tl.exp(score - top)
    if MIN_P:
        weight = tl.where(weight >= tl.load(floats + 2).to(tl.float32), weight, 0.0)
    index = tl.sum((tl.cumsum(_units(weight), 0) <= wanted).to(tl.int32), 0)
    # The sum of a block may differ from that of its integers in the last digit: the last token with weight then.
    index = tl.minimum(index, tl.max(tl.where(weight > 0, inside, 0), 0))
    index = tl.where(greedy, tl.min(tl.where(score == top, inside, BLOCK), 0), index)
    chosen = tl.where(mass == mass, tl.minimum(block * BLOCK + index, vocabulary - 1), 0)
    score = tl.max(tl.where(token == chosen, score, float("-inf")), 0)
    tl.store(sampling_logprobs + row, score - top - tl.log(mass))
    _, top, weights = _weights_of_blocks(all_tops + row * blocks, all_sums + row * blocks, blocks, place)
    score = tl.div_rn(tl.load(logits + chosen).to(tl.float32), divisor)
    tl.store(logprobs + row, score - top - tl.log(tl.sum(weights, 0)))
    tl.store(tokens + row, chosen.to(tl.int64))
    tl.store(integers, chosen.to(tl.int64))
    tl.store(integers + 1, tl.load(integers + 1) + 1)
    tl.store(integers + 2, drawn + 1)
    if SEEN:
        tl.store(seen + row * vocabulary + chosen, 1)


def sample(logits: Tensor, rows: SamplingRows, mode: SamplingMode) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the next token of each row and append it to the row.

    Args:
        logits: [B, V], float32 or the dtype of the model.
        rows: of B rows, the tables of which are read and written.
        mode: what the rows need; two launches without penalties and truncation, four at most.

    Returns:
        tokens [B] int64, their log-probs [B] float32 in the full distribution, and those in the one sampled from.
    """
    logits, (count, vocabulary) = logits.contiguous(), logits.shape
    if vocabulary > _MOST_TOKENS:
        raise ValueError(f"a vocabulary may have {_MOST_TOKENS} tokens at most, got {vocabulary}")
    blocks = triton.cdiv(vocabulary, _BLOCK)
    constants = {"BLOCK": _BLOCK, "C_PAD": triton.next_power_of_2(blocks)}
    with_scores, with_bounds = not mode.draws_from_all, mode.top_k_top_p
    integers, floats = rows.integers, rows.floats
    sizes = (vocabulary, integers.shape[1], floats.shape[1], blocks)
    tops, sums, all_tops, all_sums = logits.new_empty(4, count, blocks, dtype=torch.float32)
    scores = torch.empty_like(logits, dtype=torch.float32) if with_scores else tops
    table = integers.new_empty(count, _COLUMNS) if with_bounds else integers
    tables = (logits, integers, floats, integers if rows.seen is None else rows.seen.view(torch.uint8))
    weights = (scores, tops, sums, all_tops, all_sums)
    _weigh_kernel[count, blocks](
        *tables,
        *weights,
        table,
        *sizes,
        BLOCK=_BLOCK,
        SCORES=with_scores,
        PENALTY=mode.repetition_penalty,
        STOPS=integers.shape[1] - _STOPS if mode.min_new_tokens else 0,
        CLEARED=triton.next_power_of_2(triton.cdiv(_COLUMNS, blocks)) if with_bounds else 0,
        COLUMNS=_COLUMNS,
    )
    units, bounds, lasts = integers, tops, integers
    if with_bounds or mode.min_p:
        units = integers.new_empty(count, blocks)
        bounds, lasts = logits.new_empty(count, dtype=torch.float32), integers.new_empty(count, dtype=torch.int32)
        rows_and_scores = (scores, integers, floats, tops, sums, table)
        found, found_tokens = tops, lasts
        if with_bounds:
            found = logits.new_empty(count, CANDIDATES, dtype=torch.float32)
            found_tokens = integers.new_empty(count, CANDIDATES, dtype=torch.int32)
            _count_kernel[count, blocks](*rows_and_scores, *sizes, **constants, COLUMNS=_COLUMNS)
        _truncate_kernel[count, blocks](
            *rows_and_scores,
            *(found, found_tokens, units, bounds, lasts),
            *sizes,
            **constants,
            COLUMNS=_COLUMNS,
            MOST=CANDIDATES,
            BOUNDS=with_bounds,
            MIN_P=mode.min_p,
        )
    tokens, logprobs = integers.new_empty(count), logits.new_empty(2, count, dtype=torch.float32)
    _draw_kernel[(count,)](
        *tables,
        *weights,
        *(units, bounds, lasts),
        tokens,
        *logprobs,
        *sizes,
        **constants,
        SCORES=with_scores,
        SEEN=rows.seen is not None,
        BOUNDS=with_bounds,
        MIN_P=mode.min_p,
    )
    return tokens, logprobs[0], logprobs[1]
