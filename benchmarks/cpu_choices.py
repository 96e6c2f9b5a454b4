"""What each CPU kernel, and each choice of matrix products, buys in generation: with one of them off against all on.

    python -m benchmarks.cpu_choices --scenario ragged

The work of benchmarks/generation.py, by turns in one process: a decoding step of each variant after the other, of which
the least time of all turns counts. The processor time of the process is counted, which other work on the machine
disturbs less, and wall-clock. What is off is computed by torch's operations, as on a machine without a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.generation import DTYPE, decoder_of, ending_at, load, make_work
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching import sampler
from hybrid_rlhf.generation.model import attention, layers
from hybrid_rlhf.generation.ops import cpu_kernels
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


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=("uniform", "ragged"), default="uniform")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--off", nargs="*", choices=list(OFF), default=list(OFF), help="variants")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times = generation(options)
    print(f"{options.scenario}, {options.threads} threads, torch {torch.__version__}")
    sums = {name: [sum(kind) for kind in zip(*pairs, strict=True)] for name, pairs in times.items()}
    for name, mine in sums.items():
        cpu, wall = (f"{a:7.2f} s {a / b:6.3f}" for a, b in zip(mine, sums["nothing"], strict=True))
        print(f"{name:38s} cpu {cpu}   wall {wall}")


if __name__ == "__main__":
    main()
