"""Metrics of texts: of generated ones, (N,) predictions and (N,) references; and of language models, (N,) sums over the
tokens of each row that the model was asked for, its targets.

All are computed from sums over rows. N rows, D sets of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import Value

from training.evaluation.metrics.definition import RatioMetric, SumMetric, inputs_of
from training.evaluation.predictions import Floats, Predictions
from training.evaluation.text_statistics import find_spaceless_script, split_words

Texts = Sequence[str]


class TextMetric(SumMetric):
    """A metric of texts: subclasses define `statistics(predictions, references) -> (N, S)` and `of_sums`.
    evaluate's `compute` passes both as lists."""

    _given: ClassVar[dict[str, Any]] = {"predictions": Value("string"), "references": Value("string")}
    _format = None


class Bleu(TextMetric):
    """How many of the predictions' words, pairs, triples and quadruples of words are in the references, less where
    predictions are too short. From 0 to 100, by sacrebleu's corpus BLEU with exponential smoothing. The words of a row
    are those of sacrebleu's tokenizer zh if its reference is in Chinese, char in another script without spaces between
    words, 13a in others. N-grams longer than all predictions do not count (sacrebleu's effective order)."""

    tokenizer: ClassVar[str | None] = None
    """The tokenizer of all rows; None: by the script of a row's reference."""

    @classmethod
    def describe(cls) -> str:
        if cls.tokenizer is None:
            return super().describe()
        return (
            f"bleu with sacrebleu's tokenizer {cls.tokenizer} for all rows{TOKENIZERS[cls.tokenizer]}. From 0 to 100."
        )

    def statistics(self, predictions: Texts, references: Texts, **_: Any) -> Floats:
        found = np.zeros((len(references), 10))
        for name, rows in self.tokenizers(references).items():
            texts = ([side[row] for row in rows] for side in (predictions, references))
            found[rows] = _row_statistics(_bleu(name), *texts)
        return found

    def of_sums(self, sums: Floats) -> Floats:
        bleu = _bleu()
        scores = [bleu._compute_score_from_stats(line).score for line in sums.astype(np.int64).tolist()]
        return np.where(sums[:, 1] > 0, scores, np.nan)  # the references' tokens

    def tokenizers(self, references: Texts) -> dict[str, list[int]]:
        """The rows by the tokenizer that splits them."""
        chosen: dict[str, list[int]] = {}
        for row, text in enumerate(references):
            chosen.setdefault(self.tokenizer or BY_SCRIPT[find_spaceless_script(text)], []).append(row)
        return chosen

    def remark(self, predictions: Predictions) -> str:
        """The tokenizers, unless all rows have the usual one."""
        references = inputs_of(self.name, self, predictions)["references"]
        chosen = {name: len(rows) for name, rows in self.tokenizers(references).items()}
        if self.tokenizer or not chosen.keys() - {"13a"}:
            return ""
        bleu = _bleu(max(chosen, key=lambda name: chosen[name]))
        bleu.num_refs = 1
        rows = ", ".join(f"{name} for {count:,} rows" for name, count in sorted(chosen.items()))
        others = " or ".join(f"bleu_{name}" for name in sorted(chosen))
        return (
            f"sacrebleu's tokenizer is {rows}, by the script of the references ({bleu.get_signature()}). For one "
            f"tokenizer, name {others} in evaluation.metrics."
        )


class Chrf(TextMetric):
    """The F-score, with recall counted twice, of up to six characters in a row. From 0 to 100, by sacrebleu's corpus
    chrF2."""

    def statistics(self, **inputs: Any) -> Floats:
        return _row_statistics(_chrf(), **inputs)

    def of_sums(self, sums: Floats) -> Floats:
        chrf = _chrf()
        scores = [chrf._compute_score_from_stats(line.tolist()).score for line in sums]
        return np.where(sums[:, 1::3].any(axis=1), scores, np.nan)


def _row_statistics(metric: Any, predictions: Texts, references: Texts) -> Floats:
    """Sacrebleu's own statistics of each row."""
    return np.array(metric._extract_corpus_statistics(list(predictions), [list(references)]), np.float64)


