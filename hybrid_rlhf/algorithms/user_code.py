"""A user's own Python: found by its name, and what it raised told in a line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.folders import first_line


def import_named(name: str, *, what: str) -> Any:
    """What `module:NAME` or `path/to/file.py:NAME` names.

    Args:
        name: of it.
        what: it is, as a message begins with.

    Raises:
        UserError: when it cannot be imported.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, attribute)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module's body raises what it likes
        raise UserError(
            f"{what} {name} cannot be imported ({type(error).__name__}: {first_line(error)}): "
            "check the path and the name"
        ) from error


def told(error: BaseException) -> str:
    """What a call raised, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    try:
        said = first_line(error)
    except Exception:  # noqa: BLE001 - an exception of the user's own may not be able to tell itself
        said = "it cannot tell why"
    return f"it raised {type(error).__name__}: {said} ({Path(frame.filename).name}:{frame.lineno})"


def _load_file(path: Path) -> ModuleType:
    name = str(path.resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
