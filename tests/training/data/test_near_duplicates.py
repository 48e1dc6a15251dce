"""Nearly equal texts in several splits are found in all scripts, and no others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import report_of
from training.data import near_duplicates
from training.data.load_rows import load
from training.data.near_duplicates import LEAST_SIMILARITY, shingles
from training.problems import Problem
from training.recipe import Data
from training.recipe.task_specification import specification

LATIN = "the of a parcel letter invoice order arrived late early broken small large blue red my your our has not been"
CHINESE = (
    "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事其里所去行过家"
)


def words(draw: random.Random) -> list[str]:
    return [f"{draw.choice(LATIN.split())}{draw.randrange(30)}" for _ in range(25)]


def characters(draw: random.Random) -> list[str]:
    return draw.choices(CHINESE, k=60)


def found(folder: Path, rows: dict[str, list[str]], level: str = "warning") -> dict[str, Problem]:
    """The problems by check."""
    folder.mkdir(exist_ok=True)
    for split, texts in rows.items():
        lines = [json.dumps({"text": text, "label": "ab"[n % 2]}) + "\n" for n, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    files = {split: [str(folder / f"{split}.jsonl")] for split in rows}
    checks = {"near_duplicates": level}
    data = Data.model_validate({"source": "json", "path": "-", "text": ["text"], "label": "label", "checks": checks})
    load(data, CLASSIFICATION, files, folder / "out")
    return {one["check"]: Problem(**one) for one in report_of(folder / "out")["problems"]}


@pytest.mark.parametrize(("draw_words", "join"), [(words, " "), (characters, "")])
def test_texts_that_differ_in_a_few_words_are_counted_and_others_are_not(
    tmp_path: Path, draw_words: Callable[[random.Random], list[str]], join: str
) -> None:
    draw = random.Random(7)
    train = [draw_words(draw) for _ in range(400)]
    other, edited = [draw_words(draw) for _ in range(100)], [list(one) for one in train[:40]]
    for one in edited:
        one[draw.randrange(len(one))] = draw_words(draw)[0]
    texts = {
        "train": [join.join(one) for one in train],
        "validation": [join.join(one).upper() for one in (*other, *edited)],
    }
    alike = [_similarity(*pair) for pair in zip(texts["validation"][100:], texts["train"], strict=False)]
    assert min(alike) > LEAST_SIMILARITY
    message = found(tmp_path / "in", texts)["near_duplicates"].message
    assert int(message.split()[0]) >= 39 and "rows of validation are nearly equal to rows of train" in message
    assert "near_duplicates" not in found(tmp_path / "none", {**texts, "validation": texts["validation"][:100]})


def _similarity(one: str, other: str) -> float:
    first, second = shingles(one), shingles(other)
    return len(first & second) / len(first | second)


def test_the_first_row_is_shown_with_the_one_that_it_is_like(tmp_path: Path) -> None:
    rows = {
        "train": ["something else", "where is the parcel that I ordered last week?", "a third text"],
        "validation": ["no text of train", "Where is the  parcel that I ordered last week"],
    }
    problem = found(tmp_path, rows)["near_duplicates"]
    assert problem.where == f"{tmp_path}/validation.jsonl row 2"
    assert f"this one to row 2 of {tmp_path}/train.jsonl, 98% alike: 'Where is the  parcel" in problem.message


def test_equal_texts_are_those_of_another_check(tmp_path: Path) -> None:
    rows = {"train": ["one text of some length", "and another"], "validation": ["one text of some length", "a third"]}
    assert {"shared_rows"} == {check for check in found(tmp_path, rows) if check in ("shared_rows", "near_duplicates")}


def test_a_text_of_a_thousand_brackets_is_compared_as_it_is(tmp_path: Path) -> None:
    brackets = "[" * 3000 + " or so"
    rows = {"train": [brackets, "and another"], "validation": [f"{brackets}!", "a third text"]}
    assert found(tmp_path, rows)["near_duplicates"].message.startswith("1 row of validation is nearly equal")


def test_conversations_with_one_system_prompt_are_not_alike(tmp_path: Path) -> None:
    prompt = {"role": "system", "content": "You are a helpful assistant who answers in one short sentence. " * 5}
    questions = [
        "Where is Bern?",
        "Name three birds of the southern hemisphere that cannot fly, and say where they live.",
        "What is the boiling point of water?",
        "Who wrote Faust?",
    ]
    chats: list[list[dict[str, Any]]] = [
        [prompt, {"role": "user", "content": question}, {"role": "assistant", "content": f"{n} answers"}]
        for n, question in enumerate(
            [*questions, "Name three birds of the southern hemisphere that can not fly, and say where they live"]
        )
    ]
    for split, part in (("train", chats[:3]), ("validation", chats[3:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in part))
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "validation")}
    data = Data.model_validate({"source": "json", "path": "-", "checks": {"near_duplicates": "warning"}})
    load(data, specification("sft", {}), files, tmp_path / "out")
    (problem,) = [
        Problem(**one) for one in report_of(tmp_path / "out")["problems"] if one["check"] == "near_duplicates"
    ]
    assert problem.message.startswith("1 row of validation is nearly equal to rows of train (this one to row 2")
    assert problem.where == f"{tmp_path}/validation.jsonl row 2"


def test_nothing_is_searched_unless_the_recipe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "shingles", lambda text: pytest.fail("searched"))
    rows = {"train": ["one text", "another"], "validation": ["one text!", "a third"]}
    assert "near_duplicates" not in found(tmp_path, rows, level="ignore")


def test_a_missing_package_is_named_before_any_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "find_spec", lambda name: None)
    (problem,) = raised_problems(found, tmp_path, {"train": ["one"]})
    assert problem.where == "data.checks.near_duplicates"
    assert "pip install 'finetune-flows[near-duplicates]'" in problem.message
