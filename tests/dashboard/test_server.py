"""The server: what it answers, whom it refuses, and that no request fails it."""

import json
import string
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.conftest import RunningDashboard, StartPage, running_page
from tests.dashboard.run_writer import loss_spike, write_lines, write_run, write_spans
from tests.support.examples import examples
from trainyard.dashboard.request_guard import SECURITY_HEADERS

PARTS = ["curves", "events", "config", "checkpoints", "inputs", "samples", "step-times", "logs", "plan"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDashboard]:
    root = tmp_path_factory.mktemp("served") / "runs"
    run = write_run(root, "run", events=[loss_spike(30, list(range(1000)))])
    write_spans(run, 0, dict.fromkeys(range(1, 50), 1000000))
    (run / "logs" / "7-1" / "node").mkdir(parents=True)
    (run / "logs" / "7.log").write_text("first\n" + "x" * 100_000 + "\nlast é\n")
    (run / "logs" / "7-1" / "node" / "rank-0.log").write_text("rank 0\n")
    checkpoint = run / "checkpoints" / "step_00000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "rank_00000.safetensors").write_bytes(b"12345")
    (checkpoint / "complete.json").write_text("{}")
    (run / "checkpoints" / "step_00000200").mkdir()
    (run / "samples.jsonl").write_text('{"step": 5, "prompt": "a", "text": "b\\ud800<script>"}\n')
    parts = [["Hi", False], ["<b>Hello", True], "x", ["y"], [1, 2]]
    inputs = [{"sample": 3, "source": "c:4", "tokens": 9, "trained": 4, "shown": 9, "parts": parts}, {"sample": -1}]
    write_lines(run / "inputs.jsonl", inputs)
    (root.parent / "secret.log").write_text("secret")
    write_run(root, "other").joinpath("config.yaml").unlink()
    with running_page(root) as running:
        yield running


def test_the_parts_of_a_run(served: RunningDashboard) -> None:
    assert {run["name"] for run in served.get("/api/runs")["runs"]} == {"run", "other"}
    assert served.get("/api/runs/run/curves?buckets=20&from=10&to=12")["columns"]["step"] == [9, 10, 11, 12, 13]
    spike = served.get("/api/runs/run/events")[1]
    assert (spike["step"], spike["num_samples"], spike["samples"][:3]) == (30, 1000, [0, 1, 2])
    assert served.get("/api/runs/run/config")["keys"]["optimizer.lr"] == "0.002"
    newest, older = served.get("/api/runs/run/checkpoints")
    assert (newest["step"], newest["is_complete"], older["bytes"], older["is_complete"]) == (200, False, 7, True)
    assert served.get("/api/runs/run/samples")[0]["text"] == "b\ud800<script>"
    (sample,) = served.get("/api/runs/run/inputs")
    assert (sample["source"], sample["trained"], sample["parts"]) == ("c:4", 4, [["Hi", False], ["<b>Hello", True]])
    assert [log["file"] for log in served.get("/api/runs/run/logs")] == ["7.log", "7-1/node/rank-0.log"]
    assert served.get("/api/runs/run/step-times")["rows"][0][0] == 1.0
    assert served.get("/api/runs/other/plan")["problem"].startswith("the plan needs config.yaml")


def test_a_log_is_read_from_its_end_and_then_continued(served: RunningDashboard) -> None:
    end = served.get("/api/runs/run/logs/7.log")
    assert end["text"] == "last é\n"
    path = served.data.runs.root / "run" / "logs" / "7.log"
    with path.open("a") as file:
        file.write("more\n")
    more = served.get(f"/api/runs/run/logs/7.log?offset={end['next_offset']}")
    assert (more["text"], more["is_addition"]) == ("more\n", True)
    assert served.get("/api/runs/run/logs/7.log?offset=99999999")["is_addition"] is False
    assert served.get("/api/runs/run/logs/7-1%2Fnode/rank-0.log")["text"] == "rank 0\n"


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../../secret.log",
        "/api/runs/run/logs/../../../secret.log",
        "/api/runs/run/logs/..%2f..%2f..%2fsecret.log",
        "/api/runs/run/logs/%2e%2e/%2e%2e/%2e%2e/secret.log",
        "/api/runs/run/logs//etc/hostname",
        "/api/runs/run/logs/7.log%00.log",
        "/api/runs/run%00/config",
        "/api/runs/%2e%2e/config",
        "/api/runs/./config",
        "/api/runs/%2frun/config",
        "/api/runs/run%2f..%2frun/config",
        "/api/runs/RUN/config",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/uplot/../../app.py",
        "/app.py",
        "/api/runs/run/metrics.jsonl",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(served: RunningDashboard, path: str) -> None:
    status, _, body = served.request(path)
    assert status in (400, 404), body
    assert b"secret" not in body.replace(b"secret.log", b"")
    assert json.loads(body)["error"]


