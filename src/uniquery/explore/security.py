"""What a local server must refuse: other sites that the browser shows, other users of the machine."""

from __future__ import annotations

import secrets
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def new_token() -> str:
    """A token that cannot be guessed, of letters that fit an address."""
    return secrets.token_urlsafe(24)


def refusal(status: HTTPStatus, sentence: str) -> Response:
    """An answer that says in one sentence what is wrong."""
    return JSONResponse({"error": sentence}, status)


class Guard:
    """Lets only requests through that name this machine, come from this page, and know the token.

    The token is the first part of every path, so that the page's own relative addresses hold it too. Connections other
    than HTTP are closed.

    Args:
        app: what answers the others, at paths without the token.
        token: what every address begins with.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refused(Headers(scope=scope), scope["path"])
        if refused is not None:
            await refused(scope, receive, send_with_headers)
            return
        prefix = f"/{self._token.decode()}"
        inner = {**scope, "path": scope["path"][len(prefix) :] or "/"}
        inner.pop("raw_path", None)
        await self.app(inner, receive, send_with_headers)

    def _refused(self, headers: Headers, path: str) -> Response | None:
        host = headers.get("host", "")
        if host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            return refusal(HTTPStatus.MISDIRECTED_REQUEST, "This server answers to 127.0.0.1 and localhost only.")
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return refusal(HTTPStatus.FORBIDDEN, "Requests of other sites are refused.")
        given = path.split("/")[1] if path.startswith("/") else ""
        if not secrets.compare_digest(given.encode(), self._token):
            return refusal(HTTPStatus.FORBIDDEN, "The token is missing or wrong: open the address that was printed.")
        return None
