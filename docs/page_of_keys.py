"""The page keys.md of the site, every key of every command, from the config dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, is_dataclass
from typing import Any

import yaml

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.configs.commands.data import BlendConfig, CheckConfig, ConvertConfig, SplitConfig
from hybrid_rlhf.configs.commands.port import PortConfig
from hybrid_rlhf.configs.commands.replay import ReplayConfig
from hybrid_rlhf.configs.inference import (
    ChatConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    PushConfig,
    ServeConfig,
    TrainServerConfig,
)
from hybrid_rlhf.configs.parsing.building import config_tree
from hybrid_rlhf.configs.parsing.help import field_docs
from hybrid_rlhf.configs.parsing.listing import is_mutable
from hybrid_rlhf.configs.parsing.schema import Key
from hybrid_rlhf.configs.pipeline import STEP_NAMES, CalibrateConfig, PipelineConfig, PlanConfig
from hybrid_rlhf.configs.preference import PREFERENCE_LOSSES, PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.configs.sections.hints import type_hints, type_name
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.rules import defaults_of
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.configs.sft import SFTConfig

STEPS: dict[str, tuple[type, Sequence[str]]] = {
    "sft": (SFTConfig, ()),
    "reward": (RewardConfig, ()),
    "preference": (PreferenceStepConfig, tuple(PREFERENCE_LOSSES)),
    "rl": (RLConfig, tuple(RL_ALGORITHMS)),
}
COMMANDS = {
    **{"chat": ChatConfig, "generate": GenerateConfig, "serve": ServeConfig, "evaluate": EvaluateConfig},
    **{"export": ExportConfig, "push": PushConfig, "board": BoardConfig, "replay": ReplayConfig},
    **{"data check": CheckConfig, "data convert": ConvertConfig, "data split": SplitConfig, "data blend": BlendConfig},
    "train-server": TrainServerConfig,
    "calibrate": CalibrateConfig,
    "port": PortConfig,
}
ITEMS = {
    "An item of `data.sources`": DataSource,
    "An item of `reward.components`": RewardComponentConfig,
    "`sandbox` of an item of `reward.components`": SandboxConfig,
}
"""Lists whose items may be mappings, and sections of the items."""
INTRODUCTION = """# Keys

Every key of every command. This page is generated from the config dataclasses;
`COMMAND --help` prints the same for a given command line, including derived defaults. Set a key on the command line
(`--train.max_steps 10`) or in a file (`--config FILE.yaml`); the command line takes precedence. In a file for
`hybrid-rlhf train`, the keys of a step are in a section with its name. A section whose default is null, such as
`lora`, is enabled by setting one of its keys. An asterisk (*) marks keys that only `--help-all` shows, a dagger
(†) keys that may change when a run is resumed. [defaults.md](defaults.md) has the sources of the defaults."""


@dataclass
class Entry:
    """A key, its default, and the algorithms that have it."""

    key: Key
    default: Any
    mutable: bool = False
    algorithms: list[str] = field(default_factory=list)


def page() -> str:
    """The reference as Markdown."""
    lines = [INTRODUCTION]
    lines += _command("train", PipelineConfig, (), without=STEP_NAMES)
    for name, (kind, algorithms) in STEPS.items():
        lines += _command(name, kind, algorithms)
    pipeline = set(config_tree(PipelineConfig).all_keys(off=True))
    lines += _command("plan", PlanConfig, (), without=STEP_NAMES, known=pipeline, note="The keys of `train`, and:")
    for name, kind in COMMANDS.items():
        lines += _command(name, kind, ())
    lines += ["", "## Items of lists"]
    for name, kind in ITEMS.items():
        lines += ["", f"{name}:", "", *_table(_item_keys(kind))]
    return "\n".join(lines) + "\n"


def _command(
    name: str,
    kind: type,
    algorithms: Sequence[str],
    *,
    without: Sequence[str] = (),
    known: set[str] | None = None,
    note: str | None = None,
) -> list[str]:
    """The chapter of a command: a table per section.

    Args:
        name: of the command.
        kind: its config.
        algorithms: those that decide which keys there are.
        without: sections that have a chapter of their own.
        known: keys that another chapter has.
        note: a line instead of the config's docstring.
    """
    sections: dict[str, dict[str, Entry]] = {}
    about: dict[str, str] = {}
    for algorithm in algorithms or ("",):
        tree = config_tree(kind, ["--algorithm", algorithm] if algorithm else [])
        for section in tree.walk(off=True):
            if section.name.partition(".")[0] in without:
                continue
            about.setdefault(section.name, "" if section.variants else _text(section.kind))
            entries = sections.setdefault(section.name, {})
            for key in section.keys.values():
                if key.name not in (known or ()):
                    new = Entry(key, key.default, is_mutable(kind, key.name))
                    entries.setdefault(key.name, new).algorithms.append(algorithm)
    lines = ["", f"## {name}", "", note or _text(kind)]
    for section_name, entries in sections.items():
        if section_name and (entries or section_name == "algorithm"):
            lines += ["", f"### {name}: {section_name}", "", *_about(section_name, about, algorithms)]
        lines += ["", *_table(list(entries.values()), algorithms)] * bool(entries)
    return lines


def _about(section: str, about: Mapping[str, str], algorithms: Sequence[str]) -> list[str]:
    if section != "algorithm":
        return [about[section]]
    names = ", ".join(f"`{name}`" for name in algorithms)
    return [
        f"`algorithm.name` is one of {names}, the first by default; `--algorithm NAME` sets it. Defaults are those of "
        "the first algorithm that has the key; [algorithms.md](algorithms.md) has the others."
    ]


def _table(entries: Sequence[Entry], algorithms: Sequence[str] = ()) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for entry in entries:
        key, only = entry.key, ""
        if entry.algorithms and len(entry.algorithms) < len(algorithms):
            only = f" Only for {', '.join(f'`{name}`' for name in entry.algorithms)}."
        text = field_docs(key.owner).get(key.name.rpartition(".")[2], "") + only
        marks = " *" * key.advanced + " †" * entry.mutable
        cells = [f"`{key.name}`{marks}", type_name(key.hint), f"`{_shown(entry.default)}`", text]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('<', '&lt;') for cell in cells)} |")
    return lines


def _item_keys(kind: type) -> list[Entry]:
    """The keys of an item of a list; one without a default must be given."""
    default = vars(defaults_of(kind))
    hints = type_hints(kind)
    shown = {name: "must be given" if value is MISSING else value for name, value in default.items()}
    return [Entry(Key(name, hints[name], None, kind, advanced=False), value) for name, value in shown.items()]


def _shown(value: Any) -> str:
    """A default as YAML writes it."""
    if isinstance(value, str):
        return value.encode("unicode_escape").decode()  # in one line
    if is_dataclass(value):
        return "{}"  # a section of its own
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _text(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())
