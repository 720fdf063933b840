"""The routes of the server, and the check of its token."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trainyard import __version__
from trainyard.core.sockets import is_bearer
from trainyard.core.web_server import MAX_BODY_BYTES, REFUSAL, CheckHost, LimitBody
from trainyard.inference.serve.api_types import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
)
from trainyard.inference.serve.chat_types import ChatCompletionRequest, TokenizeRequest
from trainyard.inference.serve.errors import ApiError, add_error_handlers
from trainyard.inference.serve.generation import ChoiceDelta, Generation
from trainyard.inference.serve.response_types import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    ErrorResponse,
    Health,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    TokenizeResponse,
    Usage,
)
from trainyard.inference.serve.responses import ChatWriter, CompletionWriter, ResponseWriter
from trainyard.inference.serve.served_model import ServedModel, find_model
from trainyard.inference.serve.server import ClientDisconnect, EventStream, until_disconnect

ERROR_DESCRIPTIONS = {
    400: "The request is not valid, or asks for something that this server does not support.",
    401: "The token is missing or wrong (only for servers with a token).",
    403: "The Host header names another server.",
    404: "There is no such model.",
    413: "The body is too large.",
    500: "The engine failed.",
    503: "The queue is full, or the server is shutting down.",
}

OPEN_PATHS = ("/health", "/metrics", "/openapi.json")
"""What load balancers and Prometheus ask for without a token. It says nothing about what others do."""


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse, "description": ERROR_DESCRIPTIONS[status]} for status in statuses}


GENERATION_ERRORS = _errors(400, 401, 403, 404, 413, 500, 503)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EVENT_SCHEMA = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""An event of a stream: `data` is a chunk in JSON, or `[DONE]`."""
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": EVENT_SCHEMA}},
        "description": "The answer, or a stream of chunks.",
    }
}


def create_app(models: Sequence[ServedModel], token: str | None = None, host: str = "127.0.0.1") -> FastAPI:
    """`models` share a worker; a request that names none of them gets the first. `token`: what clients must send as
    bearer token; None: anybody can use the server. `host`: the address that the server listens on."""
    worker = models[0].worker
    app = FastAPI(title="trainyard serve", version=__version__, docs_url=None, redoc_url=None)
    app.openapi = lambda: _describe(app, token)  # type: ignore[method-assign]
    add_error_handlers(app)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_middleware(LimitBody, limit=MAX_BODY_BYTES)
    if token:
        app.add_middleware(RequireToken, token=token)
    app.add_middleware(CheckHost, host=host, refusal=ApiError(403, REFUSAL, code="unknown_host").response())

    @app.get("/health", responses=_errors(403, 500))
    async def health() -> Health:
        if worker.failure:
            raise ApiError(500, f"the engine failed: {worker.failure}", code="engine_error")
        return Health(status="ok", requests=worker.num_pending, tokens=worker.metrics.generated_tokens)

    @app.get("/metrics", response_class=PlainTextResponse, responses=_errors(403))
    async def metrics() -> Response:
        return PlainTextResponse(worker.metrics.render(worker.scheduler.load), media_type=METRICS_TYPE)

    @app.post("/tokenize", responses=_errors(400, 401, 403, 404, 413))
    async def tokenize(fields: TokenizeRequest) -> TokenizeResponse:
        model = find_model(models, fields.model)
        tokens = await model.tokenize(fields)
        texts = [model.token_texts.text(token) for token in tokens] if fields.return_token_strs else None
        return TokenizeResponse(count=len(tokens), max_model_len=model.max_seq_len, tokens=tokens, token_strs=texts)

    @app.post("/detokenize", responses=_errors(400, 401, 403, 404, 413))
    async def detokenize(fields: DetokenizeRequest) -> DetokenizeResponse:
        model = find_model(models, fields.model)
        text = model.detokenize(fields.tokens)
        return DetokenizeResponse(prompt=text, content=text)

    def card(model: ServedModel) -> ModelCard:
        return ModelCard(id=model.name, created=model.created, max_model_len=model.max_seq_len)

    @app.get("/v1/models", responses=_errors(401, 403))
    async def list_models() -> ModelList:
        return ModelList(data=[card(model) for model in models])

    @app.get("/v1/models/{name:path}", responses=_errors(401, 403, 404))
    async def retrieve_model(name: str) -> ModelCard:
        return card(find_model(models, name))

    @app.post("/v1/completions", response_model=CompletionResponse, responses=GENERATION_ERRORS | STREAM)
    async def completions(fields: CompletionRequest, request: Request) -> Response:
        model = find_model(models, fields.model)
        if fields.echo and fields.logprobs is not None:
            raise ApiError(400, "echo: cannot be combined with logprobs; the prompt has none", "echo")
        prompts = [
            await model.encode_prompt(prompt) if isinstance(prompt, str) else prompt for prompt in fields.prompts
        ]
        schema = await model.response_schema(fields)
        sequences = model.sequences(fields, prompts, DEFAULT_MAX_TOKENS, schema)
        texts = [prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt) for prompt in fields.prompts]
        echoes = [text if fields.echo else "" for text in texts for _ in range(fields.n or 1)]
        generation = Generation(model, sequences, fields.stop_strings)
        return await _respond(request, generation, CompletionWriter(model, fields, echoes), fields, prompts)

    @app.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=GENERATION_ERRORS | STREAM)
    async def chat_completions(fields: ChatCompletionRequest, request: Request) -> Response:
        model = find_model(models, fields.model)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs=true", "top_logprobs")
        prompts = [await model.encode_chat(fields.messages, tools=fields.offered_tools)]
        schema = await model.response_schema(fields)
        sequences = model.sequences(fields, prompts, None, schema)
        stop = fields.stop_strings + model.chat_template.stop
        generation = Generation(model, sequences, stop)
        return await _respond(request, generation, ChatWriter(model, fields), fields, prompts)

    return app


