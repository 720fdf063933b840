"""Routes beside OpenAI's API: metrics for Prometheus, tokens for clients of vLLM."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.inference.serve.conftest import HTTP, RunningServer, StartServer
from tests.inference.serve.fake_scheduler import FakeScheduler
from tests.inference.serve.test_refused_requests import refusal


def read_metrics(running: RunningServer) -> dict[str, float]:
    """Values by name and labels, as Prometheus reads them."""
    answer = HTTP.get(running.url.removesuffix("/v1") + "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {
        ",".join([sample.name.removeprefix("trainyard_"), *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_sequences_tokens_and_times(start_server: StartServer) -> None:
    running = start_server(scheduler=FakeScheduler(max_batch=2, step_s=0.03))
    found = read_metrics(running)
    assert set(found.values()) == {0.0}
    assert running.post("/completions", {"prompt": "say:hi", "n": 2}).status_code == 200
    assert running.post("/completions", {"prompt": "abc", "max_tokens": 4}).status_code == 200
    with HTTP.stream(
        "POST", running.url + "/completions", json={"prompt": ["x"] * 3, "max_tokens": 500, "stream": True}
    ):
        found = read_metrics(running)
        assert (found["sequences_running"], found["sequences_waiting"], found["cache_usage_ratio"]) == (2, 1, 1)
    running.wait_until_idle()
    found = read_metrics(running)
    assert found["sequences_total,stop"] == 2
    assert found["sequences_total,length"] == 1
    assert found["sequences_total,abort"] == 3
    assert found["prompt_tokens_total"] == 2 * 6 + 3 + 3
    assert found["generated_tokens_total"] >= 2 * 3 + 4
    assert found["sequences_running"] == found["sequences_waiting"] == 0
    assert found["sequence_latency_seconds_count"] == 6
    assert found["sequence_latency_seconds_bucket,+Inf"] == 6
    assert found["time_to_first_token_seconds_count"] in (5, 6)  # one sequence waited
    assert found["time_to_first_token_seconds_bucket,0.025"] == 0  # a step takes longer
    assert found["sequence_latency_seconds_sum"] > found["time_to_first_token_seconds_sum"] >= 3 * 0.03
    buckets = [value for name, value in found.items() if name.startswith("sequence_latency_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_failed_sequences_are_counted(start_server: StartServer) -> None:
    running = start_server()
    running.scheduler.faults = [RuntimeError("device lost")]
    running.scheduler.fail_now.set()
    assert running.post("/completions", {"prompt": "x"}).status_code == 500
    assert read_metrics(running)["sequences_total,abort"] == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "né"}, "né"),
        ({"prompt": ""}, ""),
        ({"content": "né"}, "né"),
        ({"prompt": "x", "model": "tiny", "add_special_tokens": False}, "x"),
        ({"messages": [{"role": "user", "content": "x"}]}, "user: x\nassistant:"),
        ({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}, "user: x\n"),
    ],
)
def test_texts_become_tokens_and_tokens_texts(served: RunningServer, body: dict[str, object], text: str) -> None:
    url = served.url.removesuffix("/v1")
    found = HTTP.post(url + "/tokenize", json=body).json()
    assert found == {
        "count": len(text.encode()),
        "max_model_len": 512,
        "tokens": list(text.encode()),
        "token_strs": None,
    }
    assert HTTP.post(url + "/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text, "content": text}


def test_token_texts(served: RunningServer) -> None:
    url = served.url.removesuffix("/v1") + "/tokenize"
    found = HTTP.post(url, json={"prompt": "aé", "return_token_strs": True}).json()
    assert found["token_strs"] == ["a", "token_id:195", "token_id:169"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 513}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_mistakes_are_named(served: RunningServer, path: str, body: object, param: str) -> None:
    assert refusal(HTTP.post(served.url.removesuffix("/v1") + path, json=body))["param"] == param


def test_which_routes_need_a_token(start_server: StartServer) -> None:
    running = start_server(token="secret")
    url = running.url.removesuffix("/v1")
    for path in ("/health", "/metrics", "/openapi.json"):
        assert HTTP.get(url + path).status_code == 200
    for path in ("/tokenize", "/detokenize"):
        refusal(HTTP.post(url + path, json={"prompt": "x"}), 401)
    headers = {"Authorization": "Bearer secret"}
    assert HTTP.post(url + "/tokenize", json={"prompt": "x"}, headers=headers).json()["tokens"] == [120]
