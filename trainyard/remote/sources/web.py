"""Files at http:// and https:// URLs, read by ranges where the server supports them.

Redirects are followed, but credentials stay with the host they are for, and https never becomes http.
"""

import base64
import http.client
import netrc
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from trainyard.core.errors import UserError, one_line
from trainyard.remote.credentials import redact
from trainyard.remote.location import file_name
from trainyard.remote.sources.remote_file import Checksum, RemoteFile, SourceChanged
from trainyard.remote.sources.retry import TransferError, with_retries

TIMEOUT_S = 30.0
"""Seconds without a byte after which a connection counts as broken."""
BLOCK_BYTES = 2**20
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Status codes that may pass."""
EXPIRED = (400, 401, 403, 404, 410)
"""Status codes of a redirect's target that is no longer valid."""
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
SHA256_DIGEST = re.compile(r"(?i)sha-256=:?([A-Za-z0-9+/]{43}=):?")


def probe(url: str) -> RemoteFile:
    """The file at a URL, as the server describes it."""
    return with_retries(WebFile(url).probe)


class WebFile:
    """A file at a URL."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        explain: Callable[[HTTPError], UserError | None] = lambda error: None,
        known_checksum: Checksum | None = None,
    ) -> None:
        """`headers` (such as Authorization) go only to the host of `url`. `explain` may turn an error of the server
        into one for the user."""
        self.url, authorization = _split_user(url)
        self.label = redact(self.url)
        self.headers = {**authorization, **(headers or {})}
        self.explain = explain
        self.location = self.url
        """Where the last redirect led: asked directly until it fails."""
        self.version: str | None = None
        self.size: int | None = None
        self.has_ranges = True
        self.known_checksum = known_checksum
        self._opener = build_opener(_SafeRedirects())

    def probe(self, name: str | None = None) -> RemoteFile:
        """Ask the server about the file. A GET, since signed URLs may not allow HEAD."""
        try:
            response = self._open({"Range": "bytes=0-0"})
        except _RangeRefused:  # an empty file has no first byte
            response = self._open({})
        with response:
            headers = response.headers
            match = CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
            self.has_ranges = response.status == 206 and match is not None
            length = match[3] if match else headers.get("Content-Length")
            self.size = int(length) if length is not None and length.isdigit() else None
            self.version = _version(headers)
            self.known_checksum = self.known_checksum or _checksum(headers)
            if self.size is None and headers.get("Transfer-Encoding", "").lower() != "chunked":
                raise UserError(f"{self.label}: the server does not tell the size, so a broken transfer would not show")
            default_name = name or file_name(response.geturl() if not _has_name(self.url) else self.url)
        return RemoteFile(default_name, self.label, self.size, self.version, self, self.has_ranges)

    def checksum(self) -> Checksum | None:
        """The checksum that is given or that a response had. Some servers send it only for the complete file."""
        if not self.known_checksum:
            try:
                with self._open({}, "HEAD") as response:
                    self.known_checksum = _checksum(response.headers)
            except (UserError, TransferError):
                return None  # a signed URL may allow GET only
        return self.known_checksum

    def read(self, start: int, stop: int | None) -> Iterator[bytes]:
        headers = {}
        if self.has_ranges and stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
            if self.version and not self.version.startswith("W/"):
                headers["If-Range"] = self.version
        try:
            response = self._open(headers)
        except _RangeRefused:
            raise SourceChanged(f"{self.label}: has become shorter") from None
        with response:
            self._check(response, start, stop)
            yield from _body(response, self.label, None if stop is None else stop - start)

    def _check(self, response: http.client.HTTPResponse, start: int, stop: int | None) -> None:
        """Raise SourceChanged unless a response is the requested part of the file that was probed."""
        match = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status == 206:
            if not match or int(match[1]) != start:
                raise TransferError(f"{self.label}: the server sent another part of the file than was asked for")
            if self.size is not None and int(match[3]) != self.size:
                raise SourceChanged(f"{self.label}: its size has changed")
        elif start or (stop is not None and stop != self.size):
            raise SourceChanged(f"{self.label}: it has changed, or the server no longer sends ranges")
        version = _version(response.headers)
        if self.version and version and version != self.version:
            raise SourceChanged(f"{self.label}: it has changed")

    def _open(self, headers: Mapping[str, str], method: str = "GET") -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "identity", "User-Agent": "trainyard", **headers}
        request = Request(self.location, headers=headers, method=method)
        if _origin(self.location) == _origin(self.url):
            for name, value in {**_netrc_headers(self.url), **self.headers}.items():
                request.add_header(name, value)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except HTTPError as error:
            with error:
                raise self._translate(error) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            raise _connection_error(self.label, error) from None
        self.location = response.geturl()
        return response

    def _translate(self, error: HTTPError) -> Exception:
        if error.code == 416:
            return _RangeRefused()
        if error.code in EXPIRED and self.location != self.url:
            self.location = self.url
            return TransferError(f"{self.label}: its temporary address has expired (HTTP {error.code})", 0)
        if error.code in BUSY:
            return TransferError(f"{self.label}: HTTP {error.code} {error.reason}", _retry_after(error.headers))
        if explained := self.explain(error):
            return explained
        if error.code in (401, 403):
            fix = "put the host's credentials into ~/.netrc, or use a signed URL that has not expired"
            return UserError(f"{self.label}: access denied (HTTP {error.code}); {fix}")
        if error.code in (404, 410):
            return UserError(f"{self.label}: no such file (HTTP {error.code})")
        reason = "too many redirects" if 300 <= error.code < 400 else one_line(error)
        return UserError(f"{self.label}: {redact(reason)}")


class _RangeRefused(Exception):
    """The server refused a range (HTTP 416)."""


class _SafeRedirects(HTTPRedirectHandler):
    max_redirections = 10

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if not newurl.startswith(("https://", "http://")) or (
            req.type == "https" and not newurl.startswith("https://")
        ):
            raise UserError(f"{redact(req.full_url)}: redirects to {redact(newurl)}, which is not https")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request and _origin(newurl) != _origin(req.full_url):
            for name in ("Authorization", "Cookie"):
                request.remove_header(name)
        return request


def _body(response: http.client.HTTPResponse, label: str, length: int | None) -> Iterator[bytes]:
    """The blocks of a response. At most `length` bytes; more are an error."""
    count = 0
    try:
        while block := response.read(BLOCK_BYTES):
            count += len(block)
            if length is not None and count > length:
                raise TransferError(f"{label}: the server sent more than it announced")
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise _connection_error(label, error) from None


def _connection_error(label: str, error: BaseException) -> Exception:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return UserError(f"{label}: the certificate of the server is not valid: {reason.verify_message}")
    if isinstance(reason, ValueError | http.client.InvalidURL):
        return UserError(f"{label}: not a valid URL: {redact(one_line(reason))}")
    if isinstance(reason, TimeoutError):
        return TransferError(f"{label}: no answer in {TIMEOUT_S:g} s")
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return TransferError(f"{label}: {redact(' '.join(str(text).split())) or type(reason).__name__}")


def _version(headers: Any) -> str | None:
    version: str | None = headers.get("ETag") or headers.get("Last-Modified")
    return version


def _checksum(headers: Any) -> Checksum | None:
    """The checksum among the headers of a complete file. Content-MD5 of a part is that of the part."""
    for name in ("Repr-Digest", "Digest"):
        if match := SHA256_DIGEST.search(headers.get(name, "")):
            return Checksum("sha256", base64.b64decode(match[1]).hex())
    if (digest := headers.get("Content-MD5")) and "Content-Range" not in headers:
        try:
            return Checksum("md5", base64.b64decode(digest, validate=True).hex())
        except ValueError:
            return None
    if headers.get("Server") == "AmazonS3":
        encryption = headers.get("x-amz-server-side-encryption", "AES256")
        customer_key = headers.get("x-amz-server-side-encryption-customer-key-MD5")
        return etag_checksum(headers.get("ETag"), encryption, customer_key)
    return None


def etag_checksum(etag: str | None, encryption: str | None = None, customer_key: str | None = None) -> Checksum | None:
    """The MD5 that the ETag of an S3 object is, unless it was uploaded in parts or encrypted with another key."""
    digest = (etag or "").strip('"')
    if not re.fullmatch(r"[0-9a-f]{32}", digest) or encryption not in (None, "AES256") or customer_key:
        return None
    return Checksum("md5", digest)


def _retry_after(headers: Any) -> float | None:
    value = headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time(), 0.0)
    except (ValueError, TypeError):
        return None


def _split_user(url: str) -> tuple[str, dict[str, str]]:
    """The URL without its user and password, and the header that has them."""
    try:
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        parts.port  # noqa: B018 (raises ValueError)
    except ValueError as error:
        raise UserError(f"{redact(url)}: not a valid URL: {error}") from None
    if not parts.hostname:
        raise UserError(f"{redact(url)}: names no host")
    if not at:
        return url, {}
    token = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}


def _netrc_headers(url: str) -> dict[str, str]:
    """The credentials that ~/.netrc has for a host."""
    try:
        entry = netrc.netrc().hosts.get(urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return {}
    if not entry:
        return {}
    token = base64.b64encode(f"{entry[0]}:{entry[2]}".encode()).decode()
    return {"Authorization": f"Basic {token}"}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _has_name(url: str) -> bool:
    return bool(urlsplit(url).path.rstrip("/"))
