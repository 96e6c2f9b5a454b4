"""Steps of the decoder: tables of the rows, sampling, and CUDA graphs of a decoding step on a GPU.

Why it outlives a call: a CUDA graph contains addresses. While the addresses of weights, cache and tables do not change,
a step that was captured once is replayed with one launch in all rollouts of a run. Without graphs, the host launches
every kernel of every layer, which takes longer than the arithmetic of a small model.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.generation.batching.grammar import Grammar, PendingMasks, TokenMasks
from hybrid_rlhf.generation.batching.preparation import PreparationLog
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.sampler import DecodeBatch, Sampler, sampling_mode
from hybrid_rlhf.generation.model.attention import Attention, Chunks, DecodeRows
from hybrid_rlhf.generation.model.cache import KVCache, blocks_of
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.images import ImageTokens
from hybrid_rlhf.generation.transfers import to_device, to_host
from hybrid_rlhf.runtime.world import close_with_world

_GRAPH_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Batch sizes that are captured. Above the last one: multiples of a quarter of it, then eight sizes per doubling."""
_IDLE_STREAMS: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Capture streams of graphs that were destroyed, for reuse."""
Step = Callable[[int], Tensor]
Fetch = Callable[[], np.ndarray]
"""Waits for a step and returns [3 + 2k, rows]: tokens, log-probs, sampling log-probs, and the most likely tokens with
their log-probs if they are reported; a token of -1 is discarded."""
Masks = Callable[[], PendingMasks]
"""Gives the masks of a step."""


class Workspace:
    """Computes the steps of live rows, which are the first rows of its tables."""

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        *,
        cache: KVCache,
        rows: int,
        capacity_tokens: int,
        cuda_graphs: bool = True,
    ) -> None:
        """Allocate tables.

        Args:
            decoder: decoder of the model.
            requests: requests to generate, which determine the width of the tables.
            cache: KV cache.
            rows: maximum number of completions decoded together.
            capacity_tokens: maximum length of a sequence.
            cuda_graphs: capture decoding steps in CUDA graphs on a GPU. While a graph is captured, no other thread may
                use the device; see `capture_in_steps`.
        """
        device = decoder.world.device
        self.decoder = decoder
        self.cache = cache
        self.capacity_tokens = capacity_tokens
        self.attention = Attention(
            decoder.architecture,
            decoder.split,
            cache,
            capacity_tokens=capacity_tokens,
            kernels=decoder.kernels,
        )
        self.rows = DecodeBatch.empty(
            rows,
            requests,
            vocab_size=decoder.architecture.vocab_size,
            device=device,
            has_axes=decoder.architecture.has_axes,
        )
        blocks = blocks_of(capacity_tokens)
        self.pages = torch.zeros(cache.layout.tables, rows, blocks, dtype=torch.int32, device=device)
        """[page tables, S, M]: the pages of each row. Unused entries are page 0, which is never read."""
        self.states = decoder.new_states(1 + rows)
        """States of recurrent layers: slot 0, which is never read, and one slot per row."""
        self.slots = torch.zeros(rows, dtype=torch.long, device=device)
        """[S]: the slot of each row; 0 for unused rows."""
        self.steps_in_flight = 1 if device.type == "cuda" else 0
        """Number of steps in flight while the result of an earlier step is fetched."""
        self._mode = sampling_mode(requests)
        self._sampler = Sampler(decoder.architecture.vocab_size, self._mode, decoder.world)
        self._graphs = None
        self._logits_graphs = None
        """Graphs of steps whose tokens are sampled outside, when the masks of grammars have arrived."""
        self._masks: TokenMasks | None = None
        if device.type == "cuda" and cuda_graphs:
            self._graphs = _Graphs(self.rows, self.slots, device)
            self._logits_graphs = _Graphs(self.rows, self.slots, device) if self._mode.grammar else None
        close_with_world(self)

    @property
    def most_rows(self) -> int:
        """Maximum number of completions decoded together."""
        return self.pages.shape[1]

    def capture_in_steps(self, *, captures: bool) -> None:
        """Set whether a step is captured when its batch size first occurs.

        If not, its kernels are launched one by one, with the same batch size, until `capture_missing` is called.
        """
        for graphs in (self._graphs, self._logits_graphs):
            if graphs is not None:
                graphs.captures = captures

    @torch.inference_mode()
    def capture_missing(self) -> None:
        """Capture the steps of all batch sizes that occurred without a capture. To be called between two runs."""
        for graphs, step in ((self._graphs, self.step), (self._logits_graphs, self.logits)):
            if graphs is not None and graphs.missing:
                self.clear()
                graphs.capture_missing(step)

    def forget_graphs(self) -> None:
        """Capture all steps again, as the addresses in them are no longer those of the weights; no step is running."""
        for graphs in (self._graphs, self._logits_graphs):
            if graphs is not None:
                graphs.forget()

    def close(self) -> None:
        """Release the CUDA graphs and their memory; the rest is freed with the last reference. Idempotent."""
        held = [graphs for graphs in (self._graphs, self._logits_graphs) if graphs is not None]
        self._graphs = None
        self._logits_graphs = None
        for graphs in held:
            graphs.close()
        if self._masks is not None:
            self._masks.close()

    def serves(self, requests: Sequence[Request], *, cache: KVCache, rows: int, capacity_tokens: int) -> bool:
        """True if this workspace is equivalent to one allocated for these requests."""
        return (
            self.cache is cache
            and self.most_rows >= rows
            and self.capacity_tokens >= capacity_tokens
            and self._mode == sampling_mode(requests)
            and self.rows.has_room_for(requests)
        )

    def accepts(self, request: Request) -> bool:
        """True if a request can join the requests that the workspace was allocated for."""
        return self.rows.has_room_for([request]) and self._mode.covers(sampling_mode([request]))

    def set_pages(self, entries: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Write entries (row, block, page in each table) to the page tables."""
        if entries:
            rows, blocks, pages = zip(*entries, strict=True)
            where = to_device([rows, blocks], self.pages.device)
            self.pages[:, where[0], where[1]] = to_device(pages, self.pages.device, torch.int32).t()

    def move(self, source: int, target: int) -> None:
        """Move row `source` to row `target`, which has finished, and clear row `source`."""
        if source != target:
            self.rows.move(source, target)
            self.pages[:, target] = self.pages[:, source]
            self.slots[target] = self.slots[source]
        self.pages[:, source] = 0
        self.slots[source] = 0

    def routes_of(self, row: int, tokens: int) -> Callable[[], Tensor]:
        """Start a copy of the routes of a row's first tokens to the host.

        Returns a function that waits and returns [tokens, E, k], as in cache.py. Later steps do not change the result.
        """
        return to_host(self.cache.routes_of(self.pages[0, row], tokens))

    def clear(self) -> None:
        """Clear all rows."""
        self.pages.zero_()
        self.slots.zero_()

    def begin_masks(self, grammars: Sequence[tuple[int, Grammar]]) -> PendingMasks:
        """Begin to compute the masks of the next step, for rows with grammars, given by their places."""
        if self._masks is None:
            self._masks = TokenMasks(self.most_rows, self.decoder.architecture.vocab_size, self.pages.device)
        return self._masks.begin(grammars)

    def decode(self, batch: int, *, longest: int, masks: Masks | None = None) -> Fetch:
        """Sample one token for each of the first `batch` rows.

        Args:
            batch: number of rows that decode.
            longest: tokens of the longest row, including those that the step computes.
            masks: gives the masks of the rows with grammars, called when the model has been launched.
        """
        if self._logits_graphs is not None and masks is not None:
            logits = self._logits_graphs(self.logits, _graph_rows(batch, self.most_rows))
            return _fetch(self._sampled(logits[:batch], batch, masks))
        if self._graphs is not None:
            return _fetch(self._graphs(self.step, _graph_rows(batch, self.most_rows))[:, :batch])
        return _fetch(self.step(batch, longest=longest, masks=masks))

    def prefill(
        self,
        batch: int,
        prompts: Prompts,
        entering: Sequence[Request],
        slots: Sequence[int],
        *,
        longest: int,
        masks: Masks | None = None,
    ) -> Fetch:
        """Sample one token for each of the first `batch` rows, and for the requests that enter after them.

        Args:
            batch: number of rows that decode.
            prompts: chunks of prompts computed in the same step.
            entering: requests whose prompts end in this step, in the order of `prompts.of_request`.
            slots: slots of their states.
            longest: as in `decode`.
            masks: as in `decode`.
        """
        self.rows.fill(batch, entering)
        self.slots[batch : batch + len(slots)] = to_device(slots, self.slots.device, torch.long)
        return _fetch(self.step(batch, longest=longest, prompts=prompts, masks=masks))

    def step(
        self,
        batch: int,
        *,
        longest: int | None = None,
        prompts: Prompts | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        """Run one step of the first `batch` rows and of chunks of prompts.

        Args:
            batch: number of rows that decode.
            longest: tokens of the longest row, for code without kernels (those read lengths from the device); none:
                the capacity.
            prompts: chunks of prompts; none: only rows decode.
            masks: as in `decode`; none: no row has a grammar.

        Returns:
            [3 + 2k, batch + entering requests], see `SampledTokens.stacked`.
        """
        entering = 0 if prompts is None else len(prompts.of_request)
        logits = self.logits(batch, longest=longest, prompts=prompts)
        if not batch + entering:
            return logits.new_empty(3, 0, dtype=torch.float64)
        return self._sampled(logits, batch + entering, masks)

    def _sampled(self, logits: Tensor, drawing: int, masks: Masks | None) -> Tensor:
        """Sample a token for each of the first `drawing` rows; see `step`."""
        if masks is not None and self.rows.allowed is not None:
            masks().write(self.rows.allowed)
        return self._sampler(logits, self.rows.view(0, drawing)).stacked()

    def logits(self, batch: int, *, longest: int | None = None, prompts: Prompts | None = None) -> Tensor:
        """Compute the logits [batch + entering requests, V / R] of a step; arguments as in `step`."""
        entering = 0 if prompts is None else len(prompts.of_request)
        drawing = self.rows.view(0, batch + entering)
        rows = drawing.view(0, batch)
        # A CUDA graph also runs finished and unused rows: their positions must stay within the tables.
        tokens = rows.token
        positions = rows.position.clamp(max=self.capacity_tokens - 1)
        adapters = rows.adapter if self.decoder.has_adapters else None
        decoding = None
        if batch:
            slots = None if self.states is None else self.slots[:batch]
            decoding = DecodeRows(self.pages[:, :batch], positions, longest or self.capacity_tokens, slots)
        rotated = None if rows.offset is None else positions + rows.offset
        chunks = images = None
        if prompts is not None:
            chunks = prompts.chunks
            if prompts.images is not None:
                images = replace(prompts.images, index=batch + prompts.images.index)
            if rotated is not None and prompts.rotated is not None:
                rotated = torch.cat([rotated[:, None].expand(-1, 3), prompts.rotated])
            tokens = torch.cat([tokens, prompts.tokens])
            positions = torch.cat([positions, prompts.positions])
            adapters = None if adapters is None else torch.cat([adapters, prompts.adapters])
        hidden = self.decoder.hidden(
            tokens,
            positions,
            self.attention,
            states=self.states,
            rows=decoding,
            chunks=chunks,
            adapters=adapters,
            rotated=rotated,
            images=images,
        )
        if not len(drawing):
            return hidden.new_empty(0, 0)
        if prompts is None:
            return self.decoder.logits(hidden)
        ends = self.decoder.logits(torch.cat([hidden[:batch], hidden[batch:][prompts.last]]))
        places = torch.arange(batch, device=hidden.device)
        return ends[torch.cat([places, batch + prompts.of_request])]


@dataclass(frozen=True)
class Prompts:
    """Chunks of prompts in one step, T tokens in all."""

    chunks: Chunks
    tokens: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] positions in their sequences."""
    adapters: Tensor
    """[T] numbers of their adapters; 0: none."""
    last: Tensor
    """[prompts that end in this step]: the index in T of the last token of each."""
    of_request: Tensor
    """[entering requests]: the index in `last` of each request's prompt."""
    images: ImageTokens | None
    """Image tokens among the T, if any."""
    rotated: Tensor | None
    """[T, 3] positions of rotation; none: the model has one axis."""


