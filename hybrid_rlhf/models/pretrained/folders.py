"""Checks of a model folder before transformers reads it, and transformers' errors as one line.

Weights must be safetensors. Loading a pickle runs code, so pickles are never read; Python code in a model folder is not
run either, unless trust_remote_code is true.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import read_json_object
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.onnx")
_INDEX = "model.safetensors.index.json"
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000


def check_folder(folder: Path, shown: str) -> None:
    """Reject a folder that transformers cannot load, or only from a pickle.

    Args:
        folder: an existing folder with a config.json.
        shown: the folder's name in errors, as the user gave it.

    Raises:
        UserError: with the name of the faulty file.
    """
    _check_generation_config(folder / "generation_config.json")
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():
        files = _indexed(folder)
    if not files:
        other_formats = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
        if not other_formats:
            raise UserError(
                f"a model folder must have a model.safetensors, {shown} has no weights: copy the model again"
            )
        raise UserError(
            f"weights must be safetensors, {shown} has only {other_formats[0]}: if you trust it, convert it once with "
            "from_pretrained(FOLDER) and save_pretrained(NEW_FOLDER) of transformers"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"weights must be complete safetensors files, {file} is not ({first_line(error)}): copy it again"
            ) from error


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in the weight files, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes


def _check_generation_config(file: Path) -> None:
    """Reject a damaged file: transformers would ignore it, and with it the tokens that end a completion."""
    if not file.exists():
        return
    eos = read_json_object(file, "a model's generation_config.json").get("eos_token_id")
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [eos or 0])):
        raise UserError(f"eos_token_id must be a number or a list of numbers, {file} has {eos!r}: correct it")


def _indexed(folder: Path) -> list[Path]:
    """The weight files that the index of a sharded model lists."""
    names = read_json_object(folder / _INDEX, _INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in names.values()
    ):
        raise UserError(
            f"{_INDEX} must map weights to files beside it, {folder / _INDEX} does not: copy the model again"
        )
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise UserError(f"all files in {_INDEX} must exist, {folder} has no {file.name}: copy the model again")
    return files


def load_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face config of a resolved model.

    Raises:
        UserError: when it is missing, or transformers does not support it.
    """
    if Path(path).is_dir():
        raw = read_json_object(Path(path) / "config.json", "a model's config.json")
        for name in _LAYER_COUNTS:  # transformers allocates a list of this length
            if isinstance(raw.get(name), int) and raw[name] > _MOST_LAYERS:
                raise UserError(f"{name} must be at most {_MOST_LAYERS:,}, {path} has {raw[name]}: correct config.json")
    with (
        reading(f"transformers must support the model, {path} fails", "check the path and its config.json"),
        _hub(path),
    ):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def _hub(name: str) -> Iterator[None]:
    """Context that replaces the messages of the hub's client about its tries, which take about 20 s, by one line.

    Raises:
        UserError: when the hub cannot be reached, most often because the name is a misspelled folder.
    """
    client = logging.getLogger("huggingface_hub.utils._http")
    told = os.environ.get("LOCAL_RANK", "0") != "0"

    def quiet(record: logging.LogRecord) -> bool:
        nonlocal told
        if not told:
            told = True
            logger.warning("%s is no folder, and the hub does not answer: trying again", name)
        return False

    client.addFilter(quiet)
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise UserError(
                f"a model must be a folder or a hub name, {name} is no folder and the hub is not reachable: check the "
                "path"
            ) from error
        raise
    finally:
        client.removeFilter(quiet)


@contextlib.contextmanager
def reading(rule: str, fix: str, *, config: PreTrainedConfig | None = None) -> Iterator[None]:
    """Context that turns any error of transformers about a faulty folder, perhaps with this config, into one line.

    Raises:
        UserError: `rule` (the reason by transformers): `fix`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001
        reason = first_line(error)
        if "ignore_mismatched_sizes" in str(error):
            reason = "its weights have other shapes than in its config.json"
        if "trust_remote_code" in str(error):
            reason = "it needs its own Python code, which is not run by default"
            fix = "set trust_remote_code to true if you trust its authors"
        if isinstance(error, KeyError) and config is not None:
            values = config.get_text_config().to_dict()
            for name in [name for name, value in values.items() if error.args == (value,)]:
                reason = f"it does not know {name} {values[name]!r}"
                fix = f"correct {name} in config.json"
        raise UserError(f"{rule} ({reason}): {fix}") from error


def warn_of_remote_code(trusted: bool, world: World) -> None:
    """Warn in red, on the main rank, that code of a model may run."""
    if trusted and world.is_main:
        Console(stderr=True).print(
            "trust_remote_code is true: Python code of the model runs with all your permissions",
            style="bold red",
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one-line messages."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
