"""Operations of a decoding step on a CPU: compiled kernels against torch's operations.

    python -m benchmarks.cpu_kernels

One layer of SmolLM2-135M's shape, float32, 32 rows: between 64 and 160 tokens, and lengths that are geometric with a
mean of 112. torch attends over slots as long as the longest row (as `DecodeAttention` does), the kernel over blocks of
16 tokens in random places. Each operation runs for one layer after the other, as in a model, so that no cache holds
what the next layer needs; matrix products in between keep torch's threads busy. The two take turns; medians in
microseconds per layer are printed. The products of a layer are compared with oneDNN's. Sampling runs once per step,
over a vocabulary of 49,152 tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.sampler import DecodeBatch, Sampler, sampling_mode
from hybrid_rlhf.generation.model.layers import InferenceLinear
from hybrid_rlhf.generation.ops import cpu_kernels
from hybrid_rlhf.runtime.world import solo_world

ROWS, LAYERS, ROUNDS, BLOCK_TOKENS = 32, 30, 21, 16
HEADS, KV_HEADS, D, HIDDEN, MLP = 9, 3, 64, 576, 1536
VOCABULARY = 49_152
SAMPLING = {
    "from all": SamplingParams(),
    "by temperature": SamplingParams(temperature=0.7),
    "by top-k": SamplingParams(top_k=50),
    "by top-p": SamplingParams(top_p=0.9),
}
SCALE, EPS = D**-0.5, 1e-5
Operation = Callable[[int], object]
"""Of a layer."""


def attention_operations(lengths: Tensor) -> dict[str, tuple[Operation, Operation]]:
    """By torch and by kernels: attention."""
    capacity = (int(lengths.max()) + BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    of_row = capacity // BLOCK_TOKENS
    slots = [torch.randn(LAYERS, ROWS, KV_HEADS, capacity, D) for _ in "kv"]
    paged = [torch.randn(LAYERS, ROWS * of_row, BLOCK_TOKENS, KV_HEADS, D) for _ in "kv"]
    blocks, positions = torch.randperm(ROWS * of_row).view(ROWS, of_row).int(), lengths - 1
    longest = int(lengths.max())
    masked = torch.arange(longest) >= lengths[:, None, None]
    mask = torch.zeros(ROWS, 1, longest).masked_fill(masked, -torch.inf).repeat_interleave(KV_HEADS, dim=0)
    queries = torch.randn(ROWS, HEADS, D)

    def torch_attend(layer: int) -> Tensor:
        k, v = (cache[layer].flatten(0, 1)[:, :longest] for cache in slots)
        scores = torch.bmm(queries.view(ROWS * KV_HEADS, -1, D), k.transpose(1, 2)).mul_(SCALE)
        scores += mask
        return torch.bmm(scores.softmax(dim=-1), v)

    def kernel_attend(layer: int) -> Tensor:
        return cpu_kernels.paged_attention(queries, paged[0][layer], paged[1][layer], blocks, positions, scale=SCALE)

    return {"attention": (torch_attend, kernel_attend)}


def row_operations() -> dict[str, tuple[Operation, Operation]]:
    """By torch and by kernels: what does not depend on lengths."""
    x, delta, weight = (torch.randn(shape) for shape in ((ROWS, HIDDEN), (ROWS, HIDDEN), (HIDDEN,)))

    def torch_norm(layer: int) -> object:
        added = x + delta
        return added, functional.rms_norm(added, (HIDDEN,), weight, EPS)

    return {
        "add and norm": (torch_norm, lambda _: cpu_kernels.add_norm(x, delta, weight, EPS, in_float32=False)),
    }


def products(rows: int) -> dict[str, tuple[Operation, Operation]]:
    """By oneDNN and by the kernel: the products of a layer with packed weights, each layer with its own."""
    shapes = ((HIDDEN, (HEADS + 2 * KV_HEADS) * D), (HEADS * D, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))
    weights = [[torch.randn(outputs, inputs) for inputs, outputs in shapes] for _ in range(LAYERS)]
    inputs = {width: torch.randn(rows, width) for width, _ in shapes}

    def operation(by_kernel: bool) -> Operation:
        with mock.patch.object(cpu_kernels, "multiplies_float32", lambda: by_kernel):
            layers = [[InferenceLinear(weight, None, pack=True) for weight in layer] for layer in weights]
        return lambda layer: [product(inputs[product.inputs]) for product in layers[layer]]

    return {f"{rows} rows": (operation(False), operation(True))}


def microseconds(operation: Operation, calls: int) -> float:
    """Of one call, between matrix products that are not counted."""
    x, weight = torch.randn(ROWS, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    spent = 0.0
    for layer in range(calls):
        torch.mm(x, weight)
        start = time.perf_counter()
        operation(layer)
        spent += time.perf_counter() - start
    return spent / calls * 1e6


def sampling_operations() -> dict[str, tuple[Operation, Operation]]:
    """By torch and by the kernel: a token per row from the logits of the whole vocabulary."""
    cpu, logits = torch.device("cpu"), 2 * torch.randn(ROWS, VOCABULARY)
    operations: dict[str, tuple[Operation, Operation]] = {}
    for name, params in SAMPLING.items():
        streams = [np.random.default_rng(row).random(4) for row in range(ROWS)]
        requests = [Request((1,), row, params, frozenset({2}), stream) for row, stream in enumerate(streams)]
        mode, rows = sampling_mode(requests), DecodeBatch.of(requests, vocab_size=VOCABULARY, device=cpu)
        by_kernel = Sampler(VOCABULARY, mode, solo_world(cpu))
        by_torch = Sampler(VOCABULARY, mode, solo_world(cpu))
        by_torch._kernels = None
        operations[f"sample {name}"] = (
            lambda _, sampler=by_torch, rows=rows: sampler(logits, rows),
            lambda _, sampler=by_kernel, rows=rows: sampler(logits, rows),
        )
    return operations


def compare(title: str, operations: dict[str, tuple[Operation, Operation]], calls: int = LAYERS) -> None:
    """Print the medians of operations that take turns."""
    for name, both in operations.items():
        taken: tuple[list[float], list[float]] = ([], [])
        for turn in range(ROUNDS + 2):
            for operation, times in zip(both, taken, strict=True):
                spent = microseconds(operation, calls)
                if turn > 1:  # the first ones warm up
                    times.append(spent)
        by_torch, by_kernel = map(statistics.median, taken)
        print(f"{title:22} {name:18} torch {by_torch:7.1f}  kernel {by_kernel:7.1f}  {by_torch / by_kernel:5.2f} times")


def main() -> None:
    """Measure in turn, print."""
    if not cpu_kernels.available():
        raise SystemExit("the kernels cannot be compiled here")
    torch.manual_seed(0)
    print(f"microseconds per layer and of sampling, {torch.get_num_threads()} threads")
    uniform = torch.linspace(64, 160, ROWS).long()
    ragged = torch.empty(ROWS).geometric_(1 / 112).long().clamp(max=1024)
    for title, lengths in (("64 to 160 tokens", uniform), (f"ragged, to {int(ragged.max())} tokens", ragged)):
        compare(title, attention_operations(lengths))
    compare("any length", row_operations())
    for rows in (1, 4, 8, 16, 32, 64):
        compare("products, oneDNN", products(rows))
    compare("one step", sampling_operations(), calls=1)


if __name__ == "__main__":
    main()
