"""What decoding works in: the KV cache, the tables of the rows, and on a GPU the captured steps over them.

Why it outlives a call: a captured step (a CUDA graph) holds addresses. As long as weights, cache and tables stay where
they are, a step that was captured once is replayed by one launch, over all the rollouts of a run; without it the host
launches every kernel of every layer, which takes longer than a small model's arithmetic.
"""

from __future__ import annotations

import bisect
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_rlhf.generation.attention import Attention
from hybrid_rlhf.generation.cache import KVCache
from hybrid_rlhf.generation.decoder import Decoder
from hybrid_rlhf.generation.requests import Request
from hybrid_rlhf.generation.rows import Mode, Rows
from hybrid_rlhf.generation.sampler import Drawn, Sampler
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import close_with_world

logger = logging.getLogger(LOGGER_NAME)
_LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Sizes of batch that are captured; above the last one, multiples of a quarter of it, then eight for each doubling."""
_IDLE_STREAMS: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of graphs that are gone."""
Step = Callable[[int], Tensor]
Fetch = Callable[[], list[list[float]]]
"""Tokens, log-probs and sampling log-probs of a step; waits until they are there."""


class Workspace:
    """Decodes the rows in the first slots of a cache, a token each at a time."""

    def __init__(
        self, decoder: Decoder, requests: Sequence[Request], *, slots: int, wanted_slots: int, capacity_tokens: int,
        captures: bool = True,
    ) -> None:  # fmt: skip
        """Allocate.

        Args:
            decoder: computes.
            requests: what will be asked, for the width of the tables.
            slots: completions at once.
            wanted_slots: as many as there would be, had memory no end.
            capacity_tokens: of a slot.
            captures: steps on a GPU, which nothing else may use meanwhile.
        """
        device = decoder.world.device
        self.decoder, self._wanted_slots = decoder, wanted_slots
        self.cache = KVCache(
            decoder.architecture, decoder.split, slots=slots, capacity_tokens=capacity_tokens, dtype=decoder.dtype,
            device=device,
        )  # fmt: skip
        self.attention = Attention(decoder.architecture, decoder.split, self.cache, decoder.kernels)
        self.rows = Rows.empty(slots, requests, vocab_size=decoder.architecture.vocab_size, device=device)
        self.lag = 1 if device.type == "cuda" else 0
        """Steps that run before the result of one is looked at."""
        self._mode = Mode.of(requests)
        self._sampler = Sampler(decoder.architecture.vocab_size, self._mode, decoder.world)
        self._graphs = None
        if device.type == "cuda" and captures:
            self._graphs = _Graphs(self.rows, device)
        close_with_world(self)

    def close(self) -> None:
        """Release captured steps and their memory; the rest goes with the last reference. More than once is fine."""
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.close()

    def serves(self, requests: Sequence[Request], *, wanted_slots: int, capacity_tokens: int) -> bool:
        """Whether requests can be generated here as well as in one made for them."""
        return (
            self._wanted_slots >= wanted_slots
            and self.cache.capacity_tokens >= capacity_tokens
            and self._mode == Mode.of(requests)
            and self.rows.has_room_for(requests)
        )

    def first_tokens(self, logits: Tensor, slot: int, requests: Sequence[Request]) -> Fetch:
        """Requests that have read their prompts enter the slots from `slot` on; logits [n, V] draw their first."""
        self.rows.enter(slot, requests)
        return _fetch(_stacked(self._sampler(logits, self.rows.part(slot, slot + len(requests)))))

    def decode(self, live: Sequence[Request]) -> Fetch:
        """One token for each of the rows, which are in the first slots."""
        if self._graphs is not None:
            return _fetch(self._graphs(self.step, _rung(len(live), self.cache.slots))[:, : len(live)])
        lengths = [request.tokens for request in live]
        return _fetch(self.step(len(live), shortest=min(lengths), longest=max(lengths)))

    def step(self, batch: int, *, shortest: int = 1, longest: int | None = None) -> Tensor:
        """[3, B]: a step of the first rows, of lengths in that range; by default any. Kernels do not look at them."""
        rows = self.rows.part(0, batch)
        # A row that has ended, or never was, may run on in a captured step: it stays in its slot.
        positions = rows.position.clamp(max=self.cache.capacity_tokens - 1)
        attend = self.attention.decode(positions, shortest=shortest, longest=longest or self.cache.capacity_tokens)
        hidden = self.decoder.hidden(rows.token, positions, attend)
        return _stacked(self._sampler(self.decoder.logits(hidden), rows))


class _Graphs:
    """CUDA graphs of a step, one for each size of batch, captured when it first comes.

    All are captured on one stream of their own: cuBLAS keeps a workspace for each stream that it sees (32 MiB on
    Hopper), and torch clears that of a graph's stream when the graph goes (pytorch issue 193402), so graphs that live
    on must not share it. A step is handed in at each call rather than kept: what it belongs to keeps these graphs.
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows, self._idle = rows, _IDLE_STREAMS[device]
        self._stream = self._idle.pop() if self._idle else torch.cuda.Stream(device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, step: Step, batch: int) -> Tensor:
        """What the step gives; its memory is written again by the next."""
        if batch not in self._captured:
            self._captured[batch] = self._capture(step, batch)
        graph, result = self._captured[batch]
        graph.replay()
        return result

    def close(self) -> None:
        """Destroy the graphs, which gives their memory back, and leave the stream to the next."""
        self._stream.synchronize()
        torch.cuda.current_stream().synchronize()  # a replay may be under way
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured.clear()
        self._idle.append(self._stream)

    def _capture(self, step: Step, batch: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        pool = None
        if self._captured:
            pool = next(iter(self._captured.values()))[0].pool()
        else:
            logger.info("decoding is captured in CUDA graphs: a moment for each size of batch, once")
        saved, main = self._rows.save(), torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):  # kernels are compiled and libraries allocate outside the graph
            step(batch)
        main.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of the process group may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step(batch)
        self._rows.restore(saved)
        return graph, result


def _rung(rows: int, slots: int) -> int:
    """The size of batch that rows are rounded up to."""
    if rows > _LADDER[-1]:
        step = max(_LADDER[-1] // 4, 1 << ((rows - 1).bit_length() - 4))
        return min(slots, -(-rows // step) * step)
    return min(slots, _LADDER[bisect.bisect_left(_LADDER, rows)])


def _stacked(drawn: Drawn) -> Tensor:
    """[3, B] float64, to be fetched at once; every token is a float64."""
    return torch.stack([drawn.tokens.double(), drawn.logprobs.double(), drawn.sampling_logprobs.double()])


def _fetch(result: Tensor) -> Fetch:
    """Start the way to the host."""
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
