"""The HTTP application of `finetune serve`.

POST /predict                   rows, for every task type
POST /v1/chat/completions       and /v1/completions, GET /v1/models: tasks/serving/openai_api.py
POST /v1/embeddings             or /v1/rerank, for models of these: tasks/serving/retrieval_api.py
GET  /health                    whether a version answers, without a token
GET  /metrics                   Prometheus
GET  /, /docs, /openapi.json    the description of these, without a token: tasks/serving/page.py
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from itertools import compress
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from tasks.registry.model_spec import ModelSpec
from tasks.services.request_guard import App, Message, Receive, Send
from tasks.serving.metrics import Metrics
from tasks.serving.model_process import ModelProcess, ProcessLost
from tasks.serving.openai_api import build_routes
from tasks.serving.page import create_app, example_row
from tasks.serving.recorded_rows import RecordedRows
from tasks.serving.response_bodies import REFUSED, HealthBody, PredictionsBody
from tasks.serving.responses import CLIENT_GONE, RequestRefused, refuse, said_error, until_gone
from tasks.serving.retrieval_api import Rows, build_retrieval_routes
from tasks.serving.served_model import Busy, NotLoaded, ServedModel
from tasks.serving.uploaded_files import FORM, UploadedFile, read_files, require_usable
from training.evaluation.stored_calibration import REVIEW
from training.programs.serve import Failed, Predicted
from training.task_types import class_of

BODY_S = 30.0
"""The body of a request arrives within this time."""
MOST_ROWS = 1_000
"""In one request of /predict."""


class PredictRequest(BaseModel):
    """The body of /predict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_ROWS)
    """Rows with the columns that the model reads, as objects."""


class _PredictRoute(APIRoute):
    """The route of /predict, whose body is read in one step: FastAPI's own takes several times as long."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that answers a request."""

        async def answer(request: Request) -> Response:
            if sends_files(request):
                return cast(Response, await self.endpoint(None, request))
            try:
                body = PredictRequest.model_validate_json(await request.body())
            except ValidationError as error:
                problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
                raise RequestValidationError(problems) from None
            return cast(Response, await self.endpoint(body, request))

        return answer


def build_app(
    served: ServedModel[ModelProcess],
    metrics: Metrics,
    recorded: RecordedRows | None,
    *,
    generates: bool,
    holds_conversations: bool,
) -> FastAPI:
    """The application.

    Args:
        served: the model, which is loaded.
        metrics: its figures.
        recorded: where rows are recorded, if they are.
        generates: whether the model continues texts.
        holds_conversations: whether the page shows a conversation: versions with a chat template answer them.
    """
    model = served.model
    app = create_app(model, "Served by finetune.", holds_conversations=holds_conversations)

    async def ask(
        make_rows: Callable[[ModelSpec], Rows],
        request: Request,
        find_prompt: Callable[[ModelSpec], str | None] = lambda model: None,
    ) -> tuple[Predicted, ModelSpec]:
        """The predictions of rows by the version that answers, and this version."""
        async with served.use() as process:
            rows = make_rows(process.model)
            prompt = find_prompt(process.model)
            said = await until_gone(request, process.predict(rows, prompt))
            model = process.model
        if not isinstance(said, Predicted):
            raise said_error(said)
        usable = sum(record is not None for record in said.records)
        metrics.count_rows(usable, len(said.records) - usable)
        metrics.count_review(sum(bool(record and record.get(REVIEW)) for record in said.records))
        if usable:
            served.trial = partial(find_failure, row=next(compress(rows, said.records)))
        if recorded is not None:
            recorded.add_predictions(rows, said.records, model.version, prompt)
        return said, model

    async def predict(body: PredictRequest | None, request: Request) -> Response:
        """Predictions of rows, in their order. An unusable row has an error in place of its prediction. A model of
        images also takes the files of a form; a file that is no image is refused."""
        if body is None:
            files = read_files(request.headers["content-type"], await request.body(), MOST_ROWS)
            said, model = await ask(partial(rows_of_files, files), request)
            require_usable(files, said.errors)
        else:
            said, model = await ask(lambda model: body.rows, request)
        found = [
            {"error": error} if record is None else record
            for record, error in zip(said.records, said.errors, strict=True)
        ]
        return JSONResponse({"model": f"{served.name}/{model.version}", "predictions": found})

    contents: dict[str, Any] = {"application/json": {"example": {"rows": [example_row(model)]}}}
    if class_of(model.task["task"]).reads_images():
        files = {"type": "array", "items": {"type": "string", "format": "binary"}}
        contents[FORM] = {"schema": {"type": "object", "properties": {"file": files}}}
    app.router.add_api_route(
        "/predict",
        predict,
        methods=["POST"],
        response_model=PredictionsBody,
        responses=REFUSED,
        openapi_extra={"requestBody": {"content": contents}},
        route_class_override=_PredictRoute,
    )
    add_common_routes(app, served, metrics)
    app.include_router(build_retrieval_routes(model.task["task"], served.name, ask))
    if generates:
        app.include_router(build_routes(served, metrics, recorded))
    return app


