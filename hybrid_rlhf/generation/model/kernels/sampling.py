"""Token sampling on a GPU in two to four launches, without a sort of the vocabulary.

The first launch weighs blocks of the vocabulary: the highest score of a block and the sum of its exponentials. The last
one chooses the block, the token in it, and its log-probs, and appends it to its row. Truncation takes two more between
them: one finds the bounds of top_k and top_p by bisection of the bits of the scores, 32 passes at most, and one weighs
the blocks again with what is left. Blocks that have no score above a bound are not read.

The rule and the reference are those of sampler.py. Masses are compared as integers, and sums have a fixed order, so a
row draws the same token in every batch. Nothing synchronises with the host; shapes depend on the batch size alone.

Shapes: B rows, V vocabulary, C blocks of a row. Columns of the tables are those of decode_batch.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.generation.batching.decode_batch import DecodeBatch, SamplingMode

_BLOCK = 1024
_MOST_TOKENS = 1 << 21
"""Largest vocabulary whose weights can be added up as integers."""
_STOPS = 6
"""First column of stop tokens."""


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
    vocabulary,
    integer_columns,
    float_columns,
    blocks,
    BLOCK: tl.constexpr,
    SCORES: tl.constexpr,
    PENALTY: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Highest score and sum of exponentials of a block; with SCORES those of penalised scores too, which are stored."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
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
def _above(scores, tops, top, bound, vocabulary, BLOCK: tl.constexpr):
    """Scores of a row above a bound: how many, and the sum of their exponentials."""
    count, weight = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        if tl.load(tops + first // BLOCK) > bound:
            token = first + tl.arange(0, BLOCK)
            score = tl.load(scores + token, mask=token < vocabulary, other=float("-inf"))
            more = score > bound
            count += more.to(tl.int32)
            weight += tl.where(more, tl.exp(score - top), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _lowest_bound(scores, tops, top, most_tokens, most_weight, vocabulary, BLOCK: tl.constexpr):
    """The lowest bound with fewer than `most_tokens` scores above it, and less than `most_weight`."""
    least = _in_order(tl.full([], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    most = _in_order(top.to(tl.int32, bitcast=True)).to(tl.int64)
    for _ in range(32):
        if least < most:
            middle = (least + most) >> 1
            bound = _in_order(middle.to(tl.int32)).to(tl.float32, bitcast=True)
            count, weight = _above(scores, tops, top, bound, vocabulary, BLOCK)
            holds = (count < most_tokens) & (weight < most_weight)
            most = tl.where(holds, middle, most)
            least = tl.where(holds, least, middle + 1)
    return _in_order(least.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _bounds_kernel(
    scores,
    integers,
    floats,
    tops,
    bounds,
    lasts,
    vocabulary,
    integer_columns,
    float_columns,
    blocks,
    BLOCK: tl.constexpr,
    C_PAD: tl.constexpr,
):
    """The lowest score that top_k and top_p leave in a row, and the last token that has it and is left."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, C_PAD)
    scores, tops = scores + row * vocabulary, tops + row * blocks
    top = tl.max(tl.load(tops + place, mask=place < blocks, other=float("-inf")), 0)
    top_k = tl.load(integers + row * integer_columns + 3).to(tl.int32)
    top_p = tl.load(floats + row * float_columns + 1).to(tl.float32)
    bound = tl.full([], float("-inf"), tl.float32)
    equals = tl.full([], vocabulary, tl.int32)
    if (top_k > 0) & (top_k < vocabulary):
        bound = _lowest_bound(scores, tops, top, top_k, float("inf"), vocabulary, BLOCK)
        count, _ = _above(scores, tops, top, bound, vocabulary, BLOCK)
        equals = top_k - count
    if top_p < 1.0:
        _, weight = _above(scores, tops, top, bound, vocabulary, BLOCK)
        fewest = bound
        each = tl.where(bound == float("-inf"), 0.0, tl.exp(bound - top))
        wanted = top_p * (weight + equals * each)
        limit = tl.where(bound == float("-inf"), vocabulary + 1, top_k)
        bound = _lowest_bound(scores, tops, top, limit, wanted, vocabulary, BLOCK)
        _, weight = _above(scores, tops, top, bound, vocabulary, BLOCK)
        each = tl.exp(bound - top)
        needed = tl.where(each > 0, tl.ceil((wanted - weight) / each), 1.0)
        equals = tl.where(bound > fewest, vocabulary, equals)
        equals = tl.maximum(tl.minimum(needed, equals.to(tl.float32)), 1.0).to(tl.int32)
    last, before = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        if tl.load(tops + first // BLOCK) >= bound:
            token = first + tl.arange(0, BLOCK)
            equal = tl.load(scores + token, mask=token < vocabulary, other=float("nan")) == bound
            rank = before + tl.cumsum(equal.to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(equal & (rank <= equals), token, -1), 0))
            before += tl.sum(equal.to(tl.int32), 0)
    tl.store(bounds + row, bound)
    tl.store(lasts + row, last)


