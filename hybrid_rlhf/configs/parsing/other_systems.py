"""Names of other systems' options and the equivalent keys: hints on unknown keys, the tables of docs/migration.md and
`hybrid-rlhf port` read them from the files in configs/other_systems/, one per system.

A row has the `names` that it is about (patterns with `*` after exact names), and either the `key` of this project, one
for all names or one per name, or `none` with the reason. `steps` restricts it to some steps, `values` maps values that
are named differently (patterns too; null sets nothing), `when` names an option without which the row has no effect,
`by` names a conversion of cli/porting/, `default` is the other system's default where it differs in
effect, and `note` is the last column of the table. A key without its section's prefix stands for that key in any
section: `optimizer.lr` is `actor.optimizer.lr` in RL.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

SYSTEMS = ("trl", "openrlhf", "verl", "llamafactory", "axolotl")
_FOLDER = Path(__file__).parents[1] / "other_systems"


@dataclass(frozen=True, eq=False)
class Row:
    """What becomes of some options."""

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    none: str | None = None
    steps: tuple[str, ...] = ()
    values: Mapping[Any, Any] = field(default_factory=dict)
    when: str | None = None
    by: str | None = None
    default: Any = None
    note: str | None = None

    def matches(self, name: str, step: str | None = None) -> bool:
        """True if the row is about an option, in a step or in any."""
        return (step is None or not self.steps or step in self.steps) and any(
            fnmatchcase(name, pattern) for pattern in self.names
        )

    def keys_of(self, name: str) -> tuple[str, ...]:
        """The keys of one of the names."""
        if len(self.keys) != len(self.names) or len(self.keys) == 1:
            return self.keys
        return tuple(key for pattern, key in zip(self.names, self.keys, strict=True) if fnmatchcase(name, pattern))


@dataclass(frozen=True)
class System:
    """The table of one system."""

    title: str
    version: str
    rows: tuple[Row, ...]
    others: tuple[Row, ...] = ()
    """Rows of the system on which it is built."""

    def find(self, name: str, step: str | None = None) -> Row | None:
        """The first row about an option."""
        return next((row for row in self.rows + self.others if row.matches(name, step)), None)


@functools.cache
def system(name: str) -> System:
    """The table of one of `SYSTEMS`."""
    content = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text())
    rows = tuple(_row(entry) for entry in content["rows"])
    others = system(content["also"]).rows if "also" in content else ()
    return System(content["system"], content["version"], rows, others)


def _row(entry: Mapping[str, Any]) -> Row:
    content = dict(entry)
    key = content.pop("key", ())
    for name in ("names", "steps"):
        content[name] = tuple(content.get(name, ()))
    return Row(keys=(key,) if isinstance(key, str) else tuple(key), **content)


def expand(key: str, known: Sequence[str]) -> list[str]:
    """The keys of a config that a key of a row stands for; commands that only sample have them without `rollout`."""
    exact = [name for name in (key, key.removeprefix("rollout.")) if name in known]
    return exact[:1] or [longer for longer in known if longer.endswith(f".{key}")]


def is_option(name: str) -> bool:
    """True if another system has an option of this name."""
    return any(name in row.names for each in SYSTEMS for row in system(each).rows)


def advice(name: str, known: Sequence[str]) -> str | None:
    """Advice for an option of another system; None for a name that none of them has.

    Args:
        name: dotted key that a config does not have.
        known: the keys of the config.
    """
    leaf = name.rpartition(".")[2]
    reasons = []
    for each in SYSTEMS:
        table = system(each)
        rows = [row for row in table.rows if name in row.names or leaf in row.names]
        short = [key for row in rows for key in row.keys_of(name if name in row.names else leaf)]
        keys = sorted(
            (longer for key in short for longer in expand(key, known)), key=lambda key: not key.endswith(leaf)
        )
        if "model.path" in short and "base_model" in known:
            return "give base_model"
        if keys:
            return f"give {' or '.join(list(dict.fromkeys(keys))[:3])}"
        reasons += [row.none for row in rows if row.none]
        if rows and rows[0].keys:
            reasons.append(f"{table.title}'s {leaf} is {' and '.join(rows[0].keys)} of another step, leave it out")
    return with_paths(reasons[0]).replace("`", "") if reasons else None


def with_paths(text: str) -> str:
    """A text of a table with the paths of pages instead of links to them."""
    return re.sub(r"\[[^]]*\]\((\w+\.md)\)", r"docs/\1", text)


def value_advice(key: str, value: str, known: Container[str]) -> str | None:
    """The value of this project for another system's value of a key, such as `dpo` for `sigmoid`."""
    rows = [row for each in SYSTEMS for row in system(each).rows if key in row.keys]
    return next((str(row.values[value]) for row in rows if str(row.values.get(value)) in known), None)
