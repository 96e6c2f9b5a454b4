"""Triton kernels of recurrent layers, each against its twin in torch, and the engine on them against itself without.

As in test_kernels.py, they run interpreted where there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.recurrence import (
    GatedDelta,
    Lightning,
    Mamba,
    Mamba2,
    Recurrence,
    ShortConvolution,
)
from hybrid_rlhf.generation.batching import capacity
from hybrid_rlhf.generation.model.attention import Chunks, DecodeRows
from hybrid_rlhf.generation.model.layers import InferenceLinear
from hybrid_rlhf.generation.model.recurrent.mixers import Mixer, MixerWeights, mixer
from hybrid_rlhf.generation.model.recurrent.states import BLOCK, StateCache, StepStates
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.runtime.world import default_device
from tests.generation.references import assert_fits
from tests.support.families import variant
from tests.support.generation import SHORT_SAMPLED, engine_of
from tests.support.marks import faults
from tests.support.triton_kernels import HALF

pytest.importorskip("triton")
DEVICE = default_device()
pytestmark = pytest.mark.usefixtures("on_the_device")
HIDDEN = 10


DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=5, value_dim=12, width=4)
MAMBA2 = Mamba2(heads=6, head_dim=12, groups=2, state_dim=5, width=4, least_step=0.2)
KINDS = {
    "delta": DELTA,
    "delta of large heads": GatedDelta(key_heads=1, value_heads=2, key_dim=128, value_dim=70, width=3),
    "mamba2": MAMBA2,
    "mamba2 of one group": replace(MAMBA2, groups=1, norm="before_gate"),
    "mamba2 of a large state": Mamba2(heads=2, head_dim=20, groups=1, state_dim=256, width=2, norm="none"),
    "mamba": Mamba(inner=40, state_dim=6, rank=3, width=4),
    "mamba of many channels": Mamba(inner=100, state_dim=16, rank=3, width=4),
    "short convolution": ShortConvolution(channels=10, width=3),
    "lightning": Lightning(heads=3, head_dim=12, rates=torch.rand(3, 3, device="cpu"), norm_eps=1e-6),
}
"""No size a power of two, and several tiles of a state."""
STEPS = {
    "rows": (3, [], []),
    "first chunks": (0, [0, 0, 0], [3, 1, 9]),
    "both": (2, [0, 5, 40, 0], [20, 2, 1, 4]),
}
"""Rows, and the starts and lengths of chunks."""


class OneLayer:
    """What a cache of states reads of a model."""

    recurrent_layers = frozenset([1])


def random_mixer(kind: Recurrence, dtype: torch.dtype) -> Mixer[Any]:
    """Of random weights, with biases of convolutions; dtypes as in a model."""
    units, sizes = range(kind.units), {}
    for role, rows in kind.others(units).items():
        sizes[role.removeprefix("recurrent_")] = [len(rows)]
    if "conv" in sizes:
        sizes["conv.bias"] = sizes["conv"]
        sizes["conv"] = [*sizes["conv"], 1, kind.width]
    if isinstance(kind, Mamba):
        sizes |= {"select": [*sizes["select"], kind.inner], "dt": [kind.inner, kind.rank], "dt.bias": [kind.inner]}
        sizes["decay"] = [kind.inner, kind.state_dim]
    if isinstance(kind, Mamba2) and kind.norm == "none":
        del sizes["norm"]
    inputs = sum(len(rows) for rows in kind.inputs(units).values())
    project, out = (
        InferenceLinear((0.4 * torch.randn(n, k)).to(dtype), None, pack=False)
        for n, k in ((inputs, HIDDEN), (HIDDEN, len(kind.columns(units))))
    )
    others = {name: (0.5 * torch.randn(size)).to(dtype) for name, size in sizes.items()}
    return mixer(kind, MixerWeights(project, out, others), "silu", 1e-6)


def caches(kind: Recurrence, dtype: torch.dtype, slots: int) -> list[StateCache]:
    """Equal random states, without and with kernels."""
    both = [
        StateCache(OneLayer(), kind, units=kind.units, slots=slots, dtype=dtype, device=DEVICE, kernels=used)
        for used in (None, kernels)
    ]
    for store in ("conv", "memory"):
        filled = torch.randn_like(getattr(both[0], store))
        for cache in both:
            getattr(cache, store).copy_(filled)
    return both


def step_of(cache: StateCache, slots: Tensor, rows: int, starts: list[int], lengths: list[int]) -> StepStates:
    """A step with rows and chunks in these slots."""
    return cache.step(
        DecodeRows(torch.empty(0), torch.zeros(rows), 1, slots[:rows]) if rows else None,
        Chunks(torch.empty(0), starts, lengths, slots[rows:]) if lengths else None,
    )


def assert_near(found: Tensor, expected: Tensor, close: float) -> None:
    """Equal but for rounding, which grows with the largest of the sums."""
    torch.testing.assert_close(found, expected, atol=close * max([1.0, *expected.abs().flatten().tolist()]), rtol=close)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_computes_with_kernels_what_it_does_without(name: str, step: str, dtype: torch.dtype) -> None:
    """Twice, so that the second step reads what the first has written; other slots stay as they are."""
    torch.manual_seed(0)
    kind, (rows, starts, lengths) = KINDS[name], STEPS[step]
    layer, slots = random_mixer(kind, dtype), 1 + torch.randperm(rows + len(lengths) + 1)[:-1]
    both = caches(kind, dtype, len(slots) + 2)
    close = 1e-4 if dtype == torch.float32 else 3e-2
    for _ in range(2):
        x = torch.randn(rows + sum(lengths), HIDDEN).to(dtype)
        expected, found = (layer(1, x, step_of(cache, slots, rows, starts, lengths)) for cache in both)
        assert found.dtype == dtype
        assert_near(found, expected, close)
        torch.testing.assert_close(both[1].conv, both[0].conv)
        assert_near(both[1].memory, both[0].memory, close)


@pytest.mark.parametrize("step", [(0, [0], [2 * BLOCK + 1]), (2, [0, 5, 40, 0], [2 * BLOCK + 20, 2, BLOCK, BLOCK + 1])])
@pytest.mark.parametrize("name", KINDS)
def test_blocks_compute_what_single_steps_do(name: str, step: tuple[int, list[int], list[int]]) -> None:
    """In torch; rows and chunks in one step, each in a slot of its own; the other slots stay as they are."""
    torch.manual_seed(0)
    kind, (rows, starts, lengths) = KINDS[name], step
    layer, slots = random_mixer(kind, torch.float32), 1 + torch.randperm(rows + len(lengths))
    single, whole = caches(kind, torch.float32, len(slots) + 2)
    whole._kernels = None
    x, expected = torch.randn(rows + sum(lengths), HIDDEN), []
    for slot, start, tokens in zip(slots, [1] * rows + starts, x.split([1] * rows + lengths), strict=True):
        if start == 0:
            single.conv[:, slot], single.memory[:, slot] = 0, 0
        expected += [layer(1, token[None], step_of(single, slot[None], 1, [], [])) for token in tokens]
    found = layer(1, x, step_of(whole, slots, rows, starts, lengths))
    assert_near(found, torch.cat(expected), 1e-4)
    assert_near(whole.conv, single.conv, 1e-5)
    assert_near(whole.memory, single.memory, 1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_are_not_in_use_share_a_slot(name: str) -> None:
    torch.manual_seed(0)
    layer, both = random_mixer(KINDS[name], torch.float32), caches(KINDS[name], torch.float32, 4)
    x, slots = torch.randn(5, HIDDEN), torch.tensor([3, 1, 0, 0, 0])
    expected, found = (layer(1, x, step_of(cache, slots, 5, [], [])) for cache in both)
    torch.testing.assert_close(found[:2], expected[:2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(both[1].memory[:, 1:], both[0].memory[:, 1:], atol=1e-5, rtol=1e-4)


def test_small_step_sizes_are_exact() -> None:
    """exp(-9) is lost to a large part in float32 if 1 is added to it."""
    torch.manual_seed(0)
    kind = replace(MAMBA2, least_step=0.0)
    layer, both = random_mixer(kind, torch.float32), caches(kind, torch.float32, 3)
    layer.weights.others["dt"].fill_(-9.0)
    for cache in both:
        cache.memory.zero_()
    slots = torch.tensor([1, 2])
    for cache in both:
        layer(1, torch.ones(2, HIDDEN), step_of(cache, slots, 2, [], []))
    torch.testing.assert_close(both[1].memory, both[0].memory, atol=0.0, rtol=1e-5)


@pytest.mark.slow
def test_the_memory_of_a_prefill_of_several_prompts_is_measured(
    everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts share one slot, of which the kernels were given a view that they read beyond its end."""
    generation = engine_of(variant("qwen3_5").to(DEVICE), range(3, 30))
    decoder = generation.backend.decoder
    requests = generation.maker.requests([[5, 6, 7]] * 3, SHORT_SAMPLED)
    measured = []
    monkeypatch.setattr(capacity, "peak_bytes", lambda device, run: (run(), measured.append(1), 1000)[-1])
    capacity.measured_memory(decoder, requests, rows=3, prefill_tokens=100, cuda_graphs=False)
    assert len(measured) == 3


