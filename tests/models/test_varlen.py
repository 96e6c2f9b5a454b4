"""The varlen path with a slow kernel in the place of the GPU's: latent attention, capped scores, and who chooses it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rlhf.models.packing import attention, batches, use_packing
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.runtime import world
from tests.support.model_types import tiny_of_type
from tests.support.models import assert_same_gradients, packed_and_padded, padded_rows
from tests.support.tensors import VARLEN_CALLS, take_slow_varlen
from tests.support.tiny import tiny_model


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"])
def test_values_that_are_smaller_than_queries_take_the_kernel(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention; the kernel's limits are those of the queries' size."""
    sizes = take_slow_varlen(monkeypatch)
    packed, padded = tiny_of_type(model_type), tiny_of_type(model_type)
    use_packing(packed)
    ids, mask = padded_rows([19, 1, 5, 12])
    assert_same_gradients(Policy(packed), Policy(padded), ids % 128, mask, mask)
    assert set(VARLEN_CALLS) == {4}
    config = packed.config
    assert set(sizes) == {config.qk_nope_head_dim + config.qk_rope_head_dim} and config.v_head_dim not in sizes


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_backward_of_a_layer_fills_no_gradient_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `x[0]` allocates, clears and copies: 7 more kernels in each layer, where launches are the limit."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return query + (key * value).mean(dim=1, keepdim=True)

    for module in (attention, batches):
        monkeypatch.setattr(module, "varlen_attention", lambda *_: kernel)
    ids, mask = padded_rows([9, 1, 5, 7])
    counts = []
    for layers in (1, 2):
        lm = tiny_model(num_hidden_layers=layers)
        use_packing(lm)
        logprobs = Policy(lm)(ids, mask, mask)[0]
        with _Operations() as operations:
            logprobs.sum().backward()
        counts.append(operations.counts)
    of_layer = counts[1] - counts[0]
    assert of_layer["mm"] == 14, "two for each product"
    assert not {"select_backward", "zeros", "zero_"} & of_layer.keys()


def test_capped_scores_are_not_given_to_a_varlen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    take_slow_varlen(monkeypatch)
    packed, padded = packed_and_padded("gemma2")
    ids, mask = padded_rows([9, 1, 5, 7], left=False)
    assert_same_gradients(Policy(packed), Policy(padded), ids, mask, mask, 1.0)
    assert not VARLEN_CALLS


def test_the_kernel_is_for_half_precision_on_newer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, capability = torch.device("cuda", 0), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(attention, "_torch_has_varlen", lambda: True)
    assert attention.varlen_attention(gpu, torch.bfloat16, 128) is attention._torch_varlen
    for device, dtype, size in (
        (torch.device("cpu"), torch.bfloat16, 128),
        (gpu, torch.float32, 128),
        (gpu, torch.float16, 60),
        (gpu, torch.float16, 512),
    ):
        assert attention.varlen_attention(device, dtype, size) is None
    monkeypatch.setattr(attention, "_torch_has_varlen", lambda: False)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    assert attention.varlen_attention(gpu, torch.float16, 64) is attention._flash_attn_varlen
    capability[0] = (7, 5)
    assert attention.varlen_attention(gpu, torch.float16, 64) is None


def test_the_call_of_torch_names_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel needs a GPU; its signature does not."""
    module = pytest.importorskip("torch.nn.attention.varlen")
    if not attention._torch_has_varlen():
        pytest.skip("this torch has an older one")
    calls: list[tuple[Any, ...]] = []

    def kernel(*arguments: Any) -> tuple[Tensor, None, None]:
        calls.append(arguments)
        return arguments[0], None, None

    monkeypatch.setattr(module.torch.ops.torch_attn, "_varlen_attn", kernel)
    q, k, ends = torch.zeros(5, 4, 8), torch.zeros(7, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    for window, expected in ((None, [-1, 0]), (3, [2, 0])):
        attention._torch_varlen(q, k, k, (ends, ends), (5, 7), scale=0.5, window=window)
        *_, max_q, max_k, causal, scale, given, gqa = calls[-1][:11]
        assert (max_q, max_k, scale, given, gqa) == (5, 7, 0.5, expected, True)
        assert causal == (window is None)


def test_keys_are_repeated_for_a_kernel_without_grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 and 2.12."""
    module = pytest.importorskip("torch.nn.attention.varlen")

    def older(
        query: Tensor, key: Tensor, value: Tensor, *lengths: Any, scale: float, window_size: tuple[int, int]
    ) -> Tensor:
        assert query.shape == key.shape == value.shape
        return key

    monkeypatch.setattr(module, "varlen_attn", older)
    attention._varlen_parameters.cache_clear()
    try:
        keys, ends = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
        queries = torch.zeros(5, 6, 8)
        found = attention._torch_varlen(queries, keys, keys, (ends, ends), (5, 5), scale=0.5, window=None)
        assert torch.equal(found.view(5, 2, 3, 8), keys[:, :, None].expand(5, 2, 3, 8))
    finally:
        monkeypatch.undo()
        attention._varlen_parameters.cache_clear()


def test_cudnn_attention_is_off_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    world.solo_world(torch.device("cpu"))
    assert told == []
    world.solo_world(torch.device("cuda", 0))
    assert told == [False]
