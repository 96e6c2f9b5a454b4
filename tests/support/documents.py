"""What the documentation says: its pages, the blocks in them, the metrics that it lists."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.runs import ROOT

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "recipes" / "README.md",
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
LIBRARY = sorted((ROOT / "hybrid_rlhf").rglob("*.py"))
_COMMAND = re.compile(
    r"^(?:\w+=\S+ )*(?:hybrid-rlhf (?P<name>[a-z][a-z-]*)|.*?(?P<file>train\.py|training/\w+/main\.py)"
    r"|.*?-m hybrid_rlhf\.cli\.(?P<module>\w+))(?P<rest>(?: .*)?)$"
)
_FILES = {
    "train.py": "train",
    "step1_sft": "sft",
    "step2_reward": "reward",
    "preference": "preference",
    "step3_ppo": "rl",
}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of the blocks of a page: name of the command, and its words without placeholders."""
    text = page.read_text()
    fenced = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^ {4,}\S.*\n?)+", plain, re.MULTILINE)
    for line in "\n".join((*fenced, *indented)).replace("\\\n", " ").splitlines():
        found = _COMMAND.match(line.strip())
        if found is None or "==" in line:  # a line of output
            continue
        name = found["name"] or found["module"] or next(name for key, name in _FILES.items() if key in found["file"])
        words = list(
            itertools.takewhile(lambda word: word not in (">", "|"), shlex.split(found["rest"], comments=True))
        )
        yield name, [word for word in words if word not in ("...", "&")]


@functools.cache
def documented_metrics() -> list[str]:
    """The names in the tables of docs/metrics.md."""
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def undocumented_metrics(names: Iterable[str]) -> set[str]:
    """Those that docs/metrics.md does not list; NAME and PHASE in it stand for any name."""
    known = "|".join(re.sub("NAME|PHASE", r"[\\w.:/-]+", re.escape(name)) for name in documented_metrics())
    return {name for name in names if re.fullmatch(known, name) is None}


@functools.cache
def library_texts() -> str:
    """All texts of the library's code, of f-strings their constant parts, each on a line of its own."""
    nodes = (node for file in LIBRARY for node in ast.walk(ast.parse(file.read_text())))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