@triton.jit
def _truncate_kernel(
    scores,
    floats,
    tops,
    sums,
    bounds,
    lasts,
    vocabulary,
    integer_columns,
    float_columns,
    blocks,
    BLOCK: tl.constexpr,
    C_PAD: tl.constexpr,
    BOUNDS: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """Excludes tokens of a block, and weighs it again."""
    row, block, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, C_PAD)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    score = tl.load(scores + row * vocabulary + token, mask=inside, other=float("-inf"))
    if BOUNDS:
        bound, last = tl.load(bounds + row), tl.load(lasts + row)
        score = tl.where((score > bound) | ((score == bound) & (token <= last)), score, float("-inf"))
    if MIN_P:
        top = tl.max(tl.load(tops + row * blocks + place, mask=place < blocks, other=float("-inf")), 0)
        min_p = tl.load(floats + row * float_columns + 2).to(tl.float32)
        score = tl.where(tl.exp(score - top) < min_p, float("-inf"), score)
    tl.store(scores + row * vocabulary + token, score, mask=inside)
    top = tl.load(tops + row * blocks + block)
    tl.store(sums + row * blocks + block, _sum_of_exponentials(score, top))


@triton.jit
def _weights_of_blocks(tops, sums, blocks, place):
    """The row's highest score, and the weights of its blocks relative to it."""
    each = tl.load(tops + place, mask=place < blocks, other=float("-inf"))
    top = tl.max(each, 0)
    return each, top, tl.load(sums + place, mask=place < blocks, other=0.0) * tl.exp(each - top)


@triton.jit
def _units(weight):
    """Weights of at most 1 as integers: 2^21 of them can be added up."""
    return (tl.where(weight == weight, weight, 0.0).to(tl.float64) * 4398046511104.0).to(tl.int64)


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
    weight = tl.exp(score - top)
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


def sample(logits: Tensor, rows: DecodeBatch, mode: SamplingMode) -> tuple[Tensor, Tensor, Tensor]:
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
    tables = (logits, integers, floats, integers if rows.seen is None else rows.seen.view(torch.uint8))
    weights = (scores, tops, sums, all_tops, all_sums)
    _weigh_kernel[count, blocks](
        *tables,
        *weights,
        *sizes,
        BLOCK=_BLOCK,
        SCORES=with_scores,
        PENALTY=mode.repetition_penalty,
        STOPS=integers.shape[1] - _STOPS if mode.min_new_tokens else 0,
    )
    if with_bounds or mode.min_p:
        bounds, lasts = logits.new_empty(count, dtype=torch.float32), logits.new_empty(count, dtype=torch.int32)
        if with_bounds:
            _bounds_kernel[(count,)](scores, integers, floats, tops, bounds, lasts, *sizes, **constants)
        _truncate_kernel[count, blocks](
            scores, floats, tops, sums, bounds, lasts, *sizes, **constants, BOUNDS=with_bounds, MIN_P=mode.min_p
        )
    tokens, logprobs = integers.new_empty(count), logits.new_empty(2, count, dtype=torch.float32)
    _draw_kernel[(count,)](
        *tables,
        *weights,
        tokens,
        *logprobs,
        *sizes,
        **constants,
        SCORES=with_scores,
        SEEN=rows.seen is not None,
    )
    return tokens, logprobs[0], logprobs[1]
