"""Token sampling on a GPU in two to four launches, without a sort of the vocabulary.

The first launch weighs blocks of the vocabulary: it computes the highest score of each block and the sum of its
exponentials. The last launch draws the block, the token in it, and its log-probs, and appends the token to its row.
Truncation adds two launches between them, each of which reads the vocabulary at most once, with one program per block.
The first of them counts and weighs scores by their distance from the highest score, in bins that are less than half a
percent of the distance wide, and thus finds the bins that contain the bounds of top_k and top_p. The second collects
the scores in these bins and weighs the blocks again with the scores above the bins. The last program of a row then
finds the exact bounds among the collected scores, and adds those within the bounds. Scores that cannot reach a bound,
judged by the highest scores of the blocks (top_k) or by the total weight (top_p), are not counted, and blocks without
other scores are not read. The vocabulary is thus read at most three times, plus one block to draw the token.

If more than `CANDIDATES` scores are in these bins, the bounds are found in the whole row instead, which its last
program then reads up to a hundred times. This happens if that many scores are nearly equal, as in an untrained model,
or if top_k is that large and top_p is also set.

The torch code is the reference, and is used for sharded vocabularies. Masses are summed and compared as integers, and
float sums have a fixed order, so a row draws the same token in every batch. Nothing synchronises with the host, and
shapes depend only on the batch size.

Shapes: B rows, V vocabulary, C blocks of a row. S rows of the tables, with all integers of a row in one
and all floats in another, so a kernel needs only two addresses.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.functional.triton_language import tl, triton
from hybrid_rlhf.generation.architecture.model_description import share
from hybrid_rlhf.runtime.world import World

INTEGERS = ("token", "position", "drawn", "top_k", "greedy", "min_new_tokens", "biased", "constrained")
FLOATS = ("divisor", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
IN_TEXT = 1
"""Bit of a token of prompt or completion in `SamplingRows.seen`."""
IN_COMPLETION = 2
"""Bit of a token of the completion."""


@dataclass(frozen=True)
class SamplingMode:
    """Sampling features that some of the requests need. The other features are skipped for all rows."""

    greedy: bool
    temperature: bool
    top_k_top_p: bool
    min_p: bool
    repetition_penalty: bool
    bias: bool
    min_new_tokens: bool
    grammar: bool
    top_logprobs: bool

    def covers(self, other: SamplingMode) -> bool:
        """True if requests that need the mode `other` can be sampled in this one."""
        return all(has or not needs for has, needs in zip(astuple(self), astuple(other), strict=True))

    @property
    def draws_from_all(self) -> bool:
        """True if tokens are drawn from the whole distribution, without truncation or penalty."""
        penalises = self.repetition_penalty or self.bias or self.min_new_tokens
        return not (self.top_k_top_p or self.min_p or penalises or self.grammar)


@dataclass
class SamplingRows:
    """Tables of S rows."""

    integers: Tensor
    """[S, 8 + stop tokens] int64, columns INTEGERS, then stop tokens."""
    floats: Tensor
    """[S, 6 + longest completion] float64, columns FLOATS, then uniform numbers."""
    seen: Tensor | None
    """[S, V] uint8, bits IN_TEXT and IN_COMPLETION of each token; none without penalties and biases."""
    bias: Tensor | None
    """[S, V] float32, added to the logits: biases, minus the presence and frequency penalties of the tokens so far;
    none without them."""
    allowed: Tensor | None
    """[S, V / 32] int32, one bit for each token that a row's grammar allows next; none without grammars."""

    def append(self, tokens: Tensor) -> None:
        """Append one sampled token [S] to each row."""
        self.token.copy_(tokens)
        self.advance(1)
        index = tokens[:, None]
        if self.bias is not None and self.seen is not None:
            repeated = self.seen.gather(1, index) >= IN_COMPLETION
            presence, frequency = self.floats[:, 4:5].float(), self.floats[:, 5:6].float()
            cost = torch.where(repeated, frequency, frequency + presence)
            self.bias.scatter_(1, index, self.bias.gather(1, index) - cost)
        if self.seen is not None:
            self.seen.scatter_(1, index, IN_TEXT | IN_COMPLETION)

    def advance(self, tokens: Tensor | int) -> None:
        """Advance position and number of drawn tokens by `tokens`, an int or [S]."""
        self.integers[:, 1:3] += tokens if isinstance(tokens, int) else tokens[:, None]

    @property
    def token(self) -> Tensor:
        """[S] int64, last token of each row."""
        return self.integers[:, 0]

    @property
    def position(self) -> Tensor:
        """[S] int64, position of the last token."""
        return self.integers[:, 1]

    @property
    def drawn(self) -> Tensor:
        """[S] int64, number of tokens of the completion so far."""
        return self.integers[:, 2]

    @property
    def top_k(self) -> Tensor:
        """[S, 1] int64; 0: no top_k."""
        return self.integers[:, 3:4]

    @property
    def greedy(self) -> Tensor:
        """[S] bool, true for rows that take the most likely token."""
        return self.integers[:, 4].bool()

    @property
    def early_stops(self) -> tuple[Tensor, Tensor]:
        """Stop tokens [S, n] int64; and [S, 1] bool, true where they are not allowed yet."""
        return self.integers[:, len(INTEGERS) :], (self.drawn < self.integers[:, 5])[:, None]

    @property
    def forbidden(self) -> Tensor | None:
        """[S, 32 words] bool, true for tokens that the grammar of a row does not allow next; None without grammars."""
        if self.allowed is None:
            return None
        bits = self.allowed[:, :, None] >> torch.arange(32, device=self.allowed.device, dtype=torch.int32)
        return (bits & 1 == 0).flatten(1) & self.integers[:, 7:8].bool()

    @property
    def temperature(self) -> Tensor:
        """[S, 1] float32, divisor of the logits."""
        return self.floats[:, 0:1].float()

    @property
    def top_p(self) -> Tensor:
        """[S, 1] float32; 1: no top_p."""
        return self.floats[:, 1:2].float()

    @property
    def min_p(self) -> Tensor:
        """[S, 1] float32; 0: no min_p."""
        return self.floats[:, 2:3].float()

    @property
    def repetition_penalty(self) -> Tensor:
        """[S, 1] float32; 1: no penalty."""
        return self.floats[:, 3:4].float()

    @property
    def uniform(self) -> Tensor:
        """[S] float64, uniform number for the next token. A finished row repeats its last one."""
        place = (self.drawn + len(FLOATS)).clamp(max=self.floats.shape[1] - 1)
        return self.floats.gather(1, place[:, None]).squeeze(1)


