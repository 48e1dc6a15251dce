"""The task types that fit some rows, and the columns that each would read.

Only the rows themselves are looked at: the types of the values, how many are different, and the names of the columns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from typing import Any

from training.recipe.tables.formats import IMAGE_SUFFIXES

MOST_LABELS = 1000
MOST_RATINGS = 20
"""Different whole numbers that may be classes, such as stars; labels of a column that is not called so come first if
they are not more."""
FEW_WORDS = 3.0
"""Words of a text on average: shorter values are names, labels or ids unless the column is called a text."""

LABELS: Sequence[str] = (
    *("label", "labels", "class", "category", "intent", "sentiment", "topic", "target", "tag", "tags", "emotion"),
    *("team", "queue", "language", "genre", "y", "output"),
)
"""Names of columns of labels, the likeliest first."""
TEXTS: Sequence[str] = (
    *("text", "sentence", "review", "content", "body", "message", "comment", "utterance", "document", "description"),
    *("tweet", "post", "question", "query", "mail", "email", "title", "subject"),
)
"""Names of columns of texts, the likeliest first."""
SCORES = ("score", "similarity", "similarity_score", "target", "value", "y", "label", "price", "grade", "relatedness")
RATINGS = ("stars", "rating", "ratings", "star_rating", "score")
PAIRS = (
    *(("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("sentence_a", "sentence_b"), ("text1", "text2")),
    *(("text_a", "text_b"), ("premise", "hypothesis"), ("question1", "question2"), ("query", "passage")),
    *(("question", "sentence"), ("text", "text_pair"), ("query", "document"), ("s1", "s2")),
)
"""Names of two texts that belong together."""
QUERIES = ("query", "question", "anchor", "search", "query_text")
DOCUMENTS = ("documents", "docs", "passages", "candidates", "answers", "responses", "texts")
DOCUMENT = ("document", "doc", "passage", "candidate", "answer", "response", "positive")
"""Names of columns of queries, of lists of documents, and of single documents."""
TEXT_TO_TEXT = (
    *(("source", "target"), ("document", "summary"), ("article", "summary"), ("article", "highlights")),
    *(("dialogue", "summary"), ("text", "summary"), ("input", "output"), ("src", "tgt"), ("input", "target")),
)
NO_INPUTS = re.compile(
    r"(^|_)(id|ids|uuid|guid|index|idx|date|time|timestamp|created|updated|url|hash|split|user)($|_)"
)
_SEPARATORS = (";", "|", ",")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WITH_COMMA = re.compile(r"[+-]?\d+([.,]\d+)*")
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?")


@dataclass(frozen=True)
class TaskGuess:
    """A task type and the columns that it would read."""

    task: str
    reason: str
    """A clause about the rows, such as "column 'label' has 3 different values"."""
    data: Mapping[str, Any]
    """Fields of the recipe's section `data`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    texts: Sequence[str] = ()
    """The columns whose lengths count."""
    labels: Sequence[str] = ()
    """The labels in the rows, the most frequent first."""
    has_tools: bool = False
    """Whether rows declare tools to call."""
    candidates: int = 1
    """The documents of a row at most, for task reranking."""
    group: str = ""
    """The column whose equal values belong together; empty if there is none."""