_COMPILE_RECURRENT = """
from hybrid_rlhf.generation.ops import convolution, recurrence

KINDS.update({"states": "*fp32", "firsts": "*i32", "fresh": "*i32", "of_token": "*i32", "slots": "*i64",
              "least_step": "fp32", **{name: "i32" for name in (
                  "x_stride", "channels", "token_stride", "gate_stride", "groups", "part_stride", "weight_stride")}})

def convolve(channels, w, model, target):
    KINDS["states"], KINDS["rows"] = model, "i32"
    sizes = dict(W=w, BLOCK=min(256, triton.next_power_of_2(channels)))
    for chunks in (False, True):
        shared_bytes(convolution._convolve_kernel, dict(sizes, CHUNKS=chunks, BIAS=chunks, ACTIVATION=-chunks), model,
                     target)
    taken = shared_bytes(convolution._keep_inputs_kernel, sizes, model, target)
    KINDS["states"] = "*fp32"
    return taken

def step(kind, r, k, v, model, target):
    pad = triton.next_power_of_2(k)
    KINDS["out"] = "*fp32"
    taken = shared_bytes(recurrence._decaying_step_kernel, dict(
        R=r, K=k, V=v, KIND=kind, K_PAD=pad, BLOCK=recurrence.values_at_once(pad, v)), model, target)
    del KINDS["out"]
    return taken
"""

PUBLISHED = {
    "convolve": {(8192, 4): "Qwen3-Next, Jamba", (1536, 3): "LFM2"},
    "step": {
        (0, 2, 128, 128): "Qwen3-Next, Qwen3.5 9B",
        (0, 3, 128, 128): "Qwen3.5 27B",
        (1, 128, 128, 64): "Granite 4, Bamba",
        (1, 24, 256, 64): "Falcon-H1 0.5B",
        (1, 32, 256, 128): "Falcon-H1 34B",
        (1, 16, 128, 80): "Nemotron-H 8B",
    },
}
"""Sizes of published models: channels and width; kind (delta, Mamba-2, lightning), r, K and V; channels and state."""


@pytest.mark.slow
@pytest.mark.parametrize("target", [90, *(faults(target) for target in (80, 86, 100))])
def test_the_kernels_compile_for_a_gpu(target: int) -> None:
    """And fit into its shared memory."""
    calls = [
        f"{name}{(*shape, model, target)}"
        for name in PUBLISHED
        for shape in PUBLISHED[name]
        for model in ("*bf16", "*fp32")
    ]
    assert_fits(_COMPILE_RECURRENT, ", ".join(calls))
