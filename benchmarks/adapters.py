"""Runs that train their adapters together on one base, against one run after the other.

    python -m benchmarks.adapters [--runs 4] [--tokens 8 16 32 64 128] [--repeats 5] [--json FILE]

A random model of SmolLM2-135M's shape. A step is one row of each run, forward, backward and AdamW, with LoRA on all
linear layers. Kinds, by turns in each repeat, so that a machine that is slow for a while is slow to all:

- together: `AdapterEngine` with the rows of all runs in one packed batch;
- deterministic: the same with the rows of each run apart, whose results are bit for bit those of training alone;
- alone: `AdapterEngine` with the row of one run, run after run;
- peft: the model and torch's AdamW as a run with `lora` has them, run after run.

Ratios are of medians of seconds, and of seconds of processor time, which other work on the machine changes less.

    python -m benchmarks.adapters --products

Forward and backward of the low-rank products of one layer alone: grouped, as the engine computes them; masked (factors
of all adapters at once, inner values of other adapters set to 0); and in a loop over the adapters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.engines.adapters import AdapterEngine, AdapterRow
from hybrid_rlhf.functional.operations import linear, use_backend
from hybrid_rlhf.models.lora import choose_trained
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import adapt_model
from hybrid_rlhf.runtime.host_memory import keep_freed_memory
from hybrid_rlhf.runtime.product_backend import faster_backend
from hybrid_rlhf.runtime.world import default_device, default_dtype, solo_world

VOCABULARY = 49152
ADAM = AdamStep(lr=1e-4)


def base_model(dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A random model of SmolLM2-135M's shape, prepared as `load_model` prepares one."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    adapt_model(lm, ModelConfig())
    return lm


def surprise(logprobs: Tensor) -> Tensor:
    """Mean negative log-prob."""
    return -logprobs.mean()


class EngineRuns:
    """Runs in an `AdapterEngine`."""

    def __init__(self, lm: PreTrainedModel, runs: int, rank: int, *, deterministic: bool = False) -> None:
        self._engine = AdapterEngine(lm, world=solo_world(lm.device), deterministic=deterministic)
        self._names = [f"run{number}" for number in range(runs)]
        for number, name in enumerate(self._names):
            self._engine.add(name, LoraConfig(rank=rank), seed=number)

    def together(self, ids: Tensor) -> None:
        """A step of all runs with a row [T + 1] each."""
        self._engine.forward_backward(
            [AdapterRow(name, row[:-1], row[1:], surprise) for name, row in zip(self._names, ids, strict=True)]
        )
        for name in self._names:
            self._engine.step(name, ADAM)

    def in_turn(self, ids: Tensor) -> None:
        """The same, run after run."""
        for name, row in zip(self._names, ids, strict=True):
            self._engine.forward_backward([AdapterRow(name, row[:-1], row[1:], surprise)])
            self._engine.step(name, ADAM)


class PeftRuns:
    """Runs as the library trains one with `lora`; their weights are those of one model, as its time does not depend on
    them."""

    def __init__(self, lm: PreTrainedModel, rank: int) -> None:
        choose_trained(lm, LoraConfig(rank=rank), "causal_lm", learns=True, seed=0)
        self._policy = Policy(lm)
        trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=ADAM.lr, fused=True)

    def in_turn(self, ids: Tensor) -> None:
        """A step with each row [T + 1], one after the other."""
        for row in ids.to(self._policy.lm.device)[:, None]:
            self._optimizer.zero_grad()
            mask = torch.ones_like(row)
            logprobs, _ = self._policy(row, mask, mask)
            surprise(logprobs[0, 1:]).backward()
            self._optimizer.step()


def measured(kinds: Mapping[str, Callable[[Tensor], None]], runs: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds and seconds of processor time of a step of each kind."""
    generator = torch.Generator().manual_seed(tokens)
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for repeat in range(repeats + 1):
        for kind, step in kinds.items():
            ids = torch.randint(VOCABULARY, (runs, tokens + 1), generator=generator)
            wall = time.perf_counter()
            processor = time.process_time()
            step(ids)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:  # the first is a warm-up
                seconds[kind].append((time.perf_counter() - wall, time.process_time() - processor))
    result: dict[str, Any] = {"runs": runs, "tokens": tokens}
    for kind, pairs in seconds.items():
        for name, values in zip(("seconds", "processor_seconds"), zip(*pairs, strict=True), strict=True):
            result[f"{kind}/{name}"] = [round(value, 4) for value in values]
    return result


