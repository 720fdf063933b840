"""A real server on loopback, with a scheduler that needs no model."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from tests.inference.serve.fake_scheduler import FakeScheduler
from trainyard.core.sockets import base_url, bind_socket
from trainyard.data.text.chat_template import ChatTemplate
from trainyard.data.text.tokenizer import ByteTokenizer, Tokenizer
from trainyard.inference.serve.app import create_app
from trainyard.inference.serve.served_model import ServedModel
from trainyard.inference.serve.server import ModelServer
from trainyard.inference.serve.worker import SchedulerWorker
from trainyard.inference.text.json_schema import SchemaCompiler

WAIT_S = 60
HTTP = httpx.Client(timeout=WAIT_S)
"""One client for all tests: making one reads all certificates of the system."""


@dataclass
class RunningServer:
    url: str
    scheduler: FakeScheduler
    worker: SchedulerWorker
    server: ModelServer
    thread: threading.Thread

    def client(self, **options: object) -> openai.OpenAI:
        """OpenAI's client, which does not retry unless asked."""
        defaults: dict[str, object] = {"base_url": self.url, "api_key": "none", "max_retries": 0, "http_client": HTTP}
        return openai.OpenAI(**(defaults | options))  # type: ignore[arg-type]

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        sent = {"json": body} if body is not None else {}
        return HTTP.post(self.url + path, **(sent | options))  # type: ignore[arg-type]

    def wait_until_idle(self) -> None:
        """Wait until every sequence has left the scheduler."""
        deadline = time.monotonic() + WAIT_S
        while self.worker.num_pending or self.scheduler.waiting or self.scheduler.running:
            assert time.monotonic() < deadline, "sequences are left"
            time.sleep(0.005)

    def health(self) -> dict[str, object]:
        found: dict[str, object] = HTTP.get(self.url.removesuffix("/v1") + "/health").json()
        return found


@contextmanager
def running_server(
    scheduler: FakeScheduler | None = None,
    tokenizer: Tokenizer | None = None,
    template: str | None = None,
    token: str | None = None,
    max_pending: int = 256,
) -> Iterator[RunningServer]:
    scheduler, tokenizer = scheduler or FakeScheduler(), tokenizer or ByteTokenizer()
    worker = SchedulerWorker(scheduler, max_pending)
    end_ids = frozenset([tokenizer.end_id] if tokenizer.end_id else [])
    scheduler.schemas = SchemaCompiler(tokenizer, tokenizer.vocab_size, end_ids)
    loaded: Any = SimpleNamespace(
        scheduler=scheduler,
        max_seq_len=scheduler.max_seq_len,
        chat_template=ChatTemplate(template),
        end_ids=end_ids,
        encode_prompt=lambda text: tokenizer.encode([text])[0].tolist(),
    )
    model = ServedModel("tiny", loaded, tokenizer, worker)
    ready = threading.Event()
    server = ModelServer(create_app([model], token), worker, ready.set)
    with bind_socket("127.0.0.1", 0) as bound:
        url = base_url(bound, "/v1")
        thread = threading.Thread(target=server.run_on, args=[bound], daemon=True)
        thread.start()
        assert ready.wait(WAIT_S)
        try:
            yield RunningServer(url, scheduler, worker, server, thread)
        finally:
            server.stop()
            thread.join(WAIT_S)
    assert not thread.is_alive()


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    """One server for all tests of a file that leave it as it was."""
    with running_server() as running:
        yield running


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts a server of one's own; it must end in order, too."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running_server(**options))
