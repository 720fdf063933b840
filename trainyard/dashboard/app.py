"""The routes of the dashboard. All of them only read."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from trainyard.core.errors import UserError
from trainyard.core.web_server import REFUSAL, CheckHost, LimitBody
from trainyard.dashboard import STATIC
from trainyard.dashboard.curves import CurveStore
from trainyard.dashboard.metrics_table import AXES
from trainyard.dashboard.plan_comparison import PlanComparisons
from trainyard.dashboard.request_guard import RequireSignIn, SecurityHeaders
from trainyard.dashboard.run_details import list_logs, read_checkpoints, read_config, read_events, read_log
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.dashboard.run_list import RunList
from trainyard.dashboard.run_texts import read_rollouts, read_texts, read_training_texts
from trainyard.dashboard.step_times import heat_map, read_step_times
from trainyard.metrics.run_directory import is_training

MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
BUCKETS = (20, 1000)
DEFAULT_BUCKETS = 300
MAX_BODY_BYTES = 4096


class DashboardData:
    """What the routes share: the list of runs, their curves and plans."""

    def __init__(self, root: Path, label: str) -> None:
        """`label` is how the user named the directory."""
        self.label = label
        self.runs, self.curves, self.plans = RunList(root), CurveStore(), PlanComparisons()
        self._one_heat_map = threading.Lock()  # reading the spans of many ranks takes memory

    def close(self) -> None:
        self.curves.close()
        self.plans.close()

    def list_runs(self, request: Request) -> Any:
        return {"root": self.label, **self.runs.changes(request.query_params.get("since", ""))}

    def run_curves(self, run: RunDirectoryReader, request: Request) -> Any:
        query = request.query_params
        axis = query.get("axis", "step")
        if axis not in AXES:
            raise UserError(f"axis: must be one of {', '.join(AXES)}")
        buckets = min(max(_count(query.get("buckets")) or DEFAULT_BUCKETS, BUCKETS[0]), BUCKETS[1])
        low, high = _number(query.get("from"), "from"), _number(query.get("to"), "to")
        after, generation = _count(query.get("after")), _count(query.get("generation"))
        return self.curves.curves(run, buckets, axis, low, high, after, generation, "only_complete" in query)

    def run_plan(self, run: RunDirectoryReader, request: Request) -> Any:
        return self.plans.get(run, run.state("run.json") is not None and is_training(run.path))

    def run_step_times(self, run: RunDirectoryReader, request: Request) -> Any:
        with self._one_heat_map:
            return heat_map(read_step_times(run))

    def run_log(self, run: RunDirectoryReader, request: Request) -> Any:
        return read_log(run, request.path_params["file"], _count(request.query_params.get("offset")))


RunHandler = Callable[[RunDirectoryReader, Request], Any]


def create_app(data: DashboardData, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """`host` is the address that the server listens on; `token` is what clients must have, None: anybody may look."""

    def of_run(handler: RunHandler) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                run = data.runs.open(request.path_params["name"])
            except UserError as error:
                raise HTTPException(404, str(error)) from None
            try:
                return _json(handler(run, request))
            except UserError as error:
                raise HTTPException(400, str(error)) from None

        return endpoint

    def run_list(request: Request) -> Response:
        return _json(data.list_runs(request))

    readers: dict[str, RunHandler] = {
        "curves": data.run_curves,
        "plan": data.run_plan,
        "events": lambda run, _: read_events(run),
        "config": lambda run, _: read_config(run),
        "checkpoints": lambda run, _: read_checkpoints(run),
        "samples": lambda run, _: read_texts(run),
        "inputs": lambda run, _: read_training_texts(run),
        "rollouts": lambda run, _: read_rollouts(run),
        "step-times": data.run_step_times,
        "logs": lambda run, _: list_logs(run),
        "logs/{file:path}": data.run_log,
    }
    routes = [
        Route("/", _static_route("index.html")),
        *(Route(f"/static/{name}", _static_route(name)) for name in static_files()),
        Route("/api/runs", run_list),
        *(Route(f"/api/runs/{{name}}/{path}", of_run(handler)) for path, handler in readers.items()),
    ]
    guards = [
        Middleware(SecurityHeaders),
        Middleware(CheckHost, host=host, refusal=PlainTextResponse(REFUSAL, 403)),
        Middleware(LimitBody, limit=MAX_BODY_BYTES),
    ]
    if token:
        guards.append(Middleware(RequireSignIn, token=token))
    return Starlette(routes=routes, middleware=guards, exception_handlers={HTTPException: _on_http_error})


def static_files() -> list[str]:
    """The files of the dashboard by path below STATIC."""
    return sorted(str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.suffix in MEDIA_TYPES)


def _static_route(name: str) -> Callable[[Request], Response]:
    path = STATIC / name

    def endpoint(request: Request) -> Response:
        headers = {"Cache-Control": "no-cache"}  # asks each time whether the file has changed
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=headers)

    return endpoint


def _json(content: Any) -> Response:
    # ASCII, because texts from files may have lone surrogates, which UTF-8 cannot encode.
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _json({"error": error.detail})
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer


def _count(text: str | None) -> int | None:
    """A number of rows or bytes from a query; None for everything else."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 16 else None


def _number(text: str | None, name: str) -> float | None:
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{name}: not a number") from None
    if number != number:
        raise UserError(f"{name}: not a number")
    return number
