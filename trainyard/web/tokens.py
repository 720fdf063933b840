"""The token that clients of a server must send."""

import hmac
import os
from pathlib import Path

from trainyard.core.errors import UserError


def read_token(file: Path | None, variable: str) -> str | None:
    """The token in `file`, or else in an environment variable; None if there is none. Raises UserError if the file has
    no token."""
    if file is None:
        return os.environ.get(variable, "").strip() or None
    try:
        token = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"--token-file {file}: {reason}") from None
    if not token or len(token.split()) > 1:
        raise UserError(f"--token-file {file}: must hold one token without spaces")
    return token


def is_bearer(authorization: bytes, token: str) -> bool:
    """True if an Authorization header has the token. Takes the same time for all tokens of one length."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())
