"""KV blocks: who uses them, which prefixes they hold, and which are evicted when memory runs out.

A block holds keys and values of `BLOCK_TOKENS` consecutive tokens in the layers of one layer group (cache.py).
Sequences with a common prefix share its blocks, which are counted by references. A block without references keeps its
content, and serves later sequences that begin alike, until its memory is needed: the least recently used is evicted
first. A sequence that leaves a cached prefix inside a block copies the block. With recurrent layers, a sequence begins
only with a prefix whose state is saved (saved_states.py).

Source: paged attention (arXiv 2309.06180, sections 4.2 to 4.4); the tree of prefixes as in RadixAttention (arXiv
2312.07104, section 3), here with whole blocks as its edges. Prefixes are compared by their tokens, not by hashes.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid_rlhf.generation.batching.saved_states import SavedStates
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, CacheLayout, blocks_of

_TAILS = 64
"""Most children of a prefix that are compared with a sequence that leaves it within a block, the latest first."""
_STATE_TOKENS = 64
"""Least tokens of a prompt that are computed in a step of their own, so that the state after them can be saved."""


@dataclass(eq=False)
class Block:
    """Keys and values of BLOCK_TOKENS consecutive tokens in one layer group."""

    group: int
    pages: tuple[int, ...]
    references: int = 1
    ready: bool = False
    """Whether the content was computed by a step that has been launched."""
    prefix: _Prefix | None = None
    """Where other sequences find it."""


@dataclass(eq=False)
class _Prefix:
    """A node of the tree: the tokens after its parent, at most BLOCK_TOKENS, and their block in each layer group."""

    tokens: tuple[int, ...]
    parent: _Prefix | None
    blocks: list[Block | None]
    children: dict[tuple[int, ...], _Prefix] = field(default_factory=dict)

    def child(self, tokens: Sequence[int]) -> _Prefix:
        """The child of these tokens, new if there is none."""
        key = tuple(tokens)
        if key not in self.children:
            self.children[key] = _Prefix(key, self, [None] * len(self.blocks))
        return self.children[key]

    @property
    def computed(self) -> list[Block] | None:
        """Its blocks, if all are there and computed."""
        blocks = [block for block in self.blocks if block is not None and block.ready]
        return blocks if len(blocks) == len(self.blocks) else None


@dataclass(frozen=True)
class Match:
    """Blocks of a prefix that a sequence shares, by depth, then layer group."""

    blocks: list[list[Block | None]]
    tail: list[Block] | None = None
    """Blocks of which it shares the first `tail_tokens` tokens."""
    tail_tokens: int = 0
    state: int | None = None
    """Slot of the saved state after all of these tokens, where there are recurrent layers."""
    stops: tuple[int, ...] = ()
    """Tokens after which the state is saved: those that an earlier sequence begins with, and all whole blocks."""


class BlockPool:
    """All blocks of a KV cache."""

    def __init__(self, layout: CacheLayout, pages: int, *, states: int | None = None) -> None:
        """Take the pages of a cache.

        Args:
            layout: how layers share pages.
            pages: of the cache; page 0 is left to rows that are not in use.
            states: of recurrent layers, how many can be saved; none: there are no such layers.
        """
        self.layout = layout
        self._needed = [math.inf if window is None else blocks_of(window - 1) for window in layout.windows]
        """Blocks that the next token attends to, in each layer group."""
        self._states = None if states is None else SavedStates(states)
        self.pages = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._idle_pages = 0
        self._roots: dict[int, _Prefix] = {}
        """By the adapter that computed the keys and values."""

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated, those of blocks without references included."""
        return len(self._free) + self._idle_pages

    @property
    def used_pages(self) -> int:
        """Pages of blocks with references."""
        return self.pages - self.available_pages

    def grow(self, pages: int) -> None:
        """Add pages behind the present ones, up to `pages` in all."""
        self._free[:0] = range(pages - 1, self.pages, -1)
        self.pages = pages - 1

    def grow_states(self, states: int) -> None:
        """Add slots of saved states, up to `states` in all."""
        assert self._states is not None
        self._states.grow(states)

    def allocate(self, group: int) -> Block:
        """A block of a layer group, the content of which is undefined. There must be enough available pages."""
        count = self.layout.pages[group]
        while len(self._free) < count:
            self._evict(next(iter(self._idle)))
        return Block(group, tuple(self._free.pop() for _ in range(count)))

    def share(self, block: Block) -> Block:
        """Add a reference."""
        if not block.references:
            del self._idle[block]
            self._idle_pages -= len(block.pages)
        block.references += 1
        return block

    def release(self, block: Block) -> None:
        """Drop a reference. A block without any keeps its content if it is computed and others can find it."""
        block.references -= 1
        if block.references:
            return
        if block.prefix is not None and block.ready:
            self._idle[block] = None
            self._idle_pages += len(block.pages)
        else:
            self._forget(block)
            self._free.extend(block.pages)

    def forget_prefixes(self) -> None:
        """Nothing cached is found any more, as after a change of the weights."""
        for block in list(self._idle):
            self._evict(block)
        self._roots = {}
        if self._states is not None:
            self._states.clear()

    def _root(self, adapter: int) -> _Prefix:
        return self._roots.setdefault(adapter, _Prefix((), None, [None] * len(self.layout.windows)))

    def match(self, tokens: Sequence[int], adapter: int = 0) -> Match:
        """The longest cached prefix of an adapter; the last token is never part of it, since its hidden state is
        needed."""
        path, whole = self._path(tokens, adapter)
        if self._states is not None:
            return self._match_state(tokens, adapter, path, whole)
        best = max(whole, default=0)
        node = path[best - 1] if best else self._root(adapter)
        return self._with_tail(self._kept(path[:best]), node, tokens[best * BLOCK_TOKENS : -1])

    def _path(self, tokens: Sequence[int], adapter: int) -> tuple[list[_Prefix], list[int]]:
        """The nodes of whole blocks that a sequence begins with, and the numbers of them whose blocks suffice."""
        node, path, whole = self._root(adapter), list[_Prefix](), list[int]()
        present = [0] * len(self._needed)
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            child = node.children.get(tuple(tokens[start : start + BLOCK_TOKENS]))
            if child is None:
                break
            path.append(child)
            node = child
            present = [0 if block is None else count + 1 for count, block in zip(present, child.blocks, strict=True)]
            if all(count >= min(len(path), least) for count, least in zip(present, self._needed, strict=True)):
                whole.append(len(path))
        return path, whole

    def _kept(self, path: Sequence[_Prefix]) -> list[list[Block | None]]:
        """The blocks of a path that are still attended to at its end."""
        return [
            [
                block if len(path) - depth <= least else None
                for block, least in zip(one.blocks, self._needed, strict=True)
            ]
            for depth, one in enumerate(path)
        ]

    def _match_state(self, tokens: Sequence[int], adapter: int, path: Sequence[_Prefix], whole: Sequence[int]) -> Match:
        """The longest prefix whose state is saved, and a longer one whose blocks alone are cached."""
        assert self._states is not None
        for depth in (*reversed(whole), 0):
            node = path[depth - 1] if depth else self._root(adapter)
            start = depth * BLOCK_TOKENS
            rest = tuple(tokens[start : min(start + BLOCK_TOKENS, len(tokens) - 1)])
            tails = [
                child
                for child in itertools.islice(reversed(node.children.values()), _TAILS)
                if child in self._states and rest[: len(child.tokens)] == child.tokens and child.computed is not None
            ]
            end = max(tails, key=lambda child: len(child.tokens), default=node)
            if end in self._states:
                tail, length = (None, 0) if end is node else (end.computed, len(end.tokens))
                stops = self._stops(path, whole, start + length, len(tokens))
                return Match(self._kept(path[:depth]), tail, length, self._states.use(end), stops)
        return Match([], stops=self._stops(path, whole, 0, len(tokens)))

    def _stops(self, path: Sequence[_Prefix], whole: Sequence[int], begun: int, tokens: int) -> tuple[int, ...]:
        """See Match; `begun`: tokens whose state is saved."""
        if self._states is None or not self._states.slots:
            return ()
        computed = [end for end in whole if all(block is None or block.ready for block in path[end - 1].blocks)]
        stops = list[int]()
        for stop in (max(computed, default=0) * BLOCK_TOKENS, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS):
            if stop >= max([begun, *stops]) + _STATE_TOKENS:
                stops.append(stop)
        return tuple(stops)

    def _with_tail(self, blocks: list[list[Block | None]], node: _Prefix, tokens: Sequence[int]) -> Match:
        """Add what a child of the last node shares with the next tokens."""
        found = Match(blocks)
        for child in itertools.islice(reversed(node.children.values()), _TAILS):
            same = _common(child.tokens, tokens)
            if same > found.tail_tokens and (tail := child.computed) is not None:
                found = Match(blocks, tail, same)
        return found

    def index(self, tokens: Sequence[int], blocks: Sequence[Sequence[Block | None]], adapter: int = 0) -> None:
        """Let later sequences of an adapter find blocks; [i][group] holds tokens i * BLOCK_TOKENS and after."""
        node = self._root(adapter)
        for place, held in enumerate(blocks):
            node = node.child(tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
            for group, block in enumerate(held):
                if block is not None and node.blocks[group] is None:
                    self._forget(block)
                    node.blocks[group], block.prefix = block, node

    def save_state(self, tokens: Sequence[int], adapter: int = 0) -> int | None:
        """The slot for the state after tokens whose blocks are indexed; none: there is nothing to save."""
        if self._states is None:
            return None
        node = self._root(adapter)
        for start in range(0, len(tokens), BLOCK_TOKENS):
            child = node.children.get(tuple(tokens[start : start + BLOCK_TOKENS]))
            if child is None:  # a block of it was evicted
                return None
            node = child
        return self._states.add(node)

    def _evict(self, block: Block) -> None:
        del self._idle[block]
        self._idle_pages -= len(block.pages)
        self._forget(block)
        self._free.extend(block.pages)

    def _forget(self, block: Block) -> None:
        """Take a block out of the tree, and the nodes that are left empty."""
        node, block.prefix = block.prefix, None
        if node is None:
            return
        node.blocks[block.group] = None
        while node.parent is not None and not node.children and not any(node.blocks):
            if self._states is not None:
                self._states.drop(node)
            node.parent.children.pop(node.tokens, None)
            node = node.parent


class BlockTable:
    """The blocks of one sequence, in each layer group."""

    def __init__(self, pool: BlockPool, adapter: int = 0) -> None:
        """Args: the blocks, and the adapter that computes them; 0: none."""
        self._pool, self._adapter = pool, adapter
        self.blocks: list[list[Block | None]] = []
        """[i][group]: of tokens i * BLOCK_TOKENS and after; none where no token to come attends to them."""
        self._first = [0] * len(pool.layout.windows)

    def begin(self, match: Match) -> tuple[int, list[tuple[int, int]]]:
        """Share a cached prefix; returns its tokens, and pages to copy, as (source, target).

        With recurrent layers, these are all tokens of the saved state, or none.
        """
        share = self._pool.share
        self.blocks = [[None if block is None else share(block) for block in held] for held in match.blocks]
        self._first = [
            next((place for place, held in enumerate(self.blocks) if held[group] is not None), 0)
            for group in range(len(self._first))
        ]
        whole = len(self.blocks) * BLOCK_TOKENS
        if match.tail is None:
            return whole, []
        if self._pool.available_pages < 2 * self._pool.layout.tables:
            if match.state is None:
                return whole, []
            self.release()  # the state is of all tokens
            self._first = [0] * len(self._first)
            return 0, []
        held = [share(block) for block in match.tail]  # allocating must not evict it
        copies = self._copies(held)
        for block in held:
            self._pool.release(block)
        return whole + match.tail_tokens, copies

    def fork(self, source: BlockTable, tokens: int) -> list[tuple[int, int]]:
        """Share the first tokens of another sequence; returns pages to copy, as (source, target)."""
        whole, share = tokens // BLOCK_TOKENS, self._pool.share
        self.blocks = [[None if block is None else share(block) for block in held] for held in source.blocks[:whole]]
        self._first = list(source._first)
        if tokens % BLOCK_TOKENS == 0:
            return []
        return self._copies([block for block in source.blocks[whole] if block is not None])

    def _copies(self, tail: Sequence[Block]) -> list[tuple[int, int]]:
        own = [self._pool.allocate(block.group) for block in tail]
        self.blocks.append(list(own))
        return [pair for one, other in zip(tail, own, strict=True) for pair in zip(one.pages, other.pages, strict=True)]

    def missing_pages(self, tokens: int) -> int:
        """Pages that `extend` allocates."""
        return max(0, blocks_of(tokens) - len(self.blocks)) * self._pool.layout.tables

    def extend(self, tokens: int) -> None:
        """Allocate blocks for tokens up to a total. There must be enough available pages."""
        while len(self.blocks) < blocks_of(tokens):
            self.blocks.append([self._pool.allocate(group) for group in range(len(self._first))])

    def trim(self, tokens: int) -> None:
        """Release the blocks that no token from number `tokens` on attends to."""
        for group, window in enumerate(self._pool.layout.windows):
            if window is None:
                continue
            end = max(0, tokens - window + 1) // BLOCK_TOKENS
            for place in range(self._first[group], min(end, len(self.blocks))):
                block = self.blocks[place][group]
                if block is not None:
                    self.blocks[place][group] = None
                    self._pool.release(block)
            self._first[group] = max(self._first[group], min(end, len(self.blocks)))

    def index(self, tokens: Sequence[int]) -> None:
        """Let later sequences find the blocks of these tokens, the first of this one."""
        self._pool.index(tokens, self.blocks[: blocks_of(len(tokens))], self._adapter)

    def set_ready(self, start: int, end: int, *, of: int) -> None:
        """Note that the step that computes tokens start to end - 1 was launched, of so many that are found as a prefix:
        a block that a later step completes cannot be copied yet."""
        for held in self.blocks[start // BLOCK_TOKENS : blocks_of(end) if end == of else end // BLOCK_TOKENS]:
            for block in held:
                if block is not None:
                    block.ready = True

    def page_table(self, start: int = 0) -> list[list[int]]:
        """[i - start][table]: the pages of the blocks from the i-th on; 0 where a block is released."""
        empty = [(0,) * count for count in self._pool.layout.pages]
        return [
            [page for group, block in enumerate(held) for page in (empty[group] if block is None else block.pages)]
            for held in self.blocks[start:]
        ]

    def release(self) -> None:
        """Drop all references, the last block's first, so that the end of a prefix is evicted before its beginning."""
        for held in reversed(self.blocks):
            for block in held:
                if block is not None:
                    self._pool.release(block)
        self.blocks = []


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
