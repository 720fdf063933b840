"""A loopback web server that serves files from memory and injects faults."""

import re
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class ServedFile:
    content: bytes
    etag: str | None = "content"
    """`content`: the MD5 of the content; None: the server sends no ETag."""
    ranges: bool = True
    honors_if_range: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    extra_length: int = 0
    """Added to the Content-Length of answers, which is then wrong."""

    @property
    def current_etag(self) -> str | None:
        return f'"{md5(self.content).hexdigest()}"' if self.etag == "content" else self.etag


Fault = Callable[["Handler"], bool]
"""Called before a GET is answered; returns True if it has answered."""


def status(code: int, **headers: str) -> Fault:
    def answer(handler: "Handler") -> bool:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return answer


def cut_after(count: int) -> Fault:
    """Reset the connection after this many bytes of the body."""

    def answer(handler: "Handler") -> bool:
        handler.cut_after = count
        return False

    return answer


def pause(seconds: float) -> Fault:
    """Answer only after some time."""

    def answer(handler: "Handler") -> bool:
        time.sleep(seconds)
        return False

    return answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "WebServer"
    cut_after: int | None = None

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        self.cut_after = None
        path = urlsplit(self.path).path
        with self.server.lock:
            self.server.requests.append((self.command, self.path, dict(self.headers)))
            fault = self.server.faults.popleft() if with_body and self.server.faults else self.server.always
            if not with_body:
                fault = None
        if fault and fault(self):
            return
        file = self.server.files.get(path)
        if file is None:
            status(404)(self)
            return
        content, code, headers = file.content, 200, dict(file.headers)
        etag = file.current_etag
        if etag:
            headers["ETag"] = etag
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range")
        if match and file.ranges and (condition in (None, etag) or not file.honors_if_range):
            start = int(match[1])
            stop = min(int(match[2]) + 1 if match[2] else len(content), len(content))
            if start >= len(content):
                status(416, Content_Range=f"bytes */{len(content)}")(self)
                return
            code, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{len(content)}"
            content = content[start:stop]
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) + file.extra_length))
        self.end_headers()
        if with_body:
            self._send(content)

    def _send(self, content: bytes) -> None:
        for start in range(0, len(content), 1 << 16):
            block = content[start : start + (1 << 16)]
            if self.cut_after is not None and start + len(block) > self.cut_after:
                self.wfile.write(block[: max(self.cut_after - start, 0)])
                self.wfile.flush()
                # A reset: the client cannot take it for the end of the file
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            if self.server.bytes_per_second:
                time.sleep(len(block) / self.server.bytes_per_second)
            self.wfile.write(block)
            with self.server.lock:
                self.server.sent[urlsplit(self.path).path] += len(block)
        if self.server.files.get(urlsplit(self.path).path, ServedFile(b"")).extra_length:
            self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ValueError):  # the client went away, or a fault closed the connection
            self.close_connection = True

    def finish(self) -> None:
        with suppress(ConnectionError, ValueError):
            super().finish()

    def log_message(self, *arguments: Any) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, handler: type[BaseHTTPRequestHandler] = Handler) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.files: dict[str, ServedFile] = {}
        self.faults: deque[Fault] = deque()
        """For the next GETs, one each."""
        self.always: Fault | None = None
        """For all GETs."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: Counter[str] = Counter()
        """Bytes of bodies by path."""
        self.bytes_per_second = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
