"""The actor's engine: it trains under ZeRO, and inside `inference()` it is a generation engine.

On entry partitions are gathered once, DeepSpeed's forward hooks are taken out of the way (with them in place
gathering gains nothing), and adapters are merged into copies. On exit everything is as it was, bit for bit: training
weights are never written to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.partition import gathered, is_partitioned
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.models.lora import adapters_off, has_lora, lora_merged


class HybridEngine(ModelEngine):
    """A ModelEngine of an actor that can also generate."""

    switch_seconds: float = 0.0
    """How long the last switch to inference and back took."""

    @contextlib.contextmanager
    def inference(self, *, stop_token_ids: tuple[int, ...] | None = None) -> Iterator[GenerationEngine]:
        """Generate with the current weights; every rank must enter, and may then generate on its own.

        Args:
            stop_token_ids: tokens that end every completion; none: the model's own eos.
        """
        lm = self.lm
        was_training = self.module.training
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if is_partitioned(lm):
                stack.enter_context(self._hooks_removed())
                stack.enter_context(gathered(list(lm.parameters())))
            if has_lora(lm):
                stack.enter_context(lora_merged(lm))
            self.module.eval()
            entered = time.perf_counter()
            self.switch_seconds = entered - start
            try:
                yield GenerationEngine(lm, stop_token_ids=stop_token_ids)
            finally:
                left = time.perf_counter()
                self.module.train(was_training)
        self.switch_seconds += time.perf_counter() - left

    @contextlib.contextmanager
    def reference(self) -> Iterator[ModelEngine]:
        """This engine as its own reference: the base model under the adapters, at no cost in memory.

        Raises:
            ValueError: without adapters there is no base model to go back to.
        """
        if not has_lora(self.lm):
            raise ValueError("only an actor with LoRA can be its own reference")
        with adapters_off(self.lm):
            yield self

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
