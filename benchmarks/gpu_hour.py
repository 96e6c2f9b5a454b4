"""What is worth measuring on one GPU, the most valuable first: `make gpu`.

    python -m benchmarks.gpu_hour                     # all parts that are not done yet
    python -m benchmarks.gpu_hour --minutes 10        # as many as fit; the next call goes on
    python -m benchmarks.gpu_hour --part kernels --redo
    python -m benchmarks.gpu_hour --small --output DIR  # tiny shapes, also on a CPU: that the parts work, no speed

Each part is a process of its own with at most two minutes (tests and generation: nine), so that one that crashes or
hangs costs no other. Figures are printed, and go to benchmarks/results/gpu.zip (or that of --output) as they come; a
part that is done is skipped, one that was cut goes on after its last figure. GPU_HOUR_VLLM_PYTHON names the python of
an environment with vLLM, to be a peer of generation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_kernels, gpu_steps
from benchmarks.gpu_record import ON_GPU, Record
from benchmarks.in_turn import ROOT
from benchmarks.results import RESULTS
from hybrid_rlhf.runtime.installation import cuda_versions

PART_SECONDS = 120
LONGER = {"tests": 540, "generation": 540}
_WORKERS = min(12, os.cpu_count() or 1)


def gpu_tests(record: Record, *, small: bool) -> None:
    """Tests marked gpu, and those of the kernels, compiled; in small one of them under the interpreter.

    Most of the time compiles kernels, so that several processes share the device; those that measure its memory come
    after them.
    """
    parts = ("", "expert_", "latent_", "recurrent_", "sampling_")
    kernels = [f"tests/generation/test_{part}kernels.py" for part in parts]
    memory = "tests/gpu/test_memory.py"
    kernels += [f"tests/functional/test_{name}.py" for name in ("head_kernels", "wide_products")]
    together = ["tests/gpu", *kernels, "--ignore", memory, "-m", "gpu or not gpu", "-n", str(_WORKERS)]
    if small:
        together = ["tests/generation/test_kernels.py", "-k", "gate"]
    record.measure("tests", lambda: _pytest(together))
    if not small:
        record.measure("memory tests", lambda: _pytest([memory, "-m", "gpu"]))
        cases = ["generation/test_grammar.py", "generation/test_open_batch.py", "engines/test_adapters.py"]
        record.measure("cases for a GPU", lambda: _pytest([f"tests/{case}" for case in cases] + ["-m", "gpu"]))


def _pytest(words: list[str]) -> dict[str, Any]:
    """The last line of pytest, and what failed; after seven minutes of what it has run until then."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *words]
    command = ["timeout", "--signal=INT", "420", *command]
    # cuBLAS reads it when it starts, which other tests may cause before those of deterministic algorithms
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    counts = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    if not counts:
        raise RuntimeError((done.stdout + done.stderr)[-1500:])
    return {"summary": counts[-1], "failed": failed, "output": done.stdout[-20_000:] if failed else ""}


def _steps(part: str) -> Callable[..., None]:
    return lambda record, *, small: gpu_steps.steps(record, part, small=small)


PARTS: dict[str, tuple[str, Callable[..., None]]] = {
    "host": ("The host's launches and additions, and the device's limits", gpu_steps.host),
    "grpo_8192": ("Three steps of GRPO, 8,192 tokens in a micro-batch", _steps("grpo_8192")),
    "grpo": ("Three steps of GRPO, the tokens of a micro-batch derived", _steps("grpo")),
    "updates": ("Twenty updates, gradients summed in float32 and bfloat16", gpu_steps.updates),
    "decoding": ("256 decoding steps of 512 rows, with garbage collections", gpu_steps.decoding),
    "lora_7b": ("An update of a 7B model with LoRA, one micro-batch", gpu_steps.lora_7b),
    "tests": ("tests/gpu", gpu_tests),
    "kernels": ("Kernels against float64, and their share of a copy's bandwidth", gpu_kernels.kernels),
    "generation": ("Generation beside its peers", gpu_steps.generation),
    "ppo": ("Three steps of PPO", _steps("ppo")),
    "deterministic": ("GRPO, deterministic", _steps("deterministic")),
    "lag": ("GRPO, lag 1", _steps("lag")),
    "offload": ("GRPO, states, frozen models and activations on the host", _steps("offload")),
    "lora": ("GRPO, LoRA of rank 16", _steps("lora")),
    "nf4": ("GRPO, LoRA of rank 16 on a base in 4 bits", _steps("nf4")),
}


def main() -> None:
    """Run the parts that are not done, each in a process."""
    options = parse()
    if options.inside:
        return run_part(options)
    if not ON_GPU and not options.small:
        raise SystemExit("error: benchmarks.gpu_hour measures a GPU, torch sees none: give --small to try the parts")
    records = options.output or RESULTS
    deadline = time.monotonic() + 60 * options.minutes
    failed = False
    for part in options.part or PARTS:
        record = Record(part, records)
        if record.content["done"] and not options.redo:
            print(f"== {part}: done already", flush=True)
            continue
        left = min(LONGER.get(part, PART_SECONDS), deadline - time.monotonic())
        if left < 20:
            print(f"== {part}: no time left, the next call goes on here", flush=True)
            break
        print(f"== {part}: {PARTS[part][0]}", flush=True)
        if options.redo:
            record.write(done=False, figures={}, seconds=0.0)
        command = [sys.executable, "-m", "benchmarks.gpu_hour", "--inside", "--part", part, "--output", str(records)]
        code = bounded(command + ["--small"] * options.small, seconds=left)
        failed |= code != 0
        if code:
            why = "cut after its time" if code == -signal.SIGKILL else f"ended with {code}"
            Record(part, records).write(failure=f"{why} ({left:.0f} s)")
            print(f"== {part}: {why}", flush=True)
    print(f"figures: {records / 'gpu.zip'}")
    sys.exit(1 if failed else 0)


def run_part(options: argparse.Namespace) -> None:
    """One part, in this process."""
    (part,) = options.part
    record = Record(part, options.output)
    record.content.pop("failure", None)
    start = time.monotonic()
    record.write(versions=versions(), small=options.small)
    PARTS[part][1](record, small=options.small)
    spent = record.content.get("seconds", 0.0) + time.monotonic() - start
    good = not any("error" in (value or {}) for value in record.figures.values())
    record.write(done=good, seconds=spent)  # an error is tried again by the next call
    sys.exit(0 if good else 3)


def bounded(command: list[str], *, seconds: float) -> int:
    """Run a command and what it starts, at most so long; its exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if not ON_GPU:
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers", "deepspeed")}
    found |= {"python": platform.python_version(), "platform": platform.platform(), **cuda_versions()}
    return {**found, "gpu": torch.cuda.get_device_name()} if ON_GPU else found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=list(PARTS), help="these only")
    parser.add_argument("--redo", action="store_true", help="measure again what is done")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no part after them, and cut the last")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--output", type=Path, help="folder of gpu.zip")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