def ratios(result: dict[str, Any], kind: str, against: str) -> tuple[float, float]:
    """How many times the tokens per second `kind` has, by seconds and by seconds of processor time."""
    medians = [
        [statistics.median(result[f"{name}/{clock}"]) for name in (against, kind)]
        for clock in ("seconds", "processor_seconds")
    ]
    return (medians[0][0] / medians[0][1], medians[1][0] / medians[1][1])


def low_rank_seconds(adapters: int, tokens: int, rank: int, repeats: int = 20) -> dict[str, float]:
    """Median seconds of processor time of each form, and of the base product, for 576 inputs and 1536 outputs."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 576, requires_grad=True)
    gradient = torch.randn(tokens, 1536)
    weight = torch.randn(1536, 576)
    down = torch.randn(adapters, rank, 576, requires_grad=True)
    up = torch.randn(adapters, rank, 1536, requires_grad=True)
    of_each = tokens // adapters
    ends = torch.arange(1, adapters + 1, dtype=torch.int32) * of_each
    all_down = down.detach().flatten(0, 1).requires_grad_()
    all_up = up.detach().flatten(0, 1).requires_grad_()
    owner = torch.arange(adapters)
    mask = (owner.repeat_interleave(of_each)[:, None] == owner.repeat_interleave(rank)).float()

    def base() -> None:
        torch.autograd.grad(linear(x, weight), x, gradient)

    def grouped() -> None:
        inner = functional.grouped_mm(x, down.transpose(1, 2), offs=ends)
        torch.autograd.grad(functional.grouped_mm(inner, up, offs=ends), (x, down, up), gradient)

    def masked() -> None:
        inner = (x @ all_down.t()) * mask
        torch.autograd.grad(inner @ all_up, (x, all_down, all_up), gradient)

    def loop() -> None:
        parts = [part @ a.t() @ b for part, a, b in zip(x.split(of_each), down, up, strict=True)]
        torch.autograd.grad(torch.cat(parts), (x, down, up), gradient)

    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 2):
        for form in (base, grouped, masked, loop):
            start = time.process_time()
            form()
            if repeat > 1:
                seconds.setdefault(form.__name__, []).append(time.process_time() - start)
    return {form: statistics.median(values) for form, values in seconds.items()}


def main() -> None:
    """Print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="tokens of a run's row")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="none: torch's number")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--products", action="store_true")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.products:
        for adapters, tokens, rank in ((4, 64, 8), (4, 256, 8), (4, 1024, 8), (16, 1024, 16), (64, 1024, 8)):
            times = low_rank_seconds(adapters, tokens, rank)
            shown = ", ".join(f"{form} {1e3 * value:.2f} ms" for form, value in times.items())
            print(f"{adapters} adapters of rank {rank}, {tokens} tokens: {shown}", flush=True)
        return
    device = default_device()
    if device.type == "cpu":
        keep_freed_memory()
        use_backend(faster_backend())
    lm = base_model(default_dtype(device), device)
    engine = EngineRuns(lm, options.runs, options.rank)
    apart = EngineRuns(lm, options.runs, options.rank, deterministic=True)
    peft = PeftRuns(base_model(default_dtype(device), device), options.rank)
    kinds = {
        "together": engine.together,
        "deterministic": apart.together,
        "alone": engine.in_turn,
        "peft": peft.in_turn,
    }
    results = []
    for tokens in options.tokens:
        result = measured(kinds, options.runs, tokens, options.repeats)
        results.append(result)
        rate = options.runs * tokens / statistics.median(result["together/seconds"])
        shown = "; ".join(
            f"{kind} {' / '.join(f'{ratio:.2f}' for ratio in ratios(result, 'together', kind))} x"
            for kind in ("deterministic", "alone", "peft")
        )
        print(
            f"{tokens} tokens a row: together {rate:.0f} tokens/s; by seconds / processor: against {shown}", flush=True
        )
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
