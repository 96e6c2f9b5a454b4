"""Training on real lengths: packed rows against padded ones in time, the chunked head against whole logits in memory.

    python -m benchmarks.training                   # SmolLM2-135M, 16 rows, lengths with a mean of half of the longest
    python -m benchmarks.training --json result.json

Time: forward and backward of log-probs of all tokens but the first half of the shortest row, packed, padded, and the
matrix products of the real tokens alone (three of each weight: forward, and two in backward), in turn in one run;
medians after a warm-up. Padded is what most trainers do: rows as they come, padded to the longest.

Memory: a batch of 32 x 256 real tokens, activations checkpointed, in a process of its own for each path: tensors alive
at the most, weights and gradients among them (what a GPU's allocator would count); and the most that was resident,
beyond what was before the step (`own`), and in all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.runtime.host_memory import MALLOC_ENVIRONMENT, keep_freed_memory
from hybrid_rlhf.runtime.world import default_device, default_dtype, solo_world

DEVICE = default_device()
DTYPE = default_dtype(DEVICE)


def policy(model: str, *, packed: bool, checkpointing: bool = False) -> Policy:
    """The model as the trainer has it; or as it was before packing."""
    config = ModelConfig(path=model, gradient_checkpointing=checkpointing)
    lm, _ = load_model(resolve_model(model, world=solo_world(DEVICE)), "causal_lm", config=config, dtype=DTYPE)
    lm.train()
    if not packed:
        lm.set_attn_implementation("sdpa")
    return Policy(lm.to(DEVICE))  # type: ignore[arg-type]


def batch(rows: int, longest: int, *, full: bool) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T]; lengths even up to the longest, so that the mean is half of it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((rows,), longest)
    if not full:
        lengths = (torch.linspace(0, 1, rows) * longest).round().long().clamp(min=2)
        lengths = lengths[torch.randperm(rows, generator=generator)]
    mask = torch.arange(longest)[None] < lengths[:, None]
    ids = torch.randint(3, 40_000, (rows, longest), generator=generator)
    return ids.to(DEVICE), mask.to(DEVICE)


def step(model: Policy, ids: Tensor, mask: Tensor) -> None:
    """Forward and backward."""
    logprobs, _ = model(ids, mask, mask)
    logprobs.sum().backward()
    model.zero_grad()


def naive_step(model: Policy, ids: Tensor, mask: Tensor) -> None:
    """The same through whole logits."""
    logits = model.lm(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None])
    logprobs.squeeze(-1)[mask[:, 1:]].sum().backward()
    model.zero_grad()


def products(model: Policy, tokens: int) -> Callable[[], None]:
    """The matrix products of a step on so many tokens: y = x W^T, and both gradients."""
    weights = [module.weight.detach() for module in model.lm.modules() if isinstance(module, nn.Linear)]

    def run() -> None:
        inputs = {width: torch.randn(tokens, width, device=DEVICE, dtype=DTYPE) for width in _widths(weights)}
        for weight in weights:
            outputs, width = weight.shape
            torch.nn.functional.linear(inputs[width], weight)
            gradient = inputs[outputs]
            gradient @ weight
            gradient.t() @ inputs[width]

    return run


def _widths(weights: list[Tensor]) -> set[int]:
    return {size for weight in weights for size in weight.shape}


def timed(run: Callable[[], None]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_gib(path: str, model: str, told: multiprocessing.connection.Connection) -> None:
    """In a process of its own: the most resident memory of a step, and what of it is the step's own."""
    torch.set_num_threads(2)
    if DEVICE.type == "cpu":
        keep_freed_memory()
    actor = policy(model, packed=path == "chunked", checkpointing=True)
    ids, mask = batch(32, 256, full=True)
    before = _resident_gib()
    if DEVICE.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # the peak of loading is not the step's
    take = step if path == "chunked" else naive_step
    take(actor, ids, mask)
    if DEVICE.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**20
    counter = LiveBytes(DEVICE.type)
    for tensor in (*actor.parameters(), *actor.buffers()):
        counter.count(tensor.detach())
    with counter:
        take(actor, ids, mask)
    told.send({"tensors_gib": counter.peak / 2**30, "peak_gib": peak, "own_gib": peak - before})


def _resident_gib() -> float:
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated() / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if DEVICE.type == "cpu":
        keep_freed_memory()  # as where models train
    memory = {}
    os.environ.update(MALLOC_ENVIRONMENT)  # of the processes that follow, as train.py starts its steps
    context = multiprocessing.get_context("spawn")
    for path in ("chunked", "naive"):
        mine, theirs = context.Pipe()
        process = context.Process(target=peak_gib, args=(path, options.model, theirs))
        process.start()
        theirs.close()
        memory[path] = mine.recv()
        process.join()
    models = {"packed": policy(options.model, packed=True), "padded": policy(options.model, packed=False)}
    ids, mask = batch(options.rows, options.longest, full=False)
    tokens = int(mask.sum())
    runs = {"matrix products": products(models["packed"], tokens)}
    runs |= {name: lambda model=model: step(model, ids, mask) for name, model in models.items()}  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.runs + 1):
        for name, run in runs.items():
            took = timed(run)
            if number:  # the first run warms up
                seconds[name].append(took)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    report = {
        "model": options.model,
        "rows": options.rows,
        "longest": options.longest,
        "real_tokens": tokens,
        "share_real": tokens / mask.numel(),
        "torch": torch.__version__,
        "device": str(DEVICE),
        "seconds": seconds,
        "packed_over_padded": medians["padded"] / medians["packed"],
        "share_of_products": medians["matrix products"] / medians["packed"],
        "memory": memory,
        "memory_ratio": memory["chunked"]["peak_gib"] / memory["naive"]["peak_gib"],
        "own_memory_ratio": memory["chunked"]["own_gib"] / memory["naive"]["own_gib"],
        "tensors_ratio": memory["chunked"]["tensors_gib"] / memory["naive"]["tensors_gib"],
    }
    print(
        f"{options.rows} rows up to {options.longest}, {tokens} real tokens ({report['share_real']:.0%} of padded), "
        f"{DTYPE}, {DEVICE.type}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, median in medians.items():
        print(f"{name:16} {tokens / median:8.1f} real tokens/s  {median:7.3f} s")
    print(f"packed is {report['packed_over_padded']:.2f} x padded, {report['share_of_products']:.0%} of the products")
    for path, told in memory.items():
        print(
            f"32 x 256, {path:8} tensors {told['tensors_gib']:5.2f} GiB, resident {told['peak_gib']:5.2f} GiB, "
            f"of it the step's own {told['own_gib']:5.2f} GiB"
        )
    print(
        f"chunked takes {report['tensors_ratio']:.2f} of naive in tensors, {report['memory_ratio']:.2f} resident, "
        f"{report['own_memory_ratio']:.2f} of the step's own"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