def _bleu(tokenizer: str = "13a") -> Any:
    from sacrebleu.metrics.bleu import BLEU  # here, because the import takes a third of a second

    # The effective order changes nothing unless all predictions have fewer than four words.
    return BLEU(tokenize=tokenizer, effective_order=True)


BY_SCRIPT = {"": "13a", "chinese": "zh", "other": "char"}
"""Sacrebleu's tokenizer by the script of a reference."""
TOKENIZERS = {
    "13a": ", which splits at spaces and signs",
    "intl": ", which splits at the signs of all scripts",
    "zh": ": each Chinese character is a word",
    "char": ": each character is a word",
}
"""The words of each."""


def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


class _MeanOfTexts(RatioMetric, TextMetric):
    """The mean of a value of each row."""

    def _of_row(self, prediction: str, reference: str) -> float | None:
        """None: the row does not count."""
        raise NotImplementedError

    def statistics(self, **inputs: Any) -> Floats:
        texts = zip(inputs["predictions"], inputs["references"], strict=True)
        found = [self._of_row(*both) for both in texts]
        return np.array([(0.0, 0.0) if value is None else (value, 1.0) for value in found]).reshape(len(found), 2)


class ExactMatch(_MeanOfTexts):
    """The share of predictions that are their references, but for white space at either end. From 0 to 1."""

    def _of_row(self, prediction: str, reference: str) -> float:
        return float(prediction.strip() == reference.strip())


class Rouge1(_MeanOfTexts):
    """The mean F-score of the words that a prediction and its reference share. Words are runs of letters and digits in
    lower case, with their endings; in scripts without spaces between words, characters. References without a word do
    not count. From 0 to 1, in English as by rouge-score's rouge1."""

    _order = 1

    def _of_row(self, prediction: str, reference: str) -> float | None:
        ours, theirs = (_runs(split_words(text), self._order) for text in (prediction, reference))
        return _f1((ours & theirs).total(), ours.total(), theirs.total())


class Rouge2(Rouge1):
    """The same of pairs of words in a row. References of one word do not count. From 0 to 1, in English as by
    rouge-score's rouge2."""

    _order = 2


class RougeL(_MeanOfTexts):
    """The same of the longest sequence of words that both have in this order, others between them or not. From 0 to 1,
    in English as by rouge-score's rougeL."""

    def _of_row(self, prediction: str, reference: str) -> float | None:
        ours, theirs = split_words(prediction), split_words(reference)
        return _f1(_longest_shared(ours, theirs), len(ours), len(theirs))


def _runs(words: list[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def _f1(both: int, ours: int, theirs: int) -> float | None:
    """None if the reference, `theirs`, has nothing to find."""
    return 2 * both / (ours + theirs) if theirs else None


def _longest_shared(first: list[str], second: list[str]) -> int:
    """The length of the longest common subsequence, a bit for each word of `first` (Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    whole = rest = (1 << len(first)) - 1
    for word in second:
        found = rest & places.get(word, 0)
        rest = ((rest + found) | (rest - found)) & whole
    return len(first) - rest.bit_count()


class Perplexity(RatioMetric):
    """e to the power of the mean loss of all targets, a loss being minus the logarithm of a token's probability: as
    uncertain as a choice between so many tokens. From 1 up; it has no value without targets."""

    _given: ClassVar[dict[str, Any]] = {"loss": Value("float64"), "targets": Value("int64")}

    def statistics(self, **inputs: Any) -> Floats:
        return np.stack([inputs["loss"], inputs["targets"]], axis=1).astype(np.float64)

    def of_sums(self, sums: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(super().of_sums(sums)))


class TokenAccuracy(RatioMetric):
    """The share of targets that the model found likelier than any other token. From 0 to 1; it has no value without
    targets."""

    _given: ClassVar[dict[str, Any]] = {"hits": Value("int64"), "targets": Value("int64")}

    def statistics(self, **inputs: Any) -> Floats:
        return np.stack([inputs["hits"], inputs["targets"]], axis=1).astype(np.float64)
