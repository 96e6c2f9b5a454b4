"""The page api.md of the site, the reference of the public names, from their docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

import hybrid_rlhf

GROUPS = {
    "Steps": ["SFT", "RewardModel", "PreferenceTuning", "RL", "TrainResult"],
    "Settings": ["SFTConfig", "RewardConfig", "PreferenceStepConfig", "RLConfig"],
    "Generation": ["GenerationEngine", "SamplingParams", "Completion"],
    "Custom training loops": ["RLSession", "RLParts", "Rollout", "Batch", "Algorithm", "Environment"],
    "Errors": ["UserError"],
}


def page() -> str:
    """The reference as Markdown."""
    lines = [
        "# API reference",
        "",
        "`import hybrid_rlhf` provides these names; each is imported on first use. This page is generated from",
        "the docstrings. For the settings, run `hybrid-rlhf STEP --help-all`.",
    ]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += _entry(name, getattr(hybrid_rlhf, name))
    return "\n".join(lines) + "\n"


def _entry(name: str, kind: type) -> list[str]:
    lines = ["", f"### `{name}`", "", *_text(kind)]
    if name.endswith("Config"):
        return lines
    base: Any = (
        kind
        if "__init__" in vars(kind)
        else next(
            (
                parent
                for parent in kind.__mro__[1:]
                if parent.__module__.startswith("hybrid_rlhf") and "__init__" in vars(parent)
            ),
            None,
        )
    )
    if base is not None and inspect.getdoc(base.__init__):
        lines += ["", f"**`{name}{_signature(base.__init__)}`**", "", *_text(base.__init__)]
    for member, value in sorted(inspect.getmembers(kind)):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        own = getattr(function, "__module__", "") or ""
        if member.startswith("_") or not own.startswith("hybrid_rlhf") or not inspect.isfunction(function):
            continue
        shown = member if isinstance(value, property) else f"{member}{_signature(function)}"
        lines += ["", f"**`{shown}`**", "", *_text(function)]
    return lines


def _signature(function: Any) -> str:
    text = re.sub(r"^\((self|cls)(, )?", "(", str(inspect.signature(function)))
    return re.sub(r"'([^']*)'", r"\1", text).removesuffix(" -> None")


def _text(thing: Any) -> list[str]:
    """A docstring as Markdown: sections such as Args as lists."""
    lines: list[str] = []
    listed = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line in ("Args:", "Returns:", "Raises:"):
            listed, line = True, f"*{line.removesuffix(':')}*\n"
        elif listed and re.match(r"    \S", line):
            line = "- " + re.sub(r"^(\w+):", r"`\1`:", line.strip())
        elif listed and line.startswith("     "):
            line = "  " + line.strip()
        lines.append(line)
    return lines
