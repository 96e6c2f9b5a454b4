"""The random states of a process as JSON: Python, NumPy, torch on the CPU and on its GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Any]:
    """The current states of all generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _hex(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _hex(torch.cuda.get_rng_state(device))
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `random_states` returned."""
    version, words, next_gauss = states["python"]
    random.setstate((version, tuple(words), next_gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)


def _hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
