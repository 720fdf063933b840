"""What happens to a request before its route: its token is checked, and answers get headers that restrict what a
browser does with them."""

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainyard.core.sockets import is_bearer
from trainyard.dashboard import STATIC

COOKIE = "trainyard_page"
OPEN_PATHS = ("/login", "/static/style.css")
"""What is answered without a token."""
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LOGIN_PAGE = (STATIC / "login.html").read_text()
ASK = "This page needs the token that <code>trainyard page</code> printed when it started."
WRONG = "That is not the token. It is in the line that <code>trainyard page</code> printed when it started."


class SecurityHeaders:
    """Adds SECURITY_HEADERS to every answer; data is not kept by the browser."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, send_with_headers)


class RequireSignIn:
    """Lets requests pass that have the token in a cookie or an Authorization header. `/?token=TOKEN` and the form of
    /login set the cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token
        self.session = hmac.new(token.encode(), b"trainyard page", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        answer = await self._answer(request)
        if answer is None:
            await self.app(scope, receive, send)
        else:
            await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """The answer to a request that must not pass, or that signs in."""
        path = request.url.path
        if path == "/login" and request.method == "POST":
            try:
                fields = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=4)
            except (HTTPException, ClientDisconnect, ValueError):
                return _login_page(WRONG, 400)
            return self._sign_in(fields.get("token", [""])[0], "/")
        if path in OPEN_PATHS:
            return None if path != "/login" else _login_page(ASK, 200)
        if path == "/" and "token" in request.query_params:
            others = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            return self._sign_in(request.query_params["token"], "/" + ("?" + urlencode(others) if others else ""))
        if self._is_signed_in(request):
            return None
        if path.startswith("/api/"):
            return JSONResponse({"error": "missing or wrong token"}, 401, {"WWW-Authenticate": "Bearer"})
        return _login_page(ASK, 401)

    def _is_signed_in(self, request: Request) -> bool:
        authorization = request.headers.get("authorization", "").encode("latin-1", "replace")
        if is_bearer(authorization, self.token):
            return True
        try:
            cookie = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self.session.encode())

    def _sign_in(self, given: str, target: str) -> Response:
        if not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return _login_page(WRONG, 401)
        answer = RedirectResponse(target, 303)
        answer.set_cookie(COOKIE, self.session, httponly=True, samesite="lax")
        return answer


def _login_page(message: str, status: int) -> Response:
    return HTMLResponse(LOGIN_PAGE.format(message=message), status)
