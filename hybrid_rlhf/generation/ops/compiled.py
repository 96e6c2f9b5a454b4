"""Compiles a C++ file of this folder on the user's machine, on first use, and loads it with ctypes.

Why here and not in the wheel: the instruction set is that of the machine (-march=native). Why not
torch.utils.cpp_extension: torch's headers take half a minute to compile, a plain C interface takes three seconds; and
`-fopenmp` may load a second OpenMP runtime beside the one that torch bundles, whose waiting threads take the cores from
torch's. Nothing is linked here: `openmp_parallel` returns the function by which torch's own code starts its threads.

The library is cached in ~/.cache/hybrid_rlhf/kernels under a key of everything that it depends on. It is compiled in a
folder of its own and renamed: processes that compile at the same time do not disturb each other and wait for no lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess  # starts the compiler  # nosec B404
import tempfile
from pathlib import Path

import torch

from hybrid_rlhf.runtime.files.reading import cache_folder
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-exceptions", "-fno-rtti")
_FOR_THIS_MACHINE = (("-march=native",), ("-mcpu=native",), ())
"""The first that the compiler accepts; some know one of the first two, on some processors."""
_TIMEOUT_SECONDS = 120
logger = logging.getLogger(LOGGER_NAME)


class CannotCompile(Exception):
    """The library cannot be had on this machine; the message names the reason and what to do."""


def load(source: Path) -> ctypes.CDLL:
    """The library of a C++ file, compiled unless the cache has it.

    Raises:
        CannotCompile: if there is no compiler, or it fails.
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

    It is looked up where the dynamic linker finds it for torch: in the global scope first, where a preloaded runtime
    is, then in the libraries that libtorch_cpu needs, by whatever name a build of torch bundles its runtime. The
    runtimes of Intel and LLVM have this function too.

    Raises:
        CannotCompile: if torch uses no such runtime.
    """
    libraries = [ctypes.CDLL(None)]
    with contextlib.suppress(OSError, IndexError):
        bundled = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))[0]
        libraries.append(ctypes.CDLL(str(bundled)))  # loaded already: this is a handle of it
    for library in libraries:
        with contextlib.suppress(AttributeError):
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    raise CannotCompile("this build of torch does not use OpenMP threads: install one of pytorch.org")


def _compiler() -> list[str]:
    """The command that starts the compiler; CXX may have arguments: "ccache g++"."""
    given = os.environ.get("CXX")
    for command in [shlex.split(given)] if given else [[name] for name in _COMPILERS]:
        found = shutil.which(command[0]) if command else None
        if found is not None:
            return [found, *command[1:]]
    raise CannotCompile(f"there is no C++ compiler ({given or ', '.join(_COMPILERS)}): install g++, or set CXX to one")


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    """Raises CannotCompile with what the compiler says to the first choice of flags, if it accepts none."""
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
    """Hash of source, compiler and its version, flags, processor and torch."""
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
    """Architecture, model and instruction sets of the processor."""
    lines: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                lines.add(line)
    return "\n".join((platform.machine(), platform.processor(), *sorted(lines)))
