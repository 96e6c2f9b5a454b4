"""User code: imported by name, with its exceptions described in one line."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.folders import first_line

_registered: dict[str, Any] = {}


def register(function: Any) -> str:
    """A name under which `import_named` finds an object of this process, such as a function of a script or a notebook.

    A lambda is named by its line and a callable object by its class, so that a script that runs again can resume. A
    function or class at module level replaces an earlier one of its name, as when a notebook's cell runs again. Other
    objects of the same name are numbered.
    """
    base_name = getattr(function, "__name__", type(function).__name__)
    if not base_name.isidentifier():
        base_name = f"lambda_{function.__code__.co_firstlineno}"
    first = name = f"{function.__module__}:{base_name}"
    is_of_module = getattr(function, "__qualname__", None) == base_name
    number = 0
    while not is_of_module and _registered.get(name, function) is not function:
        number += 1
        name = f"{first}_{number}"
    _registered[name] = function
    return name


def import_named(name: str, *, what: str) -> Any:
    """The object that `module:NAME` or `path/to/file.py:NAME` names.

    Args:
        name: name of the object.
        what: kind of object, at the beginning of an error message.

    Raises:
        UserError: when it cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    place, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, attribute)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the body of a module may raise anything
        raise UserError(
            f"{what} {name} cannot be imported ({type(error).__name__}: {first_line(error)}): "
            "check the path and the name"
        ) from error


def describe_error(error: BaseException) -> str:
    """Type, message and position of an exception, or of the first of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    try:
        message = first_line(error)
    except Exception:  # noqa: BLE001 - __str__ of a user's exception may fail
        message = "(no message: its __str__ fails)"
    return f"it raised {type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    state = path.stat()
    return _module(str(path.resolve()), path, state.st_mtime_ns, state.st_size)


@functools.cache
def _module(name: str, path: Path, *state: int) -> ModuleType:
    """The module of a file in a state: functions and classes of one file share its variables."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module
    spec.loader.exec_module(module)
    return module
