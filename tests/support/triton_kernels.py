"""Counts of launches of Triton's kernels, and their compilation for GPUs that a machine need not have."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.runtime.world import default_device
from tests.support.generation import PROMPTS, SAMPLED

LEAST_SHARED_BYTES = 101_376
"""What a program may take on sm_86 and sm_89; sm_80 has 166,912, sm_90 has 232,448."""


class Operations(TorchDispatchMode):
    """Names of the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.computing = 0
        """Calls that launch something: all but views and allocations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(str(func))
        self.computing += not (func.is_view or "empty" in str(func) or "_unsafe_view" in str(func))
        return func(*args, **(kwargs or {}))


def count_launches(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[str]:
    """Names of the kernels of a module that are launched from now on; they do not run."""
    launched: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self._name)
            return lambda *given, **constants: None

    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        monkeypatch.setattr(module, name, Counted(name))
    return launched


def launches_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, model_of: Callable[[int], PreTrainedModel], *, new_tokens: int = 600
) -> float:
    """Kernels of Triton and operations of torch that compute in a decoding step: of a model with four layers less those
    of one with two, for each layer. With 600 tokens, rows are split among programs. Only sampling runs its kernels, of
    logits that are not computed: the interpreter takes seconds for those of a layer."""
    counted, kernels = [], importlib.import_module("hybrid_rlhf.generation.model.kernels")
    names = ("attention", "convolution", "experts", "latent", "recurrent", "routing", "rows")
    for depth in (2, 4):
        model = model_of(depth).to(default_device(), torch.bfloat16)  # where conversions count too
        engine = GenerationEngine.from_model(model, stop_token_ids=range(model.config.vocab_size))
        with monkeypatch.context() as counting:
            launched = [count_launches(counting, getattr(kernels, name)) for name in names]
            engine.generate(PROMPTS[:2], replace(SAMPLED, max_new_tokens=new_tokens, n=1))
            backend: Any = engine.backend
            assert backend.workspace is not None
            before = sum(map(len, launched))
            with torch.inference_mode(), Operations() as operations:
                backend.workspace.step(2)
        counted.append(sum(map(len, launched)) - before + operations.computing)
    return (counted[1] - counted[0]) / 2


_COMPILE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hybrid_rlhf.generation.model.kernels import attention as heads, rows, sampling

TYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32}
POINTERS = {"*fp32": "tops sums all_tops all_sums bias sinks scores bounds logprobs sampling_logprobs parts",
            "*i64": "positions places integers tokens", "*i32": "pages tiles lasts", "*fp64": "floats", "*u8": "seen"}
NUMBERS = {"fp32": "scale cap eps", "i32": "window rows heads kv_heads stride row_pages bias_keys width vocabulary "
           "integer_columns inner outer_stride inner_stride out_outer_stride out_inner_stride row_stride "
           "float_columns blocks head_stride"}
MULTIPLES = set()  # names of numbers that are multiples of 16
KINDS = {name: kind for kinds in (POINTERS, NUMBERS) for kind, names in kinds.items() for name in names.split()}

def shared_bytes(kernel, constants, model="*bf16", target=90, options=None):
    signature = {name: "constexpr" if name in constants else KINDS.get(name, model) for name in kernel.arg_names}
    # as at run time: what is a multiple of 16 is loaded ahead into shared memory
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
               if signature[name].startswith("*") or name in MULTIPLES and name not in constants}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options).metadata.shared
"""


def compiled(script: str) -> Any:
    """What a script prints as JSON, in a process without the interpreter; no GPU is needed to compile for one."""
    run = subprocess.run(
        [sys.executable, "-c", _COMPILE + script],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/tmp"), "PYTHONPATH": os.getcwd()},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
