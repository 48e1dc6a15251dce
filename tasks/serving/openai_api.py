"""OpenAI's API of chat completions and completions, for models that generate text after a text.

Sources: https://platform.openai.com/docs/api-reference/chat and /completions.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from tasks.serving.metrics import Metrics
from tasks.serving.model_process import ModelProcess, ProcessLost
from tasks.serving.recorded_rows import RecordedRows
from tasks.serving.response_bodies import REFUSED, ChatCompletion, Completion, ModelsBody
from tasks.serving.responses import RequestRefused, Said, StreamOf, refuse, require_served, said_error, until_gone
from tasks.serving.served_model import ServedModel
from training.programs.serve import Failed, FinishedAnswer, Text
from training.tokenization.tool_calls import parse_message, settled_content

MOST_PROMPTS = 16
"""In one request of completions."""
_PLAIN: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}
"""Fields that would change the answer in ways that these models do not have, with the values, besides null, that do
not."""


class _Generation(BaseModel):
    """The fields of both kinds of requests. Fields that change no answer, such as `user`, are ignored."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    """The name of the served model."""
    max_tokens: int | None = Field(None, ge=1)
    """The most tokens of the answer; that of the model's recipe by default (options.max_new_tokens)."""
    stop: str | list[str] | None = None
    """Texts before which the answer ends; at most four."""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 takes the likeliest token. By default the answer is generated as the model's recipe defines."""
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    """With a seed, the same request has the same answer."""
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        """The texts before which the answer ends."""
        return [self.stop] if isinstance(self.stop, str) else [text for text in self.stop or () if text]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self) -> dict[str, Any]:
        """The fields of Generate that say how tokens are chosen."""
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed, "stop": self.stops}


class ChatRequest(_Generation):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None


class CompletionRequest(_Generation):
    """The body of /v1/completions."""

    prompt: str | list[str]


def build_routes(served: ServedModel[ModelProcess], metrics: Metrics, recorded: RecordedRows | None) -> APIRouter:
    """The routes."""
    routes, answers = APIRouter(tags=["OpenAI's API"], responses=REFUSED), _Answers(served, metrics, recorded)
    created_s = int(time.time())

    @routes.get("/v1/models", response_model=ModelsBody)
    async def models() -> dict[str, Any]:
        """The served model."""
        model = {"id": served.name, "object": "model", "created": created_s, "owned_by": "finetune"}
        return {"object": "list", "data": [model]}

    @routes.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """The assistant's answer to a conversation."""
        tools = None if body.tool_choice == "none" else body.tools
        fields = {
            "messages": body.messages,
            "tools": tools,
            "max_new_tokens": body.max_completion_tokens or body.max_tokens,
            **body.sampling(),
        }
        return await answers.respond(_Chat(tools or []), body, [fields], request)

    @routes.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """The continuation of a text, or of each of several texts."""
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not 0 < len(prompts) <= MOST_PROMPTS:
            raise refuse("prompt", f"{len(prompts)} texts are given: give 1 to {MOST_PROMPTS} of them.")
        if body.stream and len(prompts) > 1:
            raise refuse("stream", "is possible for one text at a time.")
        fields = [{"text": text, "max_new_tokens": body.max_tokens, **body.sampling()} for text in prompts]
        return await answers.respond(_Completion(), body, fields, request)

    return routes


