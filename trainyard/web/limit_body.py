"""Refuses requests with a large body."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainyard.core.constants import MIB

MAX_BODY_BYTES = 4 * MIB
MAX_DISCARDED_BYTES = 64 * MIB
"""Of a body that is too large, this much is read before the answer: most clients read it only after sending all."""


class LimitBody:
    """Answers 413 to a body of more than `limit` bytes, whether its length is announced or not."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit:
                while message.get("more_body") and received < MAX_DISCARDED_BYTES:
                    message = await receive()
                    received += len(message.get("body", b""))
                raise HTTPException(413, f"the body has more than {self.limit} bytes")
            return message

        await self.app(scope, limited_receive, send)
