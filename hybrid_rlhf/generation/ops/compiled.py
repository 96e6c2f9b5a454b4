"""Compiles a C++ file of this folder on the user's machine, on first use, and loads it with ctypes.

Why here and not in the wheel: the code uses the instruction set of the machine (-march=native). Why not
torch.utils.cpp_extension: torch's headers take half a minute to compile, a plain C interface three seconds. Also,
`-fopenmp` may load a second OpenMP runtime beside the one that torch bundles, and its waiting threads would compete
with torch's for the cores. No runtime is linked here: `openmp_parallel` returns the function with which torch's code
starts its threads.

The library is cached in ~/.cache/hybrid_rlhf/kernels under a key of everything that it depends on. It is compiled in a
temporary folder and renamed, so processes can compile at the same time without a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess  # starts the compiler  # nosec B404
import tempfile
from pathlib import Path

import torch

from hybrid_rlhf.runtime.files.reading import cache_folder
from hybrid_rlhf.runtime.observability.logs import logger

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-exceptions", "-fno-rtti")
_FOR_THIS_MACHINE = (("-march=native",), ("-mcpu=native",), ())
"""Flags for the machine's instruction set, tried in this order; compilers support them on some processors only."""
_TIMEOUT_SECONDS = 120


class CannotCompile(Exception):
    """Raised if the library cannot be built or loaded; the message gives the reason and the fix."""


def load(source: Path) -> ctypes.CDLL:
    """Return the library of a C++ file, which is compiled unless it is in the cache.

    Raises:
        CannotCompile: if there is no compiler, or compilation fails.
    """
    compiler = _compiler()
    path = cache_folder() / "kernels" / f"{source.stem}-{_key(source, compiler)}.so"
    if path.exists():
        with contextlib.suppress(OSError):  # a damaged file is replaced
            return ctypes.CDLL(str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.mkdtemp(prefix="compiling-", dir=path.parent)
    except OSError:  # a read-only home: each process compiles for itself
        beside = tempfile.mkdtemp(prefix="hybrid-rlhf-")
    try:
        made = Path(beside) / path.name
        _compile(compiler, source, made)
        if Path(beside).parent == path.parent:
            os.replace(made, path)
            made = path
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise CannotCompile(f"the compiled {source.name} cannot be stored or loaded ({error})") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def openmp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch uses.

    It is looked up in the order of the dynamic linker: first in the global scope, which has a preloaded runtime, then
    in the libraries that libtorch_cpu needs, independent of the name of the bundled runtime. The runtimes of Intel and
    LLVM also have this function.

    Raises:
        CannotCompile: if torch uses no such runtime.
    """
    libraries = [ctypes.CDLL(None)]
    with contextlib.suppress(OSError, IndexError):
        bundled = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))[0]
        libraries.append(ctypes.CDLL(str(bundled)))  # already loaded: this returns a handle
    for library in libraries:
        with contextlib.suppress(AttributeError):
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    raise CannotCompile("this build of torch does not use OpenMP threads: install one of pytorch.org")


def _compiler() -> list[str]:
    """Return the command of the compiler. CXX may have arguments, as in "ccache g++"."""
    configured = os.environ.get("CXX")
    for command in [shlex.split(configured)] if configured else [[name] for name in _COMPILERS]:
        executable = shutil.which(command[0]) if command else None
        if executable is not None:
            return [executable, *command[1:]]
    raise CannotCompile(
        f"there is no C++ compiler ({configured or ', '.join(_COMPILERS)}): install g++, or set CXX to one"
    )


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    """Compile with the first flags that work; else raise CannotCompile with the compiler's message for the first
    flags."""
    # Without this flag the library would need the C++ runtime of the compiler, which may be newer than the loaded one.
    link = ["-Wl,--as-needed"] if platform.system() == "Linux" else []
    messages = []
    for machine in _FOR_THIS_MACHINE:
        command = [*compiler, *_FLAGS, *machine, str(source), "-o", str(target), *link]
        try:
            done = subprocess.run(  # a list of arguments, no shell  # nosec B603
                command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotCompile(f"{compiler[0]} cannot compile {source.name} ({error})") from error
        if done.returncode == 0:
            return
        messages.append(
            f"{compiler[0]} cannot compile {source.name}: set CXX to another compiler\n{done.stderr.strip()}"
        )
    logger.warning("%s", messages[0])
    raise CannotCompile(messages[0].splitlines()[0])


def _key(source: Path, compiler: list[str]) -> str:
    """Hash of source, compiler and its version, flags, processor and torch version."""
    try:
        version = subprocess.run(  # a list of arguments, no shell  # nosec B603
            [*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{compiler[0]} does not start ({error}): set CXX to another compiler") from error
    parts = (source.read_text(), *compiler, version, repr((_FLAGS, _FOR_THIS_MACHINE)), processor(), torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def processor() -> str:
    """Return architecture, model and instruction sets of the processor as text."""
    lines: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                lines.add(line)
    return "\n".join((platform.machine(), platform.processor(), *sorted(lines)))
