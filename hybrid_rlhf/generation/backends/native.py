"""The library's own decoder: inference weights, a paged KV cache, continuous batching, CUDA graphs on a GPU.

The backend allocates KV cache and workspace (tables, CUDA graphs) in the first call and keeps them while they fit the
requests of later calls. Prefixes stay cached between calls until the weights change. After a weight sync the workspace
is kept if the weights were written in place, since the addresses in its CUDA graphs are then still valid.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.batching.arrivals import Arrivals
from hybrid_rlhf.generation.batching.blocks import BlockPool
from hybrid_rlhf.generation.batching.capacity import (
    Sequences,
    WorkingMemory,
    available_bytes,
    capacity_tokens,
    least_bytes,
    rows_and_pages,
    saved_states,
    with_less,
    working_memory,
)
from hybrid_rlhf.generation.batching.continuous import BatchLoad, ContinuousBatch
from hybrid_rlhf.generation.batching.images import EncodedPrompts, PromptImages
from hybrid_rlhf.generation.batching.preparation import log_compilation
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.adapters import LowRankChange
from hybrid_rlhf.generation.model.cache import CacheLayout, KVCache, page_bytes
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.recurrent.states import StateCache
from hybrid_rlhf.generation.sampling import PromptLogprobs, SamplingParams
from hybrid_rlhf.generation.scoring import prompt_logprobs

PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens per prefill, by device type."""
OPEN_PREFILL_TOKENS = 2048
"""Prompt tokens per prefill in an open batch: fewer, since its decoding requests wait for the prefill."""


@dataclass
class HeldCache:
    """A KV cache and the limits that it was allocated for."""

    cache: KVCache
    pool: BlockPool
    states: StateCache | None
    """Saved states of recurrent layers."""
    rows: int
    """Number of completions decoded together."""
    prefill_tokens: int
    """Prompt tokens per prefill that fit in memory beside the cache."""
    wanted: tuple[int, ...]
    """Numbers of rows and pages that unlimited memory would allow: the maximum over all calls."""

    @property
    def saved_states(self) -> int:
        """Number of states that can be saved."""
        return 0 if self.states is None else self.states.slots

    def with_states(self, decoder: Decoder, count: int) -> HeldCache:
        """Return a cache with room for at least `count` saved states, including the present ones."""
        if count <= self.saved_states:
            return self
        assert self.states is not None
        states = decoder.new_states(count)
        assert states is not None
        states.copy([(slot, slot) for slot in range(self.saved_states)], source=self.states)
        self.pool.grow_states(count)
        return replace(self, states=states)

    def serves(self, sequences: Sequences) -> bool:
        """True if a cache allocated for these sequences would not be larger."""
        fits = sequences.longest_pages <= self.cache.pages
        return fits and self.cache.layout == sequences.layout and all(map(operator.le, sequences.wanted, self.wanted))


