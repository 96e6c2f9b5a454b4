"""Defaults that follow from other settings: `algorithm.name: grpo` sets a number of completions per prompt, the size of
a rollout sets its mini-batches.

They override a file of defaults (the demo's), and the user's settings override them, so that the resolved config and
`--help` show the number.
"""

from __future__ import annotations

from typing import Any

from hybrid_rlhf.configs.parsing.schema import Section


def derived_defaults(tree: Section) -> dict[str, Any]:
    """Dotted keys and values of the defaults that follow from the settings of a config.

    Args:
        tree: result of `resolve`.
    """
    user = tree.user_keys()
    values = tree.values()
    chosen: dict[str, Any] = {}
    for section in tree.walk():
        algorithm = section.sections.get("algorithm")
        brought = getattr(algorithm and algorithm.kind, "defaults_elsewhere", {})
        chosen |= {section.prefix + key: value for key, value in brought.items()}
    chosen = {key: value for key, value in chosen.items() if key not in user}
    settled = {*values} - {*chosen}
    for section in tree.walk():
        following = getattr(section.kind, "following", None)
        if following is not None:
            defaults = {key.name: key.default for key in tree.all_keys().values()}
            known = defaults | values | chosen
            prefix = section.prefix
            section_values = {key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)}
            fixed = {key.removeprefix(prefix) for key in settled if key.startswith(prefix)}
            chosen |= {f"{prefix}{key}": value for key, value in following(section_values, fixed).items()}
    return chosen
