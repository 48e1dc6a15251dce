"""The bodies of HTTP responses, for the description of the API: responses are written without them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class PredictionsBody(BaseModel):
    """The response of /predict."""

    model: str
    """`NAME/VERSION`."""
    predictions: list[dict[str, Any]]
    """For each row, as `finetune predict` writes it; {"error": TEXT} for a row that cannot be used."""


class HealthBody(BaseModel):
    """The response of /health."""

    status: Literal["ok", "loading"]
    model: str
    version: str | None
    waiting: int
    """Requests without a whole answer."""
    problem: str | None
    """Why the version that the alias has now is not served."""


class ModelBody(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsBody(BaseModel):
    """The response of /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


class Usage(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatChoice(BaseModel):
    """An answer to a conversation."""

    index: int
    logprobs: None
    message: dict[str, Any]
    """`role`, `content` and `tool_calls` as in OpenAI's API, and `reasoning_content`."""
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """The continuation of a text."""

    index: int
    logprobs: None
    text: str
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class EmbeddingBody(BaseModel):
    """The embedding of a text."""

    object: Literal["embedding"]
    index: int
    """The place of the text in the request."""
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32 numbers."""


class PromptUsage(BaseModel):
    """Counts of tokens of a request without a generated answer."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsBody(BaseModel):
    """The response of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: PromptUsage


class RankedDocument(BaseModel):
    """A document and its score for the query."""

    index: int
    """The place of the document in the request."""
    relevance_score: float
    document: dict[str, str] | None = None
    """Its `text`, if the request asks for it."""


class TotalUsage(BaseModel):
    """The tokens of all queries with their documents."""

    total_tokens: int


class RerankBody(BaseModel):
    """The response of /v1/rerank: the documents, the best first."""

    model: str
    results: list[RankedDocument]
    usage: TotalUsage


class Error(BaseModel):
    """Why a request has no answer."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    """The field of the request that is wrong."""
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response with a status of 400 and more."""

    error: Error


REFUSED: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "The request has no answer."}
}
"""The further responses of a path."""