_SUMMED_TOKENS = 128
"""Number of tokens per block in the reference."""
_UNITS_OF_ONE = 2.0**52
"""Integer value of probability 1 in the reference. Sums up to it are exact in float64."""
_BLOCK = 1024
_MOST_TOKENS = 1 << 21
"""Largest vocabulary whose weights can be summed as integers."""
_STOPS = tl.constexpr(len(INTEGERS))
"""Index of the first column of stop tokens."""
_UNIFORMS = tl.constexpr(len(FLOATS))
"""Index of the first column of uniform numbers."""
CANDIDATES = 4096
"""Maximum number of scores of a row that are collected."""
_UNIT = tl.constexpr(2.0**42)
"""Integer value of weight 1, the largest; 2^21 such weights can be summed."""
_COMPLETION = tl.constexpr(IN_COMPLETION)
_SEEN = tl.constexpr(IN_TEXT | IN_COMPLETION)
_BINS = tl.constexpr(4096)
"""Number of bins of scores by distance from the highest, 256 per octave. First bin: below 2^-9; last: from 2^7 on."""
_DIGITS = tl.constexpr(15)
"""Number of low bits of a float32 distance that are dropped for its bin."""
_FIRST_BIN = tl.constexpr((118 << 8) - 1)
"""Remaining bits of distance 2^-9, minus one."""
_ARRIVED, _COLLECTED, _LOW, _HIGH, _COUNT, _WEIGHT, _BY_TOP_K = map(tl.constexpr, range(7))
"""Columns of a row's table after the counts and weights of its bins: number of finished programs, number of collected
scores, first and last undecided bin, count and weight of the bins before them, and 1 if top_k excludes a token."""
_COLUMNS = 2 * 4096 + 8


