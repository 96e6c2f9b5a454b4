"""The models that a client may select: those below the board's folders, and those of the command line.

A chat loads a model, which may run code in its folder or download it from the hub, so a client can only select a model
of this list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from hybrid_rlhf.board.runs.folders import RunFolder, RunFolders, UnknownRun, run_id
from hybrid_rlhf.board.runs.reading import complete_lines, parsed
from hybrid_rlhf.board.runs.summary import RunSummaries
from hybrid_rlhf.board.samples.lines import prompt_messages
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.names import SAMPLES_FILE
from hybrid_rlhf.runtime.files.reading import open_regular, read_json_object

Kind = Literal["chat", "reward"]
_SYSTEM_ROWS = 20
"""Number of recorded prompts that must share the system prompt, so that it is the one of the training."""


@dataclass(frozen=True)
class SavedModel:
    """A model that a client may select."""

    path: str
    name: str
    kind: Kind | None
    """None for a name of the command line, which is not inspected before it is loaded."""
    run: RunFolder | None
    """The run that saved it."""
    order: tuple[Any, ...]
    """Sort key: actors before other models, the newest first."""


@dataclass(frozen=True)
class SavedModels:
    """The models of the board's folders and of the command line."""

    folders: RunFolders
    summaries: RunSummaries
    named: Sequence[str]
    """Models that the command line names."""

    def all(self) -> list[SavedModel]:
        """All models, the most recently saved actor first."""
        models = [SavedModel(path, path, None, None, (2, 0.0, path)) for path in self.named]
        for folder in self.folders.models():
            try:
                config = read_json_object(folder / "config.json", "config.json")
                saved = (folder / "config.json").stat().st_mtime
            except (UserError, OSError):
                continue
            kind = _kind(config.get("architectures"))
            if kind is None or folder.name == "critic" or str(folder) in self.named:
                continue
            run = self._run_of(folder)
            is_actor = folder.name == "actor" or (
                run is not None and run.folder == folder and self.summaries.summary(run)["command"] == "preference"
            )
            name = self.folders.name_of(folder)
            models.append(SavedModel(str(folder), name, kind, run, (0 if is_actor else 1, -saved, name)))
        return sorted(models, key=lambda model: model.order)

    def shown(self) -> list[dict[str, Any]]:
        """GET /api/models."""
        return [
            {
                "path": model.path,
                "name": model.name,
                "kind": model.kind,
                "system": _system_prompt(model.run),
                "prompts": None if model.run is None else _prompts_of(self.summaries.config(model.run)[0]),
            }
            for model in self.all()
        ]

    def path_of(self, name: str, kind: Kind) -> str:
        """The path of a model that a client names by its path or by the id of its run.

        Raises:
            UserError: if it is not one of these models.
        """
        try:
            run = self.folders.get(name)
        except UnknownRun:
            run = None
        for model in self.all():
            if model.kind in (kind, None) and (model.path == name or (run is not None and model.run == run)):
                return model.path
        if run is not None:
            raise UserError(f"models must have been saved, run {run.name} has no model yet: wait for its end")
        what = "a model" if kind == "chat" else "a reward model"
        raise UserError(
            f"a chat loads {what} of /api/models, got {name[:200]}: choose one, or start the board with --models [PATH]"
        )

    def _run_of(self, folder: Path) -> RunFolder | None:
        """The run whose folder a model's folder, or its parent, is; None without a run."""
        for place in (folder, folder.parent):
            try:
                return self.folders.get(run_id(place))
            except UnknownRun:
                continue
        return None


def _kind(architectures: Any) -> Kind | None:
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if any("CausalLM" in name for name in names):
        return "chat"
    return "reward" if any(name.endswith("ForSequenceClassification") for name in names) else None


def _prompts_of(config: dict[str, Any]) -> str | None:
    """The first data that a run was evaluated or trained on."""
    data = config.get("data")
    sources = [*(data.get("eval_sources") or []), *(data.get("sources") or [])] if isinstance(data, dict) else []
    first = sources[0] if sources else None
    path = first.get("path") if isinstance(first, dict) else first
    return path if isinstance(path, str) else None


def _system_prompt(run: RunFolder | None) -> str | None:
    """The system prompt that the first recorded prompts of a run share; None without one."""
    if run is None:
        return None
    try:
        with open_regular(run.folder / SAMPLES_FILE) as file:
            parts = complete_lines(file, 0)
            lines = [line for _, line in islice(chain.from_iterable(parts), _SYSTEM_ROWS)]
    except (OSError, ValueError):
        return None
    first = [prompt_messages(row)[:1] for row in map(parsed, lines) if row is not None]
    texts = {message.get("content") if message.get("role") == "system" else None for (message,) in filter(None, first)}
    (text,) = texts if len(texts) == 1 else (None,)
    return text if isinstance(text, str) else None
