"""KV blocks: their references, the prefixes they store, and their eviction when memory runs out.

A block holds keys and values of `BLOCK_TOKENS` consecutive tokens in the layers of one layer group (cache.py).
Sequences with a common prefix share its blocks, which count their references. A block without references keeps its
content, for later sequences with the same prefix, until its memory is needed; the least recently used block is evicted
first. A sequence that diverges from a cached prefix inside a block copies the block.

With recurrent layers, a sequence can only reuse a prefix whose state is saved, since a state belongs to one length.
States are saved at three places: at the end of a sequence, where the next turn of a conversation continues; where a
sequence diverges from an earlier one, as after a common system prompt; and after the last whole block of a prompt, for
its further samples. The least recently used state is evicted.

Source: paged attention (arXiv 2309.06180, sections 4.2 to 4.4); the prefix tree is that of RadixAttention (arXiv
2312.07104, section 3), here with whole blocks as its edges. Prefixes are compared by their tokens, not by hashes.
Marconi (arXiv 2411.19379, section 4.1) saves the first two kinds of states; vLLM saves the third.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, CacheLayout, blocks_of

_TAILS = 64
"""Maximum number of children of a prefix that are compared with a sequence for a partly shared block, latest first."""
_STATE_TOKENS = 64
"""Minimum number of prompt tokens that are computed in a separate step to save the state after them."""


@dataclass(eq=False)
class Block:
    """Keys and values of BLOCK_TOKENS consecutive tokens in one layer group."""

    group: int
    pages: tuple[int, ...]
    references: int = 1
    ready: bool = False
    """True if the content is computed by a step that was launched."""
    prefix: _Prefix | None = None
    """Node of the prefix tree under which other sequences find the block; none: it is not in the tree."""


@dataclass(eq=False)
class _Prefix:
    """A node of the prefix tree: the tokens after its parent, at most BLOCK_TOKENS, and their block in each layer
    group."""

    tokens: tuple[int, ...]
    parent: _Prefix | None
    blocks: list[Block | None]
    children: dict[tuple[int, ...], _Prefix] = field(default_factory=dict)

    def child(self, tokens: Sequence[int]) -> _Prefix:
        """Return the child with these tokens, and create it if there is none."""
        key = tuple(tokens)
        if key not in self.children:
            self.children[key] = _Prefix(key, self, [None] * len(self.blocks))
        return self.children[key]

    @property
    def computed(self) -> list[Block] | None:
        """The blocks of the node, or None unless all are present and computed."""
        blocks = [block for block in self.blocks if block is not None and block.ready]
        return blocks if len(blocks) == len(self.blocks) else None


@dataclass(frozen=True)
class Match:
    """Cached blocks that a sequence can begin with."""

    blocks: list[list[Block | None]]
    """Whole blocks of the prefix, by depth, then layer group; none where the sequence no longer attends to a block."""
    tail: list[Block] | None = None
    """The block after these in each layer group, of which the sequence shares the first `tail_tokens` tokens."""
    tail_tokens: int = 0
    state: int | None = None
    """Slot of the saved state after all of these tokens; none without recurrent layers, or if there is no state."""
    stops: tuple[int, ...] = ()
    """Numbers of tokens after which the state is saved: the prefix shared with an earlier sequence, and all whole
    blocks."""


class SavedStates:
    """Maps prefixes to the slots of their saved states in recurrent layers."""

    def __init__(self, slots: int) -> None:
        """Args: number of slots; 0 if there are no recurrent layers."""
        self._slots: OrderedDict[_Prefix, int] = OrderedDict()
        """Least recently used first."""
        self.slots = slots
        """Total number of slots."""
        self._free = list(range(slots - 1, -1, -1))

    def grow(self, slots: int) -> None:
        """Add slots after the present ones, up to `slots` in total."""
        self._free[:0] = range(slots - 1, self.slots - 1, -1)
        self.slots = slots

    def __contains__(self, prefix: _Prefix) -> bool:
        """True if the state after a prefix is saved."""
        return prefix in self._slots

    def use(self, prefix: _Prefix) -> int:
        """Return the slot of a saved state, and mark it as the most recently used."""
        self._slots.move_to_end(prefix)
        return self._slots[prefix]

    def add(self, prefix: _Prefix) -> int | None:
        """Return a slot in which to save a state, evicting one if necessary; None if it is already saved or there are
        no slots."""
        if prefix in self._slots:
            self._slots.move_to_end(prefix)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._slots:
            _, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[prefix] = slot
        return slot

    def drop(self, prefix: _Prefix) -> None:
        """Remove a state if it is saved."""
        slot = self._slots.pop(prefix, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Remove all states."""
        for prefix in list(self._slots):
            self.drop(prefix)


