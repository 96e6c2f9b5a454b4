"""Counts of launches of Triton's kernels, and their compilation for GPUs that a machine need not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rlhf.generation import ops
from hybrid_rlhf.generation.ops import gpu  # noqa: F401 - loads all of them

LEAST_SHARED_BYTES = 101_376
"""What a program may take on sm_86 and sm_89; sm_80 has 166,912, sm_90 has 232,448."""

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The 16-bit type that kernels are compared in. Triton's interpreter truncates to bfloat16, so float16 stands for it
where there is no GPU; tolerances are those of bfloat16."""


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


def layer_kernels() -> list[ModuleType]:
    """The modules of kernels that layers launch."""
    return [each for each in vars(ops).values() if isinstance(each, ModuleType) and each is not ops.sampling]


def count_launches(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[str]:
    """Names of the kernels of some modules that are launched from now on; they do not run."""
    launched: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self._name)
            return lambda *given, **constants: None

    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Counted(name))
    return launched


_COMPILE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hybrid_rlhf.generation.ops import attention as heads, norms, rows, sampling

TYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32}
POINTERS = {"*fp32": "tops sums all_tops all_sums bias sinks scores bounds logprobs sampling_logprobs parts candidates",
            "*i64": "positions places integers tokens table units block_units",
            "*i32": "pages tiles lasts candidate_tokens allowed", "*fp64": "floats", "*u8": "seen"}
NUMBERS = {"fp32": "scale cap eps", "i32": "window rows heads kv_heads stride row_pages bias_keys width vocabulary "
           "integer_columns inner outer_stride inner_stride row_stride "
           "float_columns blocks head_stride"}
MULTIPLES = set()  # names of numbers that are multiples of 16
KINDS = {name: kind for kinds in (POINTERS, NUMBERS) for kind, names in kinds.items() for name in names.split()}

def built(kernel, constants, model="*bf16", target=90, options=None):
    missing = [parameter.name for parameter in kernel.params if parameter.is_constexpr
               and not parameter.has_default and parameter.name not in constants]
    assert not missing, f"{kernel.__name__} without {missing}"
    signature = {name: "constexpr" if name in constants else KINDS.get(name, model) for name in kernel.arg_names}
    # as at run time: what is a multiple of 16 is loaded ahead into shared memory
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
               if signature[name].startswith("*") or name in MULTIPLES and name not in constants}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)

def shared_bytes(*given, **options):
    return built(*given, **options).metadata.shared
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