def sends_files(request: Request) -> bool:
    """Whether the body of a request is a form with files."""
    return request.headers.get("content-type", "").lower().startswith(FORM)


def rows_of_files(files: Sequence[UploadedFile], model: ModelSpec) -> Rows:
    """A row of each file. Raises RequestRefused if the model reads no images."""
    forms = {
        model.columns[role]: one.form
        for role, one in class_of(model.task["task"]).columns.items()
        if role in model.columns
    }
    if [*forms.values()] != ["image"]:
        raise refuse(
            "Content-Type", f"the model reads no files: send JSON, {json.dumps({'rows': [example_row(model)]})}."
        )
    return [file.as_row(next(iter(forms))) for file in files]


async def find_failure(process: ModelProcess, row: dict[str, Any]) -> str | None:
    """How a version fails on a row; None if it predicts or refuses it."""
    said = await process.predict([row])
    return said.message if isinstance(said, Failed) else None


def add_common_routes(app: FastAPI, served: ServedModel[Any], metrics: Metrics) -> None:
    """Adds /health, /metrics, and the responses to errors."""

    @app.get(
        "/health",
        response_model=HealthBody,
        responses={503: {"model": HealthBody, "description": "No version answers."}},
    )
    async def health() -> Response:
        """Whether a version answers, and which."""
        version = served.current.model.version if served.current else None
        state = {"status": "ok" if version else "loading", "model": served.name, "version": version}
        return JSONResponse({**state, "waiting": served.waiting, "problem": served.failed}, 200 if version else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=REFUSED)
    async def prometheus() -> Response:
        """Figures for Prometheus."""
        return Response(metrics.as_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> Response:
        return error.response()

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> Response:
        return RequestRefused(429, str(error), code="busy", retry_after_s=error.retry_after_s).response()

    @app.exception_handler(NotLoaded)
    @app.exception_handler(ProcessLost)
    async def unavailable(request: Request, error: Exception) -> Response:
        return RequestRefused(503, str(error), retry_after_s=1).response()

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        return JSONResponse(RequestRefused(error.status_code, error.detail).body(), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problems = [
            ("body", f"is no JSON: {one['ctx']['error']}{f' at character {at[0]}' if (at := one['loc'][1:]) else ''}.")
            if one["type"] == "json_invalid"
            else (".".join(map(str, one["loc"][1:])) or "body", one["msg"].replace("valid dictionary", "JSON object"))
            for one in error.errors()
        ]
        message = "\n".join(f"{where}: {text}" for where, text in problems)
        return RequestRefused(400, message, problems[0][0]).response()


def read_as_json(app: App) -> App:
    """The application, for requests whose bodies are JSON whatever they are called: `curl -d` calls them a form. Only
    files come in another form."""

    async def renamed(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not sends_files(Request(scope)):
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        await app(scope, receive, send)

    return renamed


def limit_body_time(app: App) -> App:
    """The application, for requests whose bodies arrive in time. Others get 408: they hold memory."""

    async def limited(scope: Message, receive: Receive, send: Send) -> None:
        deadline, whole = asyncio.get_running_loop().time() + BODY_S, False

        async def receive_in_time() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                text = f"the body of the request did not arrive within {BODY_S:g} s."
                raise HTTPException(408, text, {"Connection": "close"}) from None
            whole = not message.get("more_body")
            return message

        await app(scope, receive_in_time if scope["type"] == "http" else receive, send)

    return limited


class Counted:
    """An ASGI application that counts the requests to another one; those to `paths` by path."""

    def __init__(self, app: App, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a request on, and counts it at its end."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began_s, status = time.monotonic(), CLIENT_GONE

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.count_request(path, status, time.monotonic() - began_s)
