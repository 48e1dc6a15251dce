"""/v1/embeddings by the real client of OpenAI's API, and /v1/rerank: real servers, and models with known answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.flows.served import Server, register
from tests.training.counting import WORDS, write_assistant


@pytest.fixture
def home(tmp_path: Path, fresh_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "mlflow.db").write_bytes(fresh_database.read_bytes())
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    return home


@pytest.fixture
def embedder(home: Path, tmp_path: Path) -> Iterator[Server]:
    """The embedding of a text has positive numbers at the places of the text's words."""
    register(write_assistant(tmp_path / "model"), "sentence-similarity", matryoshka_dims=[8])
    with Server(home, "counter") as server:
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
