"""Memory of the device, for a process that has it alone: `benchmarks.gpu_hour` runs these after the other tests."""

from __future__ import annotations

import gc

import pytest
import torch

from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.batching.capacity import free_bytes
from tests.support.generation import SHORT_PROMPTS, SHORT_SAMPLED
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda", 0)


def test_memory_that_torch_has_cached_is_available() -> None:
    gc.collect()
    before = free_bytes(GPU)
    held = torch.empty(2**30, dtype=torch.uint8, device=GPU)
    assert before - free_bytes(GPU) >= 2**30
    del held
    assert abs(free_bytes(GPU) - before) < 2**26


def test_engines_in_a_loop_give_everything_back() -> None:
    """Without the garbage collector: CUDA graphs are in no reference cycle."""
    model, used = tiny_model().cuda(), []
    gc.disable()
    try:
        for _ in range(6):
            engine = GenerationEngine.from_model(model, stop_token_ids=())
            engine.generate(SHORT_PROMPTS, SHORT_SAMPLED)
            engine.close()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    finally:
        gc.enable()
    assert used[-1] == used[2], used
