"""What each CPU kernel, and each choice of matrix products, buys in a whole run: with one of them off against all on.

    python -m benchmarks.cpu_choices generation --scenario ragged
    python -m benchmarks.cpu_choices ppo

`generation` is the work of benchmarks/generation.py, `ppo` the step of benchmarks/ppo_step.py with the lengths of the
ragged work, the same in every step. Everything runs by turns in one process: in `generation` a decoding step of each
variant after the other, of which the least time of all turns counts; in `ppo` a whole step. The processor time of the
process is counted, which other work on the machine disturbs less, and wall-clock. What is off is computed by torch's
operations, as on a machine without a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import ppo_step
from benchmarks.generation import DTYPE, decoder_of, ending_at, load, make_work
from hybrid_rlhf.functional import operations
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching import sampler
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.model import attention, layers
from hybrid_rlhf.generation.ops import cpu_kernels
from hybrid_rlhf.models import fused_layers
from hybrid_rlhf.rl.trainer import RLTrainer
from hybrid_rlhf.runtime.world import solo_world


def torch_norm(x: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> Tensor:
    """As Norm without kernels."""
    if in_float32:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def torch_add_norm(x: Tensor, delta: Tensor, *rest: Any, **how: Any) -> tuple[Tensor, Tensor]:
    """The same after a sum."""
    x = x + delta
    return x, torch_norm(x, *rest, **how)


class TorchSampler(sampler.Sampler):
    """Without kernels."""

    def __call__(self, *given: Any) -> sampler.SampledTokens:
        """As Sampler."""
        kernels, self._kernels = self._kernels, None
        try:
            return CALL(self, *given)
        finally:
            self._kernels = kernels


CALL = sampler.Sampler.__call__
LINEAR = layers.InferenceLinear.__init__


def plain_linear(self: Any, weight: Tensor, bias: Tensor | None, *, pack: bool, wide: bool = False) -> None:
    """Weights as they are."""
    LINEAR(self, weight, bias, pack=False, wide=wide)


@contextlib.contextmanager
def torch_products() -> Iterator[None]:
    """Linear layers of training by torch."""
    before = operations.backend()
    operations.use_backend("torch")
    yield
    operations.use_backend(before)


def patched(*patches: tuple[Any, str, Any]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context in which names are other values."""

    @contextlib.contextmanager
    def all_of() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, value in patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    return all_of


ROWS = (attention, "PagedKernel", attention.RowAttention)
NORMS = ((cpu_kernels, "norm", torch_norm), (cpu_kernels, "add_norm", torch_add_norm))
SAMPLE = (sampler.Sampler, "__call__", TorchSampler.__call__)
ONEDNN = (cpu_kernels, "multiplies_float32", lambda: False)
OFF: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "attention of rows": patched(ROWS),
    "norms": patched(*NORMS),
    "sampling": patched(SAMPLE),
    "compiled products (oneDNN's instead)": patched(ONEDNN),
    "packed weights (torch's products)": patched((layers.InferenceLinear, "__init__", plain_linear)),
    "all compiled kernels": patched(ROWS, *NORMS, SAMPLE, ONEDNN),
}
TRAINING: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "oneDNN in training (torch's instead)": torch_products,
    "fused layers in training": patched((fused_layers, "_fits", lambda x: False)),
}


