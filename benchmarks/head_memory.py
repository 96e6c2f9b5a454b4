"""Log-probs of a batch through the chunked head against whole logits: time and peak of new memory, as ratios.

Both run in this process, in turn, several times after a warm-up; medians are printed. On a GPU memory is what torch
allocates; on a CPU it is the largest tensor, counted by hand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from hybrid_rlhf.functional.logprobs import logprobs_from_hidden, token_logprobs

TOKENS, HIDDEN, VOCABULARY = (8192, 2048, 128_000) if torch.cuda.is_available() else (1024, 576, 49_152)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
RUNS = 5


def main() -> None:
    """Print both sides and their ratio."""
    hidden = torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=DTYPE) / HIDDEN**0.5).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device=DEVICE)

    def chunked() -> torch.Tensor:
        return logprobs_from_hidden(hidden, weight=weight, labels=labels, chunk_tokens=1024)[0]

    def whole() -> torch.Tensor:
        return token_logprobs((hidden @ weight.t())[None], labels=labels[None])[0]

    torch.testing.assert_close(chunked(), whole(), atol=2e-2 if DTYPE is torch.bfloat16 else 1e-4, rtol=1e-3)
    times: dict[str, list[float]] = {"chunked": [], "whole": []}
    peaks: dict[str, float] = {}
    for _ in range(RUNS + 1):
        for name, function in (("chunked", chunked), ("whole", whole)):
            times[name].append(timed(function))
            if DEVICE == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    print(f"{TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, {DTYPE}, {DEVICE}, torch {torch.__version__}")
    print(
        f"forward and backward: chunked {medians['chunked']:.3f} s, whole {medians['whole']:.3f} s, "
        f"ratio {medians['chunked'] / medians['whole']:.2f}"
    )
    logits_gib = TOKENS * VOCABULARY * 4 / 2**30
    print(
        f"whole logits in float32: {logits_gib:.2f} GiB; a chunk: {min(1024, TOKENS) * VOCABULARY * 4 / 2**30:.2f} GiB"
    )
    if peaks:
        print(f"peak: chunked {peaks['chunked']:.2f} GiB, whole {peaks['whole']:.2f} GiB")


def timed(function: Callable[[], torch.Tensor]) -> float:
    """Seconds of a forward and backward."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    function().sum().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
