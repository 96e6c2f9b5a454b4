"""Checks the packages that a server needs before a model is loaded; imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from hybrid_rlhf.configs.errors import UserError

_PACKAGES = {"serve": ("fastapi", "uvicorn", "prometheus_client"), "board": ("fastapi", "uvicorn")}


def require_packages(what: str, extra: str = "serve") -> None:
    """Check that an extra is installed.

    Args:
        what: name of the feature that needs it, at the beginning of the error message.
        extra: the extra.

    Raises:
        UserError: when a package is missing.
    """
    missing = next((name for name in _PACKAGES[extra] if find_spec(name) is None), None)
    if missing is not None:
        *others, last = _PACKAGES[extra]
        needed = f"{', '.join(others)} and {last}".replace("_", "-")
        raise UserError(f"{what} needs {needed}, {missing} is not installed: pip install 'hybrid_rlhf[{extra}]'")
