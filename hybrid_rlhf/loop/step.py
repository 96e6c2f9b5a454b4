"""A step of the pipeline as a Python object: `SFT`, `RewardModel`, `PreferenceTuning` and `RL` derive from it.

    result = SFT(model="embedded", data=[{"prompt": "2 + 2 =", "completion": "4"}], train={"max_steps": 10}).train()

The settings are the same as on the command line: each keyword is a section or a key of the step's config.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import build_config, plain
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.sections.run import StepConfig
from hybrid_rlhf.data.rows.files import json_line
from hybrid_rlhf.data.rows.sources import table_rows
from hybrid_rlhf.runtime.files.reading import cache_folder
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.run import FINISHED_FILE, Callback

ConfigT = TypeVar("ConfigT", bound=StepConfig)
ModelSource: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"
"""A folder, a hub name or a .gguf file; or a model of transformers."""
_HELD_OUT_SPLITS = ("test", "validation", "eval")
Rows: TypeAlias = "str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Dataset"
"""A file, folder or hub name; a list of rows; or a data set."""


@dataclass(frozen=True)
class TrainResult:
    """The results of a step, in its folder."""

    output_dir: Path
    models: dict[str, Path]
    """Folders of the saved models by role: model; for RL actor and, if there is one, critic."""
    history: list[dict[str, Any]]
    """The lines of metrics.jsonl."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value of each metric."""
        return {name: value for line in self.history for name, value in line.items()}


class Step(ABC, Generic[ConfigT]):
    """Settings, data and callbacks of one step; `train` runs it in this process, or in the ranks of a launcher."""

    config_type: ClassVar[type[Any]]

    def __init__(
        self,
        config: ConfigT | ModelSource | None = None,
        *,
        model: ModelSource | Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        data: Rows | Mapping[str, Any] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        """Take the settings.

        Args:
            config: settings that the keywords override, or the model; None: the defaults.
            model: model.path, or a model of transformers, whose current weights are written to the cache folder; or
                the section `model`, whose `path` may be either.
            tokenizer: tokenizer of a model object.
            data: a path, a list of rows, a data set, or a `DatasetDict` of train and test (or validation); or the
                section `data`, whose `sources` and `eval_sources` may be any of the first three. Rows in memory are
                written to a file in the cache folder.
            callbacks: one or several functions, called on every rank with the step and its metrics, step 0 before
                training.
            settings: other keys and sections of the config, sections as mappings or config dataclasses.

        Raises:
            UserError: for an unknown key, a wrong value, or a rule of the config.
        """
        if config is not None and not isinstance(config, self.config_type):
            if model is not None:
                raise UserError(f"{type(self).__name__} takes one model, got two: leave one out")
            config, model = None, config
        content = {name: _nested(value) for name, value in settings.items()}
        section = {} if data is None else _data_section(_nested(data))
        cache_dir = section.get("cache_dir")
        model = _nested(model)
        model_section = dict(model) if isinstance(model, Mapping) else {"path": model}
        if model is not None:
            content["model"] = model_section
        if (source := model_section.get("path")) is not None:
            model_section["path"] = _model_path(source, tokenizer, cache_dir)
        elif tokenizer is not None:
            raise UserError("tokenizer needs a model object, got no model: give model, or leave tokenizer out")
        for key in ("sources", "eval_sources"):
            if key in section and (key == "sources" or section[key] != []):
                section[key] = _sources(section[key], cache_dir)
        if section:
            content["data"] = section
        layers = [] if config is None else [Layer(plain(config))]
        self.config: ConfigT = build_config(self.config_type, [*layers, Layer(content, "keywords")])
        self.callbacks = (callbacks,) if callable(callbacks) else tuple(callbacks)

    def train(self) -> TrainResult:
        """Run the step to its end. With `resume="auto"`, a finished run is only read.

        Raises:
            UserError: for a user error, on every rank.
            SystemExit: after the checkpoint that SIGTERM or SIGINT requests.
        """
        try:
            self._run()
        except SystemExit as stop:
            if stop.code:
                raise
        return self._result()

    @abstractmethod
    def _run(self) -> None:
        """Run the step in this process."""

    def _result(self) -> TrainResult:
        folder = Path(self.config.output_dir)
        names = json.loads((folder / FINISHED_FILE).read_text())["models"]
        return TrainResult(folder, {name or "model": folder / name for name in names}, list(read_metrics(folder)))


def _nested(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return plain(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _data_section(data: Rows | Mapping[str, Any]) -> dict[str, Any]:
    """The section `data`, from the argument of a caller.

    Raises:
        UserError: when a DatasetDict has no training split, or one whose use is not clear.
    """
    if not isinstance(data, DatasetDict):
        return dict(data) if isinstance(data, Mapping) else {"sources": data}
    held_out = [name for name in data if name in _HELD_OUT_SPLITS]
    if "train" not in data or len(data) > 1 + len(held_out) or len(held_out) > 1:
        raise UserError(
            f"a DatasetDict must have the split train and at most one of {', '.join(_HELD_OUT_SPLITS)}, got "
            f"{', '.join(data)}: give data={{'sources': splits['train'], 'eval_sources': splits['test']}}"
        )
    return {"sources": data["train"], **({"eval_sources": data[held_out[0]]} if held_out else {})}


def _model_path(model: ModelSource, tokenizer: PreTrainedTokenizerBase | None, cache_dir: str | None) -> str:
    """The path of a model; a model object is written to a folder named by its content.

    Raises:
        UserError: for anything else, and for a model object without its tokenizer.
    """
    if isinstance(model, (str, os.PathLike)):
        if tokenizer is not None:
            raise UserError(f"tokenizer needs a model object, got the model {model}: leave tokenizer out")
        return os.fspath(model)
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model must be a path or a model of transformers, got {type(model).__name__}: give its path")
    if tokenizer is None:
        raise UserError("a model object needs its tokenizer, got none: give tokenizer, or the model's path")
    folder = cache_folder(cache_dir) / "models"
    folder.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder, suffix=".partial"))  # every rank may write it
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        digest = hashlib.sha256()
        for file in sorted(path for path in beside.rglob("*") if path.is_file()):
            digest.update(file.name.encode())
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        named = folder / digest.hexdigest()[:16]
        try:
            os.rename(beside, named)
        except OSError:
            if not named.is_dir():  # unless another rank, or an earlier run, has written it
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return str(named)


def _sources(data: Rows, cache_dir: str | None) -> list[Any]:
    """The paths of a data set; rows in memory are written to a file named by its content."""
    if isinstance(data, (str, os.PathLike)):
        return [os.fspath(data)]
    if not isinstance(data, Iterable):
        raise UserError(f"data must be a path or rows, got {data!r}: give a path, a list of dicts or a data set")
    rows = list(table_rows(data, "data")) if isinstance(data, Dataset) else list(data)
    if not rows:
        raise UserError("data must have rows, got none: give a path, a list of dicts or a datasets.Dataset")
    if not all(isinstance(row, Mapping) and "path" not in row for row in rows):
        return rows  # paths and sources of a blend
    content = b"".join(map(json_line, rows))
    folder = cache_folder(cache_dir) / "rows"
    file = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # every rank may write it, under a unique name that is renamed when complete
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as beside:
            beside.write(content)
        os.replace(beside.name, file)
    return [str(file)]