def generation(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Processor and wall-clock seconds of each variant and step, the least of all turns."""
    lm = load("embedded")
    work = make_work(
        options.scenario,
        requests=options.requests,
        prompt_tokens=32,
        new_tokens=32 if options.scenario == "uniform" else 128,
        n=1,
        vocabulary=lm.config.vocab_size,
    )
    params = [
        SamplingParams(max_new_tokens=length, seed=place, top_p=options.top_p)
        for place, length in enumerate(work.lengths)
    ]
    engines = {}
    for name in options.off:
        with OFF[name]():
            decoder = decoder_of(lm, world=solo_world(torch.device("cpu")), dtype=DTYPE)
        engines[name] = (decoder, GenerationEngine(NativeBackend(decoder)))
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in engines}
    with ending_at(work.lengths):
        for turn in range(options.turns + 1):
            steps = {}
            for name, (decoder, engine) in engines.items():
                engine.backend.sync_weights(decoder)  # forgets cached prefixes
                steps[name] = engine._run(engine.maker.requests(work.prompts, params))
            turn_times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            names = list(engines)
            while steps:
                for name in [name for name in names if name in steps]:
                    start, wall = time.process_time(), time.perf_counter()
                    with OFF[name]():
                        new = next(steps[name], None)
                    if new is None:
                        del steps[name]
                    else:
                        turn_times[name].append((time.process_time() - start, time.perf_counter() - wall))
                names = names[1:] + names[:1]
            for name in engines if turn else ():
                times[name].append(turn_times[name])
    return {
        name: [(min(one[0] for one in step), min(one[1] for one in step)) for step in zip(*turns, strict=True)]
        for name, turns in times.items()
    }


def ppo(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """The same of PPO steps, by turns."""
    off = OFF | TRAINING
    order = [name for turn in range(options.turns + 1) for name in options.off[:: 1 if turn % 2 else -1]]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in options.off}
    lengths = make_work(
        "ragged", requests=options.requests, prompt_tokens=32, new_tokens=64, n=1, vocabulary=1000
    ).lengths
    append, step, number = Request.append, getattr(RLTrainer, options.step_method), 0

    def ended(request: Request, *token: Any) -> None:
        append(request, *token)
        request.finish_reason = "stop" if len(request.token_ids) == lengths[request.prompt_index] else None

    def timed(trainer: RLTrainer, *given: Any, **named: Any) -> Any:
        nonlocal number
        name = order[number]
        start, wall = time.process_time(), time.perf_counter()
        with off[name]():
            result = step(trainer, *given, **named)
        if number >= len(options.off):
            times[name].append((time.process_time() - start, time.perf_counter() - wall))
            print(name, times[name][-1], flush=True)
        number += 1
        return result

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sizes = argparse.Namespace(
            prompts_per_step=options.requests,
            prompt_tokens=32,
            new_tokens=64,
            calibration=16,
            warmup=0,
            steps=4,
            seed=0,
        )
        ppo_step.prepare(folder, sizes)
        learning = {"optimizer": {"lr": 1e-6, "schedule": "constant"}}
        config = {
            "output_dir": str(folder / "run"),
            "model": {"path": str(folder / "actor"), "dtype": "float32"},
            "data": {
                "sources": [str(folder / "prompts.jsonl")],
                "eval_fraction": 0.0,
                "cache_dir": str(folder / "cache"),
            },
            "actor": learning,
            "critic": learning,
            "reward": {"components": [str(folder / "reward")]},
            "rollout": {
                "prompts_per_step": options.requests,
                "max_prompt_tokens": 32,
                "sampling": {"max_new_tokens": 64, "temperature": 1.0},
            },
            "algorithm": {"name": "ppo", "epochs": 1, "mini_batches": 1, "kl": {"coef": 0.05}},
            "train": {"max_steps": len(order), "epochs": 1000, "micro_batch_size": options.requests},
            "logging": {"sinks": [], "samples_every": 0},
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        with mock.patch.object(Request, "append", ended), mock.patch.object(RLTrainer, options.step_method, timed):
            from hybrid_rlhf.cli.rl import main as run_rl

            run_rl(["--config", str(folder / "config.yaml")])
    return times


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("generation", "ppo"))
    parser.add_argument("--scenario", choices=("uniform", "ragged"), default="uniform")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--top_p", type=float, default=1.0, help="of generation")
    parser.add_argument("--off", nargs="*", choices=[*OFF, *TRAINING], help="variants; none: all")
    parser.add_argument("--step_method", default="step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.off = options.off or [*OFF, *(TRAINING if options.work == "ppo" else ())]
    times = ppo(options) if options.work == "ppo" else generation(options)
    print(f"{options.work} {options.scenario}, {options.threads} threads, torch {torch.__version__}")
    for name in times:
        columns = []
        for kind in range(2):
            mine, base = ([pair[kind] for pair in times[one]] for one in (name, "nothing"))
            if options.work == "generation":
                columns.append(f"{sum(mine):7.2f} s {sum(mine) / sum(base):6.3f}")
            else:
                paired = statistics.median(a / b for a, b in zip(mine, base, strict=True))
                columns.append(f"{statistics.median(mine):7.2f} s {paired:6.3f} (least {min(mine) / min(base):6.3f})")
        print(f"{name:38s} cpu {columns[0]}   wall {columns[1]}")


if __name__ == "__main__":
    main()