async def _respond(
    request: Request,
    generation: Generation,
    writer: ResponseWriter,
    fields: GenerationFields,
    prompts: list[list[int]],
) -> Response:
    def usage() -> Usage:
        before, new = sum(map(len, prompts)), generation.num_tokens
        # Choices of one prompt share it: it counts once.
        cached = sum(choice.cached_tokens for choice in generation.choices[:: fields.n or 1])
        details = PromptTokensDetails(cached_tokens=cached)
        return Usage(
            prompt_tokens=before, completion_tokens=new, total_tokens=before + new, prompt_tokens_details=details
        )

    async def events() -> AsyncIterator[str]:
        for chunk in writer.first_chunks():
            yield chunk.model_dump_json()
        async for delta in generation.deltas():
            yield writer.chunk(delta).model_dump_json()
        if fields.include_usage:
            yield writer.usage_chunk(usage()).model_dump_json()

    async def collect() -> list[ChoiceDelta]:
        parts: list[list[ChoiceDelta]] = [[] for _ in generation.choices]
        async for delta in generation.deltas():
            parts[delta.index].append(delta)
        return [
            ChoiceDelta(
                index,
                "".join(delta.text for delta in deltas),
                [token for delta in deltas for token in delta.tokens],
                deltas[-1].finish_reason,
            )
            for index, deltas in enumerate(parts)
        ]

    await until_disconnect(request.receive, generation.start())
    if fields.stream:
        return EventStream(events(), generation.close)
    try:
        choices = await until_disconnect(request.receive, collect())
    finally:
        generation.close()
    return JSONResponse(writer.complete(choices, usage()).model_dump())


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


class RequireToken:
    """Refuses requests without `Authorization: Bearer TOKEN`, except those for OPEN_PATHS."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or is_bearer(dict(scope["headers"]).get(b"authorization", b""), self.token):
            await self.app(scope, receive, send)
            return
        message = "missing or wrong token; send it as Authorization: Bearer TOKEN"
        headers = {"WWW-Authenticate": "Bearer"}
        await ApiError(401, message, code="invalid_api_key", headers=headers).response()(scope, receive, send)


def _describe(app: FastAPI, token: str | None) -> dict[str, Any]:
    """The OpenAPI description. Invalid requests are answered with 400, not with FastAPI's 422."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for operations in found["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        if token:
            found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            found["security"] = [{"token": []}]
        app.openapi_schema = found
    return app.openapi_schema
