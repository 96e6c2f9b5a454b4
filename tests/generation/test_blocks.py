"""The pool of KV blocks: nothing is lost, and a prefix that is found holds what it says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.architecture.model_description import Split
from hybrid_rlhf.generation.batching.blocks import BlockPool, BlockTable, Match
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, CacheLayout, blocks_of
from tests.support.families import variant

PLAIN = CacheLayout(places_per_page=4, width=1)
MIXED = CacheLayout(windows=(None, 20), pages=(1, 3), places_per_page=2, width=1)
WINDOWS = CacheLayout(windows=(20,), pages=(2,), places_per_page=2, width=1)


@dataclass
class Memory:
    """What each page holds, as a step would write it."""

    pool: BlockPool
    pages: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """Content of a page by place: all tokens up to and including the one there, on which keys and values depend."""
    states: dict[int, list[int]] = field(default_factory=dict)
    """The tokens of each saved state."""

    def write(self, table: BlockTable, tokens: list[int], start: int) -> None:
        """Compute tokens from `start` on."""
        for place in range(start, len(tokens)):
            block, offset = divmod(place, BLOCK_TOKENS)
            for page in table.page_table()[block]:
                content = self.pages.setdefault(page, [()] * BLOCK_TOKENS)
                content[offset] = tuple(tokens[: place + 1])
        table.set_ready(start, len(tokens), of=len(tokens))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.pages[target] = list(self.pages[source])

    def save_state(self, tokens: list[int]) -> None:
        """Of a sequence whose blocks are indexed."""
        slot = self.pool.save_state(tokens) if tokens else None
        if slot is not None:
            self.states[slot] = tokens

    def check_state(self, match: Match, tokens: list[int], computed: int) -> None:
        """That a sequence begins with the state of its own tokens."""
        assert not computed or (match.state is not None and self.states[match.state] == tokens[:computed])
        assert all(computed < stop < len(tokens) for stop in match.stops)
        assert self.pool._states.slots or not match.stops, "nothing would be saved"

    def check(self, table: BlockTable, tokens: list[int]) -> None:
        """That a sequence finds what its next token attends to."""
        column = 0
        for group, window in enumerate(self.pool.layout.windows):
            first = 0 if window is None else max(0, len(tokens) - window + 1)
            for place in range(first, len(tokens)):
                block, offset = divmod(place, BLOCK_TOKENS)
                for page in table.page_table()[block][column : column + self.pool.layout.pages[group]]:
                    assert page > 0 and self.pages[page][offset] == tuple(tokens[: place + 1])
            column += self.pool.layout.pages[group]


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from([PLAIN, MIXED, WINDOWS]),
    states=st.sampled_from([None, 0, 1, 3]),
    blocks=st.integers(6, 20),
    sequences=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=70),  # few tokens: prefixes are often shared
            st.integers(0, 40),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_sequences_that_share_blocks_find_their_own_tokens(
    layout: CacheLayout, states: int | None, blocks: int, sequences: list[tuple[list[int], int, int]]
) -> None:
    pool = BlockPool(layout, 1 + blocks * layout.tables, states=states)
    memory, live = Memory(pool), list[tuple[BlockTable, list[int]]]()

    def end(place: int) -> None:
        table, tokens = live.pop(place)
        table.index(tokens)
        memory.save_state(tokens)
        table.release()

    for prompt, new, ending in sequences:
        needed = (blocks_of(len(prompt) + new) + 2) * layout.tables
        while pool.available_pages < needed and live:
            end(0)
        table = BlockTable(pool)
        match = pool.match(prompt)
        computed, copies = table.begin(match)
        assert computed < len(prompt)
        if states is not None:
            memory.check_state(match, prompt, computed)
        memory.copy(copies)
        memory.check(table, prompt[:computed])
        table.extend(len(prompt))
        memory.write(table, prompt, computed)
        table.index(prompt)
        for stop in match.stops:
            memory.save_state(prompt[:stop])  # as if it was computed in several steps
        sample = BlockTable(pool)
        memory.copy(sample.fork(table, len(prompt)))
        memory.check(sample, prompt)
        sample.release()
        tokens = list(prompt)
        for token in range(new):
            table.trim(len(tokens))
            tokens.append(token % 2)
            table.extend(len(tokens))
            memory.write(table, tokens, len(tokens) - 1)
        memory.check(table, tokens)
        live.append((table, tokens))
        for other, content in live:
            memory.check(other, content)
        for _ in range(min(ending, len(live))):
            end(0)
    while live:
        end(0)
    assert pool.used_pages == 0 and pool.available_pages == blocks * layout.tables
    pool.forget_prefixes()
    assert len(pool._free) == len(set(pool._free)) == pool.pages and not pool._roots
    if states is not None:
        assert sorted(pool._states._free) == list(range(states))


def test_a_block_is_copied_only_when_all_of_it_is_computed() -> None:
    pool, tokens, other = BlockPool(PLAIN, 1 + 8), [1] * 23, [1] * 8 + [2] * 15
    table = BlockTable(pool)
    table.extend(23)
    table.set_ready(0, 1, of=23)  # a step had room for one token of the prompt
    table.index(tokens[:BLOCK_TOKENS])  # the next step computes the rest
    assert pool.match(other).tail is None
    table.set_ready(1, 23, of=23)
    assert pool.match(other).tail_tokens == 8
    never = BlockTable(pool)
    never.extend(40)
    never.index([7] * 40)
    never.release()
    assert not pool.match([7] * 40).blocks


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(PLAIN, 1 + 6)
    texts = [[text] * 33 for text in range(2)]
    for tokens in texts:
        table = BlockTable(pool)
        table.extend(33)
        table.set_ready(0, 33, of=33)
        table.index(tokens)
        table.release()
    found = BlockTable(pool)
    found.begin(pool.match(texts[0]))  # used again
    found.release()
    other = BlockTable(pool)
    other.extend(3 * BLOCK_TOKENS)  # both ends, and one block more
    assert [len(pool.match([*tokens, 9]).blocks) for tokens in texts] == [2, 1]
    other.extend(4 * BLOCK_TOKENS)
    assert [len(pool.match([*tokens, 9]).blocks) for tokens in texts] == [2, 0]


def test_a_grown_pool_hands_out_each_page_once() -> None:
    pool = BlockPool(PLAIN, 4)
    first = [pool.allocate(0).pages[0] for _ in range(2)]
    pool.grow(9)
    assert sorted([*first, *(pool.allocate(0).pages[0] for _ in range(pool.available_pages))]) == list(range(1, 9))


@pytest.mark.parametrize(
    ("name", "capacity", "windows", "pages"),
    [("gemma3", 100, (None, 6), None), ("gemma3", 6, (None,), (1,)), ("mistral", 100, (6,), (1,))],
)
def test_layers_of_one_window_share_pages(
    name: str, capacity: int, windows: tuple[int | None, ...], pages: tuple[int, ...] | None
) -> None:
    architecture, _ = describe(variant(name))
    layout = CacheLayout.of(architecture, Split.of(architecture, 0, 1), capacity)
    assert layout.windows == windows and (pages is None or layout.pages == pages)
    assert len(set(layout.places)) == architecture.layers == layout.tables * layout.places_per_page
    assert layout.pages_of(96) == sum(
        count * (6 if window is None else 2) for count, window in zip(layout.pages, windows, strict=True)
    )
