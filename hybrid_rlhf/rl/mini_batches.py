"""The mini-batches of a rollout, and the micro-batches of each rank.

Lengths decide which rows a rank computes, so that all ranks have the same work; every rank computes the same plan. The
rows are sharded over the ranks of the role that computes, so a plan serves every role.

A mini-batch has whole prompts, as in verl; equal sizes divide some between two. Where models compute shared prefixes
once (models/packing/prefixes.py), the rows of a prompt in one mini-batch are neighbours in one micro-batch, as far as
its size and the balance of the ranks allow. Which rows a mini-batch has does not depend on it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.loaders import shard_batch
from hybrid_rlhf.models.packing.prefixes import is_worth
from hybrid_rlhf.rl.sharing import RowIndex
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class MiniBatchPlan:
    """The rows of each mini-batch, and the part of them that a rank computes."""

    index: RowIndex
    """The numbers of the rows, and where they are."""
    rows: list[list[int]]
    """[mini-batch][unit]; a unit is `together` neighbouring rows. Rows that are not learned from are in none."""
    tokens: list[float]
    """Response tokens of each mini-batch over all ranks, the denominator of its losses."""
    sequences: list[int]
    """Completions of each mini-batch over all ranks."""
    unit_lengths: list[int]
    """Tokens of each unit, with its padding where the model computes it."""
    begins: list[int]
    """Tokens that all rows of a unit have in common, those of the prompt."""
    prompts: list[int]
    """Place of the prompt of each unit."""
    together: int
    size: MicroBatches
    """Size of a micro-batch, in units."""

    def rows_of(self, mini_batch: int) -> list[int]:
        """The rows of a mini-batch, over all ranks."""
        return [unit * self.together + place for unit in self.rows[mini_batch] for place in range(self.together)]

    def mini_batches(self, world: World) -> list[list[list[int | None]]]:
        """[mini-batch][micro-batch][row] for this rank, one of those that share the rows; None is an empty row."""
        return [[self._rows(part) for part in self._shard(units, world)] for units in self.rows]

    def _rows(self, units: Sequence[int | None]) -> list[int | None]:
        together = range(self.together)
        return [None if unit is None else unit * self.together + place for unit in units for place in together]

    def _shard(self, units: Sequence[int], world: World) -> list[list[int | None]]:
        """This rank's micro-batches of a mini-batch, in units."""
        rank, ranks, size = world.rank, world.size, self.size
        if not size.shares_prefixes:
            lengths = [self.unit_lengths[unit] for unit in units]
            return shard_batch(units, lengths, rank=rank, ranks=ranks, micro_batches=size)
        largest = max(Counter(self.prompts[unit] for unit in units).values())
        pieces = [2**power for power in range(largest.bit_length())] if ranks > 1 else [1]
        bundles, lengths = min(
            (self._bundles(units, number) for number in pieces), key=lambda found: _most_of_a_rank(found[1], ranks)
        )
        if size.rows is not None:
            lengths, size = [len(bundle) for bundle in bundles], replace(size, rows=None, tokens=size.rows)
        parts = shard_batch(range(len(bundles)), lengths, rank=rank, ranks=ranks, micro_batches=size)
        # in their order, so that bundles of one prompt are neighbours
        units_of = [sorted(unit for bundle in part if bundle is not None for unit in bundles[bundle]) for part in parts]
        return [[*found] if found else [None] for found in units_of]

    def _bundles(self, units: Sequence[int], pieces: int) -> tuple[list[list[int]], list[int]]:
        """Units of one prompt that are computed together, with the prompt once, and the tokens of each bundle. The
        units of a prompt are in at least `pieces` bundles, if there are so many, and in single ones if they share
        little."""
        by_prompt: dict[int, list[int]] = {}
        for unit in units:
            by_prompt.setdefault(self.prompts[unit], []).append(unit)
        found: list[tuple[list[int], int]] = []
        for of_prompt in by_prompt.values():
            begin = min(self.begins[unit] for unit in of_prompt)
            saved = (len(of_prompt) * self.together - 1) * begin
            if not is_worth(saved, sum(self.unit_lengths[unit] for unit in of_prompt), prefix=begin):
                found += [([unit], self.unit_lengths[unit]) for unit in of_prompt]
                continue
            most = min(-(-len(of_prompt) // pieces), self.size.rows or len(of_prompt))
            bundle: list[int] = []
            tokens = begin
            for unit in sorted(of_prompt):
                rest = self.unit_lengths[unit] - self.together * begin
                if bundle and (len(bundle) == most or (self.size.rows is None and tokens + rest > self.size.tokens)):
                    found.append((bundle, tokens))
                    bundle, tokens = [], begin
                bundle.append(unit)
                tokens += rest
            found.append((bundle, tokens))
        return [bundle for bundle, _ in found], [tokens for _, tokens in found]

    def micro_batches(
        self, world: World | None, tensor_parallel: int = 1, shares_prefixes: bool = True, as_trained: bool = False
    ) -> list[list[int | None]]:
        """This rank's micro-batches of all mini-batches for a forward; [] on a rank outside of those that share the
        rows. `shares_prefixes` is False for a model that computes each row alone, though the others do not;
        `as_trained` is True for the micro-batches of the updates, which are smaller.

        Tensor-parallel groups of consecutive ranks share the rows: the ranks of a group have the same. They, and the
        copy of a critic, have inference weights, with which each computes its rows alone.

        Without ranks, the rows that this rank holds: all completions of its prompts.
        """
        if world is None:
            return [[*self.index.mine]]
        if not world.is_member:
            return []
        shared = replace(world, rank=world.rank // tensor_parallel, size=world.size // tensor_parallel)
        together = self.size.ranks
        tokens = self.size.tokens * (1 if as_trained else self.size.forward_factor)
        size = replace(self.size, tokens=tokens, shares_prefixes=self.size.shares_prefixes and shares_prefixes)
        alone = replace(size, ranks=1, tokens=size.tokens // together)
        plan = replace(self, size=alone if tensor_parallel > 1 or world.size % together else size)
        return [micro_batch for mini_batch in plan.mini_batches(shared) for micro_batch in mini_batch]


class MiniBatchPlanner:
    """Divides rows into mini-batches; computes the same plan on every rank."""

    def __init__(self, micro_batches: MicroBatches, *, seed: int, world: World) -> None:
        """Take the size of a micro-batch, the seed of the shuffles, and the ranks that hold rows."""
        self._micro_batches = micro_batches
        self._seed = seed
        self._world = world

    def plan(
        self, rollout: Rollout, *, step: int = 0, epoch: int = 0, mini_batches: int = 1, together: int = 1
    ) -> MiniBatchPlan:
        """The mini-batches of a pass over a rollout. Every rank calls.

        Args:
            rollout: this rank's rows.
            step: key of the shuffle.
            epoch: key of the shuffle.
            mini_batches: number of equal parts.
            together: neighbouring rows that stay in one micro-batch.
        """
        index = rollout.numbered(self._world)
        micro_batches = self._micro_batches
        lengths = index.lengths.view(-1, together)
        unit_lengths = lengths.amax(dim=1) * together if micro_batches.padded else lengths.sum(dim=1)
        tokens = index.responses.view(-1, together).sum(dim=1).tolist()
        if micro_batches.rows is not None:
            micro_batches = replace(micro_batches, rows=max(1, micro_batches.rows // together))
        units = np.arange(len(tokens))
        if rollout.learned is not None:
            units = units[index.gather(rollout.learned).view(-1, together).all(dim=1).numpy()]
        order = units[np.random.default_rng([self._seed, step, epoch]).permutation(len(units))].tolist()
        prompts = index.prompts[::together].tolist()
        place_of = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts[unit] for unit in order))}
        order.sort(key=lambda unit: place_of[prompts[unit]])
        size = max(1, -(-len(order) // mini_batches))
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        return MiniBatchPlan(
            index,
            parts,
            [float(sum(tokens[i] for i in part)) for part in parts],
            [len(part) * together for part in parts],
            unit_lengths.tolist(),
            index.begins.view(-1, together).amin(dim=1).tolist(),
            prompts,
            together,
            micro_batches,
        )


def _most_of_a_rank(lengths: Sequence[int], ranks: int) -> int:
    """Tokens of the rank with most, if each bundle, longest first, goes to the rank with fewest."""
    loads = [0] * ranks
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads)
