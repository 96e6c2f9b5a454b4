"""The generation engine: completions for any number of prompts of any length.

The engine checks prompts, turns them into requests and collects results; a backend (backends/) computes. It is used
alone (`GenerationEngine.from_pretrained`) and on the actor of a training run (engines/hybrid.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.generation.backends.backend import BackendName, GenerationBackend
from hybrid_rlhf.generation.backends.module import ModuleBackend
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.images import GivenImages, PromptImages
from hybrid_rlhf.generation.batching.requests import (
    DecodeWork,
    NewTokens,
    Request,
    RequestMaker,
    continue_requests,
)
from hybrid_rlhf.generation.image_loading import ImageReader, SavedImageReader
from hybrid_rlhf.generation.open_batch import OpenBatch
from hybrid_rlhf.generation.ops.quantisation import Quantization
from hybrid_rlhf.generation.sampling import Completion, SamplingParams
from hybrid_rlhf.generation.weights.adapters import NumberedAdapter
from hybrid_rlhf.generation.weights.inference_weights import SharedWeights
from hybrid_rlhf.generation.weights.probe import check_inference_weights
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.models.pretrained.adapters import LowRank, read_adapter
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import World, solo_world


class GenerationEngine:
    """Generates completions with a causal LM."""

    def __init__(
        self,
        backend: GenerationBackend,
        *,
        stop_token_ids: Iterable[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        weight_version: int = 0,
        shared: SharedWeights | None = None,
        keeps_backend: bool = False,
        image_reader: Callable[[], ImageReader] | None = None,
    ) -> None:
        """Wrap a backend; `from_pretrained` and `from_model` build one.

        Args:
            backend: runs the model.
            stop_token_ids: tokens that end every completion.
            tokenizer: for stop strings.
            weight_version: version of the weights, recorded for every token.
            shared: inference weights that follow the trained model, with its adapters; none: the caller updates the
                backend.
            keeps_backend: do not close the backend with the engine, so that a later engine can use it.
            image_reader: see `image_reader`.
        """
        self.image_reader = image_reader
        """Returns what reads the images of prompts; None: the model reads none, or its folder is unknown."""
        self._backend: GenerationBackend | None = backend
        self.weight_version = weight_version
        self._shared = shared
        self._keeps_backend = keeps_backend
        self.maker = RequestMaker(
            backend.max_positions,
            backend.trained_positions,
            backend.vocab_size,
            frozenset(stop_token_ids),
            tokenizer,
            {name: adapter.number for name, adapter in self._adapters.items()},
            backend.reads_images,
            backend.banned_ids,
        )
        if image_reader is not None:
            self.maker.prompt_images = lambda ids, images: image_reader().prompt_images(ids, images)
        """Turns prompts into requests."""
        self._last_number = len(self.maker.adapters)
        self._work_before = backend.work
        self._work = DecodeWork()

    @classmethod
    def from_model(
        cls,
        lm: PreTrainedModel,
        *,
        stop_token_ids: Iterable[int] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        backend: BackendName = "auto",
        quantization: Quantization | None = None,
        max_batch_rows: int | None = None,
        kv_cache_gib: float | None = None,
        prefill_tokens: int | None = None,
        cuda_graphs: bool = True,
        adapters: Mapping[str, str] | None = None,
    ) -> Self:
        """Generate with a loaded model, using its weights in place where no other layout is faster.

        After the model was trained, the next call updates copied weights and removes cached prefixes.

        Args:
            lm: a causal LM with its full weights on one device.
            stop_token_ids: tokens that end every completion; none: the EOS tokens of the model's generation config.
            tokenizer: for stop strings.
            backend: see BackendName.
            quantization: int8 or fp8 matmuls in the layers (model/layers.py); none: the model's dtype. Native
                backend only.
            max_batch_rows: maximum number of completions decoded together; none: limited by memory, module: 256.
            kv_cache_gib: memory for keys and values; none: the free device memory. Native backend only.
            prefill_tokens: prompt tokens per prefill; none: 2048 on a CPU, 16384 on a GPU. Native backend only.
            cuda_graphs: capture decoding steps on a GPU; false if engines in several threads use the device.
            adapters: unmerged LoRA adapters as {name: peft folder}; prompts select them by name. Native backend
                without quantization.

        Raises:
            UserError: for an adapter of another model or kind, or one that the inference weights do not support; with
                adapters, also when the log-probs of the inference weights differ from the model's.
        """
        if adapters and (quantization is not None or backend == "module"):
            option = f"quantization {quantization}" if quantization is not None else "backend module"
            raise UserError(f"adapters need inference weights in the model's dtype, got {option}: leave it out")
        read = {
            name: NumberedAdapter(number, read_adapter(lm, folder))
            for number, (name, folder) in enumerate((adapters or {}).items(), start=1)
        }
        shared = _shared_weights(lm, backend, quantization, world=solo_world(lm.device), dtype=lm.dtype, adapters=read)
        return cls(
            _backend(lm, shared, bool(adapters), max_batch_rows, kv_cache_gib, prefill_tokens, cuda_graphs),
            stop_token_ids=default_stop_token_ids(lm) if stop_token_ids is None else stop_token_ids,
            tokenizer=tokenizer,
            shared=shared,
            image_reader=SavedImageReader.find(lm, lm.name_or_path, lm.device),
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        trust_remote_code: bool = False,
        backend: BackendName = "auto",
        quantization: Quantization | None = None,
        kv_cache_gib: float | None = None,
        max_batch_rows: int | None = None,
        cuda_graphs: bool = True,
    ) -> Self:
        """Load a folder, hub name or GGUF file for generation, and check its inference weights on a short prompt.

        Args:
            path: the model.
            dtype: dtype of the weights and of all computation except the softmax.
            device: device of the weights.
            group: ranks that share the model by tensor parallelism; each must make this call.
            trust_remote_code: run Python code that comes with the model.
            backend: see BackendName.
            quantization: as in `from_model`.
            kv_cache_gib: as in `from_model`.
            max_batch_rows: as in `from_model`.
            cuda_graphs: as in `from_model`.

        Raises:
            UserError: if there is no such model, or its inference weights do not match the model.
        """
        device = torch.device(device)
        world = solo_world(device)
        if group is not None:
            rank = dist.get_rank(group)
            size = dist.get_world_size(group)
            world = World(rank, size, rank, size, device, group)
        resolved = resolve_model(path, world=world)
        config = ModelConfig(path=path, trust_remote_code=trust_remote_code)
        lm, _ = load_model(resolved, "causal_lm", config=config, dtype=dtype)
        if world.size == 1 or backend == "module":
            lm.to(device)  # type: ignore[arg-type]
        lm.eval()
        shared = _shared_weights(lm, backend, quantization, world=world, dtype=dtype)
        return cls(
            _backend(lm, shared, True, max_batch_rows, kv_cache_gib, cuda_graphs=cuda_graphs),
            stop_token_ids=default_stop_token_ids(lm),
            tokenizer=load_tokenizer(resolved, trust_remote_code=trust_remote_code),
            shared=shared,
            image_reader=SavedImageReader.find(lm, resolved, device, trust_remote_code=trust_remote_code),
        )

    @property
    def backend(self) -> GenerationBackend:
        """The backend that runs the model.

        Raises:
            RuntimeError: if the engine is closed.
        """
        if self._backend is None:
            raise RuntimeError("a generation engine is used inside `inference()`, this one was closed")
        return self._backend

    @property
    def is_closed(self) -> bool:
        """True if the engine was closed."""
        return self._backend is None

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end every completion."""
        return self.maker.stop_token_ids

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that a prompt may choose."""
        return tuple(self.maker.adapters)

    def set_adapter(self, name: str, factors: Mapping[str, LowRank], *, like: PreTrainedModel | None = None) -> None:
        """Add an adapter, or replace the one of this name.

        Its number is new, so that no cached prefix matches. While an open batch runs, call this between two of its
        steps (`OpenBatch.call`, or `paused` on a GPU); the adapter that is replaced must have no running requests.

        Args:
            name: for prompts.
            factors: as `read_adapter` returns them.
            like: a model with the shapes of the weights; none: the one that the engine was built from, which still
                exists.

        Raises:
            UserError: for an engine without inference weights, or a product without adapters.
        """
        number = self._last_number + 1
        self._replace_adapters({**self._adapters, name: NumberedAdapter(number, factors)}, like)
        self._last_number = number

    def remove_adapters(self, names: Collection[str], *, like: PreTrainedModel | None = None) -> None:
        """Remove adapters, which must have no running requests; called as `set_adapter`."""
        kept = {name: adapter for name, adapter in self._adapters.items() if name not in names}
        self._replace_adapters(kept, like)

    @property
    def _adapters(self) -> Mapping[str, NumberedAdapter]:
        """The adapters by name."""
        return {} if self._shared is None else self._shared.adapters

    def _replace_adapters(self, adapters: dict[str, NumberedAdapter], like: PreTrainedModel | None) -> None:
        backend = self.backend
        if self._shared is None or not isinstance(backend, NativeBackend):
            raise UserError("adapters need inference weights, this model has none: serve merged models")
        backend.set_adapters(self._shared.replace_adapters(adapters, like))
        self.maker.adapters = {name: adapter.number for name, adapter in adapters.items()}

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model has positions for; none: no limit."""
        return self.backend.max_positions

    @property
    def records_routes(self) -> bool:
        """True if completions can report the experts that computed each token."""
        return self.backend.records_routes

    @property
    def work(self) -> DecodeWork:
        """Decoding statistics of this engine on this rank; zeros for the module backend."""
        if self._backend is not None:
            self._work = self._backend.work - self._work_before
        return self._work

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        record_routes: bool | Sequence[bool] = False,
        on_completed: Callable[[int], None] | None = None,
        begun: Sequence[Sequence[Completion]] = (),
        until: Collection[int] | None = None,
        rows: int | None = None,
        adapters: Sequence[str | None] = (),
        images: Sequence[GivenImages] = (),
    ) -> list[list[Completion]]:
        """Complete each prompt. All tensor-parallel ranks must make this call, with the same prompts and seeds.

        Args:
            prompts: token ids, at least one per prompt, of any length.
            sampling: for all prompts, or one per prompt.
            record_routes: record the experts that computed each token, for all prompts or per prompt.
            on_completed: called after each step with the number of completions that finished in it.
            begun: completions of an earlier call, with the same seeds: all samples of a prompt, or none; shorter than
                `prompts` if the last ones have none. Finished ones are returned unchanged, others continue, also
                with other weights; their prompt and tokens are recomputed. Not by the module backend.
            until: indices of prompts; return after the step in which the last of them is finished, with the others'
                completions as they are. Native backend; none: all prompts.
            rows: maximum number of completions decoded together, by which the progress of the others does not depend
                on earlier calls; none: as many as the backend has room for. Native backend.
            adapters: name of the adapter of each prompt, None for the model itself; empty: no adapters.
            images: images of each prompt, or references that `image_reader` reads; None for a prompt without; empty:
                there are none. Native backend.

        Returns:
            completions[i][j]: sample j of prompt i. The completions of a prompt depend only on its own seed.

        Raises:
            UserError: when a prompt is empty or too long for the model, stop strings are given without a tokenizer, or
                routes are recorded of a model without inference weights or mixtures of experts, completions continue or
                images are given without inference weights, or placeholders in a prompt are not tokens of its images.
            RuntimeError: when the engine is closed, also by another thread during the call.
        """
        continues = self.backend.continues
        requests = self.maker.requests(prompts, sampling, images=images)
        if (until is not None or any(begun)) and not continues:
            raise UserError("begun and until need inference weights, got the model's own module: leave them out")
        if adapters and len(adapters) != len(prompts):
            raise UserError(f"adapters are one per prompt, got {len(adapters)} for {len(prompts)}: give as many")
        for request, adapter in ((entry, adapters[entry.prompt_index]) for entry in requests if adapters):
            request.adapter = self.maker.adapter_number(adapter)
        continue_requests(requests, begun)
        recorded = [record_routes] * len(prompts) if isinstance(record_routes, bool) else record_routes
        if any(recorded) and not self.records_routes:
            raise UserError(
                "record_routes needs a mixture of experts with inference weights, the engine has none: leave it out"
            )
        for request in requests:
            request.records_routes = recorded[request.prompt_index]
            request.streams = bool(request.grammar or request.stop_strings)
        awaited = {request for request in requests if until is None or request.prompt_index in until}
        left = sum(not request.ended for request in awaited)
        unfinished = [request for request in requests if left and not request.ended]
        with contextlib.closing(self._run(unfinished, rows=rows)) as steps:
            for new in steps:
                if self._backend is None:
                    raise RuntimeError("the generation engine was closed while it generated")
                finished = sum(request.ended and request in awaited for request, _ in new)
                left -= finished
                if on_completed is not None:
                    on_completed(finished)
                if until is not None and not left:
                    break
        results: list[list[Completion]] = [[] for _ in prompts]
        for request in requests:
            results[request.prompt_index].append(request.completion(self.weight_version))
        return results

    def open(
        self,
        *,
        rows: int,
        max_tokens: int,
        memory_share: float | None = None,
        records_routes: bool = False,
        world: World | None = None,
    ) -> OpenBatch:
        """Decode requests from other threads as they arrive, until the batch is closed.

        The engine cannot be used for anything else until then.

        Args:
            rows: maximum number of completions decoded together.
            max_tokens: maximum length of prompt and completion; keys and values of one such request must fit in memory.
            memory_share: largest share of the free memory for keys and values, unless one request needs more; none: the
                default.
            records_routes: true if requests may record the experts of their tokens.
            world: tensor-parallel ranks that share the model, each of which makes this call; the group must not be used
                by another thread. None: this rank alone.

        Raises:
            UserError: when keys and values of one request do not fit in memory.
        """
        self._follow_model()
        return OpenBatch(
            self.backend,
            self.maker,
            rows=rows,
            max_tokens=max_tokens,
            memory_share=memory_share,
            weight_version=self.weight_version,
            records_routes=records_routes,
            world=world,
        )

    def replace_weights(self, lm: PreTrainedModel, version: int, batch: OpenBatch) -> None:
        """Take the weights of another model of the same architecture, while an open batch has no requests.

        Args:
            lm: the model, on the host or the device.
            version: recorded for each further token.
            batch: the engine's open batch.

        Raises:
            UserError: when the model has no inference weights.
        """
        shared = self._shared
        if shared is None or not isinstance(self.backend, NativeBackend):
            raise UserError("weights are replaced where there are inference weights, this model has none: restart")
        changes = shared.replace_adapters(self._adapters, lm)
        with batch.paused():
            if isinstance(self.image_reader, SavedImageReader):
                self.image_reader.replace_weights(lm)
            decoder = shared.replaced(lm)
            if changes:
                decoder.set_adapters(changes)
            self.backend.sync_weights(decoder)
            batch.renew(version, recompute=False)
        self.weight_version = version

    def stream(
        self, prompt: Sequence[int], sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> Iterator[int]:
        """Complete one prompt; yields each token when it is sampled, including the stop token."""
        for new in self._run(self.maker.requests([prompt], replace(sampling, n=1), images=[images])):
            yield from (token for _, token in new)

    def close(self) -> None:
        """Release weights, cache and CUDA graphs. A `generate` that runs in another thread raises RuntimeError."""
        self._work = self.work
        backend = self._backend
        self._backend = None
        if backend is not None and not self._keeps_backend:
            backend.close()

    def _run(self, requests: Sequence[Request], *, rows: int | None = None) -> Generator[NewTokens, None, None]:
        if requests:
            self._follow_model()
            backend = self.backend
            yield from backend.run(requests, rows=rows) if isinstance(backend, NativeBackend) else backend.run(requests)

    def _follow_model(self) -> None:
        """Update the backend's weights if the model of `from_model` was trained since the last call."""
        decoder = None if self._shared is None else self._shared.newer()
        if decoder is not None:
            assert isinstance(self.backend, NativeBackend)
            self.backend.sync_weights(decoder)


def _shared_weights(
    lm: PreTrainedModel,
    backend: BackendName,
    quantization: Quantization | None,
    *,
    world: World,
    dtype: torch.dtype,
    adapters: Mapping[str, NumberedAdapter] | None = None,
) -> SharedWeights | None:
    """Return inference weights; None for backend module, or a model without them."""
    if backend != "module":
        return SharedWeights.of(lm, world=world, dtype=dtype, quantization=quantization, adapters=adapters)
    if quantization is not None:
        raise UserError(f"quantization {quantization} needs the native backend, got backend module: leave one out")
    return None


def _backend(
    lm: PreTrainedModel,
    shared: SharedWeights | None,
    checks: bool,
    max_batch_rows: int | None,
    kv_cache_gib: float | None,
    prefill_tokens: int | None = None,
    cuda_graphs: bool = True,
) -> GenerationBackend:
    """Return the native backend if there are inference weights, else the module backend.

    Raises:
        UserError: with `checks`, if the log-probs of inference weights and model differ on a short prompt.
    """
    decoder = None if shared is None else shared.newer()
    if decoder is None:
        return ModuleBackend(lm, max_batch_rows=max_batch_rows)
    if checks:
        check_inference_weights(decoder, module_logprobs(lm, probe_tokens(decoder.architecture.vocab_size)))
    return NativeBackend(
        decoder,
        max_batch_rows=max_batch_rows,
        kv_cache_gib=kv_cache_gib,
        prefill_tokens=prefill_tokens,
        cuda_graphs=cuda_graphs,
    )


def default_stop_token_ids(lm: PreTrainedModel) -> tuple[int, ...]:
    """Return the EOS tokens of a model's generation config, or of its config if it has none."""
    config = lm.config if lm.generation_config is None else lm.generation_config
    eos = config.eos_token_id
    return (eos,) if isinstance(eos, int) else tuple(eos or ())
