"""The library's own decoder: inference weights, a paged KV cache, continuous batching, CUDA graphs on a GPU.

The backend allocates KV cache and workspace (tables, CUDA graphs) in the first call and keeps them as long as they fit
the requests of later calls. Prefixes stay cached between calls until the weights change. After a weight sync the
workspace is kept if the weights were written in place, since the addresses in its CUDA graphs are then still valid.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
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
from hybrid_rlhf.generation.batching.continuous import ContinuousBatch
from hybrid_rlhf.generation.batching.preparation import log_compilation
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
from hybrid_rlhf.generation.batching.rows import BatchLoad
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.cache import CacheLayout, KVCache, bytes_per_token, page_bytes
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.recurrent.states import StateCache
from hybrid_rlhf.generation.sampling import SamplingParams
from hybrid_rlhf.generation.scoring import InferencePolicy

PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens of one prefill, by device."""
OPEN_PREFILL_TOKENS = 2048
"""The same in an open batch, whose other requests wait for it."""


@dataclass
class HeldCache:
    """A KV cache and what it was allocated for."""

    cache: KVCache
    pool: BlockPool
    states: StateCache | None
    """Saved states of recurrent layers."""
    rows: int
    """Completions that are decoded together."""
    prefill_tokens: int
    """Prompt tokens of a prefill that memory has room for beside it."""
    wanted: tuple[int, ...]
    """Rows and pages that unlimited memory would have allowed; the most of all calls."""

    @property
    def saved_states(self) -> int:
        """How many states can be saved."""
        return 0 if self.states is None else self.states.slots

    def with_states(self, decoder: Decoder, count: int) -> HeldCache:
        """Room for so many saved states at least; those that are saved remain."""
        if count <= self.saved_states:
            return self
        assert self.states is not None
        states = decoder.new_states(count)
        assert states is not None
        states.copy([(slot, slot) for slot in range(self.saved_states)], source=self.states)
        self.pool.grow_states(count)
        return replace(self, states=states)

    def serves(self, sequences: Sequences) -> bool:
        """Whether a cache allocated for these would not be larger."""
        fits = sequences.longest_pages <= self.cache.pages
        return fits and self.cache.layout == sequences.layout and all(map(operator.le, sequences.wanted, self.wanted))