@dataclass(frozen=True)
class ColumnProfile:
    """The values of a column in some rows."""

    name: str
    values: Sequence[Any]
    """Those that are not missing or blank."""
    rows: int
    """All rows."""

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each value occurs, by its spelling."""
        return Counter(str(value) for value in self.values)

    @cached_property
    def is_flat(self) -> bool:
        """Whether no value is a list or an object."""
        return not any(isinstance(value, list | tuple | Mapping) for value in self.values)

    @cached_property
    def is_number(self) -> bool:
        """Whether all values are numbers, or texts that spell one."""
        return self._all(
            lambda value: not isinstance(value, bool) and _NUMBER.fullmatch(str(value).strip()) is not None
        )

    @cached_property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        return self.is_number and self._all(lambda value: _WHOLE.fullmatch(str(value).strip()) is not None)

    @cached_property
    def is_number_with_commas(self) -> bool:
        """Whether all values are numbers, some with a comma, such as 3,5."""
        return not self.is_number and self._all(lambda value: _WITH_COMMA.fullmatch(str(value).strip()) is not None)

    @cached_property
    def has_letters(self) -> bool:
        """Whether most values have a letter."""
        return sum(any(map(str.isalpha, str(value))) for value in self.values) > len(self.values) / 2

    @cached_property
    def is_boolean(self) -> bool:
        """Whether all values are true or false, also as 1 and 0."""
        return bool(self.values) and {str(value).lower() for value in self.values} <= {"true", "false", "1", "0"}

    @cached_property
    def words(self) -> float:
        """Words of a value on average. Writing without spaces counts two characters as a word."""
        lengths = (max(len(str(value).split()), _unspaced(str(value)) / 2) for value in self.values)
        return mean(lengths) if self.values else 0.0

    @cached_property
    def is_list_of_texts(self) -> bool:
        """Whether all values are lists of texts or of numbers."""
        return self._all(lambda value: isinstance(value, list) and all(isinstance(one, str | int) for one in value))

    @cached_property
    def is_messages(self) -> bool:
        """Whether all values are lists of messages, with role and content or with from and value."""
        return self._all(lambda value: _are_messages(value, "role") or _are_messages(value, "from"))

    @cached_property
    def is_images(self) -> bool:
        """Whether all values are paths of images, their files as `data:image/…`, or objects with them."""
        return self._all(_is_image)

    @cached_property
    def has_tools(self) -> bool:
        """Whether a value is an object with tools."""
        return any(isinstance(value, Mapping) and bool(value.get("tools")) for value in self.values)

    @property
    def repeats(self) -> bool:
        """Whether values recur as those of labels do: on average each at least twice."""
        return 2 <= len(self.counts) <= MOST_LABELS and len(self.values) >= 2 * len(self.counts)

    @property
    def is_named_as_no_input(self) -> bool:
        """Whether the name is that of an id, a date or the like."""
        return NO_INPUTS.search(self.name.lower()) is not None

    def _all(self, holds: Any) -> bool:
        return bool(self.values) and all(map(holds, self.values))


def guess_tasks(columns: Mapping[str, Sequence[Any]]) -> list[TaskGuess]:
    """The task types that fit rows with these columns, the likeliest first; empty if none does."""
    profiles = {
        name: ColumnProfile(name, [one for one in values if one is not None and str(one).strip()], len(values))
        for name, values in columns.items()
    }
    there = {name: profile for name, profile in profiles.items() if profile.values}
    found: dict[str, TaskGuess] = {}
    for guess in _guesses(there, columns.keys()):
        found.setdefault(guess.task, guess)
    return list(found.values())


def _guesses(columns: Mapping[str, ColumnProfile], names: Collection[str]) -> Iterator[TaskGuess]:
    yield from _preferences(columns)
    yield from _conversations(columns, names)
    kinds = (
        _images,
        _candidates,
        _anchors,
        _questions_with_spans,
        _tags,
        _pairs_of_texts,
        _scored_pairs,
        _labelled_texts,
        _texts,
        _texts_to_search,
    )
    for guesses in kinds:
        yield from guesses(columns)


_OPENAI_PREFERENCE = ("input", "preferred_output", "non_preferred_output")


def _preferences(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    if {"chosen", "rejected"} <= columns.keys():
        named = {"chosen": "chosen", "rejected": "rejected"}
        asked = [name for name, column in columns.items() if column.is_messages and name not in named]
        if "prompt" in columns or asked:
            named = {"prompt": "prompt" if "prompt" in columns else asked[0], **named}
        asked = [named["prompt"], "chosen"] if "prompt" in named else ["chosen"]
        reason = "each row has a chosen and a rejected answer"
        yield _with_tools(columns, TaskGuess("preference", reason, {"columns": named}, texts=asked))
        reason += ", which also train a reward"
        yield _with_tools(columns, TaskGuess("reward-modeling", reason, {"columns": named}, texts=asked))
    if {*_OPENAI_PREFERENCE} <= columns.keys():
        named = dict(zip(("prompt", "chosen", "rejected"), _OPENAI_PREFERENCE, strict=True))
        reason, asked = "each row has a preferred and a non-preferred output (OpenAI's form)", [*named.values()][:2]
        for task in ("preference", "reward-modeling"):
            guess = TaskGuess(task, reason, {"columns": named}, texts=asked, has_tools=columns["input"].has_tools)
            yield _with_tools(columns, guess)
    if "label" not in columns or not columns["label"].is_boolean:
        return
    reason = "each answer is rated as true or false"
    if {"prompt", "completion"} <= columns.keys():
        data = {"columns": {"prompt": "prompt", "completion": "completion"}, "label": "label"}
        yield _with_tools(columns, TaskGuess("kto", reason, data, texts=("prompt", "completion")))
    for name, column in columns.items():
        if column.is_messages:
            data = {"columns": {"messages": name}, "label": "label"}
            yield _with_tools(columns, TaskGuess("kto", reason, data, texts=(name,)))


def _with_tools(columns: Mapping[str, ColumnProfile], guess: TaskGuess) -> TaskGuess:
    """The guess with the column `tools`, if rows have one."""
    if "tools" not in columns:
        return guess
    data = {**guess.data, "columns": {**guess.data["columns"], "tools": "tools"}}
    return replace(guess, data=data, texts=(*guess.texts, "tools"), has_tools=True)


def _conversations(columns: Mapping[str, ColumnProfile], there: Collection[str]) -> Iterator[TaskGuess]:
    """`there` are all columns, those without any value too."""
    for name, column in columns.items():
        if column.is_messages:
            data: dict[str, Any] = {"columns": {"messages": name}}
            reason = f"column {name!r} has lists of messages"
            if "label" in columns and columns["label"].is_boolean:
                yes = "True" if {*columns["label"].counts} <= {"True", "False"} else "1"
                data["filter"] = f"label == {yes}"
                reason += f", and 'label' rates them: only rows of {yes} are read"
            yield _with_tools(columns, TaskGuess("sft", reason, data, texts=(name,)))
    for usual, roles in _ANSWERED.items():
        names = _spelled(usual, columns)
        if names and _are_texts(columns[name] for name in names):
            data = {"columns": dict(zip(roles, names, strict=True))}
            if "input" in there and "input" not in names and roles[0] == "instruction":
                data["columns"]["input"] = "input"
            reason = f"columns {_and(names)} are a request and its answer"
            yield TaskGuess("sft", reason, data, texts=names)
            data = {"columns": {"source": names[0], "target": names[-1]}}
            yield TaskGuess("seq2seq", f"column {names[-1]!r} is a text for that of {names[0]!r}", data, texts=names)


_ANSWERED = {
    ("instruction", "output"): ("instruction", "output"),
    ("prompt", "completion"): ("prompt", "completion"),
    ("prompt", "response"): ("prompt", "completion"),
    ("instruction", "response"): ("instruction", "output"),
    ("question", "answer"): ("instruction", "output"),
    ("query", "response"): ("instruction", "output"),
    ("query", "answer"): ("instruction", "output"),
}
"""Names of a request and its answer, and the roles of the two for task sft."""


_OF_IMAGES = {
    "sequence-classification": "image-classification",
    "multi-label-classification": "image-multi-label-classification",
    "regression": "image-regression",
}
"""Task types of images, by those of texts with the same labels."""


def _images(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    for name in (name for name, column in columns.items() if column.is_images):
        rest = {other: column for other, column in columns.items() if other != name and not column.is_images}
        for guess in _with_target([], rest, f"{name!r} has images"):
            if (task := _OF_IMAGES.get(guess.task)) is not None:
                data = {"columns": {"image": name}, **{key: one for key, one in guess.data.items() if key != "text"}}
                yield replace(guess, task=task, data=data, texts=())


def _candidates(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    """Queries with a list of documents and a list of their labels; or with a document a row, and several such rows."""
    lower = {name.lower(): name for name in columns}
    for query in (columns[lower[name]] for name in QUERIES if name in lower and columns[lower[name]].has_letters):
        for documents in (columns[lower[name]] for name in DOCUMENTS if name in lower):
            sizes = [len(value) if isinstance(value, list) else 0 for value in documents.values]
            for labels in columns.values():
                numbers = [one for value in labels.values if isinstance(value, list) for one in value]
                if labels is documents or [len(value) for value in labels.values if isinstance(value, list)] != sizes:
                    continue
                if numbers and all(isinstance(one, int | float) for one in numbers):
                    reason = f"each {query.name!r} has {documents.name!r}, a list, and {labels.name!r}, numbers of them"
                    named = {"query": query.name, "documents": documents.name, "labels": labels.name}
                    options = {} if all(0 <= one <= 1 for one in numbers) else {"loss": "lambda"}
                    texts = (query.name, documents.name)
                    yield TaskGuess(
                        "reranking", reason, {"columns": named}, options, texts, candidates=max(sizes, default=1)
                    )
        for document in (columns[lower[name]] for name in DOCUMENT if name in lower):
            label = next((columns[lower[name]] for name in (*LABELS, *SCORES) if name in lower), None)
            if label is None or not label.is_number or len(query.values) < 2 * len(query.counts):
                continue
            reason = f"each {query.name!r} has several rows with {document.name!r}, and {label.name!r} is a number"
            data = {"columns": {"query": query.name, "document": document.name}, "label": label.name}
            options = {} if all(0 <= float(value) <= 1 for value in label.values) else {"loss": "mse"}
            yield TaskGuess("reranking", reason, data, options, (query.name, document.name), group=query.name)


def _anchors(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    """Texts with one that belongs to each, `positive`, and perhaps some that do not, `negative`."""
    lower = {name.lower(): name for name in columns}
    anchor = next((lower[name] for name in ("anchor", *QUERIES) if name in lower), None)
    positive = lower.get("positive")
    if anchor is None or positive is None or not all(columns[name].has_letters for name in (anchor, positive)):
        return
    named = {"anchor": anchor, "positive": positive}
    for usual in ("negative", "negatives"):
        if usual in lower:
            column = columns[lower[usual]]
            named["negatives" if column.is_list_of_texts else "negative"] = column.name
    reason = f"{positive!r} is a text that belongs to that of {anchor!r}"
    yield TaskGuess("embedding", reason, {"columns": named}, texts=(anchor, positive))


def _scored_pairs(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    for usual in PAIRS:
        one, other = _spelled(usual, columns) or ("", "")
        score = next((name for name in columns if name.lower() in SCORES and columns[name].is_number), None)
        if one and score and _are_texts((columns[one], columns[other]), few_words=1):
            reason = f"{score!r} is a score of the similarity of {one!r} and {other!r}"
            named = {"sentence1": one, "sentence2": other, "score": score}
            yield TaskGuess("sentence-similarity", reason, {"columns": named}, texts=(one, other))


def _questions_with_spans(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    names = ("question", "context", "answers")
    if columns.keys() >= {*names} and not columns["answers"].is_flat:
        task = "deployments.examples.question_answering:ExtractiveQA"
        reason = "each row has a question, a context and its answers (SQuAD)"
        yield TaskGuess(task, reason, {"checks": {"duplicates": "ignore"}}, texts=("question", "context"))


def _tags(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    lists = [column for column in columns.values() if column.is_list_of_texts]
    for words in lists:
        for tags in reversed(lists):
            lengths = zip(words.values, tags.values, strict=False)
            if words is tags or not all(len(one) == len(other) for one, other in lengths):
                continue
            kinds = Counter(str(tag) for value in tags.values for tag in value)
            if len(kinds) < len({str(word) for value in words.values for word in value}) and len(kinds) <= MOST_LABELS:
                reason = f"columns {words.name!r} and {tags.name!r} are lists of the same lengths: words and their tags"
                data = {"text": [words.name], "label": tags.name}
                yield TaskGuess("token-classification", reason, data, texts=(words.name,), labels=_most_common(kinds))


def _pairs_of_texts(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    for usual in PAIRS:
        one, other = _spelled(usual, columns) or ("", "")
        if one and _are_texts((columns[one], columns[other]), few_words=1):
            rest = {name: column for name, column in columns.items() if name not in (one, other)}
            yield from _with_target([one, other], rest, f"{one!r} and {other!r} are a pair of texts")
    for usual in TEXT_TO_TEXT:
        one, other = _spelled(usual, columns) or ("", "")
        if one and _are_texts((columns[one], columns[other])) and not columns[other].repeats:
            yield _text_to_text(one, other)


def _labelled_texts(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    texts = _ordered_texts(columns)
    for text in texts[:1]:
        rest = {name: column for name, column in columns.items() if name != text.name}
        yield from _with_target([text.name], rest, f"{text.name!r} is the text")


def _texts(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    texts = _ordered_texts(columns)
    if len(texts) == 2 and len(columns) == 2:
        one, other = (name for name in columns if name in {text.name for text in texts})
        yield _text_to_text(one, other)
    if texts:
        name = texts[0].name
        yield TaskGuess("causal-lm", f"{name!r} has texts", {"text": [name]}, texts=(name,))
        yield TaskGuess("masked-lm", f"{name!r} has texts", {"text": [name]}, texts=(name,))


def _texts_to_search(columns: Mapping[str, ColumnProfile]) -> Iterator[TaskGuess]:
    """Texts with classes also train embeddings, by which texts of one class are found. Seldom wanted, so the last."""
    for guess in _labelled_texts(columns):
        if guess.task == "sequence-classification" and len(guess.labels) > 1:
            reason = f"{guess.reason}: texts with one of them belong together"
            yield replace(guess, task="embedding", reason=reason, options={"loss": "batch_all_triplet"})


def _text_to_text(one: str, other: str) -> TaskGuess:
    reason = f"column {other!r} is a text for that of {one!r}"
    return TaskGuess("seq2seq", reason, {"columns": {"source": one, "target": other}}, texts=(one, other))


def _with_target(texts: list[str], rest: Mapping[str, ColumnProfile], about: str) -> Iterator[TaskGuess]:
    """The guesses for rows with one or two texts and a label or number beside them, the likeliest column first."""

    def place(column: ColumnProfile) -> tuple[bool, int, bool, bool, int]:
        named = [*LABELS, *RATINGS, *SCORES]
        name = column.name.lower()
        last = name.rpartition("_")[2]
        rank = named.index(name) if name in named else named.index(last) + 100 if last in named else 1000
        is_last_resort = column.is_number_with_commas or len(column.counts) == 1
        return is_last_resort, rank, not column.is_flat, len(column.counts) > MOST_RATINGS, -names[name]

    names = {name.lower(): number for number, name in enumerate(rest)}
    candidates = [
        column for column in rest.values() if not column.is_named_as_no_input or column.name.lower() in LABELS
    ]
    flags = [column.name for column in candidates if column.is_boolean and column.repeats]
    for column in sorted(candidates, key=place):
        others = [name for name in flags if name != column.name] if column.name in flags else []
        more = f"; {_and(others)} may be labels too: one column is read, with several labels as in red;blue"
        more = more if others else ""
        yield from (replace(guess, reason=guess.reason + more) for guess in _for_target(texts, column, about))


def _for_target(texts: list[str], column: ColumnProfile, about: str) -> Iterator[TaskGuess]:
    name, different = column.name, len(column.counts)
    data: dict[str, Any] = {"text": texts, "label": name}

    def guess(task: str, reason: str, labels: Collection[str] = (), **more: Any) -> TaskGuess:
        return TaskGuess(task, f"{about}, and {name!r} {reason}", {**data, **more}, texts=texts, labels=[*labels])

    is_class = (
        column.is_flat and column.repeats and (not column.is_number or (column.is_whole and different <= MOST_RATINGS))
    )
    is_numeric = column.is_flat and column.is_number and different > 2
    if different == 1 and column.is_flat and name.lower() in LABELS:
        yield guess("sequence-classification", f"has the one value {next(iter(column.counts))!r}", [*column.counts])
        return
    if column.is_flat and column.is_number_with_commas:
        yield guess("regression", f"has numbers with commas, such as {column.values[0]}")
        return
    if column.is_list_of_texts:
        kinds = Counter(str(one) for value in column.values for one in value)
        if len(kinds) <= MOST_LABELS and sum(kinds.values()) >= 2 * len(kinds):
            yield guess("multi-label-classification", "has lists of labels", _most_common(kinds))
        return
    if column.is_flat and (split := _split_labels(column)):
        separator, kinds = split
        reason = f"has several labels between {separator!r}"
        yield guess("multi-label-classification", reason, _most_common(kinds), label_separator=separator)
    classes = guess("sequence-classification", f"has {different:,} different values", _most_common(column.counts))
    numbers = guess("regression", f"has numbers, {different:,} different ones")
    if is_class and column.words <= 2 * FEW_WORDS:
        yield classes
        if is_numeric:
            yield numbers
    elif is_numeric and (column.name.lower() in SCORES or not column.is_whole):
        yield numbers


def _split_labels(column: ColumnProfile) -> tuple[str, Counter[str]] | None:
    """The separator of several labels in a cell, and the labels, if they recur more often than whole cells do."""
    for separator in _SEPARATORS:
        cells = [[part.strip() for part in str(value).split(separator)] for value in column.values]
        kinds = Counter(part for cell in cells for part in cell)
        several = sum(len(cell) > 1 for cell in cells)
        is_list = "" not in kinds and all(len(part.split()) <= FEW_WORDS for part in kinds)
        if (
            several >= len(cells) / 20
            and is_list
            and len(kinds) * 1.2 <= len(column.counts)
            and len(kinds) <= MOST_LABELS
        ):
            return separator, kinds
    return None


def _ordered_texts(columns: Mapping[str, ColumnProfile]) -> list[ColumnProfile]:
    """The columns of texts: first those that are called one, then those with most words."""

    def is_text(column: ColumnProfile) -> bool:
        if not column.is_flat or not column.has_letters or column.is_named_as_no_input:
            return False
        return (column.words >= FEW_WORDS and len(column.counts) > 1) or (
            column.name.lower() in TEXTS and column.words > 1
        )

    def place(column: ColumnProfile) -> tuple[int, float]:
        name = column.name.lower()
        return (TEXTS.index(name) if name in TEXTS else len(TEXTS)), -column.words

    texts = [column for column in columns.values() if is_text(column)]
    if not texts:  # words or short phrases, such as names
        texts = [one for one in columns.values() if one.is_flat and one.has_letters and not one.repeats]
        texts = [one for one in texts if not one.is_named_as_no_input]
    return sorted(texts, key=place)


def _spelled(names: Sequence[str], columns: Collection[str]) -> tuple[str, ...]:
    """The columns with these names in capitals or small letters; empty unless all are there."""
    there = {column.lower(): column for column in columns}
    return tuple(there[name] for name in names) if there.keys() >= {*names} else ()


def _are_texts(columns: Any, few_words: float = FEW_WORDS) -> bool:
    """Whether all are texts; one of them, such as an answer, may be short."""
    found = list(columns)
    flat = all(column.is_flat and not (column.is_number and column.repeats) for column in found)
    return flat and found[0].words >= few_words


def _are_messages(value: Any, key: str) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and key in one for one in value)


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return {*value} == {"bytes", "path"}
    return (isinstance(value, str) and value.lower().endswith(IMAGE_SUFFIXES)) or str(value).startswith("data:image/")


def _unspaced(text: str) -> int:
    """Characters of scripts that write without spaces: Chinese, Japanese, Thai, Lao, Khmer and Burmese."""
    return sum(
        "\u0e00" <= one <= "\u0eff" or "\u1000" <= one <= "\u109f" or "\u3040" <= one <= "\u9fff" for one in text
    )


def _most_common(counts: Counter[str]) -> list[str]:
    return [label for label, _ in counts.most_common()]


def _and(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