def test_foreign_names_and_methods_are_refused(served: RunningDashboard) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.0.2.1", "", "[::1", "localhost:1:2"):
        assert served.request("/api/runs", headers={"Host": host})[0] == 403, host
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:1", "127.9.9.9", "[::1]:8265"):
        assert served.request("/api/runs", headers={"Host": host})[0] == 200, host
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert served.request("/api/runs", method)[0] == 405
    assert served.request("/", "POST", body=b"x" * 100_000)[0] in (405, 413)


def test_answers_restrict_the_browser(served: RunningDashboard) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/nothing", "/api/runs/none/config"):
        _, headers, _ = served.request(path)
        assert {name: headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS, path
        assert headers["Cache-Control"] in ("no-store", "no-cache")
        assert "Access-Control-Allow-Origin" not in headers
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_a_token_is_required_where_others_can_connect(start_page: StartPage, tmp_path: Path) -> None:
    write_run(tmp_path, "run")
    page = start_page(tmp_path, token="s3cret", host="0.0.0.0")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "trainyard_page=guess"}, {"Cookie": "=;=;\x7f"}):
        assert page.request("/api/runs", headers=headers)[0] == 401
        assert page.request("/", headers=headers)[0] == 401
        assert page.request("/static/main.js", headers=headers)[0] == 401
    assert page.request("/api/runs", headers={"Authorization": "Bearer s3cret"})[0] == 200
    assert page.request("/?token=wrong")[0] == 401
    status, headers, _ = page.request("/?token=s3cret")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert "s3cret" not in cookie
    assert "HttpOnly" in headers["Set-Cookie"]
    assert page.request("/api/runs", headers={"Cookie": cookie})[0] == 200
    assert page.request("/login", "POST", body=b"token=s3cret")[0] == 303
    for body in (b"token=wrong", b"", b"\xff" * 100, b"a&" * 2000, b"token=" + b"x" * 10_000):
        assert page.request("/login", "POST", body=body)[0] in (400, 401)
    assert page.request("/login")[0] == 200
    assert page.request("/api/runs", headers={"Host": "192.0.2.7", "Authorization": "Bearer s3cret"})[0] == 200
    assert page.request("/api/runs", headers={"Host": "evil.example", "Authorization": "Bearer s3cret"})[0] == 403


SEGMENTS = st.sampled_from(["run", "other", "logs", "..", ".", "", "7.log", "api", "runs", "static", *PARTS]) | st.text(
    string.printable + "é\0", max_size=8
)
QUERY = st.dictionaries(
    st.sampled_from(["since", "axis", "buckets", "from", "to", "after", "generation", "offset", "x"]),
    st.sampled_from(["", "0", "1", "-1", "nan", "inf", "1e400", "step", "time", "9" * 30, "٣", "a-b"])
    | st.text(string.printable, max_size=6),
)


@examples(1000)
@given(segments=st.lists(SEGMENTS, max_size=4), query=QUERY, is_api=st.booleans(), is_raw=st.booleans())
def test_no_request_fails_the_server(
    served: RunningDashboard, segments: list[str], query: dict[str, str], is_api: bool, is_raw: bool
) -> None:
    if "plan" in segments:  # starts a process
        return
    prefix = ["api", "runs", "run"] if is_api else []
    path = "/" + "/".join(quote(segment, safe="/.") for segment in [*prefix, *segments])
    if is_raw:
        path = path.replace("%2E", ".").replace("%5C", "\\").replace("%25", "%")
    search = "&".join(f"{name}={quote(value)}" for name, value in query.items())
    status, _, body = served.request(f"{path}?{search}")
    assert status in (200, 307, 400, 404), (path, body)


@examples(300)
@given(line=st.binary(max_size=60))
def test_any_request_line_is_answered_or_refused(served: RunningDashboard, line: bytes) -> None:
    target = b"/" + line.translate(None, b"\r\n")
    status, _, _ = served.request(target)
    assert status < 500