def gather_vocabulary(logits: Tensor, vocab_size: int, world: World) -> Tensor:
    """Gather the logits [B, V / R] of all ranks; returns [B, V]."""
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
        logits: [B, V / R] float32, for this rank's part of the vocabulary; tokens with -inf are never drawn.
        uniforms: [B] float64 in [0, 1).
        greedy: [B] bool, true for rows that take the most likely token; none: no row does.
        vocabulary: token ids of this rank's part.
        world: the tensor-parallel ranks.

    Returns:
        tokens [B] int64 and their log-probs [B] float32, the same on every rank.
    """
    probs = torch.softmax(logits, dim=-1)
    # log-sum-exp of each rank's logits [R, B]; a single rank does not need it
    mass = None if world.size == 1 else world.all_gather(logits.double().logsumexp(dim=-1))
    cumulative = running_sums(_block_sums(probs))
    # Each rank's share of the total mass, and where this rank's part begins.
    shares = cumulative[:, -1:] if mass is None else mass.softmax(dim=0).transpose(0, 1)
    before = shares[:, : world.rank].sum(dim=-1)
    target = uniforms * shares.sum(dim=-1)
    rank_of = (running_sums(shares) <= target[:, None]).sum(dim=-1).clamp_(max=world.size - 1)
    index = _invert(probs, cumulative, (target - before) / shares[:, world.rank] * cumulative[:, -1])
    if greedy is not None:
        top, best = logits.max(dim=-1)
        index = torch.where(greedy, best, index)
        rank_of = torch.where(greedy, world.all_gather(top).argmax(dim=0), rank_of)
    chosen = probs.gather(1, index[:, None]).squeeze(1).log()
    if mass is None:
        return index, chosen
    mine = rank_of == world.rank
    logprob = chosen.double() + mass[world.rank] - mass.logsumexp(dim=0)
    sent = torch.stack([(index + vocabulary.start).double(), logprob]).where(mine, 0.0)
    tokens, logprobs = world.all_reduce(sent)
    return tokens.long(), logprobs.float()


def running_sums(probs: Tensor) -> Tensor:
    """Return the cumulative sums [..., n] float64 of probabilities, with a resolution of 2^-52.

    The result does not depend on the order of summation. The sum of a row must be at most 1, up to rounding.
    """
    units = (probs * _UNITS_OF_ONE).long()  # a power of two: exact
    return torch.cumsum(units, dim=-1, out=units).double().div_(_UNITS_OF_ONE)


def _block_sums(probs: Tensor) -> Tensor:
    """Return sums [B, blocks] over blocks of 128 tokens; the last block may be shorter."""
    whole = probs.shape[-1] // _SUMMED_TOKENS * _SUMMED_TOKENS
    sums = [probs[:, :whole].unflatten(-1, (-1, _SUMMED_TOKENS)).sum(dim=-1)] if whole else []
    return torch.cat([*sums, probs[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)


def _invert(probs: Tensor, cumulative: Tensor, wanted: Tensor) -> Tensor:
    """Return the index [B] at which the cumulative sum of probs exceeds `wanted`; an entry above 0 if there is one.

    Args:
        probs: [B, V] probabilities.
        cumulative: [B, blocks] float64, cumulative sums of the blocks of probs.
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
    # The sum of a block may differ in the last digit: do not go past the last entry with weight.
    last = ((weights > 0) * (inside + 1)).argmax(dim=1, keepdim=True)
    return (block * _SUMMED_TOKENS + torch.minimum(place, last)).squeeze(1)


