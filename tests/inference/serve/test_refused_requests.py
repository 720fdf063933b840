"""Requests that the server refuses: what is wrong is said in OpenAI's format, and the server continues."""

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.inference.serve.conftest import HTTP, RunningServer, StartServer
from tests.inference.serve.fake_scheduler import FakeScheduler
from trainyard.core import web_server
from trainyard.core.constants import MIB
from trainyard.data.text.tokenizer import ByteTokenizer, EncodedTexts

CHAT = {"messages": [{"role": "user", "content": "x"}]}
PROMPT = {"prompt": "x"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
JSON = {"Content-Type": "application/json"}


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(("/completions", name, value) for name, value in [("suffix", "y"), ("best_of", 3), ("logit_bias", {"5": 1})]),
        ("/chat/completions", "functions", [{"name": "f"}]),
        ("/chat/completions", "modalities", ["text", "audio"]),
        ("/chat/completions", "reasoning_effort", "high"),
        ("/chat/completions", "store", True),
        ("/chat/completions", "store", 0),  # not false
    ],
)
def test_fields_that_cannot_be_honored_are_named(served: RunningServer, path: str, field: str, value: object) -> None:
    body = (CHAT if "chat" in path else PROMPT) | {field: value}
    error = refusal(served.post(path, body))
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{field}: this server does not support it")


def test_their_neutral_values_are_accepted(served: RunningServer) -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "max_tokens": 1}
    assert served.post("/completions", PROMPT | neutral | {"suffix": None, "best_of": 1}).status_code == 200
    chat = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "metadata": {"a": "b"}}
    assert served.post("/chat/completions", CHAT | neutral | chat).status_code == 200


