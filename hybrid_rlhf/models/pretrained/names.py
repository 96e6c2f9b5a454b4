"""Names by which a user gives a model: a folder, a .gguf file, the name of a hub model, or `embedded`.

They are checked without transformers, whose import takes a second, so that a command can check those of all its steps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.credentials import redacted
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.folder_lock import LOCK_FILE
from hybrid_rlhf.runtime.files.reading import regular_file, user_path

EMBEDDED_MODEL = "embedded"
_HUB_NAME = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}")


def require_model(path: str) -> None:
    """Require a model folder, a .gguf file, or what may be a hub name; the hub is not asked.

    Raises:
        UserError: for any other path, and for a folder without a config.json.
    """
    if path == EMBEDDED_MODEL:
        return
    if "://" in path:
        raise UserError(
            f"a model must be a folder, a .gguf file or a hub name, got {redacted(path)}: download it first"
        )
    source = user_path(path)
    if source.suffix == ".gguf":
        regular_file(source, "a model file must exist")
    elif os.path.isdir(source):
        _require_config(source, path)
    elif os.path.exists(source) or not _HUB_NAME.fullmatch(path):
        raise UserError(f"a model must be a folder, a .gguf file or a hub name, {path} is none: check the path")


def named_models(config: Any) -> Iterator[tuple[str, str]]:
    """The models that a training step loads, each with its key, as the user has named them."""
    for name in ("model", "critic", "reference", "teacher"):
        if path := getattr(getattr(config, name, None), "path", None):
            yield f"{name}.path", path
    for path in getattr(getattr(config, "teacher", None), "per_source", {}).values():
        yield "teacher.per_source", path
    if teacher := getattr(getattr(config, "distill", None), "teacher", None):
        yield "distill.teacher", teacher
    for component in config.reward.named if hasattr(config, "reward") else ():
        if path := component.model or component.judge_path:
            yield "reward.components", path


def _require_config(folder: Path, shown: str) -> None:
    """Require a model folder; errors call it `shown`."""
    if not (folder / "config.json").is_file():
        inner = min(folder.glob("*/config.json"), default=None)  # in an RL run's folder the actor sorts first
        fix = "a folder that save_pretrained wrote" if inner is None else str(Path(shown) / inner.parent.name)
        if (folder / "adapter_config.json").is_file():
            if (folder.parent / "config.json").is_file():  # a run saves the adapter within the merged model
                raise UserError(
                    f"a model folder must have whole weights, {shown} has an adapter of peft: give "
                    f"{Path(shown).parent}, which has them with the adapter merged"
                )
            raise UserError(
                f"a model folder must have whole weights, {shown} has an adapter of peft: merge it into its base with "
                f"hybrid-rlhf export BASE --adapter {shown} --output FOLDER, and give that"
            )
        if (folder / LOCK_FILE).exists() and inner is None:  # a run saves its model at its end
            fix = "a run that is finished, or finish this one"
        raise UserError(f"a model folder must have a config.json, {shown} has none: give {fix}")
