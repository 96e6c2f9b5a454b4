"""Checks the packages that serving needs before a model is loaded; imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from hybrid_rlhf.configs.errors import UserError

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def require_packages(what: str) -> None:
    """Check that the extra `serve` is installed.

    Args:
        what: name of the feature that needs it, at the beginning of the error message.

    Raises:
        UserError: when a package is missing.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{what} needs fastapi, uvicorn and prometheus-client, {missing[0]} is not installed: "
            "pip install 'hybrid_rlhf[serve]'"
        )
