"""An HTTP server on the loopback in front of another: it counts requests, adds latency, and fails on demand."""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fault = Callable[[str, str, int], str | None]
"""Method, path and number of a request to what happens to it: `500`, `503`, `403`, `cut` (no answer), `half` (the
connection breaks in the middle of the body), `hang` (an answer after a second) or None."""


class StoreProxy:
    def __init__(self, target: str, latency_s: float = 0.0) -> None:
        self.target, self.latency_s = urlsplit(target), latency_s
        self.fault: Fault = lambda method, path, number: None
        self.reads: Counter[tuple[str, str]] = Counter()
        """Successful reads by path and range."""
        self.num_requests = 0
        self.mutex = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reset(self) -> None:
        self.reads.clear()
        self.num_requests = 0
        self.fault = lambda method, path, number: None

    def _handler_class(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the handler
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16

            def log_message(self, *arguments: object) -> None:
                pass

            def handle_expect_100(self) -> bool:
                super().handle_expect_100()
                self.wfile.flush()
                return True

            def forward(self) -> None:
                with proxy.mutex:
                    number, proxy.num_requests = proxy.num_requests, proxy.num_requests + 1
                time.sleep(proxy.latency_s)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault(self.command, self.path, number)
                if fault == "cut":
                    self.close_connection = True
                    self.connection.close()
                    return
                if fault == "hang":
                    time.sleep(1.0)
                if fault and fault.isdigit():
                    self.answer(int(fault), {}, b"<Error><Code>InternalError</Code></Error>")
                    return
                connection = http.client.HTTPConnection(proxy.target.hostname or "", proxy.target.port)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                content = response.read()
                headers = {
                    name: value
                    for name, value in response.getheaders()
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date")
                }
                connection.close()
                if response.status == 206 and fault != "half":
                    with proxy.mutex:
                        proxy.reads[self.path.partition("?")[0], self.headers["Range"]] += 1
                self.answer(response.status, headers, content, half=fault == "half")

            def answer(self, status: int, headers: dict[str, str], content: bytes, half: bool = False) -> None:
                self.send_response(status)
                is_head = self.command == "HEAD"
                for name, value in headers.items():
                    if is_head or name.lower() != "content-length":
                        self.send_header(name, value)
                if not is_head:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if not is_head:
                    self.wfile.write(content[: len(content) // 2] if half else content)
                self.wfile.flush()
                if half:
                    self.close_connection = True
                    self.connection.close()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        return Handler


@contextmanager
def store_proxy(target: str, latency_s: float = 0.0) -> Iterator[StoreProxy]:
    proxy = StoreProxy(target, latency_s)
    thread = threading.Thread(target=proxy.server.serve_forever, daemon=True)
    thread.start()
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()
    thread.join()
