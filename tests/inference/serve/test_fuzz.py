"""Requests generated from the server's own OpenAPI description: none fails the server, all answers are as described."""

from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from tests.inference.serve.conftest import RunningServer, running_server
from tests.inference.serve.fake_scheduler import FakeScheduler

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def target() -> Iterator[RunningServer]:
    """The queue is never full: 128 choices fit, and requests follow each other."""
    with running_server(FakeScheduler(max_batch=128), max_pending=128) as running:
        yield running
        # After all of them, the server is idle and answers.
        running.wait_until_idle()
        assert running.client().completions.create(model="tiny", prompt="say:hi").choices[0].text == "hi"
        assert running.worker.failure is None


@pytest.fixture(scope="module")
def description(target: RunningServer) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(target.url.removesuffix("/v1") + "/openapi.json")


def send_generated(description: schemathesis.BaseSchema, path: str, mode: GenerationMode, count: int) -> None:
    """Send `count` requests that the description allows, or that it does not allow."""
    strategy = description[path]["POST"].as_strategy(generation_mode=mode)
    with requests.Session() as session:

        @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=strategy)
        def send(case: schemathesis.Case) -> None:
            case.call_and_validate(session=session, checks=CHECKS, timeout=20)

        send()


PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
MODES = pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)


@PATHS
@MODES
def test_generated_requests(description: schemathesis.BaseSchema, path: str, mode: GenerationMode) -> None:
    send_generated(description, path, mode, 8)


@pytest.mark.nightly
@PATHS
@MODES
def test_many_generated_requests(description: schemathesis.BaseSchema, path: str, mode: GenerationMode) -> None:
    send_generated(description, path, mode, 1000)