@pytest.mark.parametrize(
    ("path", "changed", "param", "message"),
    [
        ("/completions", {"prompt": None}, "prompt", "must be a string, a list of strings, a list of token ids"),
        ("/completions", {"prompt": []}, "prompt", "must be a string"),
        ("/completions", {"prompt": [[]]}, "prompt", "must be a string"),
        ("/completions", {"prompt": ["a", 1]}, "prompt", "must be a string"),
        ("/completions", {"prompt": [True]}, "prompt", "must be a string"),
        ("/completions", {"prompt": [-1]}, "prompt", "must be a string"),
        ("/completions", {"prompt": [10**30]}, "prompt", "must be a string"),
        ("/completions", {"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        ("/completions", {"frequency_penalty": False}, "frequency_penalty", "valid number"),
        ("/completions", {"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ("/completions", {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ("/completions", {"response_format": {"type": "json_schema"}}, "response_format", "not valid"),
        (
            "/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}},
            "response_format",
            "Invalid type: wrong",
        ),
        (
            "/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        ("/completions", {"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ("/completions", {"temperature": "1"}, "temperature", "valid number"),
        ("/completions", {"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ("/completions", {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ("/completions", {"max_tokens": 10**40}, "max_tokens", "less than"),
        ("/completions", {"n": 129}, "n", "less than or equal to 128"),
        ("/completions", {"prompt": ["x"] * 50, "n": 3}, "n", "150 choices; the limit is 128"),
        ("/completions", {"stop": ["a"] * 5}, "stop", "up to 4 strings"),
        ("/completions", {"stop": ""}, "stop", "up to 4 strings"),
        ("/completions", {"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ("/completions", {"echo": True, "logprobs": 1}, "echo", "cannot be combined with logprobs"),
        ("/completions", {"stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ("/completions", {"temprature": 1}, "temprature", "unknown field"),
        ("/completions", {"messages": []}, "messages", "unknown field"),
        ("/completions", {"seed": 2**63}, "seed", "less than"),
        ("/chat/completions", {"messages": []}, "messages", "at least 1"),
        ("/chat/completions", {"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "system"),
        ("/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ("/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "required"),
        ("/chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages.0.content", "parts of type"),
        ("/chat/completions", {"tools": [FUNCTION]}, "tools", "chat template of this checkpoint does not show them"),
        ("/chat/completions", {"tools": [{"type": "web"}]}, "tools.0.type", "function"),
        ("/chat/completions", {"tool_choice": "required"}, "tool_choice", "no such function"),
        (
            "/chat/completions",
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "no such function",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "JSON object",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "parts of type text",
        ),
        ("/chat/completions", {"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
        ("/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ],
)
def test_invalid_values_are_named(
    served: RunningServer, path: str, changed: dict[str, object], param: str, message: str
) -> None:
    error = refusal(served.post(path, (CHAT if "chat" in path else PROMPT) | changed))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON object"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"x"', "JSON object"),
        (b'{"prompt": "x"', "not valid JSON"),
        (b'{"prompt": "\xff"}', "pars"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
        (b'{"prompt": "\\ud800"}', "prompt: must be valid Unicode"),
        (b'{"prompt": "x", "\\ud800": 1}', ""),
        (b'{"prompt": ' + b"[" * 100_000, "pars"),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", ""),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else "",
)
def test_malformed_bodies(served: RunningServer, body: bytes, message: str) -> None:
    assert message in refusal(served.post("/completions", content=body, headers=JSON))["message"]
    assert served.health()["status"] == "ok"


def test_other_content_types_and_routes(served: RunningServer) -> None:
    refusal(served.post("/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}))
    refusal(served.post("/embeddings", {"input": "x"}), 404)
    answer = HTTP.get(served.url + "/completions")
    refusal(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_bodies_have_a_limit(served: RunningServer) -> None:
    error = refusal(served.post("/completions", {"prompt": "x" * (5 * MIB)}), 413)
    assert "4194304 bytes" in error["message"]
    parts = (b"x" * MIB for _ in range(6))  # sent in chunks, without a Content-Length
    refusal(served.post("/completions", content=parts, headers=JSON), 413)
    with pytest.raises(openai.APIStatusError) as caught:
        served.client().completions.create(model="tiny", prompt="x" * (5 * MIB))
    assert caught.value.status_code == 413


def test_long_prompts_are_refused_with_the_numbers(served: RunningServer) -> None:
    error = refusal(served.post("/completions", {"prompt": "x" * 3_000_000}))
    assert "3000000 characters; the longest sequence is 512 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"
    error = refusal(served.post("/chat/completions", {"messages": [{"role": "user", "content": "y" * 3_000}]}))
    assert error["param"] == "messages"
    room = served.post("/completions", {"prompt": "x" * 511})
    assert room.json()["usage"]["completion_tokens"] == 1


class UnencodableTokenizer(ByteTokenizer):
    """Fails if it is asked to encode a long text."""

    def encode(self, texts: list[str]) -> EncodedTexts:
        assert all(len(text) <= 512 for text in texts)
        return super().encode(texts)


def test_prompts_that_cannot_fit_are_not_encoded(start_server: StartServer) -> None:
    running = start_server(tokenizer=UnencodableTokenizer())
    assert running.post("/completions", {"prompt": "x" * 500, "max_tokens": 1}).status_code == 200
    error = refusal(running.post("/completions", {"prompt": ["x", "y" * 513]}))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    error = refusal(running.post("/chat/completions", {"messages": [{"role": "user", "content": "y" * 513}]}))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_requests_to_another_name_are_refused(served: RunningServer) -> None:
    """What a page of another site sends whose name now resolves to this machine (DNS rebinding)."""
    for path in ("/v1/models", "/health", "/openapi.json"):
        url = served.url.removesuffix("/v1") + path
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.0.2.1", "", "localhost:1:2"):
            assert refusal(HTTP.get(url, headers={"Host": host}), 403)["code"] == "unknown_host", host
        for host in ("localhost", "LOCALHOST:9", "127.0.0.1:1", "[::1]:8265"):
            assert HTTP.get(url, headers={"Host": host}).status_code == 200, host
    assert refusal(served.post("/completions", PROMPT, headers={"Host": "evil.example"}), 403)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comple",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nPOST /v1/completions HTTP/1.1\r\nContent-Le",
    ],
)
def test_requests_that_are_never_completed_are_ended(
    served: RunningServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "REQUEST_S", 0.1)
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port or 0), timeout=10) as client:
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert b"HTTP/1.1 408 Request Timeout\r\n" in answer
    assert served.health()["requests"] == 0


def test_slow_answers_have_no_time_limit(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "REQUEST_S", 0.1)
    running = start_server(scheduler=FakeScheduler(step_s=0.03))
    assert running.post("/completions", PROMPT | {"max_tokens": 12}).json()["usage"]["completion_tokens"] == 12


def test_a_template_that_refuses_the_messages_is_a_bad_request(start_server: StartServer) -> None:
    running = start_server(template="{{ raise_exception('roles must alternate') }}")
    error = refusal(running.post("/chat/completions", CHAT))
    assert error["message"] == "chat template: roles must alternate"


def test_a_token_is_required_under_v1(start_server: StartServer) -> None:
    running = start_server(token="s3cret-é")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
        answer = HTTP.get(running.url + "/models", headers=headers)
        assert refusal(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        refusal(running.post("/completions", PROMPT, headers=headers), 401)
    assert running.health()["status"] == "ok"
    headers_with_token = {"Authorization": "Bearer s3cret-é".encode()}
    assert HTTP.get(running.url + "/models", headers=headers_with_token).status_code == 200  # type: ignore[arg-type]
    description = HTTP.get(running.url.removesuffix("/v1") + "/openapi.json").json()
    assert description["security"] == [{"token": []}]


def test_the_client_sends_its_key_as_the_token(start_server: StartServer) -> None:
    running = start_server(token="s3cret")
    with pytest.raises(openai.AuthenticationError):
        running.client(api_key="guess").models.list()
    client = running.client(api_key="s3cret")
    assert client.completions.create(model="tiny", prompt="say:hi").choices[0].text == "hi"


def test_a_full_queue_is_answered_with_503_and_retry_after(start_server: StartServer) -> None:
    scheduler = FakeScheduler(2, 10**6, step_s=0.002)
    running = start_server(scheduler=scheduler, max_pending=4)
    with HTTP.stream(
        "POST", running.url + "/completions", json=PROMPT | {"n": 4, "max_tokens": 900_000, "stream": True}
    ):
        answer = running.post("/completions", PROMPT)
        assert refusal(answer, 503)["code"] == "queue_full"
        assert "4 of 4 sequences" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        assert scheduler.most_running == 2
    assert "5 choices: the queue holds 4" in refusal(running.post("/completions", PROMPT | {"n": 5}))["message"]
    running.wait_until_idle()
    # The client left; a client that retries gets its answer.
    assert running.client(max_retries=3).completions.create(model="tiny", prompt="say:hi").choices[0].text == "hi"


def test_the_description_has_the_real_status_codes(served: RunningServer) -> None:
    description = HTTP.get(served.url.removesuffix("/v1") + "/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = description["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "403", "404", "413", "500", "503"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "422" not in json.dumps(description)
