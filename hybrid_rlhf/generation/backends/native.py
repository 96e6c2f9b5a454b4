"""The library's own decoder: inference weights, a KV cache in slots, continuous batching, CUDA graphs on a GPU.

The backend allocates its workspace (KV cache, tables, CUDA graphs) in the first call and keeps it as long as it fits
the requests of later calls. After a weight sync it keeps the workspace if the weights were written in place, since the
addresses in its CUDA graphs are then still valid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.batching.cache import bytes_per_token
from hybrid_rlhf.generation.batching.continuous import ContinuousBatch
from hybrid_rlhf.generation.batching.requests import NewTokens, Request
from hybrid_rlhf.generation.batching.slots import (
    WorkingMemory,
    available_bytes,
    slot_tokens,
    slots_within,
    working_memory,
)
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.decoder import Decoder

PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens of one prefill, by device."""


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
            kv_cache_gib: memory for keys and values; none: what is free on the device (batching/slots.py).
            prefill_tokens: prompt tokens of one prefill; none: 2048 on a CPU, 16384 on a GPU.
            cuda_graphs: capture decoding steps in CUDA graphs on a GPU. While a graph is captured, no other thread may
                use the device.
        """
        self._decoder: Decoder | None = decoder
        self._max_batch_rows, self._kv_cache_gib = max_batch_rows, kv_cache_gib
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[decoder.world.device.type]
        self._cuda_graphs = cuda_graphs
        self.max_positions = decoder.architecture.max_positions
        self.decode_bytes = 0
        self.workspace: Workspace | None = None
        """KV cache, tables and CUDA graphs of the last call."""

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
        self._decoder = decoder

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """See GenerationBackend."""
        decoder = self.decoder
        self.workspace = self._workspace_for(decoder, requests)
        batch = ContinuousBatch(self.workspace, requests, prefill_tokens=self._prefill_tokens)
        yield from batch.steps()
        cached = bytes_per_token(decoder.architecture, decoder.split, decoder.dtype)
        self.decode_bytes += batch.decode_steps * decoder.product_bytes
        self.decode_bytes += cached * sum(request.attended_tokens for request in requests)

    def close(self) -> None:
        """See GenerationBackend."""
        self._release_workspace()
        self._decoder = None

    def _release_workspace(self) -> None:
        workspace, self.workspace = self.workspace, None
        if workspace is not None:
            workspace.close()

    def _workspace_for(self, decoder: Decoder, requests: Sequence[Request]) -> Workspace:
        """The last call's workspace if it serves these requests too, else a new one with as many slots as fit."""
        needed_tokens = max(len(request.prompt) + len(request.uniforms) for request in requests)
        wanted_slots = min(len(requests), self._max_batch_rows or sys.maxsize)
        if self.workspace is not None and self.workspace.serves(
            requests, wanted_slots=wanted_slots, capacity_tokens=needed_tokens
        ):
            return self.workspace
        self._release_workspace()  # before free memory is measured
        capacity = min(slot_tokens(needed_tokens, decoder.world.device), self.max_positions or sys.maxsize)
        slots = self._slots(decoder, requests, wanted_slots=wanted_slots, capacity_tokens=capacity)
        return Workspace(
            decoder,
            requests,
            slots=slots,
            wanted_slots=wanted_slots,
            capacity_tokens=capacity,
            cuda_graphs=self._cuda_graphs,
        )

    def _slots(self, decoder: Decoder, requests: Sequence[Request], *, wanted_slots: int, capacity_tokens: int) -> int:
        """How many slots of `capacity_tokens` fit in memory, up to `wanted_slots`; the same number on every rank.

        Raises:
            UserError: when memory has no room for one completion.
        """
        world = decoder.world
        slot_bytes = capacity_tokens * bytes_per_token(decoder.architecture, decoder.split, decoder.dtype)
        if self._kv_cache_gib is not None:
            budget, working = self._kv_cache_gib * 2**30, WorkingMemory()
        else:
            working = working_memory(
                decoder,
                requests,
                rows=wanted_slots,
                prefill_tokens=self._prefill_tokens,
                cuda_graphs=self._cuda_graphs,
            )
            budget = available_bytes(world)
        slots = min(wanted_slots, slots_within(budget, slot_bytes, working))
        # Free memory and KV heads may differ between ranks.
        slots = int(world.all_reduce(torch.tensor(slots, device=world.device), dist.ReduceOp.MIN))
        if slots < 1:
            raise UserError(
                f"the KV cache must hold one completion of {capacity_tokens} tokens, {slot_bytes / 2**30:.2f} GiB, its "
                f"budget is {max(0.0, budget - working.prefill) / 2**30:.2f} GiB: lower max_new_tokens or raise "
                "kv_cache_gib"
            )
        return slots
