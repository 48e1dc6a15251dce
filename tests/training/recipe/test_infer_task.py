"""The task types that are inferred from rows, and the columns that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from training.recipe.infer_task import guess_tasks

TEXTS = [f"The printer on floor {number} does not print" for number in range(20)]
OTHERS = [f"Der Drucker in Stock {number} druckt nicht" for number in range(20)]
TEAMS = ["hardware", "billing"] * 10
TOOLS = [{"function": {"name": "f"}}]
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
OUTPUTS = ("preferred_output", "non_preferred_output")
WORDS, TAGS = [["EU", "rejects", "calls"]] * 10 + [["Peter", "is", "here"]] * 10, [["B-ORG", "O", "O"]] * 20


@pytest.mark.parametrize(
    ("columns", "task", "data"),
    [
        ({"text": TEXTS, "label": TEAMS}, "sequence-classification", {"text": ["text"], "label": "label"}),
        (
            {"id": range(20), "created": ["2026-01-01"] * 20, "body": TEXTS, "team": TEAMS},
            "sequence-classification",
            {"text": ["body"], "label": "team"},
        ),
        (
            {"conversations": [MESSAGES] * 20, "chosen": [MESSAGES[1]] * 20, "rejected": [MESSAGES[1]] * 20},
            "preference",
            {"columns": {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"}},
        ),
        (
            {"sentence1": TEXTS, "sentence2": OTHERS, "label": TEAMS},
            "sequence-classification",
            {"text": ["sentence1", "sentence2"], "label": "label"},
        ),
        (
            {"review": TEXTS, "stars": ["1", "5"] * 10},
            "sequence-classification",
            {"text": ["review"], "label": "stars"},
        ),
        (
            {"sentence1": TEXTS, "sentence2": OTHERS, "score": [f"{number / 7:.2f}" for number in range(20)]},
            "regression",
            {"text": ["sentence1", "sentence2"], "label": "score"},
        ),
        (
            {"comment": TEXTS, "tags": ["joy;love", "joy", "fear;joy", "love;fear", "fear"] * 4},
            "multi-label-classification",
            {"text": ["comment"], "label": "tags", "label_separator": ";"},
        ),
        (
            {"text": TEXTS, "labels": [["joy"], ["joy", "fear"], []] * 6 + [["fear"], ["joy"]]},
            "multi-label-classification",
            {"text": ["text"], "label": "labels"},
        ),
        (
            {"query": TEXTS, "docs": [OTHERS[:3]] * 20, "labels": [[1, 0, 0.5]] * 20},
            "reranking",
            {"columns": {"query": "query", "documents": "docs", "labels": "labels"}},
        ),
        (
            {"Question": TEXTS[:5] * 4, "passage": OTHERS, "label": ["1", "0"] * 10},
            "reranking",
            {"columns": {"query": "Question", "document": "passage"}, "label": "label"},
        ),
        (
            {"anchor": TEXTS, "positive": OTHERS, "negative": TEXTS[::-1]},
            "embedding",
            {"columns": {"anchor": "anchor", "positive": "positive", "negative": "negative"}},
        ),
        (
            {"query": TEXTS, "positive": OTHERS, "negative": [OTHERS[:2]] * 20},
            "embedding",
            {"columns": {"anchor": "query", "positive": "positive", "negatives": "negative"}},
        ),
        (
            {"query": TEXTS, "passage": OTHERS, "label": TEAMS},
            "sequence-classification",
            {"text": ["query", "passage"], "label": "label"},
        ),
        ({"tokens": WORDS, "ner_tags": TAGS}, "token-classification", {"text": ["tokens"], "label": "ner_tags"}),
        ({"en": TEXTS, "de": OTHERS}, "seq2seq", {"columns": {"source": "en", "target": "de"}}),
        ({"messages": [MESSAGES] * 20}, "sft", {"columns": {"messages": "messages"}}),
        (
            {"messages": [MESSAGES] * 20, "tools": [TOOLS] * 20},
            "sft",
            {"columns": {"messages": "messages", "tools": "tools"}},
        ),
        (
            {"id": [*range(20)], "conversations": [[{"from": "human", "value": "Hi"}]] * 20},
            "sft",
            {"columns": {"messages": "conversations"}},
        ),
        (
            {"input": [{"messages": MESSAGES[:1]}] * 20, **dict.fromkeys(OUTPUTS, [MESSAGES[1:]] * 20)},
            "preference",
            {"columns": {"prompt": "input", "chosen": OUTPUTS[0], "rejected": OUTPUTS[1]}},
        ),
        (
            {"prompt": [MESSAGES[:1]] * 20, "chosen": [MESSAGES[1:]] * 20, "rejected": TEXTS, "tools": [TOOLS] * 20},
            "preference",
            {"columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "tools": "tools"}},
        ),
        (
            {"messages": [MESSAGES] * 20, "label": [True, False] * 10, "tools": [TOOLS] * 20},
            "kto",
            {"columns": {"messages": "messages", "tools": "tools"}, "label": "label"},
        ),
        (
            {"instruction": TEXTS, "input": ["", "x"] * 10, "output": OTHERS},
            "sft",
            {"columns": {"instruction": "instruction", "output": "output", "input": "input"}},
        ),
        ({"question": TEXTS, "answer": OTHERS}, "sft", {"columns": {"instruction": "question", "output": "answer"}}),
        (
            {"prompt": TEXTS, "chosen": OTHERS, "rejected": TEXTS},
            "preference",
            {"columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}},
        ),
        (
            {"prompt": TEXTS, "completion": OTHERS, "label": [True, False] * 10},
            "kto",
            {"columns": {"prompt": "prompt", "completion": "completion"}, "label": "label"},
        ),
        (
            {"ctx": TEXTS, "endings": [["one", "two", "three"]] * 20, "label": ["0", "2"] * 10},
            "multiple-choice",
            {"columns": {"context": "ctx", "choices": "endings"}, "label": "label"},
        ),
        (
            {
                **dict.fromkeys(("sent1", "sent2"), TEXTS),
                **{f"ending{n}": OTHERS for n in range(4)},
                "label": [0, 3] * 10,
            },
            "multiple-choice",
            {"label": "label"},
        ),
        ({"text": TEXTS}, "causal-lm", {"text": ["text"]}),
        (
            {"headline": TEXTS, "section": TEAMS, "keywords": [["ink"], ["ink", "paper"]] * 10},
            "sequence-classification",
            {"text": ["headline"], "label": "section"},
        ),
        (
            {"text": TEXTS, "label": ["all"] * 20, "category": TEAMS},
            "sequence-classification",
            {"text": ["text"], "label": "category"},
        ),
        (
            {"body": TEXTS * 5, "folder": TEAMS * 5, "sender": [f"person {number % 30}" for number in range(100)]},
            "sequence-classification",
            {"text": ["body"], "label": "folder"},
        ),
        ({"Question": TEXTS, "Answer": OTHERS}, "sft", {"columns": {"instruction": "Question", "output": "Answer"}}),
        ({"text": TEXTS, "price": ["3,5", "4,25"] * 10}, "regression", {"text": ["text"], "label": "price"}),
    ],
)
def test_the_task_type_that_fits_best_is_first_with_its_columns(
    columns: Mapping[str, Sequence[Any]], task: str, data: Mapping[str, Any]
) -> None:
    best = guess_tasks(columns)[0]
    assert (best.task, dict(best.data)) == (task, data)


def test_tools_are_found_in_a_column_and_in_the_prompts_of_openais_preferences() -> None:
    for asked in ({"messages": MESSAGES[:1]}, {"messages": MESSAGES[:1], "tools": TOOLS}):
        guesses = guess_tasks({"input": [asked] * 20, **dict.fromkeys(OUTPUTS, [MESSAGES[1:]] * 20)})
        assert [guess.has_tools for guess in guesses[:2]] == ["tools" in asked] * 2
    assert guess_tasks({"messages": [MESSAGES] * 20, "tools": [TOOLS] * 20})[0].has_tools


def test_texts_with_classes_train_embeddings_if_that_is_asked_for() -> None:
    *_, last = guess_tasks({"text": TEXTS, "team": TEAMS})
    assert (last.task, last.options) == ("embedding", {"loss": "batch_all_triplet"})
    assert last.data == {"text": ["text"], "label": "team"}


def test_questions_without_an_answer_set_the_option_for_them() -> None:
    rows = {"id": [*range(20)], "question": TEXTS, "context": OTHERS}
    answers = {"text": ["ink"], "answer_start": [3]}
    for given, options in (
        ([answers] * 20, {}),
        ([answers, {"text": [], "answer_start": []}] * 10, {"no_answer": True}),
    ):
        best = guess_tasks({**rows, "answers": given})[0]
        assert (best.task, best.options) == ("question-answering", options)


def test_ratings_may_be_classes_or_numbers() -> None:
    guesses = guess_tasks({"review": TEXTS, "stars": [1, 2, 3, 4, 5] * 4})
    assert [guess.task for guess in guesses[:2]] == ["sequence-classification", "regression"]


def test_a_label_of_its_own_for_each_row_is_no_label() -> None:
    tasks = [
        guess.task for guess in guess_tasks({"text": TEXTS, "label": [f"ticket-{number}" for number in range(20)]})
    ]
    assert "sequence-classification" not in tasks


def test_a_column_of_labels_with_one_value_is_the_target_of_a_classifier() -> None:
    best = guess_tasks({"text": TEXTS, "label": ["spam"] * 20})[0]
    assert (best.task, best.labels, best.reason) == (
        "sequence-classification",
        ["spam"],
        "'text' is the text, and 'label' has the one value 'spam'",
    )


def test_of_several_columns_of_flags_one_is_the_target_and_the_others_are_named() -> None:
    flags = {"toxic": [0, 1] * 10, "insult": ["0", "1"] * 10, "threat": [1, 0] * 10}
    best = guess_tasks({"comment_text": TEXTS, **flags})[0]
    assert best.data["label"] == "threat" and "; 'toxic' and 'insult' may be labels too" in best.reason


def test_numbers_are_no_texts() -> None:
    assert guess_tasks({"rows": [f"{number} 162 60" for number in range(20)]}) == []


def test_columns_of_ids_alone_fit_no_task_type() -> None:
    assert guess_tasks({"id": [*range(20)], "user_id": [*range(20)]}) == []