class BlockPool:
    """All blocks of a KV cache."""

    def __init__(self, layout: CacheLayout, pages: int, *, states: int | None = None) -> None:
        """Manage the pages of a cache, all of which are free.

        Args:
            layout: assignment of layers to pages.
            pages: number of pages of the cache; page 0 is reserved for unused rows.
            states: number of states of recurrent layers that can be saved; none: there are no such layers.
        """
        self.layout = layout
        self._needed = [math.inf if window is None else blocks_of(window - 1) for window in layout.windows]
        """Number of blocks that the next token attends to, in each layer group."""
        self._has_states = states is not None
        self._states = SavedStates(states or 0)
        self.pages = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._idle_pages = 0
        self._roots: dict[int, _Prefix] = {}
        """Root of the prefix tree by the number of the adapter that computed the keys and values."""

    @property
    def available_pages(self) -> int:
        """Number of pages that can be allocated, including those of blocks without references."""
        return len(self._free) + self._idle_pages

    @property
    def used_pages(self) -> int:
        """Number of pages of blocks with references."""
        return self.pages - self.available_pages

    def grow(self, pages: int) -> None:
        """Add pages after the present ones, up to `pages` in total."""
        self._free[:0] = range(pages - 1, self.pages, -1)
        self.pages = pages - 1

    def grow_states(self, states: int) -> None:
        """Add slots for saved states, up to `states` in total."""
        self._states.grow(states)

    def allocate(self, group: int) -> Block:
        """Return a new block of a layer group, with undefined content. Enough pages must be available."""
        count = self.layout.pages[group]
        while len(self._free) < count:
            self._evict(next(iter(self._idle)))
        return Block(group, tuple(self._free.pop() for _ in range(count)))

    def share(self, block: Block) -> Block:
        """Add a reference to a block, and return the block."""
        if not block.references:
            del self._idle[block]
            self._idle_pages -= len(block.pages)
        block.references += 1
        return block

    def release(self, block: Block) -> None:
        """Drop a reference. A block without references keeps its content if it is computed and in the prefix tree."""
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
        """Remove all cached prefixes, as after a change of the weights."""
        for block in list(self._idle):
            self._evict(block)
        self._roots = {}
        self._states.clear()

    def _root(self, adapter: int) -> _Prefix:
        return self._roots.setdefault(adapter, _Prefix((), None, [None] * len(self.layout.windows)))

    def match(self, tokens: Sequence[int], adapter: int = 0) -> Match:
        """Return the longest cached prefix of a sequence. The last token is never part of it: its hidden state is
        needed."""
        path, whole = self._path(tokens, adapter)
        if self._has_states:
            return self._match_state(tokens, adapter, path, whole)
        best = max(whole, default=0)
        node = path[best - 1] if best else self._root(adapter)
        return self._with_tail(self._kept(path[:best]), node, tokens[best * BLOCK_TOKENS : -1])

    def _path(self, tokens: Sequence[int], adapter: int) -> tuple[list[_Prefix], list[int]]:
        """Return the nodes of the whole blocks that a sequence begins with, and the depths at which all needed blocks
        are cached."""
        node = self._root(adapter)
        path = list[_Prefix]()
        whole = list[int]()
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
        """Return the blocks of a path, None in place of those that tokens after its end do not attend to."""
        return [
            [
                block if len(path) - depth <= least else None
                for block, least in zip(node.blocks, self._needed, strict=True)
            ]
            for depth, node in enumerate(path)
        ]

    def _match_state(self, tokens: Sequence[int], adapter: int, path: Sequence[_Prefix], whole: Sequence[int]) -> Match:
        """Return the longest prefix whose state is saved. Its stops include a longer prefix of which only blocks are
        cached."""
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
        """Return `Match.stops`; `begun` is the number of tokens that the sequence takes from the cache."""
        if not self._states.slots:
            return ()
        computed = [end for end in whole if all(block is None or block.ready for block in path[end - 1].blocks)]
        stops = list[int]()
        for stop in (max(computed, default=0) * BLOCK_TOKENS, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS):
            if stop >= max([begun, *stops]) + _STATE_TOKENS:
                stops.append(stop)
        return tuple(stops)

    def _with_tail(self, blocks: list[list[Block | None]], node: _Prefix, tokens: Sequence[int]) -> Match:
        """Return a match of `blocks` and the longest start of `tokens` that a child of `node` shares."""
        match = Match(blocks)
        for child in itertools.islice(reversed(node.children.values()), _TAILS):
            same = sum(itertools.takewhile(bool, map(operator.eq, child.tokens, tokens)))
            if same > match.tail_tokens and (tail := child.computed) is not None:
                match = Match(blocks, tail, same)
        return match

    def index(self, tokens: Sequence[int], blocks: Sequence[Sequence[Block | None]], adapter: int = 0) -> None:
        """Add blocks to the prefix tree of an adapter; blocks[i][group] begins with token i * BLOCK_TOKENS."""
        node = self._root(adapter)
        for place, blocks_at in enumerate(blocks):
            node = node.child(tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
            for group, block in enumerate(blocks_at):
                if block is not None and node.blocks[group] is None:
                    self._forget(block)
                    node.blocks[group] = block
                    block.prefix = node

    def save_state(self, tokens: Sequence[int], adapter: int = 0) -> int | None:
        """Return the slot in which to save the state after tokens with indexed blocks; None: it cannot or need not be
        saved."""
        node = self._root(adapter)
        for start in range(0, len(tokens), BLOCK_TOKENS):
            child = node.children.get(tuple(tokens[start : start + BLOCK_TOKENS]))
            if child is None:  # a block of the prefix was evicted
                return None
            node = child
        return self._states.add(node)

    def _evict(self, block: Block) -> None:
        del self._idle[block]
        self._idle_pages -= len(block.pages)
        self._forget(block)
        self._free.extend(block.pages)

    def _forget(self, block: Block) -> None:
        """Remove a block from the prefix tree, and the nodes that are then empty."""
        node = block.prefix
        block.prefix = None
        if node is None:
            return
        node.blocks[block.group] = None
        while node.parent is not None and not node.children and not any(node.blocks):
            self._states.drop(node)
            node.parent.children.pop(node.tokens, None)
            node = node.parent


class BlockTable:
    """The blocks of one sequence, in each layer group."""

    def __init__(self, pool: BlockPool, adapter: int = 0) -> None:
        """Args: the pool of blocks, and the number of the adapter that computes them; 0: none."""
        self._pool = pool
        self._adapter = adapter
        self.blocks: list[list[Block | None]] = []
        """[i][group]: the block that begins with token i * BLOCK_TOKENS; none if no later token attends to it."""
        self.outdated = False
        """True if older weights computed some of the blocks: later sequences do not share them."""

    def begin(self, match: Match) -> tuple[int, list[tuple[int, int]]]:
        """Share a cached prefix; returns the number of its tokens, and the pages to copy as (source, target).

        With recurrent layers, the number is that of the tokens of the saved state, or 0.
        """
        share = self._pool.share
        self.blocks = [[None if block is None else share(block) for block in at_depth] for at_depth in match.blocks]
        whole = len(self.blocks) * BLOCK_TOKENS
        if match.tail is None:
            return whole, []
        if self._pool.available_pages < 2 * self._pool.layout.tables:
            if match.state is None:
                return whole, []
            self.release()  # the saved state includes the tail, which cannot be copied
            return 0, []
        shared = [share(block) for block in match.tail]  # referenced, so that allocating copies cannot evict them
        copies = self._copies(shared)
        for block in shared:
            self._pool.release(block)
        return whole + match.tail_tokens, copies

    def fork(self, source: BlockTable, tokens: int) -> list[tuple[int, int]]:
        """Share the blocks of the first `tokens` tokens of another sequence; returns the pages to copy as (source,
        target)."""
        whole = tokens // BLOCK_TOKENS
        share = self._pool.share
        self.blocks = [
            [None if block is None else share(block) for block in at_place] for at_place in source.blocks[:whole]
        ]
        self.outdated = source.outdated
        if tokens % BLOCK_TOKENS == 0:
            return []
        return self._copies([block for block in source.blocks[whole] if block is not None])

    def _copies(self, tail: Sequence[Block]) -> list[tuple[int, int]]:
        copies = [self._pool.allocate(block.group) for block in tail]
        self.blocks.append(list(copies))
        return [
            pair
            for source, target in zip(tail, copies, strict=True)
            for pair in zip(source.pages, target.pages, strict=True)
        ]

    def missing_pages(self, tokens: int) -> int:
        """Number of pages that `extend` would allocate."""
        return max(0, blocks_of(tokens) - len(self.blocks)) * self._pool.layout.tables

    def extend(self, tokens: int) -> None:
        """Allocate blocks for `tokens` tokens in total. Enough pages must be available."""
        while len(self.blocks) < blocks_of(tokens):
            self.blocks.append([self._pool.allocate(group) for group in range(len(self._pool.layout.windows))])

    def trim(self, tokens: int) -> None:
        """Release the blocks that no token from index `tokens` on attends to."""
        for group, window in enumerate(self._pool.layout.windows):
            if window is None:
                continue
            place = min(max(0, tokens - window + 1) // BLOCK_TOKENS, len(self.blocks))
            unattended = list[Block]()
            while place and (block := self.blocks[place - 1][group]) is not None:  # before it, all are released
                place -= 1
                self.blocks[place][group] = None
                unattended.append(block)
            for block in reversed(unattended):
                self._pool.release(block)

    def index(self, tokens: Sequence[int]) -> None:
        """Add the blocks of these tokens, the first ones of the sequence, to the prefix tree, unless they are
        outdated."""
        if not self.outdated:
            self._pool.index(tokens, self.blocks[: blocks_of(len(tokens))], self._adapter)

    def set_ready(self, start: int, end: int, *, of: int) -> None:
        """Mark the blocks of tokens start to end - 1 as computed by a launched step; `of` is the length of the prompt.

        A block that a later step completes is not marked, because it cannot be copied yet.
        """
        for at_place in self.blocks[start // BLOCK_TOKENS : blocks_of(end) if end == of else end // BLOCK_TOKENS]:
            for block in at_place:
                if block is not None:
                    block.ready = True

    def page_table(self, start: int = 0) -> list[list[int]]:
        """Return the pages of the blocks from index `start` on, [blocks][tables]; 0 if a block was released."""
        empty = [(0,) * count for count in self._pool.layout.pages]
        return [
            [page for group, block in enumerate(at_place) for page in (empty[group] if block is None else block.pages)]
            for at_place in self.blocks[start:]
        ]

    def release(self) -> None:
        """Drop all references, last block first, so that the end of a prefix is evicted before its beginning."""
        for at_place in reversed(self.blocks):
            for block in at_place:
                if block is not None:
                    self._pool.release(block)
        self.blocks = []
