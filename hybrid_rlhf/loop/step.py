"""A step of the pipeline as a Python object: `SFT`, `RewardModel`, `PreferenceTuning` and `RL` derive from it.

    result = SFT(model="embedded", data=[{"prompt": "2 + 2 =", "completion": "4"}], train={"max_steps": 10}).train()

Settings are those of the command line: each keyword is a section or a key of the step's config.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from datasets import Dataset

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files.cache import cache_folder
from hybrid_rlhf.configs.parsing.command_line import build_config, plain
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.sections.run import StepConfig
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.run import FINISHED_FILE, Callback

ConfigT = TypeVar("ConfigT", bound=StepConfig)
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
        config: ConfigT | None = None,
        *,
        model: str | os.PathLike[str] | None = None,
        data: Rows | Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        """Take the settings.

        Args:
            config: settings that the keywords override; none: the defaults.
            model: model.path.
            data: a path, a list of rows, or a data set; or the section `data`, whose `sources` may be any of these.
                Rows in memory are written to a file in the cache folder.
            callbacks: called on every rank with the step and its metrics, step 0 before training.
            settings: other keys and sections of the config, sections as mappings or config dataclasses.

        Raises:
            UserError: for an unknown key, a wrong value, or a rule of the config.
        """
        content = {name: _nested(value) for name, value in settings.items()}
        if model is not None:
            content["model"] = {**content.get("model", {}), "path": os.fspath(model)}
        if data is not None:
            section: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"sources": data}
            if "sources" in section:
                section["sources"] = _sources(section["sources"], section.get("cache_dir"))
            content["data"] = section
        layers = [] if config is None else [Layer(plain(config))]
        self.config: ConfigT = build_config(self.config_type, [*layers, Layer(content, "keywords")])
        self.callbacks = tuple(callbacks)

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
    return plain(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _sources(data: Rows, cache_dir: str | None) -> list[Any]:
    """The paths of a data set; rows in memory become a file that is named by its content."""
    if isinstance(data, (str, os.PathLike)):
        return [os.fspath(data)]
    rows = data.to_list() if isinstance(data, Dataset) else list(data)
    if not rows:
        raise UserError("data must have rows, got none: give a path, a list of dicts or a datasets.Dataset")
    if not all(isinstance(row, Mapping) and "path" not in row for row in rows):
        return rows  # paths and sources of a blend
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    folder = cache_folder(cache_dir) / "rows"
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # every rank may write it: each under a name of its own, renamed when complete
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".partial", delete=False) as beside:
            beside.write(text)
        os.replace(beside.name, file)
    return [str(file)]
