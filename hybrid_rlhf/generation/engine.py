"""The generation engine: any number of prompts of any lengths, batched as memory allows.

Usable by itself (`GenerationEngine.from_pretrained`) and over the actor of a training run (engines/hybrid.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import ModelConfig
from hybrid_rlhf.generation.cache import bytes_per_token
from hybrid_rlhf.generation.continuous import ContinuousBatch
from hybrid_rlhf.generation.decoder import Decoder
from hybrid_rlhf.generation.layout import check_layout, decoder_of
from hybrid_rlhf.generation.module_batch import ModuleBatch, module_batches
from hybrid_rlhf.generation.requests import Request
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, per_request, uniform_stream
from hybrid_rlhf.generation.slots import Working, available_bytes, slot_tokens, slots_within, working_memory
from hybrid_rlhf.generation.workspace import Workspace
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.models.loading import load_model, position_limit
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import World, solo_world

if TYPE_CHECKING:
    from typing import Self

Layout = Literal["auto", "module"]
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens of prompts read at once."""
_MODULE_ROWS = 256
"""Completions decoded together through the module, at most unless told: its cache is not planned."""


class GenerationEngine:
    """Completions from a causal LM."""

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        *,
        stop_token_ids: Iterable[int] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        layout: Layout = "auto",
        max_batch_rows: int | None = None,
        kv_cache_gib: float | None = None,
        prefill_tokens: int | None = None,
        weight_version: int = 0,
        workspace: Workspace | None = None,
        captures: bool = True,
    ) -> None:
        """Wrap a model; its weights are used as they are and where they are.

        Args:
            model: a causal LM whose weights are whole, or its decoder.
            stop_token_ids: tokens that end every completion; none: the eos of the model's generation config, or none
                of a decoder.
            tokenizer: for stop strings.
            layout: auto computes with the inference layout where it describes the model; module never does.
            max_batch_rows: completions decoded together, at most; none: as many as memory has room for, 256 where the
                module generates.
            kv_cache_gib: memory for keys and values; none: what is free on the device, as generation/slots.py plans.
            prefill_tokens: tokens of prompts read at once; none: 2048 on a CPU, 16384 on a GPU.
            weight_version: stamped on every completion.
            workspace: of an earlier engine over the same decoder, to go on with.
            captures: decoding steps on a GPU, which nothing else may use meanwhile.
        """
        if stop_token_ids is None:
            stop_token_ids = default_stop_token_ids(model) if isinstance(model, PreTrainedModel) else ()
        self.stop_token_ids = frozenset(stop_token_ids)
        self._tokenizer = tokenizer
        self._max_batch_rows, self._kv_cache_gib = max_batch_rows, kv_cache_gib
        self._weight_version = weight_version
        self._lm = model if isinstance(model, PreTrainedModel) else None
        self._decoder = model if isinstance(model, Decoder) else None
        if self._lm is not None and layout == "auto":
            self._decoder = decoder_of(self._lm, world=solo_world(self._lm.device), dtype=self._lm.dtype)
        self._module_positions = None if self._lm is None or self._decoder is not None else position_limit(self._lm)
        device = self._decoder.world.device if self._decoder is not None else self._lm.device  # type: ignore[union-attr]
        self._closed, self._captures = False, captures
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[device.type]
        self.workspace = workspace
        """KV cache, tables and captured steps of the last call; the next one goes on with them if it can."""
        self.decode_bytes = 0
        """Weights, keys and values that decoding has read on this rank; a layout's only."""

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        trust_remote_code: bool = False,
        layout: Layout = "auto",
        kv_cache_gib: float | None = None,
        max_batch_rows: int | None = None,
    ) -> Self:
        """Load a folder, hub name or GGUF file for generation, and check its layout on a prompt.

        Args:
            path: the model.
            dtype: of the weights and of all computation but the softmax.
            device: where the weights lie.
            group: ranks that share the model by tensor parallelism; each must call.
            trust_remote_code: run Python code that comes with the model.
            layout: see the constructor.
            kv_cache_gib: see the constructor.

        Raises:
            UserError: when there is no such model, or its layout does not compute what it should.
        """
        device = torch.device(device)
        world = solo_world(device)
        if group is not None:
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            world = World(rank, size, rank, size, device, group)
        resolved = resolve_model(path, world=world)
        config = ModelConfig(path=path, trust_remote_code=trust_remote_code)
        lm, _ = load_model(resolved, "causal_lm", config=config, dtype=dtype)
        if world.size == 1 or layout == "module":
            lm.to(device)  # type: ignore[arg-type]
        lm.eval()
        decoder = None if layout == "module" else decoder_of(lm, world=world, dtype=dtype)
        if decoder is not None:
            check_layout(decoder, module_logprobs(lm, probe_tokens(decoder.architecture.vocab_size)))
        return cls(
            lm if decoder is None else decoder,
            stop_token_ids=default_stop_token_ids(lm),
            tokenizer=load_tokenizer(resolved, trust_remote_code=trust_remote_code),
            layout="module",  # what has a layout is a decoder by now
            kv_cache_gib=kv_cache_gib,
            max_batch_rows=max_batch_rows,
        )

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model has positions for; none: it sets no limit."""
        return self._module_positions if self._decoder is None else self._decoder.architecture.max_positions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        on_completed: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """Complete each prompt. Tensor-parallel ranks must all call, with the same prompts and seeds.

        Args:
            prompts: token ids, at least one a prompt, any lengths.
            sampling: for all prompts, or one for each.
            on_completed: called with how many completions have come to their ends since the last call.

        Returns:
            completions[i][j]: sample j of prompt i. The result of a prompt depends on its own seed alone.
        """
        requests = self._requests(prompts, sampling)
        for added in self._run(requests):
            if self._closed:
                raise RuntimeError("the generation engine was closed while it generated")
            if on_completed is not None:
                on_completed(sum(request.finish_reason is not None for request, _ in added))
        results: list[list[Completion]] = [[] for _ in prompts]
        for request in requests:
            results[request.prompt_index].append(request.completion(self._weight_version))
        return results

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[int]:
        """Complete one prompt, token by token, the stop token included."""
        for added in self._run(self._requests([prompt], replace(sampling, n=1))):
            yield from (token for _, token in added)

    def close(self) -> None:
        """Let go of weights, cache and captured steps; a `generate` under way in another thread raises RuntimeError."""
        self._closed = True
        workspace = self.detach_workspace()
        if workspace is not None:
            workspace.close()
        self._decoder = self._lm = None

    def detach_workspace(self) -> Workspace | None:
        """Give away what decoding worked in, for a later engine over the same decoder; `close` leaves it alone then."""
        workspace, self.workspace = self.workspace, None
        return workspace

    def _requests(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise UserError(f"a prompt has at least one token, prompt {index} has none: drop it")
        each = per_request(sampling, len(prompts))
        if any(params.stop_strings for params in each) and self._tokenizer is None:
            raise UserError("stop_strings need a tokenizer, the engine has none: use stop_token_ids")
        detokenize = None if self._tokenizer is None else self._tokenizer.decode
        return [
            Request(
                list(prompt),
                index,
                params,
                self.stop_token_ids | set(params.stop_token_ids),
                uniform_stream(params.seed or 0, sample, self._longest_completion(index, prompt, params)),
                detokenize,
            )
            for index, (prompt, params) in enumerate(zip(prompts, each, strict=True))
            for sample in range(params.n)
        ]

    def _longest_completion(self, index: int, prompt: Sequence[int], params: SamplingParams) -> int:
        """Tokens that a completion may have: a model with a table of positions ends where the table does."""
        limit = self.max_positions
        if limit is None:
            return params.max_new_tokens
        if len(prompt) >= limit:
            raise UserError(
                f"the model has {limit} positions, prompt {index} has {len(prompt)} tokens: shorten the prompt"
            )
        return min(params.max_new_tokens, limit - len(prompt))

    def _run(self, requests: Sequence[Request]) -> Iterator[list[tuple[Request, int]]]:
        if not requests:
            return
        if self._decoder is not None:
            decoder = self._decoder
            self.workspace = self._workspace_for(decoder, requests)
            batch = ContinuousBatch(self.workspace, requests, prefill_tokens=self._prefill_tokens)
            yield from batch.steps()
            cached = bytes_per_token(decoder.architecture, decoder.split, decoder.dtype)
            self.decode_bytes += batch.decode_steps * decoder.product_bytes
            self.decode_bytes += cached * sum(request.attended_tokens for request in requests)
            return
        if self._lm is None:
            raise RuntimeError("a generation engine is used inside `inference()`, this one was closed")
        for rows in module_batches(self._lm, requests, max_rows=self._max_batch_rows or _MODULE_ROWS):
            yield from ModuleBatch(self._lm, rows).steps()

    def _workspace_for(self, decoder: Decoder, requests: Sequence[Request]) -> Workspace:
        """As many slots as there are requests, rows in a batch, or room."""
        a, needed = decoder.architecture, max(len(request.prompt) + len(request.uniforms) for request in requests)
        wanted_slots = min(len(requests), self._max_batch_rows or sys.maxsize)
        if self.workspace is not None and self.workspace.serves(
            requests, wanted_slots=wanted_slots, capacity_tokens=needed
        ):
            return self.workspace
        if self.workspace is not None:
            self.workspace.close()
        self.workspace = None  # its memory counts as free
        world = decoder.world
        capacity = min(slot_tokens(needed, world.device), a.max_positions or sys.maxsize)
        slot_bytes = capacity * bytes_per_token(a, decoder.split, decoder.dtype)
        if self._kv_cache_gib is not None:
            budget, working = self._kv_cache_gib * 2**30, Working()
        else:
            working = working_memory(
                decoder, requests, rows=wanted_slots, prefill_tokens=self._prefill_tokens, captures=self._captures
            )
            budget = available_bytes(world)
        slots = min(wanted_slots, slots_within(budget, slot_bytes, working))
        # Ranks must come to the same number; free memory and heads may be unequal.
        slots = int(world.all_reduce(torch.tensor(slots, device=world.device), dist.ReduceOp.MIN))
        if slots < 1:
            raise UserError(
                f"the KV cache must hold one completion of {capacity} tokens, {slot_bytes / 2**30:.2f} GiB, its budget "
                f"is {max(0.0, budget - working.prefill) / 2**30:.2f} GiB: lower max_new_tokens or raise kv_cache_gib"
            )
        return Workspace(
            decoder, requests, slots=slots, wanted_slots=wanted_slots, capacity_tokens=capacity, captures=self._captures
        )


def default_stop_token_ids(lm: PreTrainedModel) -> tuple[int, ...]:
    """The eos tokens of a model's generation config, or of its config."""
    config = lm.config if lm.generation_config is None else lm.generation_config
    eos = config.eos_token_id
    return (eos,) if isinstance(eos, int) else tuple(eos or ())
