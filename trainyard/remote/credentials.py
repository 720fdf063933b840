"""Credentials in URLs: recognized, so that they are neither stored nor printed."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

SECRET_PARAMETERS = re.compile(
    r"(?i)(x-(amz|goog)-(signature|credential|security-token)|awsaccesskeyid|signature|sig|(access_?|auth_?)?token"
    r"|api_?key|key|password|secret)"
)
"""Names of query parameters that grant access: those of signed S3, Google and Azure URLs, and usual names of tokens."""
HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")
URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>]+")
HIDDEN = "..."


def has_credentials(text: str) -> bool:
    """True if a text contains a token of the Hub, or a URL with a password, a token or a signature."""
    return bool(HUB_TOKEN.search(text)) or any(_is_secret(url) for url in URL.findall(text))


def redact(text: str) -> str:
    """The text without the passwords, tokens and signatures of its URLs."""
    return HUB_TOKEN.sub(f"hf_{HIDDEN}", URL.sub(lambda match: _redact_url(match[0]), text))


def keys_with_credentials(data: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of nested data whose values contain credentials."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from keys_with_credentials(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from keys_with_credentials(value, prefix)
    elif isinstance(data, str) and has_credentials(data):
        yield prefix


def _is_secret(url: str) -> bool:
    return _redact_url(url) != url


def _redact_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    user, at, host = parts.netloc.rpartition("@")
    hides_user = bool(at) and (":" in user or parts.scheme in ("http", "https"))  # hf://name@revision has none
    query = parts.query
    if any(SECRET_PARAMETERS.fullmatch(name) for name, _ in parse_qsl(query, keep_blank_values=True)):
        query = HIDDEN
    return urlunsplit(parts._replace(netloc=host if hides_user else parts.netloc, query=query))
