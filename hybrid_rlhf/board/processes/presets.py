"""Initial settings of a form: those of earlier runs and of recipes.

Recipes are the YAML files of the folder `recipes/` in the working folder, if it exists: a checkout has it, the wheel
does not, because recipes name files of the checkout. A file has the keys of `hybrid-rlhf train`, and is then a preset
of each of its steps, or the keys of one step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rlhf.board.processes.form import PROCESSES, config_type, optional_sections
from hybrid_rlhf.board.processes.training import world_size
from hybrid_rlhf.board.runs.folders import RunFolders
from hybrid_rlhf.board.runs.summary import COMMANDS, RunSummaries, command_of
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import build_config, config_tree, settings_and_defaults
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml
from hybrid_rlhf.configs.pipeline import STEP_NAMES, PipelineConfig, step_config
from hybrid_rlhf.configs.sections.rules import defaults_of
from hybrid_rlhf.planning.dotted_keys import setting
from hybrid_rlhf.runtime.files.reading import read_text

_RECIPES = Path("recipes")
_NOT_COPIED = ("output_dir", "resume")
"""Keys of an earlier run that a new run does not take over."""


@dataclasses.dataclass(frozen=True)
class Presets:
    """The presets that the form offers."""

    folders: RunFolders
    summaries: RunSummaries

    def all(self) -> list[dict[str, Any]]:
        """GET /api/presets: recipes, then runs, the latest first."""
        recipes = [
            {"id": f"{file.name}:{step}", "name": file.stem, "kind": "recipe", "command": step, "problem": problem}
            for file in _recipe_files()
            for step, problem in _recipe_steps(file)
        ]
        runs = [self.summaries.summary(run) for run in self.folders.all()]
        runs = [run for run in runs if run["command"] is not None]
        runs.sort(key=lambda run: -(run["updated_seconds"] or 0))
        return recipes + [
            {"id": run["id"], "name": run["name"], "kind": "run", "command": run["command"], "problem": None}
            for run in runs
        ]

    def values(self, preset: str) -> dict[str, Any]:
        """GET /api/presets/PRESET: the command, and the values that differ from its defaults.

        Raises:
            UserError: if there is no such preset, or its settings do not fit this version.
        """
        name, colon, step = preset.partition(":")
        if not colon:
            run = self.folders.get(preset)
            content, problem = self.summaries.config(run)
            command = command_of(content)
            if command is None:
                raise UserError(
                    f"the settings of {run.name} cannot be read: {problem or 'they are of another program'}"
                )
            config: Any = build_config(COMMANDS[command], [Layer(content)])
            values = _values(config, world_size(run.folder))
            values["output_dir"] = self.folders.shown(self.folders.unused(run.folder.name))
            return {"command": command, "values": values, "note": f"The settings of {run.name}, in a new folder."}
        files = {file.name: file for file in _recipe_files()}
        if name not in files:
            raise UserError(f"preset must be an id of /api/presets, got {preset[:80]!r}: reload the page")
        text = read_text(files[name], "a recipe must be a file")
        config, processes = _recipe_config(parse_yaml(text, name), step)
        note = "\n".join(
            line.lstrip("# ") for line in itertools.takewhile(lambda line: line[:1] == "#", text.splitlines())
        )
        values = _values(config, processes)
        folder = self.folders.place(config.output_dir)
        if folder is not None and not folder.exists():
            values["output_dir"] = config.output_dir  # the recipe's next step reads the model from there
        return {"command": step, "values": values, "note": note}


def _recipe_files() -> list[Path]:
    return sorted(_RECIPES.glob("*.yaml"))


def _recipe_steps(file: Path) -> list[tuple[str | None, str | None]]:
    """The steps of a recipe, or the reason why it cannot be read; its settings are checked when it is selected."""
    try:
        content = parse_yaml(read_text(file, "a recipe must be a file"), file.name)
        if not _is_pipeline(content):
            command = command_of(content)
            return [(command, None if command else f"{file.name} has no settings of a run")]
        named = str(content.get("steps", PipelineConfig.steps)).replace(" ", "").split(",")
        return [(step, None) for step in STEP_NAMES if step in named]
    except UserError as error:
        return [(None, str(error))]


def _is_pipeline(content: Mapping[str, Any]) -> bool:
    return "base_model" in content or any(
        isinstance(content.get(step), Mapping) for step in ("sft", "rl", "preference")
    )


def _recipe_config(content: Mapping[str, Any], step: str) -> tuple[Any, int]:
    """The config of a step of a recipe, and the number of processes."""
    if not _is_pipeline(content):
        return build_config(config_type(step), [Layer(content)]), 1
    pipeline = build_config(PipelineConfig, [Layer(content)])
    if step not in STEP_NAMES:
        raise UserError(f"a step is one of {', '.join(STEP_NAMES)}, got {step[:40]!r}: choose one")
    return step_config(step, pipeline), pipeline.launcher.num_processes or 1


def _values(config: Any, processes: int) -> dict[str, Any]:
    """The values of a config that differ from the defaults of a form."""
    algorithm = getattr(getattr(config, "algorithm", None), "name", None)
    tree = config_tree(type(config), [] if algorithm is None else ["--algorithm.name", algorithm])
    values: dict[str, Any] = {} if algorithm is None else {"algorithm.name": algorithm}
    for switch, is_on in optional_sections(tree):
        if is_on != (setting(config, switch) is not None):
            values[switch] = None if is_on else True
    for key, (value, default) in settings_and_defaults(config).items():
        if value != default and key not in _NOT_COPIED:
            values[key] = _short(setting(config, key))
    if processes != 1:
        values[PROCESSES] = processes
    return values


def _short(value: Any) -> Any:
    """A value as JSON; dataclasses without their default values."""
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    kind: Any = type(value)
    defaults = vars(defaults_of(kind))
    values = {name: getattr(value, name) for name in defaults}
    return {name: _short(inner) for name, inner in values.items() if inner != defaults[name]}
