"""Extractive question answering: windows, answers, no answer, and the figures of SQuAD's script."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, ByT5Tokenizer

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training import programs_here, tiny
from tests.training.forks import finish, run_main
from tests.training.programs_here import PREDICT, SCORE
from training.batching.batches import TokenRows
from training.data.load_rows import load
from training.engine.predictor import Predictor
from training.evaluation import metrics
from training.evaluation.extracted_answers import ExtractedAnswers
from training.jobs.protocol import Job
from training.models.loading import load_tokenizer
from training.problems import UserError
from training.programs import create_model, predict, score
from training.recipe import Data
from training.task_types.question_answering import NO_CONTEXT, QuestionAnswering, _tokens_of
from training.tokenization import transformers_encoder
from training.tokenization.encoder import encode_windows, load_fast_encoder
from training.tokenization.token_files import tokenize

KIND = "question-answering"
OPTIONS = {"stride": 4, "max_answer_tokens": 6}
NAMES, CITIES, YEARS = (
    ["Ada", "Emmy Noether", "Sofia", "Grace"],
    ["Rome", "New York", "Oslo", "Lima"],
    range(1931, 1935),
)
QUESTIONS = {"Who moved?": "name", "Where to?": "city", "When was it?": "year"}
RAIN = "It rained all day long. "


def rows(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Questions about sentences, some of which stand far behind the first token that a model sees."""
    found = []
    for _ in range(count):
        facts = {"name": draw.choice(NAMES), "city": draw.choice(CITIES), "year": str(draw.choice(YEARS))}
        context = (
            RAIN * draw.randrange(3) + "{name} moved to {city} in {year}. ".format(**facts) + RAIN * draw.randrange(3)
        )
        question, of = draw.choice([*QUESTIONS.items()])
        answers = {"text": [facts[of]], "answer_start": [context.index(facts[of])]}
        found.append({"question": question, "context": context, "answers": answers})
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home, draw = tmp_path_factory.mktemp("world"), random.Random(3)
    for split, count in {"train": 200, "validation": 40}.items():
        (home / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(count, draw)))
    loaded(home / "data", home, "train", "validation")
    config = {**tiny.CONFIG, "vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {"config": config, "seed": 1, "texts": ["question", "context"], "writes": False}
    run(create_model, home / "base", {"data": home / "data"}, **settings)
    tokenize(QuestionAnswering(OPTIONS), home / "data", home / "base/output/tokenizer", home / "tokens", 32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield home
    torch.set_num_threads(before)


def loaded(out: Path, folder: Path, *splits: str, **options: Any) -> None:
    files = {split: [str(folder / f"{split}.jsonl")] for split in splits}
    data = Data(source="json", path=str(folder), checks={"duplicates": "ignore", "shared_rows": "ignore"})
    load(data, QuestionAnswering(OPTIONS | options), files, out)


def run(program: ModuleType, job_dir: Path, inputs: dict[str, Path], **settings: Any) -> Path:
    task = {} if program is create_model else {"task": KIND, "options": OPTIONS}
    programs_here.run(program, job_dir, inputs, **task | settings)
    return job_dir / "output"


def read(file: Path) -> pa.Table:
    return read_arrow(file)


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tmp_path_factory.mktemp("jobs") / "fit"
    training = {"num_train_epochs": 8, "learning_rate": 5e-3, "per_device_train_batch_size": 16}
    tiny.fit_job(world, job_dir, base="base/output", **training, metric_for_best_model="f1")
    written = Job.read(job_dir)
    settings = {"task": KIND, "options": OPTIONS, "labels": [], "max_length": 32, "metrics": ["f1", "exact_match"]}
    written.model_copy(update={"settings": {**written.settings, **settings}}).write(job_dir)
    outcome = finish(job_dir)
    assert outcome.state == "finished", outcome
    return job_dir / "output" / "model"


def test_windows_are_those_of_autotokenizer_and_labels_lead_back_to_the_answer(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "base/output/tokenizer")
    data, tokens = read(world / "data/train.arrow").to_pylist(), read(world / "tokens/train.arrow")
    theirs = tokenizer(
        [row["question"] for row in data],
        [row["context"] for row in data],
        truncation="only_second",
        max_length=32,
        stride=4,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    assert tokens["input_ids"].to_pylist() == theirs["input_ids"]
    assert tokens["token_type_ids"].to_pylist() == theirs["token_type_ids"]
    assert tokens["row"].to_pylist() == theirs["overflow_to_sample_mapping"]
    assert len(tokens) > len(data) == 1 + tokens["row"][-1].as_py()
    answered = set()
    for window, offsets in zip(tokens.to_pylist(), theirs["offset_mapping"], strict=True):
        row = data[window["row"]]
        first, last = window["label"]
        if first:
            assert row["context"][offsets[first][0] : offsets[last][1]] == json.loads(row["answers"])["text"][0]
            answered.add(window["row"])
        assert row["context"][window["passage_start"] :].startswith(window["passage"])
    assert len(answered) == len(data)
    report = json.loads((world / "tokens/log/report.json").read_text())
    assert report["rows"] == {"train": 200, "validation": 40} and report["truncated"] == {"train": 0, "validation": 0}


def test_windows_have_a_third_of_their_tokens_in_common_by_default(world: Path) -> None:
    encoder = load_fast_encoder(world / "base/output/tokenizer", 32)
    (rows,) = read(world / "data/train.arrow").combine_chunks().to_batches()
    usual, third, most = (
        QuestionAnswering(options).features(encoder, rows).rows for options in ({}, {"stride": 10}, {"stride": 20})
    )
    assert usual.equals(third) and not usual.equals(most)


def test_an_answer_is_learnt_only_in_a_window_that_shows_all_of_it() -> None:
    """By hand: "a bc d" with an answer of two tokens, cut behind the first of them."""
    window = np.array([[-1, -1], [-1, -1], [0, 1], [2, 3], [3, 4], [-1, -1]])
    assert _tokens_of(window, (2, 4)) == [3, 4]
    assert _tokens_of(window, (0, 1)) == [2, 2]
    assert _tokens_of(window, (3, 6)) == _tokens_of(window, (5, 6)) == [0, 0]
    assert _tokens_of(window[3:], (0, 3)) == _tokens_of(window, None) == [0, 0]


@pytest.mark.slow
def test_the_model_learns_and_the_best_window_of_a_row_answers_it(world: Path, trained: Path, tmp_path: Path) -> None:
    stored = run(predict, tmp_path / "predict", {"model": trained, "tokens": world / "tokens"}, **PREDICT)
    table = pq.read_table(stored / "validation.parquet")
    data = read(world / "data/validation.arrow")
    assert table["row"].to_pylist() == [*range(40)] and table["label"].to_pylist() == data["answers"].to_pylist()
    for row, context in zip(table.to_pylist(), data["context"].to_pylist(), strict=True):
        assert context[row["start"] :].startswith(row["answer"])
    predictor = Predictor(QuestionAnswering(OPTIONS), trained, trained, 32)
    predictions = predictor.predict(data.select(["question", "context"]).to_batches()[0])
    assert [row["answer"] for row in predictions] == table["answer"].to_pylist()
    assert [row["score"] for row in predictions] == pytest.approx(table["score"].to_pylist(), abs=1e-4)

    settings = SCORE | {"slices": ["length_bucket"], "each": ["length_bucket"], "fewest_rows": 5}
    inputs = {"predictions": stored, "data": world / "data", "tokens": world / "tokens", "model": world / "base"}
    (world / "data/labels.json").write_text("[]")
    out = run(score, tmp_path / "score", inputs, splits=["validation"], metrics=["f1", "exact_match"], **settings)
    found = json.loads((out / "metrics.json").read_text())["validation"]
    assert found["f1"]["value"] >= found["exact_match"]["value"] > 0.6  # of 12 words that stand there
    assert found["f1"]["low"] is not None
    (groups,) = json.loads((out / "slices.json").read_text())["validation"].values()
    assert any(group["metrics"]["f1"]["low"] is not None for group in groups)
    with open(out / "log/predictions_sample.csv", newline="", encoding="utf-8") as file:
        worst = [float(row["f1"]) for row in csv.DictReader(file)]
    assert len(worst) == 40 and worst == sorted(worst)


class Mistaken(QuestionAnswering):
    """One whose author has forgotten something."""

    def predictions(self, model: Any, outputs: Any, batch: Any) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"score": outputs["scores"]})


def test_a_mistake_in_the_code_of_a_kind_is_its_authors_in_a_program_too(
    world: Path, trained: Path, tmp_path: Path
) -> None:
    settings = {"task": f"{__name__}:Mistaken", "options": OPTIONS, **PREDICT}
    inputs = {"model": str(trained), "tokens": str(world / "tokens")}
    Job(program="training.programs.predict", key="k", settings=settings, inputs=inputs).write(tmp_path / "job")
    failure = finish(tmp_path / "job", program=run_main(predict)).failure
    assert failure is not None and failure.kind == "user_error", failure
    assert failure.problems[0].where == "task"
    line = next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if '["scores"]' in text
    )
    assert f"`predictions` failed in {__file__} line {line}: KeyError" in failure.problems[0].message