class NativeBackend:
    """Decodes with inference weights and a paged KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_batch_rows: int | None = None,
        kv_cache_gib: float | None = None,
        prefill_tokens: int | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        """Take a decoder; memory is allocated in the first call.

        Args:
            decoder: holds the inference weights.
            max_batch_rows: maximum number of completions decoded together; none: as many as fit in memory.
            kv_cache_gib: memory for keys and values; none: the free memory of the device (batching/capacity.py).
            prefill_tokens: prompt tokens per prefill, fewer if memory is short; none: 2048 on a CPU and in open
                batches, 16384 on a GPU.
            cuda_graphs: capture decoding steps in CUDA graphs on a GPU. While a graph is captured, no other thread may
                use the device; see `capture_between_runs`.
        """
        self._decoder: Decoder | None = decoder
        self._max_batch_rows = max_batch_rows
        self._kv_cache_gib = kv_cache_gib
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[decoder.world.device.type]
        self._open_prefill_tokens = prefill_tokens or OPEN_PREFILL_TOKENS
        self._cuda_graphs = cuda_graphs
        self._captures_in_runs = True
        if decoder.world.device.type == "cuda":
            log_compilation()
        self.max_positions = decoder.architecture.max_positions
        """Longest sequence that the model has positions for; none: no limit."""
        self.trained_positions = decoder.architecture.trained_positions
        """Longest sequence that the model was trained for, if it computes positions; none: unknown."""
        self.vocab_size = decoder.architecture.vocab_size
        self.reads_images = bool(decoder.architecture.banned_ids)
        """True if prompts may have images."""
        self.banned_ids = decoder.architecture.banned_ids
        """Tokens with probability 0: placeholders."""
        self._encoded = EncodedPrompts()
        self.work = DecodeWork()
        """Decoding work of all calls so far."""
        self.records_routes = bool(decoder.architecture.expert_layers)
        """True if the backend can record the experts of each token."""
        self.continues = True
        """True if requests may begin with tokens of an earlier call, and may be returned before they are finished."""
        self.preemptions = 0
        """Number of requests that were preempted because blocks ran out, and computed again."""
        self.held: HeldCache | None = None
        """KV cache of the last call."""
        self.workspace: Workspace | None = None
        """Tables and CUDA graphs of the last call."""
        self._open: ContinuousBatch | None = None
        self._runs_open = False
        """True during a `run_open`."""

    @property
    def decoder(self) -> Decoder:
        """The decoder of the current weights."""
        if self._decoder is None:
            raise RuntimeError("a backend must be open to generate, this one was closed")
        return self._decoder

    def sync_weights(self, decoder: Decoder) -> None:
        """Generate with newer weights from now on. While the thread of a `run_open` waits, call `renew` then.

        Args:
            decoder: the current decoder, if its weights were updated in place: KV cache and CUDA graphs are kept. Or
                another decoder of the same model: they are released, except in a `run_open`, which is on a CPU then.
        """
        if self._runs_open and self.workspace is not None:
            self.workspace.decoder = decoder
        elif decoder is not self._decoder:
            self._release_workspace()
            self.held = None
        elif self.held is not None:
            self.held.pool.forget_prefixes()
        self._encoded.clear()
        self._decoder = decoder

    def capture_in_runs(self) -> None:
        """From now on, capture a decoding step in a CUDA graph when its batch size first occurs; the default."""
        self._set_captures(in_runs=True)

    def capture_between_runs(self) -> None:
        """Capture the batch sizes of earlier runs in CUDA graphs now, and none in later runs.

        This is for runs in one thread while another thread uses the device: the other thread calls this before each
        run. The first run launches all kernels one by one.
        """
        self._set_captures(in_runs=False)
        if self.workspace is not None:
            self.workspace.capture_missing()

    def _set_captures(self, *, in_runs: bool) -> None:
        self._captures_in_runs = in_runs
        if self.workspace is not None:
            self.workspace.capture_in_steps(captures=in_runs)

    def run(self, requests: Sequence[Request], *, rows: int | None = None) -> Iterator[NewTokens]:
        """Decode requests by continuous batching, until all are finished or the iterator is closed.

        Args:
            requests: ordered by prompt; earlier ones enter first.
            rows: maximum number of requests decoded together; none: as many as there is room for.

        Yields:
            the tokens that each step appends to the requests.
        """
        decoder = self.decoder
        prefill = self._prefill_tokens
        most_rows = min(len(requests), rows or sys.maxsize)
        workspace, held_cache = self._prepared(decoder, requests, rows=most_rows, prefill_tokens=prefill)
        batch = ContinuousBatch(
            workspace,
            held_cache.pool,
            requests,
            prefill_tokens=min(prefill, held_cache.prefill_tokens),
            encoded=self._encoded,
            saved_states=held_cache.states,
            rows=rows,
        )
        try:
            yield from batch.steps()
        finally:
            self.preemptions += batch.preemptions
            decoded = sum(request.decoded_tokens for request in requests)
            read = batch.work.steps * decoder.product_bytes + decoded * decoder.state_bytes
            operations = decoded * decoder.token_operations
            for window, cost in decoder.attention_costs.items():
                attended = sum(request.attended_tokens(window) for request in requests)
                read, operations = read + attended * cost.bytes, operations + attended * cost.operations
            self.work += DecodeWork(read, batch.work.steps, operations)

    def run_open(self, arrivals: Arrivals) -> Iterator[NewTokens]:
        """Decode requests as they arrive; yields the new tokens of each step.

        A request that needs a sampling feature, or a number of stop tokens, that the tables have no room for ends the
        present batch. The next batch continues its requests in wider tables: they are computed again, except for cached
        prefixes.
        """
        self._runs_open = True
        try:
            shapes = _shapes(arrivals.max_tokens, records_routes=arrivals.records_routes)
            prefill = self._open_prefill_tokens
            requests: list[Request] = []
            while not arrivals.closed:
                if self.workspace is not None:
                    shapes += [request for request in requests if not self.workspace.accepts(request)]
                workspace, held_cache = self._prepared(
                    self.decoder,
                    shapes,
                    rows=arrivals.rows,
                    prefill_tokens=prefill,
                    memory_share=arrivals.memory_share,
                )
                if not requests:
                    requests = arrivals.take(wait=True)
                    continue
                batch = self._open = ContinuousBatch(
                    workspace,
                    held_cache.pool,
                    requests,
                    prefill_tokens=min(prefill, held_cache.prefill_tokens),
                    encoded=self._encoded,
                    saved_states=held_cache.states,
                )
                steps = batch.steps()
                for new in steps:
                    yield new
                    if arrivals.choose():
                        yield batch.drain()
                    arrived = arrivals.take()
                    batch.add(arrived)
                    batch.cancel(arrivals.take_cancelled())
                    if arrivals.closed or not all(map(workspace.accepts, arrived)):
                        break
                requests = sorted(batch.unfinished, key=lambda request: request.prompt_index)
                steps.close()
                self._open = None
                self.preemptions = self.preemptions + batch.preemptions
                self.work += batch.work
        finally:
            self._runs_open = False

    def set_adapters(self, changes: Mapping[tuple[int, str], Sequence[LowRankChange]]) -> None:
        """Replace the adapters, also between two steps of a `run_open`. A new one has a number that none had before, so
        that no cached prefix is its own."""
        self.decoder.set_adapters(changes)
        if self.workspace is not None:
            self.workspace.forget_graphs()

    def renew(self, *, recompute: bool) -> None:
        """Continue `run_open` with weights that have changed; while its thread waits.

        Args:
            recompute: compute the keys and values of running requests again; false: keep those of the older weights.
        """
        self._encoded.clear()
        if self._open is not None:
            self._open.renew(recompute=recompute)
        if self.held is not None:
            self.held.pool.forget_prefixes()

    @property
    def load(self) -> BatchLoad:
        """Numbers of running and waiting requests and of pages in `run_open`; zeros otherwise."""
        batch = self._open
        return BatchLoad() if batch is None else batch.load

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV cache; 0 before the first call."""
        return 0 if self.held is None else self.held.cache.bytes

    def prompt_logprobs(
        self, tokens: Sequence[int], adapter: int = 0, top: int = 0, images: PromptImages | None = None
    ) -> PromptLogprobs:
        """Log-probs of a prompt, with the `top` most likely tokens. `adapter` is the number of an adapter; 0: none."""
        encoded = None if images is None else self._encoded.of(images)
        return prompt_logprobs(self.decoder, tokens, adapter, top, encoded)

    def reset(self) -> None:
        """Release the KV cache and the workspace, which an exception in `run_open` may have left inconsistent."""
        self._release_workspace()
        self.held = self._open = None

    def close(self) -> None:
        """Release weights, KV cache and CUDA graphs. The backend cannot be used afterwards."""
        self._release_workspace()
        self.held = None
        self._decoder = None

    def _release_workspace(self) -> None:
        workspace = self.workspace
        self.workspace = None
        if workspace is not None:
            workspace.close()

    def _prepared(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        *,
        rows: int,
        prefill_tokens: int,
        memory_share: float | None = None,
    ) -> tuple[Workspace, HeldCache]:
        """Return a workspace and a cache for requests, of which at most `rows` run together: those of the last call if
        they also serve these requests."""
        sequences = self._sequences(decoder, requests, rows, prefill_tokens, memory_share)
        if self.held is None or not self.held.serves(sequences):
            self.held = self._cache_for(decoder, requests, sequences)
        held_cache = self.held
        longest = sequences.longest_tokens
        rows = min(held_cache.rows, sequences.rows)
        if self.workspace is None or not self.workspace.serves(
            requests, cache=held_cache.cache, rows=rows, capacity_tokens=longest
        ):
            self._release_workspace()
            self.workspace = Workspace(
                decoder,
                requests,
                cache=held_cache.cache,
                rows=held_cache.rows,
                capacity_tokens=capacity_tokens(longest, decoder.world.device, self.max_positions),
                cuda_graphs=self._cuda_graphs,
            )
            self.workspace.capture_in_steps(captures=self._captures_in_runs)
        return self.workspace, held_cache

    def _sequences(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        rows: int,
        prefill_tokens: int,
        memory_share: float | None,
    ) -> Sequences:
        longest = max(len(request.prompt) + len(request.uniforms) for request in requests)
        layout = CacheLayout.of(
            decoder.architecture,
            decoder.split,
            capacity_tokens(longest, decoder.world.device, self.max_positions),
            # a cache that records routes also serves requests without them: it is kept with its prefixes
            records_routes=any(request.records_routes for request in requests)
            or (self.held is not None and self.held.cache.layout.routes is not None),
        )
        return Sequences(
            layout,
            page_bytes(layout, decoder.dtype),
            longest_tokens=longest,
            prompt_tokens=max(len(request.prompt) for request in requests),
            rows=min(rows, self._max_batch_rows or sys.maxsize),
            prefill_tokens=prefill_tokens,
            state_bytes=decoder.state_bytes,
            memory_share=memory_share,
        )

    def _cache_for(self, decoder: Decoder, requests: Sequence[Request], sequences: Sequences) -> HeldCache:
        """Return a cache as large as memory allows. The held cache is grown if both fit in memory, to keep its
        prefixes.

        Raises:
            UserError: when one completion does not fit in memory.
        """
        held_cache = self.held
        wanted = sequences.wanted
        if held_cache is not None and held_cache.cache.layout != sequences.layout:
            self._release_workspace()
            held_cache = self.held = None
        held_bytes = 0
        if held_cache is not None:
            # also large enough for earlier calls: calls that alternate between two shapes would else allocate each time
            sequences = replace(sequences, rows=max(held_cache.wanted[0], sequences.rows))
            wanted = tuple(map(max, held_cache.wanted, sequences.wanted))
            held_bytes = held_cache.cache.pages * sequences.page_bytes + held_cache.saved_states * sequences.state_bytes
        budget, working, prefill_tokens = self._budget(decoder, requests, sequences, held_bytes)
        rows, pages = rows_and_pages(budget, sequences, working)
        # Free memory and KV heads may differ between ranks.
        grows = held_cache is not None and held_bytes + pages * sequences.page_bytes <= budget
        local = [rows, pages, saved_states(budget, sequences, working, rows), int(grows)]
        agreed = decoder.world.all_reduce(torch.tensor(local, device=decoder.world.device), dist.ReduceOp.MIN)
        rows, pages, saved = map(int, agreed[:3].tolist())
        if pages < 1:
            raise _no_room(sequences, budget - working.prefill)
        if held_cache is not None and pages <= held_cache.cache.pages:
            return replace(
                held_cache.with_states(decoder, saved),
                rows=max(rows, held_cache.rows),
                wanted=wanted,
                prefill_tokens=prefill_tokens,
            )
        self._release_workspace()  # it refers to the old cache
        if held_cache is not None and bool(agreed[3]):
            larger = with_less(held_cache.cache.grown, pages, least=held_cache.cache.pages + 1, world=decoder.world)
            if larger is not None:
                held_cache.pool.grow(larger.pages)
                held_cache = held_cache.with_states(decoder, saved)
                return replace(held_cache, cache=larger, rows=rows, wanted=wanted, prefill_tokens=prefill_tokens)
        held_cache = self.held = None  # freed before the new one is allocated

        def allocate(pages: int) -> HeldCache:
            cache = decoder.new_cache(sequences.layout, pages=pages)
            states = decoder.new_states(saved)
            pool = BlockPool(sequences.layout, pages, states=None if states is None else saved)
            return HeldCache(cache, pool, states, rows, prefill_tokens, wanted)

        allocated = with_less(allocate, pages, least=sequences.longest_pages, world=decoder.world)
        if allocated is None:
            raise _no_room(sequences, available_bytes(decoder.world))
        return allocated

    def _budget(
        self, decoder: Decoder, requests: Sequence[Request], sequences: Sequences, held_bytes: int
    ) -> tuple[float, WorkingMemory, int]:
        """Return the bytes for cache and working memory, the working memory, and the tokens per prefill that fit.

        `held_bytes` is the size of the held cache.
        """
        if self._kv_cache_gib is not None:
            return self._kv_cache_gib * 2**30, WorkingMemory(), sequences.prefill_tokens
        working, prefill_tokens = working_memory(decoder, requests, sequences, cuda_graphs=self._cuda_graphs)
        states = 0 if self.workspace is None else (1 + self.workspace.most_rows) * decoder.state_bytes
        most = available_bytes(decoder.world) + held_bytes + states
        if sequences.memory_share is not None:
            share = available_bytes(decoder.world, sequences.memory_share) + held_bytes + states
            most = min(most, max(share, least_bytes(sequences, working)))
        return most, working, prefill_tokens


def _no_room(sequences: Sequences, budget_bytes: float) -> UserError:
    needed_bytes = sequences.longest_pages * sequences.page_bytes + 2 * sequences.state_bytes
    return UserError(
        f"the KV cache must hold one completion of {sequences.longest_tokens} tokens, {needed_bytes / 2**30:.2g} GiB, "
        f"its budget is {max(0.0, budget_bytes) / 2**30:.2g} GiB: lower max_new_tokens or raise kv_cache_gib"
    )


def _shapes(max_tokens: int, *, records_routes: bool) -> list[Request]:
    """Return one greedy and one sampled request of at most `max_tokens` tokens, for the first tables of an open
    batch."""
    uniforms = np.zeros(max_tokens - 1)
    kinds = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.5))
    return [Request([0], 0, params, frozenset({0}), uniforms, records_routes=records_routes) for params in kinds]
