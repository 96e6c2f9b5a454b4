"""Rows that begin alike: their common tokens, a prefix, pass through a model once.

In a causal model equal beginnings have equal states, so prefixes are found in the ids, and no caller has to name them:
prompts of several completions, of pairs and of ranked lists.

The packed row has the prefixes first, together with rows that share nothing, then the rests of the other rows, whose
positions continue those of their prefixes. States are read once for each row that has the token, which sums their
gradients, so heads and losses do not change.

Source: Prefix Grouper (arXiv 2506.05433). Deviations: prefixes are found in the ids, and the rests of all prefixes
share an attention call, for which each has a copy of its prefix's keys.

Shapes: B rows, T time, N real tokens of all rows, M tokens of the packed row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.models.packing.rows import NO_PREFIX

LEAST_TOKENS = 16
"""Tokens of the shortest prefix."""
LEAST_SHARE = 0.1
"""Share of the tokens that prefixes must save, as rests take a further attention call and copies of keys."""


@dataclass(frozen=True)
class SharedRows:
    """The rows of a packed row with prefixes."""

    lengths: list[int]
    """Tokens of prefixes and whole rows, longest first, then of rests, those with the most attention scores first."""
    prefixes: list[int]
    """The row that each row continues, NO_PREFIX for those that are not rests."""
    first: Tensor
    """[M] index of each token among the N, at its first occurrence."""
    positions: Tensor
    """[M] position of each token in its sequence."""
    order: Tensor
    """[N] index in the packed row of each real token of [B, T]."""

    @property
    def saved(self) -> list[int]:
        """Tokens of the prefix of each row but the first that has it."""
        shared = [prefix for prefix in self.prefixes if prefix != NO_PREFIX]
        return [self.lengths[prefix] for prefix, rows in Counter(shared).items() for _ in range(rows - 1)]

    @property
    def scores(self) -> list[int]:
        """Attention scores of each row."""
        shared = [0 if prefix == NO_PREFIX else self.lengths[prefix] for prefix in self.prefixes]
        return [own * (own + before) for own, before in zip(self.lengths, shared, strict=True)]

    @staticmethod
    def of(input_ids: Tensor, real: Tensor, routes: Tensor | None = None) -> SharedRows | None:
        """The rows of [B, T] with the prefixes that save most tokens; None if they save too few.

        Args:
            input_ids: [B, T].
            real: [B, T] bool, true on real tokens.
            routes: [B, T, E, k], experts that are given to tokens; tokens with others are other tokens.
        """
        same = (input_ids[1:] == input_ids[:-1]) & real[1:] & real[:-1]
        if routes is not None:
            same &= (routes[1:] == routes[:-1]).flatten(2).all(dim=2)
        common = torch.nn.functional.pad(same.long().cumprod(dim=1).sum(dim=1), (0, 1))
        lengths, common_tokens = torch.stack([real.sum(dim=1), common]).tolist()
        runs = like_beginnings(lengths, common_tokens)
        if not is_worth(sum((rows - 1) * shared for rows, shared in runs), sum(lengths)):
            return None
        return SharedRows._of_runs(lengths, runs, input_ids.device)

    @staticmethod
    def _of_runs(lengths: Sequence[int], runs: Sequence[tuple[int, int]], device: torch.device) -> SharedRows:
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        firsts = torch.tensor([0, *(rows for rows, _ in runs)]).cumsum(0).tolist()
        longest_first = sorted(range(len(runs)), key=lambda run: -runs[run][1])
        place_of = {run: place for place, run in enumerate(longest_first)}
        rests = [
            (row, run) for run, (rows, _) in enumerate(runs) if rows > 1 for row in range(firsts[run], firsts[run + 1])
        ]
        rests.sort(key=lambda rest: -(lengths[rest[0]] - runs[rest[1]][1]) * lengths[rest[0]])
        # of each row of the packed row: its tokens, its first token among the N, its first position, its prefix
        roots = [(runs[run][1], starts[firsts[run]], 0, NO_PREFIX) for run in longest_first]
        others = [
            (lengths[row] - runs[run][1], starts[row] + runs[run][1], runs[run][1], place_of[run]) for row, run in rests
        ]
        own, sources, positions, prefixes = map(list, zip(*roots, *others, strict=True))
        packed = torch.tensor([0, *own]).cumsum(0).tolist()
        rest_of = {row: len(roots) + place for place, (row, _) in enumerate(rests)}
        order = []
        for run, (rows, shared) in enumerate(runs):
            for row in range(firsts[run], firsts[run] + rows):
                order.append((packed[place_of[run]], shared))
                if row in rest_of:
                    order.append((packed[rest_of[row]], own[rest_of[row]]))
        return SharedRows(
            own,
            prefixes,
            _spans(sources, own).to(device),
            _spans(positions, own).to(device),
            _spans(*zip(*order, strict=True)).to(device),
        )


def is_worth(saved: float, tokens: float, *, prefix: float = LEAST_TOKENS) -> bool:
    """Return True if rows with so many tokens share prefixes that save some of them, the shortest of `prefix`."""
    return prefix >= LEAST_TOKENS and saved > LEAST_SHARE * tokens


def like_beginnings(lengths: Sequence[int], common: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers of neighbouring rows that share a prefix, and its tokens: those that save most tokens. A row that shares
    none is alone, with all its tokens.

    Args:
        lengths: tokens of each row.
        common: number of first tokens that each row has in common with the next.
    """
    best = [(0, 0, 0)]  # for the rows before each row: saved tokens, first row of the last run, tokens of its prefix
    for stop, length in enumerate(lengths, 1):
        choice = best[-1][0], stop - 1, length
        shared = length - 1  # so that each row has a rest
        for start in range(stop - 2, -1, -1):
            shared = min(shared, common[start], lengths[start] - 1)
            if shared < LEAST_TOKENS:
                break
            saved = best[start][0] + (stop - 1 - start) * shared
            if saved > choice[0]:
                choice = saved, start, shared
        best.append(choice)
    runs = []
    stop = len(lengths)
    while stop:
        _, start, shared = best[stop]
        runs.append((stop - start, shared))
        stop = start
    return runs[::-1]


def _spans(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The numbers from each start on, as many as the lengths."""
    counts = torch.tensor(lengths)
    offsets = torch.tensor(starts) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + offsets.repeat_interleave(counts)
