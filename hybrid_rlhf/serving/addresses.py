"""Addresses that servers listen on."""

from __future__ import annotations

import socket

from hybrid_rlhf.configs.errors import UserError


def url_of(host: str, port: int) -> str:
    """The URL of an address, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address that does not listen yet: connections are refused until the model is loaded.

    Raises:
        UserError: when the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(
            f"host and port must be an address that is free here, got {host}:{port} ({error.strerror}): choose another"
        ) from error
    return listener
