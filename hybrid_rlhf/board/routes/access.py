"""Access rules of the board: only its own pages may send requests.

The rules of serving/web.py apply, and a request that changes something needs a header that a form or an image cannot
send. A board that other machines can reach also requires a token, which a browser stores as a cookie.
"""

from __future__ import annotations

import hmac
import json

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_rlhf.board.routes.answers import error_answer
from hybrid_rlhf.serving.web import AccessRules, Arriving, limited

COOKIE = "board_token"
MOST_BODY_BYTES = 4 * 2**20
"""Limit of a body; a completion of a hundred thousand tokens is a tenth of it."""
_ARRIVING_BODIES = 16
"""Number of largest bodies that may arrive at a time."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class BoardAccess:
    """ASGI middleware: refuses requests that no page of the board sends, and adds security headers to all answers."""

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        """Take the application, the configured host, and the token; None admits everyone who reaches the board."""
        self._app = app
        self._token = token
        self._rules = AccessRules(host)
        self._arriving = Arriving(_ARRIVING_BODIES * MOST_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        with limited(receive, MOST_BODY_BYTES, self._arriving) as body:
            await (self._app if refusal is None else refusal)(scope, body, with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer that refuses a request; None if it is admitted."""
        try:
            self._rules.require_host(headers)
            self._rules.require_origin(headers)
            if scope["method"] not in ("GET", "HEAD", "POST"):
                raise HTTPException(405, f"the method must be GET or POST, got {scope['method'][:20]}")
            if self._token is not None and scope["path"] != "/health":
                request = Request(scope)
                if scope["path"] == "/" and self._is_token(request.query_params.get("token", "")):
                    moved = RedirectResponse("/", 303)
                    moved.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
                    return moved
                if not self._is_token(request.cookies.get(COOKIE, "")):
                    raise HTTPException(401, "this board needs its token: open it as http://HOST:PORT/?token=TOKEN")
            if scope["method"] == "POST" and headers.get("x-board") != "1":
                raise HTTPException(403, "a POST needs the header X-Board: 1")
            self._rules.require_json(scope["method"], headers)
        except HTTPException as refusal:
            return error_answer(refusal.detail, refusal.status_code)
        return None

    def _is_token(self, token: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(token.encode(), self._token.encode())


async def require_text(request: Request) -> None:
    """Raise HTTPException for a body with numbers that are not finite, or texts that UTF-8 cannot write."""
    if request.method == "POST":
        try:
            json.dumps(await request.json(), ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise HTTPException(400, "the body has half of a surrogate pair: remove it") from None
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body must be JSON with finite numbers ({str(error)[:100]})") from None