class _Answers:
    """Sends requests to the served model, and counts and records its answers."""

    def __init__(self, served: ServedModel[ModelProcess], metrics: Metrics, recorded: RecordedRows | None) -> None:
        self._served, self._metrics, self._recorded = served, metrics, recorded

    async def respond(
        self, form: _Form, body: _Generation, fields: Sequence[dict[str, Any]], request: Request
    ) -> Response:
        """The response to a request of these `fields` of Generate, one for each text to answer."""
        async with AsyncExitStack() as block:
            process = await block.enter_async_context(self._served.use())
            version = process.model.version
            _require_known(body, self._served.name, version)
            if isinstance(body, ChatRequest) and not process.has_chat_template:
                message = f"{self._served.name} has no chat template: it continues texts, by /v1/completions."
                raise refuse("model", message)
            form.begin(f"{self._served.name}/{version}")
            if body.stream:
                answer = process.generate(**fields[0], stream=True)
                # The first part decides about the status, so it is awaited before the response begins.
                first = await until_gone(request, anext(answer))
                if not isinstance(first, Text | FinishedAnswer):
                    raise said_error(first)
                block.push_async_callback(answer.aclose)
                events = self._stream(form, first, answer, body, fields[0])
                return StreamOf(events, block.pop_all(), media_type="text/event-stream")
            whole = await until_gone(request, _collect([process.generate(**one) for one in fields]))
            for one, answered in zip(fields, whole, strict=True):
                self._record(one, answered, version)
            return JSONResponse(form.whole(whole))

    async def _stream(
        self, form: _Form, said: Any, answer: AsyncIterator[Any], body: _Generation, fields: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """The events of a stream, from the first part of the answer on."""
        try:
            for chunk in form.opening():
                yield _event(chunk)
            while isinstance(said, Text):
                for chunk in form.add(said.text):
                    yield _event(chunk)
                said = await anext(answer)
            if isinstance(said, FinishedAnswer):
                for chunk in form.closing(said, with_usage=body.includes_usage):
                    yield _event(chunk)
                self._record(fields, said, form.model.rpartition("/")[2])
            else:
                yield _event(said_error(said).body())
        except ProcessLost as error:
            yield _event(RequestRefused(503, str(error)).body())
        yield "data: [DONE]\n\n"

    def _record(self, fields: Mapping[str, Any], answered: FinishedAnswer, version: str) -> None:
        self._metrics.count_tokens(answered.prompt_tokens, answered.tokens)
        self._served.trial = partial(_find_failure, fields=fields)
        if self._recorded is not None:
            self._recorded.add_answer(fields, answered.text, version)


async def _find_failure(process: ModelProcess, fields: Mapping[str, Any]) -> str | None:
    """How a version fails on a request; None if it answers or refuses it."""
    async for said in process.generate(**{**fields, "max_new_tokens": 1}):
        if isinstance(said, Failed):
            return said.message
    return None


async def _collect(answers: Sequence[AsyncGenerator[Said]]) -> list[FinishedAnswer]:
    """The whole answers to several requests, which are generated together."""

    async def wait_for(answer: AsyncGenerator[Said]) -> FinishedAnswer:
        async for said in answer:
            if isinstance(said, FinishedAnswer):
                return said
            if not isinstance(said, Text):
                raise said_error(said)
        raise ProcessLost()

    tasks = [asyncio.create_task(wait_for(answer)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # of the others, if one is refused


def _require_known(body: _Generation, name: str, version: str) -> None:
    """Raises RequestRefused for another model, and for fields that have no effect here."""
    require_served(body.model, name, version)
    given = {**(body.model_extra or {}), **{field: getattr(body, field) for field in type(body).model_fields}}
    for field, plain in _PLAIN.items():
        value = given.get(field)
        if value is not None and value not in plain:
            shown = json.dumps(plain[0])
            raise refuse(field, f"{json.dumps(value)[:60]} has no effect on this model: leave it out, or give {shown}.")
    if len(body.stops) > 4:
        raise refuse("stop", f"{len(body.stops)} texts are given: give at most 4.")


class _Form:
    """The form of an answer, in one piece or in chunks."""

    kind: Literal["chat.completion", "text_completion"]
    prefix: str
    chunk_kind: str

    def begin(self, model: str) -> None:
        """Begins an answer of this model, `NAME/VERSION`."""
        self.model = model
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[FinishedAnswer]) -> dict[str, Any]:
        """The body of a response."""
        choices = [{"index": place, "logprobs": None, **self.choice(one)} for place, one in enumerate(answers)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": _usage(answers)}

    def choice(self, answered: FinishedAnswer) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first part."""
        return []

    def add(self, text: str) -> list[dict[str, Any]]:
        """The chunks of a part of the answer."""
        raise NotImplementedError

    def closing(self, answered: FinishedAnswer, *, with_usage: bool) -> list[dict[str, Any]]:
        """The chunks after the last part."""
        usage = [{**self._head, "object": self.chunk_kind, "choices": [], "usage": _usage([answered])}]
        return [*self.last(answered), *(usage if with_usage else [])]

    def last(self, answered: FinishedAnswer) -> list[dict[str, Any]]:
        raise NotImplementedError

    def chunk(self, part: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}


class _Chat(_Form):
    kind, prefix, chunk_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools, self._text, self._sent = tools, "", ""

    def choice(self, answered: FinishedAnswer) -> dict[str, Any]:
        message = parse_message(answered.text, self._tools)
        return {"message": {"refusal": None, **message}, "finish_reason": _reason(answered, message)}

    def opening(self) -> list[dict[str, Any]]:
        return [self.chunk({"delta": {"role": "assistant", "content": ""}})]

    def add(self, text: str) -> list[dict[str, Any]]:
        self._text += text
        return self._send(settled_content(self._text, self._tools))

    def last(self, answered: FinishedAnswer) -> list[dict[str, Any]]:
        message = parse_message(answered.text, self._tools)
        chunks = self._send(message["content"] or "")
        if reasoning := message.get("reasoning_content"):
            chunks.append(self.chunk({"delta": {"reasoning_content": reasoning}}))
        if calls := message.get("tool_calls"):
            numbered = [{"index": place, **call} for place, call in enumerate(calls)]
            chunks.append(self.chunk({"delta": {"tool_calls": numbered}}))
        return [*chunks, self.chunk({"delta": {}}, _reason(answered, message))]

    def _send(self, content: str) -> list[dict[str, Any]]:
        """A chunk with what the content has more than was sent."""
        more = content.removeprefix(self._sent) if content.startswith(self._sent) else ""
        self._sent += more
        return [self.chunk({"delta": {"content": more}})] if more else []


class _Completion(_Form):
    kind, prefix, chunk_kind = "text_completion", "cmpl", "text_completion"

    def choice(self, answered: FinishedAnswer) -> dict[str, Any]:
        return {"text": answered.text, "finish_reason": answered.finish_reason}

    def add(self, text: str) -> list[dict[str, Any]]:
        return [self.chunk({"text": text})]

    def last(self, answered: FinishedAnswer) -> list[dict[str, Any]]:
        return [self.chunk({"text": ""}, answered.finish_reason)]


def _reason(answered: FinishedAnswer, message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else answered.finish_reason


def _usage(answers: Sequence[FinishedAnswer]) -> dict[str, int]:
    prompt, completion = (sum(counts) for counts in zip(*((a.prompt_tokens, a.tokens) for a in answers), strict=True))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
