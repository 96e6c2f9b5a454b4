"""Checks of the models, data, reward functions and folder that a form names, without loading them.

The run makes them again, and more, but only when it has started.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import read_text, user_path


def input_problem(config: Any, check_folder: Callable[[str], None]) -> tuple[str, str] | None:
    """The first input that a run would refuse, as its key and the error; None without one.

    Args:
        config: of a form.
        check_folder: raises UserError for an output_dir that the board does not make.
    """
    for key, check, value in _inputs(config, check_folder):
        try:
            check(value)
        except UserError as error:
            return key, str(error)
    return None


def _inputs(config: Any, check_folder: Callable[[str], None]) -> Iterator[tuple[str, Callable[[Any], object], Any]]:
    from hybrid_rlhf.data.rows.sources import peek  # imports datasets
    from hybrid_rlhf.models.pretrained.names import named_models, require_model

    for key, path in named_models(config):
        yield key, require_model, path
    for key in ("sources", "eval_sources"):
        for source in getattr(config.data, key):
            yield f"data.{key}", peek, source
    for component in config.reward.named if hasattr(config, "reward") else ():
        if component.function is not None:
            yield "reward.components", _check_function, component.function
    yield "output_dir", check_folder, config.output_dir


def _check_function(name: str) -> None:
    """Require the name of a function in a Python file, which is parsed and not run."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return
    text = read_text(user_path(place), "a reward function must be in a file")
    try:
        names = {getattr(node, "name", getattr(node, "id", None)) for node in ast.walk(ast.parse(text))}
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{place} must be a Python file, it cannot be parsed ({error}): correct it") from None
    if attribute not in names:
        raise UserError(f"reward.components: {place} must define {attribute}, it does not: check the name")
