"""What happens to a request before its route: its token is checked."""

from starlette.types import ASGIApp, Receive, Scope, Send

from trainyard.core.sockets import is_bearer
from trainyard.inference.serve.errors import ApiError

OPEN_PATHS = ("/health", "/metrics", "/openapi.json")
"""What load balancers and Prometheus ask for. It says nothing about what others do."""


class RequireToken:
    """Refuses requests without `Authorization: Bearer TOKEN`, except those for OPEN_PATHS."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or is_bearer(dict(scope["headers"]).get(b"authorization", b""), self.token):
            await self.app(scope, receive, send)
            return
        message = "missing or wrong token; send it as Authorization: Bearer TOKEN"
        headers = {"WWW-Authenticate": "Bearer"}
        await ApiError(401, message, code="invalid_api_key", headers=headers).response()(scope, receive, send)