class _Graphs:
    """CUDA graphs of a step, one per batch size, captured when that size first occurs.

    All graphs of a workspace are captured on one stream that no other workspace uses. cuBLAS keeps a workspace per
    stream (32 MiB on Hopper), and torch clears that of a graph's capture stream when the graph is destroyed (pytorch
    issue 193402), which would break live graphs on the same stream. The step is passed in each call, because storing it
    would make a reference cycle with the workspace, which owns these graphs. The step that runs before a capture
    changes no state of a row, because all rows have slot 0 meanwhile.

    A thread that samples while another one trains on the device may replay graphs but not capture them. A device
    synchronization in any thread invalidates a capture in any mode (CUDA programming guide, "Prohibited and unhandled
    operations"), and DeepSpeed synchronizes in each micro-batch. Also, during a capture torch's allocator raises
    out-of-memory errors in all threads where it would otherwise free its cached memory and try again. Such a thread
    sets `captures` to false, and the thread that trains captures between two runs. A replay is safe: it is a launch in
    the current stream of its thread, draws no numbers from torch's generator, and nothing else uses its memory pool.
    """

    def __init__(self, rows: DecodeBatch, slots: Tensor, device: torch.device) -> None:
        self._rows = rows
        self._slots = slots
        self._idle = _IDLE_STREAMS[device]
        self._stream = self._idle.pop() if self._idle else torch.cuda.Stream(device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.captures = True
        """True if a call captures a batch size that it sees for the first time."""
        self.missing: set[int] = set()
        """Batch sizes that occurred while `captures` was false."""
        sizes = {_graph_rows(batch, len(rows)) for batch in range(1, len(rows) + 1)}
        self._log = PreparationLog("CUDA graphs captured, one per batch size", most=len(sizes))

    def __call__(self, step: Step, batch: int) -> Tensor:
        """Run a step; the next call overwrites the result."""
        if batch not in self._captured:
            if not self.captures:
                self.missing.add(batch)
                return step(batch)
            self._captured[batch] = self._capture(step, batch)
            self.missing.discard(batch)
        graph, result = self._captured[batch]
        graph.replay()
        return result

    def capture_missing(self, step: Step) -> None:
        """Capture the missing batch sizes, in the same order on all ranks that compute a step together."""
        for batch in sorted(self.missing):
            self._captured[batch] = self._capture(step, batch)
        self.missing.clear()

    def close(self) -> None:
        """Destroy the graphs, which frees their memory, and release the stream for reuse."""
        self.forget()
        self._idle.append(self._stream)

    def forget(self) -> None:
        """Destroy the graphs, and capture them again when they are needed."""
        self._stream.synchronize()
        torch.cuda.current_stream().synchronize()  # a replay may still run
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured.clear()

    def _capture(self, step: Step, batch: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        start = time.perf_counter()
        pool = next(iter(self._captured.values()))[0].pool() if self._captured else None
        saved = self._rows.save()
        slots = self._slots.clone()
        main = torch.cuda.current_stream()
        self._slots.zero_()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):  # compile kernels and load libraries outside the graph
            step(batch)
        main.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of the process group may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step(batch)
        self._rows.restore(saved)
        self._slots.copy_(slots)
        self._log.add(time.perf_counter() - start)
        return graph, result


def _graph_rows(rows: int, most: int) -> int:
    """Round a number of rows up to a captured batch size."""
    if rows > _GRAPH_ROWS[-1]:
        step = max(_GRAPH_ROWS[-1] // 4, 1 << ((rows - 1).bit_length() - 4))
        return min(most, -(-rows // step) * step)
    return min(most, _GRAPH_ROWS[bisect.bisect_left(_GRAPH_ROWS, rows)])


def _fetch(result: Tensor) -> Fetch:
    """Start the copy of a step's result to the host; returns a function that waits for it."""
    arrived = to_host(result)
    return lambda: arrived().numpy()
