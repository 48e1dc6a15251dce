"""Rows with a model's outputs, from which simulated drift reports draw their samples.

The model is TF-IDF with logistic regression, and the embeddings are its features in 32 dimensions: the comparisons see
only outputs, so a model that trains in a second takes the place of a fine-tuned one.

N rows, L labels.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from training.evaluation.drift.verdict import Observations

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
DIMENSIONS = 32
MAX_TOKENS = 64
UNKNOWN = "[UNK]"
TYPING_ERRORS = 0.05
"""The share of letters that typing errors exchange with the next one."""


@dataclass(frozen=True)
class Pool:
    """Rows that the model has not trained on, with its outputs."""

    texts: Sequence[str]
    labels: Rows  # (N,) -1 without a label
    probabilities: Floats  # (N, L)
    embeddings: Floats  # (N, D)
    tokens: Floats  # (N,)
    unknown: Floats  # (N,)

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Rows) -> Observations:
        """The observations of these rows."""
        texts = [self.texts[row] for row in rows]
        predictions, confidence = self.probabilities[rows].argmax(axis=1), self.probabilities[rows].max(axis=1)
        return Observations(
            texts=texts,
            fields={"label": predictions.tolist(), "probability": confidence.round(2).tolist()},
            tokens=self.tokens[rows],
            tokens_per_word=self.tokens[rows] / np.maximum(1, [len(text.split()) for text in texts]),
            unknown=self.unknown[rows],
            embeddings=self.embeddings[rows],
            confidence=confidence,
            correct=predictions == self.labels[rows],
        )


class Model:
    """A text classifier with embeddings."""

    def __init__(self, texts: Sequence[str], labels: Rows) -> None:
        self._classifier = make_pipeline(
            TfidfVectorizer(min_df=2, sublinear_tf=True), LogisticRegression(C=10, max_iter=500)
        )
        self._classifier.fit(texts, labels)
        self._embedder = TruncatedSVD(DIMENSIONS, random_state=0)
        self._embedder.fit(self._classifier[0].transform(texts))
        self._tokenizer = Tokenizer(WordPiece(unk_token=UNKNOWN))
        self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = Lowercase(), BertPreTokenizer()
        self._tokenizer.train_from_iterator(texts, WordPieceTrainer(vocab_size=4_000, special_tokens=[UNKNOWN]))

    def observe(self, texts: Sequence[str], labels: Rows | None = None) -> Pool:
        """The texts with the model's outputs."""
        features = self._classifier[0].transform(texts)
        ids = [np.array(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]
        return Pool(
            texts,
            np.full(len(texts), -1) if labels is None else labels,
            self._classifier[1].predict_proba(features),
            self._embedder.transform(features),
            np.array([len(row) for row in ids], np.float64),
            np.array([(row == 0).mean() if len(row) else 0.0 for row in ids]),
        )


def embed(model: Path, texts: Sequence[str]) -> Floats:
    """(N, D) the embeddings of the texts by a model of sentence-transformers, as `finetune drift` observes them."""
    import pyarrow as pa

    from training import task_types
    from training.engine.observation import Observer
    from training.models import loading

    task_type = task_types.load("embedding", {"pooling": "mean", "normalize": True})
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = loading.load_tokenizer(model)
        network = loading.load_base(task_type, model, seed=0)
        task_type.prepare(network, tokenizer)
        loading.export(network, model, Path(folder))
        observer = Observer(task_type, Path(folder), model, MAX_TOKENS)
        rows = observer.observe(pa.record_batch({"anchor": list(texts)}))
    return np.stack(rows["embedding"].to_pylist()).astype(np.float64)


def cut(text: str) -> str:
    """The first half of a text's words."""
    words = text.split()
    return " ".join(words[: max(1, len(words) // 2)])


def misspell(text: str) -> str:
    """The text with exchanged neighbours among its letters, the same at each call."""
    draw, letters = random.Random(text), list(text)
    for place in range(len(letters) - 1):
        if letters[place].isalpha() and letters[place + 1].isalpha() and draw.random() < TYPING_ERRORS:
            letters[place], letters[place + 1] = letters[place + 1], letters[place]
    return "".join(letters)


@dataclass(frozen=True)
class Shift:
    """New rows: some of `pool`, in proportion to `weights`, and a `share` of them from `other`.

    A row of `other` with the same number as a reference row is left out if `is_changed`: it is that row, changed.
    """

    pool: Pool
    weights: Floats | None = None
    other: Pool | None = None
    share: float = 0.0
    is_changed: bool = False

    def draw(self, generator: np.random.Generator, reference_rows: int, rows: int) -> tuple[Observations, Observations]:
        """Reference rows, and new rows that share none with them."""
        order = generator.permutation(len(self.pool))
        reference, rest = order[:reference_rows], order[reference_rows:]
        others = generator.binomial(rows, self.share) if self.other else 0
        if self.weights is not None:
            rest = rest[np.argsort(-np.log(generator.random(len(rest))) / self.weights[rest])]
        new = self.pool.take(rest[: rows - others])
        if self.other and others:
            places = rest[rows - others :] if self.is_changed else generator.permutation(len(self.other))
            new = _concatenate(new, self.other.take(places[:others]))
        return self.pool.take(reference), new


def _concatenate(first: Observations, second: Observations) -> Observations:
    fields = {name: [*first.fields[name], *second.fields[name]] for name in first.fields}
    arrays = ("tokens", "tokens_per_word", "unknown", "embeddings", "confidence", "correct")
    joined = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in arrays}
    return Observations(texts=[*first.texts, *second.texts], fields=fields, **joined)
