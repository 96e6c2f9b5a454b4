"""Access rules of a server against pages of other sites, shared by `serve`, the endpoint of a run and the board.

A page of another origin in the same browser can send requests to 127.0.0.1, and if an attacker's DNS resolves its name
to 127.0.0.1, it even has the same origin. So the Host must be an address or a name of this machine; an Origin, which
only browsers send, must be the server's or an allowed one; and a POST needs a content type that no form or image can
send.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from typing import NamedTuple

from starlette.datastructures import Headers

_HOST = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::\d{1,5})?")


class Refusal(NamedTuple):
    """Reason for refusing a request."""

    status: int
    message: str


class AccessRules:
    """The rules of one server."""

    def __init__(self, host: str, origins: Collection[str] = ()) -> None:
        """Take the configured host, and the origins of other sites whose pages may send requests."""
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._origins = frozenset(origins)

    def host_refusal(self, headers: Headers) -> Refusal | None:
        """Why the Host is refused; None if it is an address, which needs no DNS, or a name of this machine."""
        host = headers.get("host", "")
        if self._is_own(host):
            return None
        return Refusal(403, f"Host must be an address or a name of this machine, got {host[:100]!r}: ask it by that")

    def origin_refusal(self, headers: Headers) -> Refusal | None:
        """Why the Origin is refused; None without an Origin, or if it is the server's or an allowed one."""
        origin = headers.get("origin")
        host = headers.get("host")
        if origin is None or origin in {*self._origins, f"http://{host}", f"https://{host}"}:
            return None
        return Refusal(
            403,
            f"Origin must be that of the server or an allowed one (--cors_origins of serve), got {origin[:100]!r}: "
            "ask from one of them",
        )

    def content_refusal(self, method: str, headers: Headers) -> Refusal | None:
        """Why the content type is refused; None if the request has no body, or JSON."""
        content_type = headers.get("content-type", "")
        if method != "POST" or content_type.partition(";")[0].strip().lower() == "application/json":
            return None
        return Refusal(415, f"a POST needs Content-Type: application/json, got {content_type[:100]!r}: send it")

    def _is_own(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        try:
            ipaddress.ip_address(match["address"] or match["name"] or "")
        except ValueError:
            return match["name"] is not None and match["name"].lower() in self._names
        return match["address"] is None or ":" in match["address"]
