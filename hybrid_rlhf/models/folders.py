"""What a model folder may hold: checked before transformers reads it, and its errors turned into one line.

Weights are safetensors. A pickle is a program, which runs when it is loaded, so none is read here, whatever wrote it;
nor is Python code that lies beside a model, unless trust_remote_code says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files import read_json_object
from hybrid_rlhf.runtime.world import World

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.onnx")
_INDEX = "model.safetensors.index.json"
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000


def check_folder(folder: Path, shown: str) -> None:
    """Refuse a folder that transformers would not load, or only as a pickle.

    Args:
        folder: that exists.
        shown: how the user named it.

    Raises:
        UserError: naming the file at fault.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"a model folder has a config.json, {shown} has none: name the folder that save_pretrained wrote"
        )
    _check_generation_config(folder / "generation_config.json")
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():
        files = _indexed(folder)
    if not files:
        others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
        if not others:
            raise UserError(f"a model folder has a model.safetensors, {shown} has no weights: copy the model again")
        raise UserError(
            f"weights are safetensors, {shown} has only {others[0]}: where you trust it, convert it once with "
            "from_pretrained(FOLDER) and save_pretrained(NEW_FOLDER) of transformers"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is no whole safetensors file ({first_line(error)}): copy it again") from error


def stored_elements(folder: Path) -> int:
    """Numbers that the files of weights hold."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


def _check_generation_config(file: Path) -> None:
    """Refuse one that is damaged: transformers would go on without it, and so without the tokens that end an answer."""
    if not file.exists():
        return
    eos = read_json_object(file, "a model's generation_config.json").get("eos_token_id")
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [eos or 0])):
        raise UserError(f"eos_token_id is a number or a list of numbers, {file} has {eos!r}: mend it")


def _indexed(folder: Path) -> list[Path]:
    """The files that the index of a model in several parts names."""
    names = read_json_object(folder / _INDEX, _INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in names.values()
    ):
        raise UserError(f"{_INDEX} maps weights to files beside it, {folder / _INDEX} does not: copy the model again")
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{_INDEX} names {file.name}, {folder} has none: copy the model again")
    return files


def load_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face config of a resolved model.

    Raises:
        UserError: when there is none, or none that transformers knows.
    """
    if Path(path).is_dir():
        raw = read_json_object(Path(path) / "config.json", "a model's config.json")
        for name in _LAYER_COUNTS:  # transformers makes a list of them
            if isinstance(raw.get(name), int) and raw[name] > _MOST_LAYERS:
                raise UserError(
                    f"{name} of a model is at most {_MOST_LAYERS:,}, {path} has {raw[name]}: mend config.json"
                )
    with reading(f"{path} is no model that transformers knows", "check the path and its config.json"):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def reading(rule: str, fix: str) -> Iterator[None]:
    """Around a call of transformers, which raises whatever comes up in a faulty folder: as one line.

    Raises:
        UserError: `rule` (what transformers says): `fix`.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001
        reason = first_line(error)
        if "ignore_mismatched_sizes" in str(error):
            reason = "its weights have other shapes than its config.json says"
        if "trust_remote_code" in str(error):
            reason = "it comes with Python code of its own, which is not run"
            fix = "set trust_remote_code to true if you trust those who wrote it"
        raise UserError(f"{rule} ({reason}): {fix}") from error


def warn_of_remote_code(trusted: bool, world: World) -> None:
    """Say in red that code which comes with a model may run; on the main rank."""
    if trusted and world.is_main:
        Console(stderr=True).print(
            "trust_remote_code is on: Python code that comes with a model runs here, with all your rights",
            style="bold red",
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one-line messages."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
