"""The actor's engine: it trains under ZeRO, and inside `inference()` it is a generation engine.

On entry the weights are taken through the inference layout bucket by bucket: gathered from ZeRO-3's partitions,
adapters merged in, cut to this rank's share of tensor parallelism, fused. Training weights are only read, so training
goes on bit for bit where it was. On exit all memory is given back. A model that the layout does not describe
generates through its Hugging Face module, gathered whole; DeepSpeed's forward hooks are out of the way then (with
them in place gathering gains nothing).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.engines.engine import EngineOptions, ModelEngine, Role
from hybrid_rlhf.engines.host_states import HostStates
from hybrid_rlhf.engines.partition import WholeWeight, base_parameters, gathered, is_partitioned, whole_weights
from hybrid_rlhf.generation.decoder import Decoder
from hybrid_rlhf.generation.engine import GenerationEngine, default_stop_token_ids
from hybrid_rlhf.generation.layout import check_layout, plan_layout
from hybrid_rlhf.generation.workspace import Workspace
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.loading import DTYPES
from hybrid_rlhf.models.lora import has_lora, lora_merged
from hybrid_rlhf.runtime.world import World

BUCKET_ELEMENTS = 2**26
"""Weights gathered at once, at most, unless one alone is larger."""


@dataclass(frozen=True)
class _Kept:
    """An inference layout that stays between rollouts."""

    weight_version: int
    decoder: Decoder
    workspace: Workspace | None

    def close(self) -> None:
        """Release what decoding captured."""
        if self.workspace is not None:
            self.workspace.close()


class HybridEngine(ModelEngine):
    """A ModelEngine of an actor that can also generate."""

    def __init__(
        self,
        role: Role,
        engine: DeepSpeedEngine,
        world: World,
        options: EngineOptions | None = None,
        *,
        rollout: RolloutConfig | None = None,
    ) -> None:
        """Wrap an engine; every rank must call.

        Args:
            role: its name.
            engine: the actor's.
            world: the ranks that train it.
            options: see EngineOptions.
            rollout: how the layout is built; none: the defaults.

        Raises:
            UserError: when tensor_parallel or max_staleness needs a layout and the model has none.
        """
        super().__init__(role, engine, world, options)
        self._rollout = rollout or RolloutConfig()
        self._keeps = self._rollout.keep_weights is True  # auto is for who knows the memory of the whole run
        self.generation_world = world.split(self._rollout.tensor_parallel)
        """The ranks that generate together, from the same prompts."""
        self.switch_seconds = 0.0
        """How long the last switch to inference and back took."""
        self.decode_bytes = 0
        """What decoding read on this rank the last time."""
        self._host_states = HostStates(engine, world.device)
        self._checked = False
        self._kept: _Kept | None = None
        self._layout = None
        if self._rollout.layout == "auto":
            self._layout = plan_layout(
                self.lm,
                [name for name, _ in base_parameters(self.lm)],
                world=self.generation_world,
                dtype=DTYPES.get(self._rollout.dtype, next(self.lm.parameters()).dtype),
                in_place=self._keeps,
            )
        if self._layout is None and self._rollout.max_staleness:
            raise UserError(
                f"rollout.max_staleness copies the inference layout, {type(self.lm).__name__} has none: set it to 0"
            )

    @property
    def weight_version(self) -> int:
        """Updates that made the current weights."""
        return int(self._engine.global_steps)

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine]:
        """Generate with the current weights; every rank must enter, and ranks of one `generation_world` must generate
        from the same prompts.

        Args:
            stop_token_ids: tokens that end every completion; none: the model's own eos.
            tokenizer: for stop strings.
        """
        stop = default_stop_token_ids(self.lm) if stop_token_ids is None else stop_token_ids
        was_training = self.module.training
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if self._rollout.offload_states:
                stack.enter_context(self._host_states.moved())
            model = self._decoder() if self._layout is not None else stack.enter_context(self._whole_module())
            self.module.eval()
            generation = GenerationEngine(
                model,
                stop_token_ids=stop,
                tokenizer=tokenizer,
                layout="module",
                kv_cache_gib=self._rollout.kv_cache_gib,
                max_batch_rows=self._rollout.max_decode_rows,
                weight_version=self.weight_version,
                workspace=None if self._kept is None else self._kept.workspace,
            )
            self.switch_seconds = time.perf_counter() - start
            del model
            try:
                yield generation
            finally:
                left = time.perf_counter()
                self.decode_bytes = generation.decode_bytes
                if self._kept is not None:
                    self._kept = replace(self._kept, workspace=generation.detach_workspace())
                generation.close()
                self.module.train(was_training)
        self.switch_seconds += time.perf_counter() - left

    def copied(
        self, *, stop_token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> GenerationEngine:
        """Generate with a copy of the current weights, in another thread, while these change; every rank must call.

        Args:
            stop_token_ids: tokens that end every completion.
            tokenizer: for stop strings.
        """
        start = time.perf_counter()
        decoder = self._built(lasts=lambda weight: weight.is_copy)
        self.switch_seconds += time.perf_counter() - start
        return GenerationEngine(
            decoder,
            stop_token_ids=stop_token_ids,
            tokenizer=tokenizer,
            kv_cache_gib=self._rollout.kv_cache_gib,
            max_batch_rows=self._rollout.max_decode_rows,
            weight_version=self.weight_version,
            captures=False,
        )

    def tell_sampled_ahead(self, *, decode_bytes: int) -> None:
        """Take note of a rollout that needed no switch now, because a copy sampled it."""
        self.switch_seconds, self.decode_bytes = 0.0, decode_bytes

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """While weights of the same version are in place that are not those of training: nothing kept is used."""
        kept, self._kept = self._kept, None
        try:
            yield
        finally:
            if self._kept is not None:
                self._kept.close()
            self._kept = None if self._layout is None or kept is None else replace(kept, weight_version=-1)

    def _decoder(self) -> Decoder:
        """The inference layout of the current weights; built again only if they have changed, or were not kept."""
        kept = self._kept
        if kept is not None and kept.weight_version == self.weight_version:
            return kept.decoder
        self._kept = None
        decoder = self._built(lasts=lambda weight: weight.is_lasting)
        if self._keeps:
            same = kept is not None and kept.decoder is decoder  # what was captured still holds
            self._kept = _Kept(self.weight_version, decoder, kept.workspace if kept is not None and same else None)
            if kept is not None and not same:
                kept.close()
        return decoder

    def _built(self, *, lasts: Callable[[WholeWeight], bool]) -> Decoder:
        """The layout of the current weights, checked the first time; a view of a weight that lasts will do."""
        assert self._layout is not None, "asked for where there is one"
        decoder = self._layout.build(
            (weight.name, weight.merged(), lasts(weight))
            for weight in whole_weights(self.lm, bucket_elements=BUCKET_ELEMENTS)
        )
        if not self._checked:
            self._check(decoder)
        return decoder

    @torch.no_grad()
    def _check(self, decoder: Decoder) -> None:
        """Once a run: the layout against the training forward."""
        tokens = torch.tensor([probe_tokens(decoder.architecture.vocab_size)], device=self.device)
        counts = torch.ones_like(tokens, dtype=torch.bool)
        check_layout(decoder, self(tokens, counts, counts)[0][0, 1:])
        self._checked = True

    @contextlib.contextmanager
    def _whole_module(self) -> Iterator[Any]:
        """The Hugging Face module with all its weights, adapters merged."""
        with contextlib.ExitStack() as stack:
            if is_partitioned(self.lm):
                stack.enter_context(self._hooks_removed())
                stack.enter_context(gathered(list(self.lm.parameters())))
            if has_lora(self.lm):
                stack.enter_context(lora_merged(self.lm))
            yield self.lm

    @contextlib.contextmanager
    def _hooks_removed(self) -> Iterator[None]:
        """ZeRO-3's module hooks, off and on again. Written against DeepSpeed 0.19; a test pins it."""
        offload: Any = self._engine.optimizer.parameter_offload
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()