def test_answers_are_the_likeliest_span_of_the_context_within_the_maximum_length() -> None:
    logits = torch.full((1, 2, 6), -1.0)
    logits[0, 0, [1, 3]], logits[0, 1, [2, 5]] = torch.tensor([9.0, 2.0]), torch.tensor([1.0, 4.0])
    batch = {"context": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    for longest, expected in {6: (3, 5, 6.0), 2: (4, 5, 3.0)}.items():
        kind = QuestionAnswering({"max_answer_tokens": longest})
        (found,) = kind.predictions(None, {"logits": logits}, batch).to_pylist()  # type: ignore[arg-type]
        assert (found["first"], found["last"], found["score"]) == expected
    (nothing,) = kind.predictions(None, {"logits": logits}, {"context": torch.zeros(1, 6)}).to_pylist()  # type: ignore[arg-type]
    assert nothing["first"] == nothing["last"] == 0 and nothing["score"] < -1e8


def test_a_row_has_no_answer_if_the_lowest_score_of_none_is_larger_by_more_than_the_threshold() -> None:
    """By hand, as run_qa.py decides: the likeliest span of all windows against the lowest score of none."""
    logits = torch.zeros((3, 2, 4))
    logits[0, :, 0], logits[0, 0, 1], logits[0, 1, 2] = 4.0, 1.0, 1.0  # none 8, span 2
    logits[1, :, 0], logits[1, 0, 2], logits[1, 1, 3] = 2.5, 2.0, 2.0  # none 5, span 4: the same row
    logits[2, :, 0], logits[2, 0, 3], logits[2, 1, 3] = 1.0, 2.0, 2.0  # none 2, span 4
    batch = {"context": torch.tensor([[0, 1, 1, 1]] * 3)}
    windows = pa.table(
        {
            "row": [0, 0, 1],
            "starts": [[-1, 0, 2, 4], [-1, 6, 8, 10], [-1, 0, 2, 4]],
            "ends": [[-1, 1, 3, 5], [-1, 7, 9, 11], [-1, 1, 3, 5]],
            "passage": ["a b c", "d e f", "g h i"],
            "passage_start": [0, 6, 0],
            "reference": ['{"text": [], "answer_start": []}'] * 3,
            "length": [4] * 3,
        }
    )
    for threshold, first in {0.0: ("", None, 4.0, 1.0), 1.5: ("e f", 8, 4.0, 1.0)}.items():
        task_type = QuestionAnswering({"no_answer": True, "no_answer_threshold": threshold})
        found = task_type.predictions(None, {"logits": logits}, batch)  # type: ignore[arg-type]
        joined = task_type.join_labels(pa.Table.from_batches([found]), TokenRows(windows))
        records = task_type.to_records(joined, [])
        assert [(*row.values(),) for row in records] == [first, ("i", 4, 4.0, -2.0)]
        assert task_type.lines(records[0]) == (["no answer"] if threshold == 0 else ["e f  (from character 8)"])
        assert task_type.metric_inputs(joined, []).row_scores.tolist() == [float(threshold == 0), 0.0]


def test_answers_may_be_lists_of_objects_and_none_of_them_with_no_answer(tmp_path: Path) -> None:
    context = "Ada wrote it in 1843."
    given = [[{"text": "Ada", "answer_start": 0}], [], {"text": [], "answer_start": []}, None]
    rows = [{"question": f"q{place}", "context": context, "answers": answers} for place, answers in enumerate(given)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "validation.jsonl").write_text(f"{json.dumps(rows[0] | {'question': 'q'})}\n")
    loaded(tmp_path / "out", tmp_path, "train", "validation", no_answer=True)
    tasked = QuestionAnswering({"no_answer": True})
    baseline = tasked.baseline(tmp_path / "out", tmp_path, tmp_path, [])
    assert baseline.train is not None and baseline.train.references.tolist() == [["Ada"], [], [], []]
    sentence, none = (rival.predict(baseline.train, "train") for rival in baseline.rivals)
    assert sentence.predictions.tolist() == [context] * 4
    assert none.row_scores.tolist() == [0, 1, 1, 1]


def test_figures_are_those_of_squads_script() -> None:
    """By hand, as evaluate-v2.0.py counts: articles, punctuation, case are nothing, and the nearest answer counts."""
    table: list[tuple[str, list[str], float, float]] = [
        ("the Cat!", ["cat"], 1.0, 1.0),
        ("a black cat", ["cat", "the black cat's tail"], 2 / 3, 0.0),  # "black cat" against "cat" and "black cats tail"
        ("black cat", ["black cat sat", "cat"], 0.8, 0.0),
        ("U.S. a-n", ["us an"], 1.0, 1.0),
        ("cat cat", ["cat"], 2 / 3, 0.0),
        ("dog", ["cat"], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("", [], 1.0, 1.0),  # no answer
        ("cat", [], 0.0, 0.0),
        ("The", ["the", "..."], 1.0, 1.0),  # answers of articles and punctuation alone are none
    ]
    answered = ExtractedAnswers(
        np.fromiter((right for _, right, *_ in table), object),
        np.array([prediction for prediction, *_ in table], object),
    )
    assert answered.row_scores.tolist() == pytest.approx([f1 for *_, f1, _ in table])
    found = metrics.compute(["exact_match", "f1"], answered)
    assert found == {
        "exact_match": pytest.approx(np.mean([match for *_, match in table])),
        "f1": pytest.approx(np.mean([f1 for *_, f1, _ in table])),
    }
    with pytest.raises(
        UserError, match=r"'accuracy' does not fit extractive question answering: choose from f1, exact"
    ):
        metrics.compute(["accuracy"], answered)


KEPT = [
    ("all", 51.49396825396826, 42.6),
    ("HasAns", 45.52601520343456, 34.49131513647643),
    ("NoAns", 76.28865979381443, 76.28865979381443),
]


def made_answers(count: int) -> ExtractedAnswers:
    """True answers, a fifth of them none, and predictions that are near them, far from them, or none."""
    draw = random.Random(500)
    words = [
        "the",
        "a",
        "An",
        "cat",
        "Cat's",
        "U.S.",
        "1,931",
        "\u201cOslo\u201d",
        "na\u00efve",
        "-",
        "in",
        "New",
        "York",
        "Zoë",
    ]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    references, predictions = [], []
    for _ in range(count):
        right = [] if draw.random() < 0.2 else [text(4) for _ in range(draw.randint(1, 3))]
        near = f"{draw.choice(right)} {draw.choice(['', 'the', 'cat', '!'])}" if right else ""
        predictions.append(draw.choice([near, near, text(3), ""]))
        references.append(right)
    return ExtractedAnswers(np.fromiter(references, object, count), np.array(predictions, object))


def test_figures_of_made_answers_are_those_that_squads_script_gave() -> None:
    """Kept: `squad_evaluate` of transformers 4.57.1 on these 500, with all answers, those with and those without."""
    made = made_answers(500)
    answerable = np.array([bool(right) for right in made.references])
    for rows, f1, exact in KEPT:
        part = made.take(np.flatnonzero({"all": np.ones(500, bool), "HasAns": answerable, "NoAns": ~answerable}[rows]))
        found = metrics.compute(["f1", "exact_match"], part)
        assert found == {"f1": pytest.approx(f1 / 100, abs=1e-12), "exact_match": pytest.approx(exact / 100, abs=1e-12)}


def test_answers_that_do_not_stand_at_their_offset_are_reported_with_their_row(tmp_path: Path) -> None:
    good = {"question": "q", "context": "in Rome, 1931"}
    wrong = [
        {"text": ["Rome"], "answer_start": [3]},
        {"text": ["Rome"], "answer_start": [4]},
        {"text": [], "answer_start": []},
    ]
    lines = [{**good, "question": f"q{number}", "answers": answers} for number, answers in enumerate(wrong)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    problems = raised_problems(loaded, tmp_path / "out", tmp_path, "train")
    found = {problem.check: f"{problem.where} {problem.message}" for problem in problems}
    assert "row 2" in found["answer_start"]
    assert "'Rome' at character 4, where the context has 'ome,'" in found["answer_start"]
    assert "row 3" in found["answers"] and "set options.no_answer: true" in found["answers"]


def test_a_question_that_leaves_no_room_is_cut_and_a_tokenizer_without_characters_is_refused(
    world: Path, tmp_path: Path
) -> None:
    encoder = load_fast_encoder(world / "base/output/tokenizer", 16)
    words = "When was it that Ada moved to Rome or to Oslo?"
    cut, lost = encode_windows(encoder, ["Who moved?", words], ["Ada moved to Rome."] * 2, 4)
    (whole,) = encoder.encode_whole([words]).lengths.tolist()
    assert lost.tolist() == [0, whole - 2 - (16 - 3 - 4) // 2] and lost[1] > 0
    kept = [window[window[:, 0] >= 0] for window in cut.iterate_offsets()]
    assert {pair for pair, window in zip(cut.pair.tolist(), kept, strict=True) if window[-1, 1] == 18} == {0, 1}
    assert (cut.lengths <= 16).all() and (cut.lengths[cut.pair == 1] >= 12).any()
    with pytest.raises(UserError, match=r"tokens\.max_length: 16 leaves no room .* special tokens and the 12"):
        encode_windows(encoder, ["x"], ["x"], 12)
    assert encoder.encode([RAIN * 4], None).lengths.tolist() == [16]  # it cuts as before
    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UserError, match="does not map tokens to characters"):
        encode_windows(transformers_encoder.load_encoder(tmp_path, tmp_path, 8), ["a"], ["b"], 1)


def test_an_answer_starts_at_its_first_letter_and_nothing_is_found_in_a_window_without_context() -> None:
    """Some tokenizers give a token the space before it."""
    windows = pa.table(
        {
            "row": [0, 1],
            "starts": [[-1, 0, 3], [-1, -1, -1]],
            "ends": [[-1, 3, 9], [-1, -1, -1]],
            "passage": ["Ada wrote it", ""],
            "passage_start": [0, 0],
            "length": [3, 3],
        }
    )
    found = pa.table({"first": [2, 0], "last": [2, 0], "score": [5.0, NO_CONTEXT]})
    wrote, nothing = QuestionAnswering().join_labels(found, TokenRows(windows)).to_pylist()
    assert (wrote["answer"], wrote["start"]) == ("wrote", 4)
    assert (nothing["answer"], nothing["start"]) == ("", None)
    assert QuestionAnswering().lines(nothing) == ["no answer"]


def test_batches_count_tokens_from_the_left_whatever_the_tokenizers_side(world: Path) -> None:
    tokenizer = load_tokenizer(world / "base/output/tokenizer")
    tokenizer.padding_side = "left"
    rows = TokenRows(world / "tokens/train.arrow")
    some = sorted(range(len(rows)), key=lambda row: rows.lengths[row])[:: len(rows) // 3]
    batch = QuestionAnswering().collator(tokenizer, multiple=8)([rows[row] for row in some])
    assert batch["attention_mask"][0].tolist() == [1] * rows.lengths[some[0]] + [0] * (32 - rows.lengths[some[0]])
    for line, row in enumerate(some):
        first, last = batch["labels"][line].tolist()
        assert [first, last] == rows[row]["label"].tolist()
        assert batch["context"][line].sum() == rows[row]["context"].sum()
        assert not first or batch["context"][line, first : last + 1].all()
