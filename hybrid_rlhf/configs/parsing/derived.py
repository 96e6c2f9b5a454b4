"""Defaults that follow from other settings: `algorithm.name: raft` brings a learning rate, `lora` one ten times higher,
the size of a rollout its mini-batches.

They lie over a file of defaults (the demo's) and under what the user gives, so the resolved config and `--help` show
the number.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hybrid_rlhf.configs.parsing.schema import Section

LORA_RATE_FACTOR = 10
"""Default learning rate of adapters, relative to that of all weights: TRL, docs/source/lora_without_regret.md, which
has 1e-5 for 1e-6."""


def derived_defaults(tree: Section) -> dict[str, Any]:
    """Dotted keys and values of the defaults that follow from the settings of a config.

    Args:
        tree: of `resolve`.
    """
    user, values = tree.user_keys(), tree.values()
    chosen: dict[str, Any] = {}
    for section in tree.walk():
        algorithm = section.sections.get("algorithm")
        brought = getattr(algorithm and algorithm.kind, "defaults_elsewhere", {})
        chosen |= {_inside(section, key): value for key, value in brought.items()}
    chosen = {key: value for key, value in chosen.items() if key not in user}
    settled = {*values} - {*chosen}
    for section in tree.walk():
        following = getattr(section.kind, "following", None)
        if following is not None:
            defaults = {key.name: key.default for key in tree.all_keys().values()}
            known = defaults | values | chosen
            prefix = f"{section.name}." if section.name else ""
            own = {key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)}
            fixed = {key.removeprefix(prefix) for key in settled if key.startswith(prefix)}
            chosen |= {f"{prefix}{key}": value for key, value in following(own, fixed).items()}
    for key, rate in lora_rates(tree, chosen).items():
        if key not in settled:
            chosen[key] = rate
    return chosen


def lora_rates(tree: Section, chosen: dict[str, Any]) -> dict[str, float]:
    """The default learning rate of each model with adapters, by dotted key."""
    found = {}

    def add_rate(optimizer: Section) -> None:
        key = optimizer.keys["lr"]
        found[key.name] = float(Decimal(str(chosen.get(key.name, key.default))) * LORA_RATE_FACTOR)

    for section in tree.walk():
        if _has_adapters(section) and (optimizer := section.sections.get("optimizer")):
            add_rate(optimizer)
        critic, actor = section.sections.get("critic"), section.sections.get("actor")
        if critic and actor and not critic.sections["lora"].is_on and _has_adapters(actor):
            add_rate(critic.sections["optimizer"])
    return found


def _has_adapters(section: Section) -> bool:
    lora = section.sections.get("lora")
    return lora is not None and lora.is_on and str(lora.given.get("rank", 1)) != "0"


def _inside(section: Section, key: str) -> str:
    return f"{section.name}.{key}" if section.name else key
