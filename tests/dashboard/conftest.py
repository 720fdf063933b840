"""A real server of the page on loopback, and a real Chromium."""

import http.client
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainyard.core.sockets import base_url, bind_socket
from trainyard.core.web_server import SignalServer
from trainyard.dashboard.app import DashboardData, create_app

WAIT_S = 60


@dataclass
class RunningDashboard:
    url: str
    port: int
    data: DashboardData

    def request(
        self, target: str | bytes, method: str = "GET", headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send exactly `target`: clients such as httpx would normalize it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.putrequest(method, "/", skip_host=True, skip_accept_encoding=True)
            raw = target if isinstance(target, bytes) else target.encode()
            connection._buffer[0] = method.encode() + b" " + raw + b" HTTP/1.1"  # type: ignore[attr-defined]
            for name, value in ({"Host": f"127.0.0.1:{self.port}"} | (headers or {})).items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON of an answer, which must be a success."""
        status, _, body = self.request(path)
        assert status == 200, body
        return json.loads(body)


@contextmanager
def running_page(root: Path, token: str | None = None, host: str = "127.0.0.1") -> Iterator[RunningDashboard]:
    data, ready = DashboardData(root, "runs"), threading.Event()
    server = SignalServer(create_app(data, host, token), ready.set)
    with bind_socket("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run_on, args=[bound], daemon=True)
        thread.start()
        assert ready.wait(WAIT_S)
        try:
            yield RunningDashboard(base_url(bound), bound.getsockname()[1], data)
        finally:
            server.stop()
            thread.join(WAIT_S)
            data.close()
    assert not thread.is_alive()


StartPage = Callable[..., RunningDashboard]


@pytest.fixture
def start_page() -> Iterator[StartPage]:
    """Starts a server for a directory of runs."""
    with ExitStack() as stack:
        yield lambda root, **options: stack.enter_context(running_page(root, **options))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for the tests of a file. While it is open, playwright has an event loop in this thread, so that
    others could not start one."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no Chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


@dataclass
class BrowserPage:
    """A tab, and what it wrote to its console."""

    tab: Any
    problems: list[str]


OpenTab = Callable[..., BrowserPage]


@pytest.fixture
def open_tab(browser: Any) -> Iterator[OpenTab]:
    """Opens an address in a new context; at the end, the console must have no errors or warnings."""
    opened: list[tuple[Any, BrowserPage]] = []

    def start(url: str, width: int = 1280, height: int = 900, wait: bool = True, **options: Any) -> BrowserPage:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(WAIT_S * 1000)
        tab = context.new_page()
        page = BrowserPage(tab, [])
        tab.on("console", lambda line: page.problems.append(line.text) if line.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: page.problems.append(str(error)))
        opened.append((context, page))
        tab.goto(url)
        if wait:
            tab.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield start
    for context, page in opened:
        context.close()
        assert page.problems == []
