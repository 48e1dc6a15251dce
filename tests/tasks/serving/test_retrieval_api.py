"""/v1/embeddings by the real client of OpenAI's API, and /v1/rerank: real servers, and models with known answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.flows.served import Server, register
from tests.training.counting import NUMBERS, WORDS, write_assistant, write_classifier
from training.models.repository_files import PROMPTS


@pytest.fixture
def embedder(registry_home: Path, tmp_path: Path) -> Iterator[Server]:
    """The embedding of a text has positive numbers at the places of the text's words."""
    register(write_assistant(tmp_path / "model"), "sentence-similarity", matryoshka_dims=[8])
    with Server(registry_home, "counter") as server:
        yield server


def test_embeddings_are_those_of_predict_as_numbers_or_base64_and_shortened_if_the_model_was_trained_for_it(
    embedder: Server,
) -> None:
    http = httpx.Client(trust_env=False)
    api = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key=embedder.token, max_retries=0, http_client=http)
    texts = ["one two", "three", "two"]
    found = api.embeddings.create(model="counter", input=texts)  # by default the client asks for base64
    plain = api.embeddings.create(model="counter", input=texts[1], encoding_format="float")
    rows = embedder.client.post("/predict", json={"rows": [{"talk": text} for text in texts]}).json()["predictions"]
    assert [one.index for one in found.data] == [0, 1, 2] and found.model == "counter/1"
    assert [one.embedding for one in found.data] == [pytest.approx(row["embedding"], abs=1e-6) for row in rows]
    assert plain.data[0].embedding == pytest.approx(rows[1]["embedding"], abs=1e-6)
    for text, one in zip(texts, found.data, strict=True):
        assert [word for word, value in zip(WORDS, one.embedding, strict=True) if value > 0] == text.split()
    assert found.usage.prompt_tokens == found.usage.total_tokens == 4

    short = api.embeddings.create(model="counter", input="three", dimensions=8).data[0].embedding
    assert len(short) == 8 and sum(value * value for value in short) == pytest.approx(1)
    refused = {
        "dimensions: 5 is none of the numbers that the model was trained for: 8, 20": {"input": "one", "dimensions": 5},
        "input: tokens are given": {"input": [[1, 2]]},
        "input[1]: has no text in column 'talk'": {"input": ["one", " "]},
        "input: 0 texts are given": {"input": []},
    }
    for message, body in refused.items():
        with pytest.raises(openai.BadRequestError, match=message.replace("[", r"\[")):
            api.embeddings.create(model="counter", **body)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="there is no model 'other': counter is served"):
        api.embeddings.create(model="other", input="one")
    assert embedder.client.post("/v1/rerank", json={}).status_code == 404


def test_a_request_selects_the_prompt_of_its_texts_and_a_kind_that_the_model_lacks_is_refused(
    registry_home: Path, tmp_path: Path
) -> None:
    prompts = {"anchor": "one ", "positive": "two "}
    register(write_assistant(tmp_path / "model"), "embedding", prompts=prompts, predicted_prompt="positive")

    def words_of(**body: object) -> list[str]:
        answer = server.client.post("/v1/embeddings", json={"model": "counter", "input": "five", **body}).json()
        values = answer["data"][0]["embedding"]
        return [word for word, value in zip(WORDS, values, strict=True) if value > 0]

    with Server(registry_home, "counter", "--record", str(tmp_path / "served")) as server:
        assert words_of() == words_of(input_type="document") == words_of(input_type="positive") == ["two", "five"]
        assert words_of(input_type="query") == words_of(input_type="anchor") == ["one", "five"]
        refused = server.client.post("/v1/embeddings", json={"model": "counter", "input": "a", "input_type": "querry"})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "input_type"
        message = "input_type: 'querry' is no kind of text of this model: give query or document, or leave it out."
        assert error["message"] == message
    (recorded,) = (tmp_path / "served").iterdir()
    found = [json.loads(line).get("served_prompt") for line in recorded.read_text().splitlines()]
    assert found == [None, "positive", "positive", "anchor", "anchor"]


def test_a_model_of_texts_with_labels_gets_no_prompt_of_queries_or_documents(
    registry_home: Path, tmp_path: Path
) -> None:
    write_assistant(tmp_path / "model")
    prompts = {"prompts": {"query": "one ", "document": "two ", "usual": "three "}, "default_prompt_name": "usual"}
    (tmp_path / "model" / PROMPTS).write_text(json.dumps(prompts))
    register(tmp_path / "model", "embedding", ["text"], loss="batch_all_triplet")
    with Server(registry_home, "counter") as server:
        asked = {"model": "counter", "input": "five"}
        kinds = {
            kind: server.client.post("/v1/embeddings", json=asked | ({} if kind is None else {"input_type": kind}))
            for kind in (None, "text", "default", "query", "document")
        }
    values = kinds[None].json()["data"][0]["embedding"]
    assert [word for word, value in zip(WORDS, values, strict=True) if value > 0] == ["three", "five"]
    assert kinds["text"].json() == kinds["default"].json() == kinds[None].json()
    for kind in ("query", "document"):
        message = f"input_type: '{kind}' is no kind of text of this model: give default, or leave it out."
        assert (kinds[kind].status_code, kinds[kind].json()["error"]["message"]) == (400, message)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [("query", "document"), ("query", "documents")], ids=["of rows", "of lists"])
def test_documents_are_sorted_by_their_scores_for_a_query(
    columns: tuple[str, str], registry_home: Path, tmp_path: Path
) -> None:
    register(write_scorer(tmp_path / "model"), "reranking", columns)
    documents = ["two", "nine", {"text": "five"}]
    with Server(registry_home, "counter") as server:
        asked = {"model": "counter", "query": "one", "documents": documents}
        found = server.client.post("/v1/rerank", json=asked).json()
        first = server.client.post("/v1/rerank", json=asked | {"top_n": 1, "return_documents": True}).json()
        empty = server.client.post("/v1/rerank", json=asked | {"documents": ["two", " "]})
        unasked = server.client.post("/v1/rerank", json=asked | {"query": " "})
        assert server.client.post("/v1/embeddings", json={}).status_code == 404
    scores = [one["relevance_score"] for one in found["results"]]
    assert [one["index"] for one in found["results"]] == [1, 2, 0] and scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)  # a sigmoid, by the default loss
    assert found["model"] == "counter/1" and found["usage"] == {"total_tokens": 6}
    assert first["results"] == [{"index": 1, "relevance_score": scores[0], "document": {"text": "nine"}}]
    assert unasked.status_code == 400 and unasked.json()["error"]["param"] == "query"
    assert empty.status_code == 400 and "documents" in empty.json()["error"]["message"]


def write_scorer(folder: Path) -> Path:
    """A reranker: the score of a document is higher for larger numbers as its last word."""
    import torch
    from transformers import GPT2ForSequenceClassification

    write_classifier(folder, shift=0)
    model = GPT2ForSequenceClassification.from_pretrained(folder, num_labels=1, ignore_mismatched_sizes=True)
    with torch.no_grad():
        model.score.weight.zero_()
        for number, word in enumerate(NUMBERS):
            model.score.weight[0, WORDS.index(word)] = number / 10
    model.save_pretrained(folder)
    return folder
