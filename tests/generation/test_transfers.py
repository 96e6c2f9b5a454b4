"""No step waits for the device because it copies something there: copies are from page-locked memory, asynchronous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.batching.continuous import ContinuousBatch
from tests.support.families import variant
from tests.support.generation import PROMPTS, SAMPLED, STOP_TOKEN_IDS, engine_of

MADE_ON_THE_HOST = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.zeros, torch.arange}


class CopiesToTheDevice(TorchFunctionMode):
    """Follows tensors that are made without a device, as on the host of a GPU, though all are on the CPU here.

    Only an asynchronous `to` may bring them, or what is computed from them alone, to the tensors of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_the_host = {}
        self.asynchronous = 0
        self.waited = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        result = func(*args, **kwargs)
        given = [each for each in _flat([*args, *kwargs.values()]) if isinstance(each, Tensor)]
        hosts = [id(each) in self.on_the_host for each in given]
        if func in MADE_ON_THE_HOST:
            if kwargs.get("device") is None:
                self._follow(result)
            elif func in (torch.tensor, torch.as_tensor):
                self.waited.append(f"{name} with a device")
        elif func is Tensor.to and any(isinstance(each, torch.device) for each in args):
            if not kwargs.get("non_blocking"):
                self.waited.append("a blocking to")
            self.asynchronous += any(hosts)
            result = result.clone()
        elif hosts and all(hosts):
            self._follow(result)
        elif any(hosts):
            self.waited.append(name)
        return result

    def _follow(self, result: Any) -> None:
        self.on_the_host |= {id(each): each for each in _flat([result]) if isinstance(each, Tensor)}


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> CopiesToTheDevice:
    """Of all that is done between two steps but the result."""
    watched, launch = CopiesToTheDevice(), ContinuousBatch._launch

    def launched(self: ContinuousBatch, *given: Any) -> None:
        with watched:
            launch(self, *given)

    monkeypatch.setattr(ContinuousBatch, "_launch", launched)
    return watched


SAMPLINGS = [SAMPLED, replace(SAMPLED, repetition_penalty=1.2, min_new_tokens=2, top_p=0.9)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "penalised"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5"])
def test_steps_copy_without_waiting(name: str, sampling: SamplingParams, copies: CopiesToTheDevice) -> None:
    """`torch.tensor(..., device=...)` and `.to(device)` from ordinary memory were synchronous in nearly every step."""
    engine = engine_of(variant(name), STOP_TOKEN_IDS, max_batch_rows=5)
    engine.generate(PROMPTS, sampling)
    assert copies.asynchronous and not copies.waited, set(copies.waited)


def test_tiles_of_kernels_are_copied_without_waiting(copies: CopiesToTheDevice, everywhere: None) -> None:
    engine = engine_of(stop=STOP_TOKEN_IDS)
    engine.generate(PROMPTS[:2], replace(SAMPLED, max_new_tokens=2, n=1))
    assert copies.asynchronous and not copies.waited, set(copies.waited)