def truncated(logits: Tensor, rows: SamplingRows, mode: SamplingMode) -> Tensor:
    """Return logits [B, V] with -inf for tokens that top_k, then top_p, then min_p exclude (Hugging Face's order)."""
    if mode.top_k_top_p:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        place = torch.arange(logits.shape[-1], device=logits.device)
        beyond = (rows.top_k > 0) & (place >= rows.top_k)
        probs = ordered.masked_fill(beyond, -torch.inf).softmax(dim=-1)
        # Keep the smallest set that reaches top_p: exclude a token if those before it already reach top_p.
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
    bias,
    allowed,
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
    BIAS: tl.constexpr,
    GRAMMAR: tl.constexpr,
    STOPS: tl.constexpr,
    CLEARED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute highest score and sum of exponentials of a block; with SCORES, also of penalised scores, and store these.

    Each program also clears CLEARED columns of the row's table.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
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
        row_integers = integers + row * integer_columns
        if BIAS:
            biased = inside & (tl.load(row_integers + 6) != 0)  # other rows read no bias
            logit += tl.load(bias + row * vocabulary + token, mask=biased, other=0.0)
        if GRAMMAR:
            constrained = inside & (tl.load(row_integers + 7) != 0)
            words = allowed + row * tl.cdiv(vocabulary, 32)
            word = tl.load(words + token // 32, mask=constrained, other=-1)
            logit = tl.where(((word >> (token % 32)) & 1) != 0, logit, float("-inf"))
        early = tl.load(row_integers + 2) < tl.load(row_integers + 5)
        for place in range(STOPS):
            logit = tl.where(early & (token == tl.load(row_integers + _STOPS + place)), float("-inf"), logit)
        score = tl.div_rn(logit, divisor)
        tl.store(scores + row * vocabulary + token, score, mask=inside)
        _store_weights(score, tops + row * blocks + block, sums + row * blocks + block)


@triton.jit
def _store_weights(score, top_at, sum_at):
    top = tl.max(score, 0)
    tl.store(top_at, top)
    tl.store(sum_at, tl.sum(tl.exp(score - tl.where(top == float("-inf"), 0.0, top)), 0))


@triton.jit
def _in_order(bits):
    """Map bits of floats to integers in the order of the floats, or back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _units(weight):
    """Convert weights of at most 1 to integers."""
    return (tl.where(weight == weight, weight, 0.0).to(tl.float64) * _UNIT).to(tl.int64)


@triton.jit
def _weights_of_blocks(tops, sums, blocks, place):
    """Highest scores of the blocks of a row, highest score of the row, and weights of the blocks relative to it."""
    block_tops = tl.load(tops + place, mask=place < blocks, other=float("-inf"))
    top = tl.max(block_tops, 0)
    return block_tops, top, tl.load(sums + place, mask=place < blocks, other=0.0) * tl.exp(block_tops - top)


@triton.jit
def _bin(score, top):
    """Bin of a score. A higher score never has a later bin."""
    distance = tl.maximum(top - score, 0.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((distance >> _DIGITS) - _FIRST_BIN, 0), _BINS - 1)


@triton.jit
def _limits(integers, floats, row, vocabulary, integer_columns, float_columns):
    """top_k of a row, at least V if it excludes nothing, and top_p."""
    top_k = tl.load(integers + row * integer_columns + 3).to(tl.int32)
    return tl.where(top_k > 0, top_k, vocabulary), tl.load(floats + row * float_columns + 1).to(tl.float32)


@triton.jit
def _lowest_needed(block_tops, top, total, top_k, top_p, vocabulary, blocks):
    """A score below which top_k, or else top_p, excludes all tokens."""
    lowest = tl.full([], float("-inf"), tl.float32)
    if top_k < vocabulary:
        if top_k <= blocks:  # then at least top_k blocks have a score that high
            low, high = top - 128.0, top
            for _ in range(12):
                middle = (low + high) / 2
                enough = tl.sum((block_tops >= middle).to(tl.int32), 0) >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            lowest = tl.where(tl.sum((block_tops >= low).to(tl.int32), 0) >= top_k, low, lowest)
    elif top_p <= 0.9999:  # all tokens below weigh less than the share that top_p excludes
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
    """Count and weigh the scores of a block by bins. The last program of a row finds the bins of its bounds."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    place = tl.arange(0, C_PAD)
    top_k, top_p = _limits(integers, floats, row, vocabulary, integer_columns, float_columns)
    block_tops, top, weights = _weights_of_blocks(tops + row * blocks, sums + row * blocks, blocks, place)
    total = tl.sum(weights.to(tl.float64), 0)
    table = table + row * COLUMNS
    if (top_k < vocabulary) | (top_p < 1.0):
        lowest = _lowest_needed(block_tops, top, total, top_k, top_p, vocabulary, blocks)
        if tl.load(tops + row * blocks + block) >= lowest:
            token = block * BLOCK + tl.arange(0, BLOCK)
            score = tl.load(scores + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
            counted = (score >= lowest) & (score > float("-inf"))
            at = table + _bin(score, top)
            tl.atomic_add(at, tl.full([BLOCK], 1, tl.int64), mask=counted, sem="relaxed")
            tl.atomic_add(at + _BINS, _units(tl.exp(score - top)), mask=counted, sem="relaxed")
    state = table + 2 * _BINS
    tl.debug_barrier()  # all threads must have counted before the program is marked as finished
    if tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel") == blocks - 1:
        bin = tl.arange(0, _BINS)
        counts = tl.cumsum(tl.load(table + bin, cache_modifier=".cg"), 0)
        units = tl.cumsum(tl.load(table + _BINS + bin, cache_modifier=".cg"), 0)
        by_top_k = tl.sum((counts < top_k).to(tl.int32), 0)
        by_top_p = tl.sum((units.to(tl.float64) < top_p * (total * _UNIT)).to(tl.int32), 0)
        by_top_k = tl.where(top_k < vocabulary, by_top_k, _BINS)
        by_top_p = tl.where(top_p < 1.0, by_top_p, _BINS)
        high = tl.where(by_top_k < _BINS, by_top_k, by_top_p)
        low = tl.where((by_top_k < _BINS) & (top_p < 1.0), 0, high)  # top_p applies to the tokens that top_k keeps
        before = bin == low - 1
        tl.store(state + _LOW, low.to(tl.int64))
        tl.store(state + _HIGH, high.to(tl.int64))
        tl.store(state + _COUNT, tl.sum(tl.where(before, counts, 0), 0))
        tl.store(state + _WEIGHT, tl.sum(tl.where(before, units, 0), 0))
        tl.store(state + _BY_TOP_K, (by_top_k < _BINS).to(tl.int64))
        tl.store(state + _ARRIVED, tl.zeros([], tl.int64))


@triton.jit
def _above(candidates, size, top, bound, BLOCK: tl.constexpr):
    """Number and weight of the scores above a bound."""
    count = tl.zeros([BLOCK], tl.int64)
    units = tl.zeros([BLOCK], tl.int64)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        score = tl.load(candidates + place, mask=place < size, other=float("-inf"))
        count += (score > bound).to(tl.int64)
        units += tl.where(score > bound, _units(tl.exp(score - top)), 0)
    return tl.sum(count, 0), tl.sum(units, 0)


@triton.jit
def _lowest_bound(candidates, size, top, most_tokens, most_units, BLOCK: tl.constexpr):
    """Lowest bound with fewer than `most_tokens` scores above it, which weigh less than `most_units`."""
    least = _in_order(tl.full([], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    most = _in_order(top.to(tl.int32, bitcast=True)).to(tl.int64)
    for _ in range(32):
        if least < most:
            middle = (least + most) >> 1
            bound = _in_order(middle.to(tl.int32)).to(tl.float32, bitcast=True)
            count, units = _above(candidates, size, top, bound, BLOCK)
            holds = (count < most_tokens) & (units.to(tl.float64) < most_units)
            most = tl.where(holds, middle, most)
            least = tl.where(holds, least, middle + 1)
    return _in_order(least.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _tokens_at(candidate_tokens, place, size, whole):
    """Token ids of the scores at `place`: those of the collected scores, or the index in the whole row."""
    collected = tl.load(candidate_tokens + place, mask=place < tl.where(whole, 0, size), other=0)
    return tl.where(whole, place, collected)


@triton.jit
def _last_of_equals(candidates, candidate_tokens, size, whole, bound, equals, vocabulary, BLOCK: tl.constexpr):
    """Last token that is kept among those whose score equals the bound; the first `equals` are kept."""
    least, most = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + vocabulary - 1
    for _ in range(21):
        if least < most:
            middle = (least + most) // 2
            count = tl.zeros([BLOCK], tl.int32)
            for first in range(0, size, BLOCK):
                place = first + tl.arange(0, BLOCK)
                score = tl.load(candidates + place, mask=place < size, other=float("nan"))
                token = _tokens_at(candidate_tokens, place, size, whole)
                count += ((score == bound) & (token <= middle)).to(tl.int32)
            enough = tl.sum(count, 0) >= equals
            most = tl.where(enough, middle, most)
            least = tl.where(enough, least, middle + 1)
    return least


@triton.jit
def _bound_row(
    candidates,
    candidate_tokens,
    size,
    whole,
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
):
    """Store the lowest score that top_k and top_p keep, and the last kept token with that score. Adds the kept scores
    in the undecided bins to the weights of blocks. `whole`: the candidates are the whole row, in order of tokens."""
    by_top_k = tl.load(state + _BY_TOP_K) != 0
    most_tokens = tl.where(by_top_k, top_k.to(tl.int64), vocabulary + 1) - count_before
    bound = tl.full([], float("-inf"), tl.float32)
    equals = tl.zeros([], tl.int64) + vocabulary
    wanted = top_p * (total * _UNIT)
    if by_top_k:
        bound = _lowest_bound(candidates, size, top, most_tokens, float("inf"), BLOCK)
        count, weight = _above(candidates, size, top, bound, BLOCK)
        equals = most_tokens - count
        wanted = top_p * (weight + equals * _units(tl.exp(bound - top))).to(tl.float64)
    if top_p < 1.0:
        fewest = bound
        bound = _lowest_bound(candidates, size, top, most_tokens, wanted - units_before.to(tl.float64), BLOCK)
        _, weight = _above(candidates, size, top, bound, BLOCK)
        per_token = _units(tl.exp(bound - top)).to(tl.float64)
        missing = wanted - (units_before + weight).to(tl.float64)
        needed = tl.where(per_token > 0, tl.ceil(missing / per_token), 1.0)
        equals = tl.where(bound > fewest, vocabulary, equals)
        equals = tl.maximum(tl.minimum(needed, equals.to(tl.float64)), 1.0).to(tl.int64)
    last = _last_of_equals(candidates, candidate_tokens, size, whole, bound, equals, vocabulary, BLOCK)
    low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        score = tl.load(candidates + place, mask=place < size, other=float("-inf"))
        token = _tokens_at(candidate_tokens, place, size, whole)
        bin = _bin(score, top)
        weight = tl.exp(score - top)
        selected = ((score > bound) | ((score == bound) & (token <= last))) & (bin >= low) & (bin <= high)
        if MIN_P:
            selected &= weight >= min_p
        tl.atomic_add(units + token // BLOCK, _units(weight), mask=selected & (place < size), sem="relaxed")
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
    candidates,
    candidate_tokens,
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
    """Weigh a block without the tokens that truncation excludes, in integers, and collect the scores in undecided bins,
    at most MOST. The last program of a row decides about these."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    place = tl.arange(0, C_PAD)
    _, top, weights = _weights_of_blocks(tops + row * blocks, sums + row * blocks, blocks, place)
    best = tl.load(tops + row * blocks + block)
    min_p = tl.load(floats + row * float_columns + 2).to(tl.float32)
    state = table + row * COLUMNS + 2 * _BINS
    candidates = candidates + row * MOST
    candidate_tokens = candidate_tokens + row * MOST
    scores = scores + row * vocabulary
    units = units + row * blocks
    if BOUNDS:
        low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
        left = _bin(best, top) <= high
    else:
        left = tl.exp(best - top) >= min_p
    block_units = tl.zeros([], tl.int64)
    if left:
        token = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + token, mask=token < vocabulary, other=float("-inf"))
        selected = score > float("-inf")
        weight = tl.exp(score - top)
        if BOUNDS:
            bin = _bin(score, top)
            unsure = selected & (bin >= low) & (bin <= high)
            count = tl.cumsum(unsure.to(tl.int32), 0)
            at = tl.atomic_add(state + _COLLECTED, tl.max(count, 0).to(tl.int64), sem="relaxed") + count - 1
            tl.store(candidates + at, score, mask=unsure & (at < MOST))
            tl.store(candidate_tokens + at, token, mask=unsure & (at < MOST))
            selected &= bin < low
        if MIN_P:
            selected &= weight >= min_p
        block_units = tl.sum(tl.where(selected, _units(weight), 0), 0)
    tl.store(units + block, block_units)
    if BOUNDS:
        tl.debug_barrier()  # all threads must have collected before the program is marked as finished
        if tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel") == blocks - 1:
            top_k, top_p = _limits(integers, floats, row, vocabulary, integer_columns, float_columns)
            total = tl.sum(weights.to(tl.float64), 0)
            collected = tl.load(state + _COLLECTED, cache_modifier=".cg")
            bounds = bounds + row
            lasts = lasts + row
            if high == _BINS:
                tl.store(bounds, float("-inf"))
                tl.store(lasts, vocabulary)
            else:
                whole = collected > MOST
                size = collected.to(tl.int32)
                count_before = tl.load(state + _COUNT)
                units_before = tl.load(state + _WEIGHT)
                if whole:
                    candidates = scores
                    size = size * 0 + vocabulary
                    count_before = count_before * 0
                    units_before = units_before * 0
                _bound_row(
                    candidates,
                    candidate_tokens,
                    size,
                    whole,
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
                    BLOCK,
                    MIN_P,
                )


@triton.jit
def _draw_kernel(
    logits,
    integers,
    floats,
    seen,
    bias,
    allowed,
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
    BIAS: tl.constexpr,
    BOUNDS: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """Draw the token of a row at which the cumulative weight exceeds uniform * total, and append it to the row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, C_PAD)
    integers = integers + row * integer_columns
    floats = floats + row * float_columns
    logits = logits + row * vocabulary
    divisor = tl.load(floats).to(tl.float32)
    if SCORES:
        block_tops, top, weights = _weights_of_blocks(tops + row * blocks, sums + row * blocks, blocks, place)
    else:
        block_tops, top, weights = _weights_of_blocks(all_tops + row * blocks, all_sums + row * blocks, blocks, place)
    units = _units(weights)
    mass = tl.sum(weights, 0)
    if BOUNDS or MIN_P:
        units = tl.load(block_units + row * blocks + place, mask=place < blocks, other=0)
        mass = tl.where(mass == mass, (tl.sum(units, 0).to(tl.float64) / _UNIT).to(tl.float32), mass)
    drawn = tl.load(integers + 2)
    uniform = tl.load(floats + tl.minimum(drawn + _UNIFORMS, float_columns - 1))
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
    # The sum of a block may differ from that of its integers in the last digit: do not go past the last with weight.
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
        seen_at = seen + row * vocabulary + chosen
        if BIAS:
            presence = tl.load(floats + 4).to(tl.float32)
            frequency = tl.load(floats + 5).to(tl.float32)
            bias_at = bias + row * vocabulary + chosen
            repeated = tl.load(seen_at) >= _COMPLETION
            tl.store(bias_at, tl.load(bias_at) - tl.where(repeated, frequency, frequency + presence))
        tl.store(seen_at, _SEEN)


def sample(logits: Tensor, rows: SamplingRows, mode: SamplingMode) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the next token of each row and append it to the row.

    Args:
        logits: [B, V], float32 or the dtype of the model.
        rows: tables of B rows, which are read and written.
        mode: sampling features of the rows; two launches without penalties and truncation, at most four with them.

    Returns:
        tokens [B] int64, and their log-probs [B] float32 under the full distribution and the sampled one.
    """
    logits, (count, vocabulary) = logits.contiguous(), logits.shape
    if vocabulary > _MOST_TOKENS:
        raise ValueError(f"a vocabulary may have {_MOST_TOKENS} tokens at most, got {vocabulary}")
    blocks = triton.cdiv(vocabulary, _BLOCK)
    constants = {"BLOCK": _BLOCK, "C_PAD": triton.next_power_of_2(blocks)}
    with_scores = not mode.draws_from_all
    with_bounds = mode.top_k_top_p
    integers = rows.integers
    floats = rows.floats
    sizes = (vocabulary, integers.shape[1], floats.shape[1], blocks)
    tops, sums, all_tops, all_sums = logits.new_empty(4, count, blocks, dtype=torch.float32)
    scores = torch.empty_like(logits, dtype=torch.float32) if with_scores else tops
    table = integers.new_empty(count, _COLUMNS) if with_bounds else integers
    seen = integers if rows.seen is None else rows.seen
    bias = tops if rows.bias is None else rows.bias
    tables = (logits, integers, floats, seen, bias, integers if rows.allowed is None else rows.allowed)
    weights = (scores, tops, sums, all_tops, all_sums)
    _weigh_kernel[count, blocks](
        *tables,
        *weights,
        table,
        *sizes,
        BLOCK=_BLOCK,
        SCORES=with_scores,
        PENALTY=mode.repetition_penalty,
        BIAS=mode.bias,
        GRAMMAR=mode.grammar,
        STOPS=integers.shape[1] - len(INTEGERS) if mode.min_new_tokens else 0,
        CLEARED=triton.next_power_of_2(triton.cdiv(_COLUMNS, blocks)) if with_bounds else 0,
        COLUMNS=_COLUMNS,
    )
    units = integers
    bounds = tops
    lasts = integers
    if with_bounds or mode.min_p:
        units = integers.new_empty(count, blocks)
        bounds = logits.new_empty(count, dtype=torch.float32)
        lasts = integers.new_empty(count, dtype=torch.int32)
        rows_and_scores = (scores, integers, floats, tops, sums, table)
        candidates = tops
        candidate_tokens = lasts
        if with_bounds:
            candidates = logits.new_empty(count, CANDIDATES, dtype=torch.float32)
            candidate_tokens = integers.new_empty(count, CANDIDATES, dtype=torch.int32)
            _count_kernel[count, blocks](*rows_and_scores, *sizes, **constants, COLUMNS=_COLUMNS)
        _truncate_kernel[count, blocks](
            *rows_and_scores,
            *(candidates, candidate_tokens, units, bounds, lasts),
            *sizes,
            **constants,
            COLUMNS=_COLUMNS,
            MOST=CANDIDATES,
            BOUNDS=with_bounds,
            MIN_P=mode.min_p,
        )
    tokens = integers.new_empty(count)
    logprobs = logits.new_empty(2, count, dtype=torch.float32)
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
        BIAS=mode.bias,
        BOUNDS=with_bounds,
        MIN_P=mode.min_p,
    )
    return tokens, logprobs[0], logprobs[1]