class NativeBackend:
    """Decodes with inference weights."""

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
            max_batch_rows: most completions to decode together; none: as many as fit in memory.
            kv_cache_gib: memory for keys and values; none: what is free on the device (batching/capacity.py).
            prefill_tokens: prompt tokens of one prefill, fewer if memory is short; none: 2048 on a CPU and in open
                batches, 16384 on a GPU.
            cuda_graphs: capture decoding steps in CUDA graphs on a GPU. While a graph is captured, no other thread may
                use the device; see `capture_between_runs`.
        """
        self._decoder: Decoder | None = decoder
        self._max_batch_rows, self._kv_cache_gib = max_batch_rows, kv_cache_gib
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[decoder.world.device.type]
        self._open_prefill_tokens = prefill_tokens or OPEN_PREFILL_TOKENS
        self._cuda_graphs, self._captures_in_runs = cuda_graphs, True
        if decoder.world.device.type == "cuda":
            log_compilation()
        self.max_positions = decoder.architecture.max_positions
        self.trained_positions = decoder.architecture.trained_positions
        self.vocab_size = decoder.architecture.vocab_size
        self.work = DecodeWork()
        self.records_routes, self.continues = bool(decoder.architecture.expert_layers), True
        self.preemptions = 0
        """Requests that were computed again because blocks ran out."""
        self.held: HeldCache | None = None
        """KV cache of the last call."""
        self.workspace: Workspace | None = None
        """Tables and CUDA graphs of the last call."""
        self._open: ContinuousBatch | None = None

    @property
    def decoder(self) -> Decoder:
        """The decoder of the current weights."""
        if self._decoder is None:
            raise RuntimeError("a backend must be open to generate, this one was closed")
        return self._decoder

    def sync_weights(self, decoder: Decoder) -> None:
        """Generate with newer weights from now on.

        Args:
            decoder: the current one, whose weights were updated in place, which keeps KV cache and CUDA graphs; or
                another of the same model, which releases them.
        """
        if decoder is not self._decoder:
            self._release_workspace()
            self.held = None
        elif self.held is not None:
            self.held.pool.forget_prefixes()
        self._decoder = decoder

    def capture_in_runs(self) -> None:
        """From now on a decoding step is captured in a CUDA graph when its batch size first occurs; the default."""
        self._set_captures(in_runs=True)

    def capture_between_runs(self) -> None:
        """Capture the batch sizes of earlier runs in CUDA graphs now, and none in later runs.

        For runs in a thread beside another one that uses the device: the latter calls this before each of them. The
        first run launches all kernels one by one.
        """
        self._set_captures(in_runs=False)
        if self.workspace is not None:
            self.workspace.capture_missing()

    def _set_captures(self, *, in_runs: bool) -> None:
        self._captures_in_runs = in_runs
        if self.workspace is not None:
            self.workspace.capture_in_steps(captures=in_runs)

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """See GenerationBackend."""
        decoder = self.decoder
        prefill = self._prefill_tokens
        workspace, held = self._prepared(decoder, requests, rows=len(requests), prefill_tokens=prefill)
        batch = ContinuousBatch(
            workspace,
            held.pool,
            requests,
            prefill_tokens=min(prefill, held.prefill_tokens),
            saved_states=held.states,
        )
        yield from batch.steps()
        self.preemptions += batch.preemptions
        cached = bytes_per_token(decoder.architecture, decoder.split, decoder.dtype)
        read = batch.work.steps * decoder.product_bytes
        read += cached * sum(request.attended_tokens for request in requests)
        read += decoder.state_bytes * sum(request.decoded_tokens for request in requests)
        self.work += replace(batch.work, bytes=read)

    def run_open(self, arrivals: Arrivals) -> Iterator[NewTokens]:
        """See GenerationBackend.

        A request that needs another part of sampling, or more stop tokens, than any before ends the present batch. The
        next one continues its requests in wider tables; they are computed again, except prefixes that are cached.
        """
        decoder, shapes, prefill = self.decoder, _shapes(arrivals.max_tokens), self._open_prefill_tokens
        requests: list[Request] = []
        while not arrivals.closed:
            shapes += [request for request in requests if not self._accepts(request)]
            workspace, held = self._prepared(
                decoder,
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
                held.pool,
                requests,
                prefill_tokens=min(prefill, held.prefill_tokens),
                saved_states=held.states,
            )
            steps, live = batch.steps(), set(requests)
            for new in steps:
                yield new
                arrived = arrivals.take()
                batch.add(arrived)
                batch.cancel(arrivals.take_cancelled())
                live = {request for request in (*live, *arrived) if request.finish_reason is None}
                if arrivals.closed or not all(map(workspace.accepts, arrived)):
                    break
            steps.close()
            self._open, self.preemptions = None, self.preemptions + batch.preemptions
            self.work += batch.work
            requests = sorted(live, key=lambda request: request.prompt_index)

    def _accepts(self, request: Request) -> bool:
        return self.workspace is not None and self.workspace.accepts(request)

    @property
    def load(self) -> BatchLoad:
        """See GenerationBackend."""
        batch = self._open
        return BatchLoad() if batch is None else batch.load

    @property
    def kv_cache_bytes(self) -> int:
        """See GenerationBackend."""
        return 0 if self.held is None else self.held.cache.bytes

    def prompt_logprobs(self, tokens: Sequence[int], adapter: int = 0) -> list[float]:
        """See GenerationBackend."""
        ids = torch.tensor([tokens], device=self.decoder.world.device)
        places = torch.arange(len(tokens), device=ids.device)[None]
        logprobs, _ = InferencePolicy(self.decoder, adapter)(ids, torch.ones_like(ids), places > 0)
        return logprobs[0, 1:].tolist()  # type: ignore[no-any-return]

    def reset(self) -> None:
        """See GenerationBackend."""
        self._release_workspace()
        self.held = self._open = None

    def close(self) -> None:
        """See GenerationBackend."""
        self._release_workspace()
        self.held = None
        self._decoder = None

    def _release_workspace(self) -> None:
        workspace, self.workspace = self.workspace, None
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
        """Workspace and cache for requests, of which up to `rows` run together."""
        sequences = self._sequences(decoder, requests, rows, prefill_tokens)
        sequences = replace(sequences, memory_share=memory_share)
        self.workspace = workspace = self._workspace_for(decoder, requests, sequences)
        assert self.held is not None
        return workspace, self.held

    def _workspace_for(self, decoder: Decoder, requests: Sequence[Request], sequences: Sequences) -> Workspace:
        """The last call's workspace if it serves these requests too, else a new one."""
        if self.held is None or not self.held.serves(sequences):
            self.held = self._cache_for(decoder, requests, sequences)
        held, longest = self.held, sequences.longest_tokens
        rows = min(held.rows, sequences.rows)
        if self.workspace is not None and self.workspace.serves(
            requests, cache=held.cache, rows=rows, capacity_tokens=longest
        ):
            return self.workspace
        self._release_workspace()
        capacity = capacity_tokens(longest, decoder.world.device, self.max_positions)
        self.workspace = Workspace(
            decoder,
            requests,
            cache=held.cache,
            rows=held.rows,
            capacity_tokens=capacity,
            cuda_graphs=self._cuda_graphs,
        )
        self.workspace.capture_in_steps(captures=self._captures_in_runs)
        return self.workspace

    def _sequences(self, decoder: Decoder, requests: Sequence[Request], rows: int, prefill_tokens: int) -> Sequences:
        longest = max(len(request.prompt) + len(request.uniforms) for request in requests)
        layout = CacheLayout.of(
            decoder.architecture,
            decoder.split,
            capacity_tokens(longest, decoder.world.device, self.max_positions),
            # a cache that records serves requests that do not, so that it and its prefixes remain
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
        )

    def _cache_for(self, decoder: Decoder, requests: Sequence[Request], sequences: Sequences) -> HeldCache:
        """A cache as large as memory allows; the held one, grown, where both fit, so that its prefixes remain.

        Raises:
            UserError: when memory has no room for one completion.
        """
        held, wanted = self.held, sequences.wanted
        if held is not None and held.cache.layout != sequences.layout:
            self._release_workspace()
            held = self.held = None
        own = 0
        if held is not None:
            # one that is enough for earlier calls too: calls of two shapes in turn would otherwise allocate each time
            sequences = replace(sequences, rows=max(held.wanted[0], sequences.rows))
            wanted = tuple(map(max, held.wanted, sequences.wanted))
            own = held.cache.pages * sequences.page_bytes + held.saved_states * sequences.state_bytes
        budget, working, prefill_tokens = self._budget(decoder, requests, sequences, own)
        rows, pages = rows_and_pages(budget, sequences, working)
        # Free memory and KV heads may differ between ranks.
        grows = held is not None and own + pages * sequences.page_bytes <= budget
        each = [rows, pages, saved_states(budget, sequences, working, rows), int(grows)]
        agreed = decoder.world.all_reduce(torch.tensor(each, device=decoder.world.device), dist.ReduceOp.MIN)
        rows, pages, saved = map(int, agreed[:3].tolist())
        if pages < 1:
            raise _no_room(sequences, budget - working.prefill)
        if held is not None and pages <= held.cache.pages:
            return replace(
                held.with_states(decoder, saved),
                rows=max(rows, held.rows),
                wanted=wanted,
                prefill_tokens=prefill_tokens,
            )
        self._release_workspace()  # it refers to the old cache
        if held is not None and bool(agreed[3]):
            larger = with_less(held.cache.grown, pages, least=held.cache.pages + 1, world=decoder.world)
            if larger is not None:
                held.pool.grow(larger.pages)
                held = held.with_states(decoder, saved)
                return replace(held, cache=larger, rows=rows, wanted=wanted, prefill_tokens=prefill_tokens)
        held = self.held = None  # freed before the new one is allocated

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
        self, decoder: Decoder, requests: Sequence[Request], sequences: Sequences, own: int
    ) -> tuple[float, WorkingMemory, int]:
        """Bytes for cache and working memory, what the latter takes, and the tokens of a prefill that it has room for;
        `own`: bytes of the held cache."""
        if self._kv_cache_gib is not None:
            return self._kv_cache_gib * 2**30, WorkingMemory(), sequences.prefill_tokens
        working, prefill_tokens = working_memory(decoder, requests, sequences, cuda_graphs=self._cuda_graphs)
        states = 0 if self.workspace is None else (1 + self.workspace.most_rows) * decoder.state_bytes
        most = available_bytes(decoder.world) + own + states
        if sequences.memory_share is not None:
            share = available_bytes(decoder.world, sequences.memory_share) + own + states
            most = min(most, max(share, least_bytes(sequences, working)))
        return most, working, prefill_tokens


def _no_room(sequences: Sequences, budget_bytes: float) -> UserError:
    one = sequences.longest_pages * sequences.page_bytes + 2 * sequences.state_bytes
    return UserError(
        f"the KV cache must hold one completion of {sequences.longest_tokens} tokens, {one / 2**30:.2g} GiB, "
        f"its budget is {max(0.0, budget_bytes) / 2**30:.2g} GiB: lower max_new_tokens or raise kv_cache_gib"
    )


def _shapes(max_tokens: int) -> list[Request]:
    """Requests of the widest tables that an open batch begins with: greedy and sampled, of up to so many tokens."""
    uniforms = np.zeros(max_tokens - 1)
    kinds = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.5))
    return [Request([0], 0, params, frozenset({0}), uniforms) for params in kinds]
