"""The memory of decoding: KV cache, tables of the rows, and CUDA graphs of a decoding step on a GPU.

Why it outlives a call: a CUDA graph holds addresses. As long as weights, cache and tables stay at theirs, a step that
was captured once is replayed with one launch, over all rollouts of a run. Without graphs the host launches every kernel
of every layer, which takes longer than the arithmetic of a small model.
"""

from __future__ import annotations

import bisect
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_rlhf.generation.batching.cache import KVCache
from hybrid_rlhf.generation.batching.decode_batch import DecodeBatch, SamplingMode
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.model.attention import Attention
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.sampler import SampledTokens, Sampler
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import close_with_world

logger = logging.getLogger(LOGGER_NAME)
_GRAPH_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Batch sizes that are captured; above the last, multiples of a quarter of it, then eight sizes per doubling."""
_IDLE_STREAMS: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Capture streams of graphs that were destroyed, for reuse."""
Step = Callable[[int], Tensor]
Fetch = Callable[[], list[list[float]]]
"""Waits for a step and returns its tokens, log-probs and sampling log-probs."""


class Workspace:
    """Decodes the rows in the first slots of a KV cache, one token per row and step."""

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        *,
        slots: int,
        wanted_slots: int,
        capacity_tokens: int,
        cuda_graphs: bool = True,
    ) -> None:
        """Allocate.

        Args:
            decoder: of the model.
            requests: what will be generated, for the width of the tables.
            slots: completions decoded together.
            wanted_slots: as many as there would be with unlimited memory.
            capacity_tokens: of a slot.
            cuda_graphs: capture decoding steps in CUDA graphs on a GPU. While a graph is captured, no other thread may
                use the device.
        """
        device = decoder.world.device
        self.decoder, self._wanted_slots = decoder, wanted_slots
        self.cache = KVCache(
            decoder.architecture,
            decoder.split,
            slots=slots,
            capacity_tokens=capacity_tokens,
            dtype=decoder.dtype,
            device=device,
        )
        self.attention = Attention(decoder.architecture, decoder.split, self.cache, decoder.kernels)
        self.rows = DecodeBatch.empty(slots, requests, vocab_size=decoder.architecture.vocab_size, device=device)
        self.steps_in_flight = 1 if device.type == "cuda" else 0
        """Steps that are started before the result of an earlier one is fetched."""
        self._mode = SamplingMode.of(requests)
        self._sampler = Sampler(decoder.architecture.vocab_size, self._mode, decoder.world)
        self._graphs = None
        if device.type == "cuda" and cuda_graphs:
            self._graphs = _Graphs(self.rows, device)
        close_with_world(self)

    def close(self) -> None:
        """Release the CUDA graphs and their memory; the rest is freed with the last reference. Idempotent."""
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.close()

    def serves(self, requests: Sequence[Request], *, wanted_slots: int, capacity_tokens: int) -> bool:
        """Whether requests can be generated here as well as in a workspace allocated for them."""
        return (
            self._wanted_slots >= wanted_slots
            and self.cache.capacity_tokens >= capacity_tokens
            and self._mode == SamplingMode.of(requests)
            and self.rows.has_room_for(requests)
        )

    def first_tokens(self, logits: Tensor, slot: int, requests: Sequence[Request]) -> Fetch:
        """Sample the first tokens of requests from logits [n, V]; the requests occupy the slots from `slot` on."""
        self.rows.fill(slot, requests)
        return _fetch(_stacked(self._sampler(logits, self.rows.view(slot, slot + len(requests)))))

    def decode(self, live: Sequence[Request]) -> Fetch:
        """Sample one token for each of the live rows, which occupy the first slots."""
        if self._graphs is not None:
            return _fetch(self._graphs(self.step, _graph_rows(len(live), self.cache.slots))[:, : len(live)])
        lengths = [request.tokens for request in live]
        return _fetch(self.step(len(live), shortest=min(lengths), longest=max(lengths)))

    def step(self, batch: int, *, shortest: int = 1, longest: int | None = None) -> Tensor:
        """[3, B]: one step of the first `batch` rows.

        Args:
            batch: rows.
            shortest: length of the shortest row; kernels read lengths from the device instead.
            longest: of the longest; none: the capacity of a slot.
        """
        rows = self.rows.view(0, batch)
        # A CUDA graph also runs rows that have finished or are unused: they must stay within their slots.
        positions = rows.position.clamp(max=self.cache.capacity_tokens - 1)
        attend = self.attention.decode(positions, shortest=shortest, longest=longest or self.cache.capacity_tokens)
        hidden = self.decoder.hidden(rows.token, positions, attend)
        return _stacked(self._sampler(self.decoder.logits(hidden), rows))


class _Graphs:
    """CUDA graphs of a step, one per batch size, captured when that size first occurs.

    All are captured on one stream of their own. cuBLAS keeps a workspace per stream (32 MiB on Hopper), and torch
    clears that of a graph's capture stream when the graph is destroyed (pytorch issue 193402), so live graphs of
    another workspace must not use the same stream. The step is passed in each call, because storing it would make a
    reference cycle with the workspace, which owns these graphs.
    """

    def __init__(self, rows: DecodeBatch, device: torch.device) -> None:
        self._rows, self._idle = rows, _IDLE_STREAMS[device]
        self._stream = self._idle.pop() if self._idle else torch.cuda.Stream(device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, step: Step, batch: int) -> Tensor:
        """Run a step; the next call overwrites the result."""
        if batch not in self._captured:
            self._captured[batch] = self._capture(step, batch)
        graph, result = self._captured[batch]
        graph.replay()
        return result

    def close(self) -> None:
        """Destroy the graphs, which frees their memory, and release the stream for reuse."""
        self._stream.synchronize()
        torch.cuda.current_stream().synchronize()  # a replay may still run
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured.clear()
        self._idle.append(self._stream)

    def _capture(self, step: Step, batch: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        pool = None
        if self._captured:
            pool = next(iter(self._captured.values()))[0].pool()
        else:
            logger.info("capturing CUDA graphs of decoding, once per batch size: the first steps take longer")
        saved, main = self._rows.save(), torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):  # compile kernels and load libraries outside the graph
            step(batch)
        main.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of the process group may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step(batch)
        self._rows.restore(saved)
        return graph, result


def _graph_rows(rows: int, slots: int) -> int:
    """The batch size that a number of rows is rounded up to."""
    if rows > _GRAPH_ROWS[-1]:
        step = max(_GRAPH_ROWS[-1] // 4, 1 << ((rows - 1).bit_length() - 4))
        return min(slots, -(-rows // step) * step)
    return min(slots, _GRAPH_ROWS[bisect.bisect_left(_GRAPH_ROWS, rows)])


def _stacked(drawn: SampledTokens) -> Tensor:
    """[3, B] float64, to copy to the host at once; float64 represents every token id exactly."""
    return torch.stack([drawn.tokens.double(), drawn.logprobs.double(), drawn.sampling_logprobs.double()])


def _fetch(result: Tensor) -> Fetch:
    """Start the copy to the host."""
    if result.device.type == "cpu":
        return result.tolist
    host = torch.empty(result.shape, dtype=result.dtype, device="cpu", pin_memory=True)
    host.copy_(result, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> list[list[float]]:
        arrived.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return wait
