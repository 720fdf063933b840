"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

TYPE_BY_STATUS = {401: "authentication_error", 500: "server_error", 503: "service_unavailable"}
EXPECTED = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "must be a string, or a list of up to 4 strings",
    "content": "must be a string, or a list of parts of type text",
}
"""Fields with several types, for which pydantic reports one error per type."""


class ApiError(Exception):
    """An answer other than 200. `param` is the field of the request that causes it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        error_type = TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        message, param = _encodable(str(self)), self.param and _encodable(self.param)
        return {"error": {"message": message, "type": error_type, "param": param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers)


def _encodable(text: str) -> str:
    """`text` without lone surrogates, which JSON strings can have and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception of a route in the format of the API."""

    def add(kind: type[Exception], describe: Callable[[Request, Any], ApiError]) -> None:
        async def handle(request: Request, error: Exception) -> Response:
            return describe(request, error).response()

        app.add_exception_handler(kind, handle)

    add(ApiError, lambda request, error: error)
    add(RequestValidationError, lambda request, error: validation_error(error.errors()))
    add(HTTPException, http_error)
    # The traceback goes to the log of the server, not to the client.
    add(Exception, lambda _, error: ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def http_error(request: Request, error: HTTPException) -> ApiError:
    """What starlette refuses, such as an unknown path, with the request line."""
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers)


def validation_error(found: Iterable[Any]) -> ApiError:
    """The first of pydantic's errors as an answer that names the field."""
    first = next(iter(found))
    path = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    names = [part for part in path if part in EXPECTED]
    param = ".".join(str(part) for part in path[: path.index(names[0]) + 1 if names else None])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: unknown field", param, "unknown_parameter")
    if first["type"] == "not_supported":
        return ApiError(400, f"{param}: {first['msg']}", param, "unsupported_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: this field is required", param, "missing_required_parameter")
    several = names and first["type"] != "lone_surrogate"
    message = EXPECTED[names[0]] if several else first["msg"][:1].lower() + first["msg"][1:]
    return ApiError(400, f"{param}: {message}", param, "invalid_value")
