"""Many clients at once: everybody gets the stream of their own prompt, and whoever leaves gives back the place."""

import asyncio
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from tests.inference.serve.conftest import HTTP, WAIT_S, RunningServer, StartServer
from tests.inference.serve.fake_scheduler import FakeScheduler, fake_text
from trainyard.inference.serve import server

NUM_CLIENTS = 64
ENDLESS = 10**6
"""Longest sequence of tests whose requests must not finish by themselves."""
STREAM = {"prompt": "x", "max_tokens": ENDLESS - 9, "stream": True}


async def stream_text(client: openai.AsyncOpenAI, prompt: str, length: int, seed: int) -> str:
    stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=length, seed=seed, stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_64_clients_get_the_streams_of_their_prompts(start_server: StartServer) -> None:
    running = start_server(scheduler=FakeScheduler(max_batch=48, step_s=0.001))

    async def run_clients() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(stream_text(client, f"prompt {number}", 10 + number % 30, number) for number in range(NUM_CLIENTS))
            )

    texts = asyncio.run(run_clients())
    assert texts == [fake_text(f"prompt {number}", 10 + number % 30, number) for number in range(NUM_CLIENTS)]
    assert running.scheduler.most_running > 24  # they ran together
    running.wait_until_idle()
    assert running.scheduler.cancelled == []


def test_a_dropped_stream_releases_its_places(start_server: StartServer) -> None:
    running = start_server(scheduler=FakeScheduler(4, ENDLESS, step_s=0.002))
    for _ in range(3):
        with HTTP.stream("POST", running.url + "/completions", json=STREAM | {"n": 4}) as answer:
            lines = answer.iter_lines()  # the answer is closed when this iterator goes away
            next(lines)
            assert len(running.scheduler.running) == 4
        running.wait_until_idle()
    assert len(running.scheduler.cancelled) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_before_their_first_token_release_their_places(
    start_server: StartServer, stream: bool
) -> None:
    running = start_server(scheduler=FakeScheduler(1, ENDLESS, step_s=0.002))
    with HTTP.stream("POST", running.url + "/completions", json=STREAM):  # takes the only place
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(running.url + "/completions", json=STREAM | {"stream": stream, "n": 8}, timeout=0.1)
        deadline = time.monotonic() + WAIT_S
        while running.scheduler.waiting:
            assert time.monotonic() < deadline
        assert len(running.scheduler.running) == 1
    running.wait_until_idle()
    assert running.client().completions.create(model="tiny", prompt="say:hi").choices[0].text == "hi"


def test_a_client_that_does_not_read_does_not_stop_the_others(start_server: StartServer) -> None:
    running = start_server(scheduler=FakeScheduler(max_seq_len=25_000))
    host, port = running.url.removeprefix("http://").removesuffix("/v1").split(":")
    body = b'{"prompt": "x", "max_tokens": 20000, "stream": true}'
    with socket.create_connection((host, int(port))) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        silent.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        client = running.client()
        for _ in range(5):
            assert client.completions.create(model="tiny", prompt="say:hi").choices[0].text == "hi"
    running.wait_until_idle()


def test_slow_and_broken_connections(served: RunningServer) -> None:
    host, port = served.url.removeprefix("http://").removesuffix("/v1").split(":")
    for sent in (
        b"",
        b"POST /v1/comp",
        b"\x16\x03\x01\x02\x00",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    ):
        with socket.create_connection((host, int(port))) as broken:
            broken.sendall(sent)
    assert served.post("/completions", {"prompt": "say:hi"}).json()["choices"][0]["text"] == "hi"


def statuses(running: RunningServer, count: int) -> list[Any]:
    """Errors of `count` simultaneous requests, half of them streams."""

    async def one(client: openai.AsyncOpenAI, number: int) -> Any:
        try:
            if number % 2:
                await stream_text(client, "x", ENDLESS - 9, number)
            else:
                await client.completions.create(model="tiny", prompt="x", max_tokens=ENDLESS - 9)
        except openai.APIStatusError as error:
            return error.status_code, error.code
        except openai.APIError as error:  # inside a stream, whose status was 200
            return 200, error.code
        return None

    async def run_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=running.url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
            tasks = [asyncio.ensure_future(one(client, number)) for number in range(count)]
            deadline = time.monotonic() + WAIT_S
            while len(running.scheduler.running) < count:  # a request that still waits does not see the fault
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)
            running.scheduler.fail_now.set()
            return await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)

    return asyncio.run(run_all())


@pytest.mark.parametrize("fault", [RuntimeError("out of\nmemory"), SystemExit(3)])
def test_a_fault_of_the_engine_answers_all_requests_and_the_server_goes_on(
    start_server: StartServer, fault: BaseException
) -> None:
    scheduler = FakeScheduler(max_seq_len=ENDLESS, step_s=0.002)
    running = start_server(scheduler=scheduler)
    scheduler.faults = [fault]
    found = statuses(running, 6)
    assert {code for _, code in found} == {"engine_error"}
    assert {status for status, _ in found} <= {200, 500}
    running.wait_until_idle()
    assert running.client().completions.create(model="tiny", prompt="say:hi").choices[0].text == "hi"


def test_a_scheduler_that_loses_requests_is_a_fault(start_server: StartServer) -> None:
    scheduler = FakeScheduler(step_s=0.002)
    running = start_server(scheduler=scheduler)
    scheduler.lose_requests = True
    with pytest.raises(openai.InternalServerError, match="the scheduler lost 1 request"):
        running.client().completions.create(model="tiny", prompt="x", max_tokens=400)
    scheduler.lose_requests = False
    assert running.client().completions.create(model="tiny", prompt="say:hi").choices[0].text == "hi"


@pytest.mark.parametrize("broken_cancel", [False, True])
def test_an_engine_that_stays_broken_ends_the_server(start_server: StartServer, broken_cancel: bool) -> None:
    scheduler = FakeScheduler()
    running = start_server(scheduler=scheduler)
    scheduler.fail_now.set()
    scheduler.faults = [RuntimeError("device lost")] * 100
    scheduler.cancel_fault = RuntimeError("device lost") if broken_cancel else None
    client = running.client()
    for _ in range(1 if broken_cancel else 3):
        with pytest.raises(openai.InternalServerError, match="RuntimeError: device lost"):
            client.completions.create(model="tiny", prompt="x")
    running.thread.join(WAIT_S)
    assert not running.thread.is_alive()
    assert running.worker.failure == "RuntimeError: device lost"


def test_requests_in_flight_finish_or_end_when_the_server_stops(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DRAIN_S", 1.0)
    running = start_server(scheduler=FakeScheduler(max_seq_len=ENDLESS, step_s=0.002))
    with (
        HTTP.stream("POST", running.url + "/completions", json=STREAM | {"max_tokens": 100}) as short,
        HTTP.stream("POST", running.url + "/completions", json=STREAM) as endless,
    ):
        running.server.stop()
        assert list(short.iter_lines())[-2] == "data: [DONE]"
        assert '"shutting_down"' in list(endless.iter_lines())[-2]  # all its tokens would take many minutes
    running.thread.join(WAIT_S)
    assert not running.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        running.health()
