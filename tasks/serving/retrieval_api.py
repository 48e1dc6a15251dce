"""Embeddings in the form of OpenAI's API, and documents sorted for a query in the form of Jina's and Cohere's.

Sources: https://platform.openai.com/docs/api-reference/embeddings, https://jina.ai/reranker and
https://docs.cohere.com/reference/rerank.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from tasks.registry.model_spec import ModelSpec
from tasks.serving.response_bodies import REFUSED, EmbeddingsBody, RerankBody
from tasks.serving.responses import refuse, require_served
from training.programs.serve import Predicted
from training.task_types import class_of, from_settings
from training.task_types.reranking import Reranking
from training.task_types.text_embedding import TextEmbedding, normalize

MOST_TEXTS = 2_048
"""In one request, as in OpenAI's API."""
Rows = list[dict[str, Any]]


class Ask(Protocol):
    """Predicts rows with the prompt of a column of the training data, both made for the version that answers; returns
    the predictions and the version."""

    def __call__(
        self,
        make_rows: Callable[[ModelSpec], Rows],
        request: Request,
        find_prompt: Callable[[ModelSpec], str | None] = ...,
    ) -> Awaitable[tuple[Predicted, ModelSpec]]: ...


class EmbeddingRequest(BaseModel):
    """The body of /v1/embeddings."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    """The name of the served model."""
    input: str | list[str] | list[int] | list[list[int]]
    """A text or several; tokens are refused."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of the little-endian float32 numbers."""
    dimensions: int | None = Field(None, ge=1)
    """The first so many dimensions, one of options.matryoshka_dims of the model's recipe, scaled to length 1; or all of
    them, unchanged."""
    input_type: str | None = None
    """query or document: the prompt that is put before the texts. By default that of the model's recipe."""


class RerankRequest(BaseModel):
    """The body of /v1/rerank."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    """The name of the served model."""
    query: str
    documents: list[str | dict[str, Any]] = Field(min_length=1, max_length=MOST_TEXTS)
    """Texts, or objects with a `text`."""
    top_n: int | None = Field(None, ge=1)
    """The most results; all by default."""
    return_documents: bool = False
    """Whether results have their texts."""


def build_retrieval_routes(task: str, name: str, ask: Ask) -> APIRouter:
    """The route of a task type for retrieval, for the served model of this name; none for other task types."""
    routes, task_type = APIRouter(tags=["Retrieval"], responses=REFUSED), class_of(task)

    async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """The embedding of a text, or of each of several texts."""
        texts = [body.input] if isinstance(body.input, str) else body.input
        if not 0 < len(texts) <= MOST_TEXTS:
            raise refuse("input", f"{len(texts):,} texts are given: give 1 to {MOST_TEXTS:,}.")
        if not all(isinstance(text, str) for text in texts):
            raise refuse("input", "tokens are given: give texts.")

        def rows(model: ModelSpec) -> Rows:
            require_served(body.model, name, model.version)
            column = next(iter(model.columns.values()))
            return [{column: text} for text in texts]

        predicted, model = await ask(rows, request, lambda model: _find_prompt(model, body.input_type))
        _require_usable(predicted, "input")
        vectors = np.array([record["embedding"] for record in predicted.records if record], np.float32)
        if body.dimensions is not None:
            vectors = _shorten(vectors, body.dimensions, model)
        written = [_encode(vector) if body.encoding_format == "base64" else vector.tolist() for vector in vectors]
        data = [{"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(written)]
        tokens = sum(predicted.tokens)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": f"{name}/{model.version}", "usage": usage}

    async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
        """The documents with their scores for the query, the best first."""
        if not body.query.strip():
            raise refuse("query", "is empty: give a text.")
        texts = [one if isinstance(one, str) else one.get("text") for one in body.documents]

        def rows(model: ModelSpec) -> Rows:
            require_served(body.model, name, model.version)
            if "documents" in model.columns:
                return [{model.columns["query"]: body.query, model.columns["documents"]: texts}]
            return [{model.columns["query"]: body.query, model.columns["document"]: text} for text in texts]

        predicted, model = await ask(rows, request)
        _require_usable(predicted, "documents", of_one="documents" in model.columns)
        records = [record for record in predicted.records if record is not None]
        if "documents" in model.columns:
            ranked = [(one["score"], one["document"]) for one in records[0]["ranking"]]
        else:
            scores = [record["score"] for record in records]
            ranked = sorted(zip(scores, range(len(scores)), strict=True), key=lambda one: -one[0])
        results = [
            {"index": place, "relevance_score": score}
            | ({"document": {"text": texts[place]}} if body.return_documents else {})
            for score, place in ranked[: body.top_n]
        ]
        return {
            "model": f"{name}/{model.version}",
            "results": results,
            "usage": {"total_tokens": sum(predicted.tokens)},
        }

    if issubclass(task_type, TextEmbedding):
        routes.add_api_route("/v1/embeddings", embeddings, methods=["POST"], response_model=EmbeddingsBody)
    if issubclass(task_type, Reranking):
        routes.add_api_route("/v1/rerank", rerank, methods=["POST"], response_model=RerankBody)
    return routes


def _require_usable(predicted: Predicted, field: str, *, of_one: bool = False) -> None:
    """Raises RequestRefused if a row has an error. `of_one`: one row has the whole field."""
    for place, error in enumerate(predicted.errors):
        if error is not None:
            raise refuse(field if of_one else f"{field}[{place}]", f"{error}.")


def _find_prompt(model: ModelSpec, kind: str | None) -> str | None:
    """The first column whose prompt has this name, or the column of this name; None for None."""
    if kind is None:
        return None
    task_type = from_settings(model.task)
    assert isinstance(task_type, TextEmbedding)
    columns = task_type.prompt_columns()
    for column, names in columns.items():
        if kind in (column, *names):
            return column
    known = [*dict.fromkeys(names[0] for names in columns.values())]
    message = f"{kind!r} is no kind of text of this model: give {' or '.join(known)}, or leave it out."
    raise refuse("input_type", message)


def _shorten(vectors: np.ndarray[Any, Any], dimensions: int, model: ModelSpec) -> np.ndarray[Any, Any]:
    """The first dimensions of the embeddings, (N, dimensions), with length 1 if they are cut."""
    trained = model.task["options"].get("matryoshka_dims") or []
    allowed = sorted({*trained, vectors.shape[1]})
    if dimensions not in allowed:
        message = f"{dimensions} is none of the numbers that the model was trained for: {', '.join(map(str, allowed))}."
        raise refuse("dimensions", message)
    if dimensions == vectors.shape[1]:
        return vectors
    return normalize(vectors[:, :dimensions])


def _encode(vector: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
