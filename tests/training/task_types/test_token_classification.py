"""A tag a word: its rows, its tokens, its batches, and what training, predicting and scoring make of them."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from seqeval import metrics as seqeval
from seqeval.metrics.sequence_labeling import get_entities
from tokenizers import models, normalizers, pre_tokenizers

from tests.training import programs_here, tiny, vocabularies
from tests.training.data.test_forms import json_lines, problems_of, run
from tests.training.forks import assert_same, checkpoints_written, finish, kill_when
from tests.training.programs_here import COMPARE, PREDICT, SCORE, warnings_of
from tests.training.tokenization.test_exact_tokens import python_pieces
from tests.training.vocabularies import ROBERTA, WORD_PIECES, save_repository
from training.batching.batches import IGNORED, LengthGroupedBatches, TokenRows
from training.data.ipc_files import ipc_writer
from training.evaluation import bootstrap, metrics
from training.evaluation.metrics.resampling import figures
from training.evaluation.tagged_words import Tagged
from training.jobs.protocol import Job
from training.models.loading import load_tokenizer
from training.problems import UserError
from training.programs import compare, predict, score
from training.recipe import Training
from training.task_types.token_classification import TokenClassification
from training.tokenization import token_files, transformers_encoder

KIND = TokenClassification()
NAMES = list(TokenClassification.metrics)
TAGS = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
ROWS = {
    "text": [["Angela", "Merkel", "visits", "\u200b", "Rome"], ["\u200b"], ["Rome"]],
    "label": [[3, 4, 0, 0, 1], [0], [1]],
}


def save_rows(folder: Path, rows: dict[str, list[Any]] = ROWS, split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    schema = pa.schema([("text", pa.list_(pa.string())), ("label", pa.list_(pa.int64()))])
    table = pa.table(rows, pa.schema([schema.field(name) for name in rows]))
    with ipc_writer(folder / f"{split}.arrow", table.schema) as writer:
        writer.write(table)
    return folder


def save_tokenizer(folder: Path, vocabulary: list[str], **settings: Any) -> Path:
    """Word pieces between [CLS] and [SEP], as BERT's, with a vocabulary of one's own."""
    made = vocabularies.word_pieces()
    every = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocabulary]
    made.model = models.WordPiece({piece: place for place, piece in enumerate(every)}, unk_token="[UNK]")
    return save_repository(folder, "bert", made, {**WORD_PIECES, **settings})


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "pieces", ["angela", "mer", "##kel", "visits", "rome"])


def tokenized(data: Path, tokenizer: Path, out: Path, max_length: int = 32) -> TokenRows:
    token_files.tokenize(KIND, data, tokenizer, out, max_length)
    return TokenRows(out / "train.arrow")


# Rows


def tagged(*tags: str) -> dict[str, Any]:
    return {"tokens": [f"{tag}{place}".lower() for place, tag in enumerate(tags)], "ner_tags": list(tags)}


ASKED = {"text": ["tokens"], "label": "ner_tags"}


def test_rows_that_break_iob2_or_have_too_few_tags_are_named_with_the_word(tmp_path: Path) -> None:
    good = [tagged("O", "B-PER", "I-PER", "B-PER"), tagged("B-LOC", "I-LOC", "I-LOC", "O")]
    rows = [
        *good,
        tagged("O", "I-PER"),
        tagged("B-PER", "I-PER") | {"tokens": ["Anna", "visits", "Rome"]},
        tagged("B-PER", "I-LOC"),
        tagged("I-PER", "I-PER"),
    ]
    assert problems_of(KIND, rows, tmp_path, **ASKED) == [
        "uneven_tags row 4: has more or fewer tags than words: 'Rome', word 3 of 3, has none",
        "iob2 row 3: has an I- tag without a span before it: 'i-per1' is I-PER after O (3 rows like this: 3, 5, 6)",
    ]
    report = run(
        KIND,
        json_lines(tmp_path / "r.jsonl", rows),
        tmp_path,
        checks={"iob2": "warning", "uneven_tags": "warning"},
        **ASKED,
    )
    assert report["rows"]["train"] == 2
    assert json.loads((tmp_path / "labels.json").read_text()) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_tags_of_two_sorts_are_refused_and_those_without_prefix_may_be_anything(tmp_path: Path) -> None:
    (message,) = problems_of(KIND, [tagged("O", "B-PER"), tagged("PER", "O")], tmp_path, **ASKED)
    assert message.startswith(
        "None row 2: label 'PER' and 'B-PER' are of different schemes: either all tags are O, B-X and I-X"
    )
    assert problems_of(KIND, [tagged("NOUN", "I"), tagged("VERB", "O")], tmp_path, **ASKED) == []
    assert json.loads((tmp_path / "labels.json").read_text()) == ["I", "NOUN", "O", "VERB"]


@pytest.mark.parametrize("tags", [("B_PER", "I_PER"), ("b-per", "i-per"), ("PER-B", "PER-I"), ("per.b", "per.i")])
def test_tags_that_mark_spans_in_another_spelling_than_iob2_are_refused(tmp_path: Path, tags: tuple[str, str]) -> None:
    (message,) = problems_of(KIND, [tagged(tags[0], tags[1]), tagged(tags[0], "O")], tmp_path, **ASKED)
    assert f"label {tags[0]!r} marks the words of a span, but not as 'B-" in message
    assert problems_of(KIND, [tagged("hepatitis-B", "type_a"), tagged("vitamin_B", "O")], tmp_path, **ASKED) == []


# Tokens


def test_a_word_has_its_tag_at_its_first_token_worked_by_hand(tmp_path: Path, pieces: Path) -> None:
    table = tokenized(save_rows(tmp_path / "data"), pieces, tmp_path / "out").table
    # [CLS] 2, [SEP] 3; angela 5, mer 6, ##kel 7, visits 8, rome 9; a space without width is dropped
    assert table["input_ids"].to_pylist() == [[2, 5, 6, 7, 8, 9, 3], [2, 3], [2, 9, 3]]
    assert table["first"].to_pylist() == [[1, 2, 4, -1, 5], [-1], [1]]
    assert table["label"].to_pylist() == ROWS["label"] and table["targets"].to_pylist() == [4, 0, 1]
    assert {field.name: str(field.type) for field in table.schema} == {
        "input_ids": "list<item: int32>",
        "length": "int32",
        "first": "list<item: int32>",
        "targets": "int32",
        "label": "list<item: int64>",
    }


def test_words_that_are_cut_have_no_token_and_what_is_cut_is_counted(tmp_path: Path, pieces: Path) -> None:
    data = save_rows(tmp_path / "data")
    table = tokenized(data, pieces, tmp_path / "out", 4).table
    assert table["input_ids"].to_pylist() == [[2, 5, 6, 3], [2, 3], [2, 9, 3]]
    assert table["first"].to_pylist() == [[1, 2, -1, -1, -1], [-1], [1]]  # of Merkel the first token is left
    report = json.loads((tmp_path / "out/log/report.json").read_text())
    assert report["truncated"] == {"train": 1} and report["lost"] == {"train": 3}


def test_words_that_the_tokenizer_drops_are_reported_by_split_and_those_that_are_cut_are_not(
    tmp_path: Path, pieces: Path
) -> None:
    for most, dropped in ((64, "2 words have"), (4, "1 word has")):
        out = tmp_path / f"out-{most}"
        tokenized(save_rows(tmp_path / "data"), pieces, out, most)
        problems = json.loads((out / "log/report.json").read_text())["problems"]
        (found,) = [problem for problem in problems if problem["check"] != "truncated"]
        assert found["where"] == "train" and found["level"] == "warning"
        assert found["message"].startswith(f"{dropped} no token, such as '\\u200b': their tags are not learned")


SENTENCES = [["The", "quick", "café", "naïve", "U.N.", "[SEP]", "日本"], ["dogs"], [" fox", "a b", "x" * 30, "\u200b"]]


@pytest.mark.parametrize("name", ["word pieces", "byte pairs", "unigram", "chat, a token first", "prepended"])
def test_ids_and_tags_are_those_of_the_librarys_recipe(tmp_path: Path, name: str) -> None:
    """That of transformers' run_ner.py: `is_split_into_words`, add_prefix_space for byte pairs, and word_ids."""
    if name == "prepended":  # as of SentencePiece's converted byte pairs
        made = vocabularies.unigram()
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = None
        model_type, settings = "llama", ROBERTA
    else:
        model_type, make, settings = vocabularies.FROM_TOKENIZER_JSON[name]
        made = make()
    folder = save_repository(tmp_path / "repository", model_type, made, settings)
    reference = load_tokenizer(folder)
    if isinstance(made.pre_tokenizer, pre_tokenizers.ByteLevel):
        reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for max_length in (64, 9):
        theirs = reference(SENTENCES, is_split_into_words=True, truncation=True, max_length=max_length)
        data = save_rows(tmp_path / "data", {"text": SENTENCES, "label": [[1] * len(row) for row in SENTENCES]})
        rows = tokenized(data, folder, tmp_path / "out", max_length)
        assert rows.table["input_ids"].to_pylist() == theirs["input_ids"]
        collate = KIND.collator(reference, 1)
        for number in range(len(rows)):
            (ours,) = collate([rows[number]])["labels"].tolist()
            words = pairwise([None, *theirs.word_ids(number)])
            assert ours == [1 if word is not None and word != before else IGNORED for before, word in words]


def test_a_tokenizer_that_does_not_tell_words_apart_is_refused(tmp_path: Path) -> None:
    folder = python_pieces(tmp_path / "python")
    encoder = transformers_encoder.load_encoder(folder, folder, 16)
    with pytest.raises(UserError, match="CTRLTokenizer encodes in Python and does not map tokens to words"):
        token_files.write_tokens(
            KIND, save_rows(tmp_path / "data"), encoder, tmp_path / "out", "ignore", lambda done, total: None
        )


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_as_the_librarys_collator_pads(tmp_path: Path, side: str) -> None:
    from transformers import DataCollatorForTokenClassification

    folder = save_tokenizer(tmp_path / "pieces", ["angela", "mer", "##kel", "visits", "rome"], padding_side=side)
    rows = tokenized(save_rows(tmp_path / "data"), folder, tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    ours = KIND.collator(tokenizer, 8)([rows[number] for number in range(3)])
    labels = [[-100, 3, 4, -100, 0, 1, -100], [-100, -100], [-100, 1, -100]]
    features = [
        {"input_ids": ids.as_py(), "labels": tags} for ids, tags in zip(rows.table["input_ids"], labels, strict=True)
    ]
    theirs = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)(features)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_a_batch_without_any_target_costs_nothing_and_is_still_a_number(tmp_path: Path, pieces: Path) -> None:
    rows = tokenized(save_rows(tmp_path / "data"), pieces, tmp_path / "out")
    loss = KIND.loss(Training(), TAGS, rows, outside=False)
    assert loss is not None
    empty = KIND.collator(load_tokenizer(pieces), 1)([rows[1]])
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss(logits, empty["labels"]).backward()
    assert KIND.target_count(empty) == 0 and torch.equal(logits.grad, torch.zeros(1, 2, 5))
    every = KIND.collator(load_tokenizer(pieces), 1)([rows[number] for number in range(3)])
    logits = torch.randn(3, 7, 5)
    usual = torch.nn.functional.cross_entropy(logits.flatten(0, 1), every["labels"].flatten())
    assert torch.allclose(loss(logits, every["labels"]), usual) and KIND.target_count(every) == 5
    batches = LengthGroupedBatches(rows.lengths, 1, targets=rows.targets)
    assert sorted(batches.targets_of_step(step) for step in range(3)) == [1, 1, 4]  # a divisor


# Metrics


def guessed(tags: list[str], rows: int, seed: int = 3) -> Tagged:
    """Rows of up to 12 words, about two in three rightly tagged, and some that a model did not see."""
    draw = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(draw.integers(1, 13, rows))])
    references = draw.integers(0, len(tags), starts[-1])
    other = draw.integers(0, len(tags), starts[-1])
    predictions = np.where(draw.random(starts[-1]) < 0.5, references, other)
    return Tagged(references, predictions, draw.uniform(0.2, 1, starts[-1]), starts, tags)


def names(rows: Tagged) -> tuple[list[list[str]], list[list[str]]]:
    found = [rows.feature_values("", name, "string", True) for name in ("references", "predictions")]
    return tuple(list(one) for one in found)  # type: ignore


def by_seqeval(name: str, rows: Tagged) -> float:
    score, _, average = name.partition("_")
    task = getattr(seqeval, f"{score}_score")
    return task(*names(rows), **({} if score == "accuracy" else {"average": average or "micro", "zero_division": 0}))


def test_figures_are_those_of_seqeval_whether_or_not_a_span_is_begun_as_it_should() -> None:
    rows = guessed(["O", "B-LOC", "I-LOC", "I-PER", "B-PER", "B-X", "I-X"], 300)
    assert metrics.compute(NAMES, rows) == pytest.approx({n: by_seqeval(n, rows) for n in NAMES}, abs=1e-12)
    assert len(set(metrics.compute(NAMES, rows).values())) == len(NAMES) - 1  # recall is recall_weighted
    nothing = rows.take(np.flatnonzero(np.bincount(rows.rows, rows.references) == 0)[:1])
    without_spans = metrics.compute(NAMES, nothing.take(np.array([], int)))
    assert all(map(math.isnan, without_spans.values()))


def test_a_span_is_right_by_its_first_word_its_last_and_its_type_worked_by_hand() -> None:
    labels = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    # true: PER 0-1, LOC 3; and LOC 0-1. Predicted: PER 0-1, PER 3; and LOC 0 (too short), O.
    true, given = [3, 4, 0, 1, 1, 2], [3, 4, 0, 3, 1, 0]
    rows = Tagged(np.array(true), np.array(given), np.full(6, 0.9), np.array([0, 4, 6]), labels)
    assert metrics.compute(["precision", "recall", "f1_macro", "accuracy"], rows) == pytest.approx(
        {"precision": 1 / 3, "recall": 1 / 3, "f1_macro": (2 / 3 + 0) / 2, "accuracy": 4 / 6}
    )
    described = rows.describe_row(0, {"text": ["Angela", "Merkel", "in", "Rome"]})
    assert (described["label"], described["prediction"]) == (
        "[PER Angela Merkel] [LOC Rome]",
        "[PER Angela Merkel] [PER Rome]",
    )
    assert rows.row_scores == pytest.approx([np.log([0.9, 0.9, 0.9, 0.1]).mean(), np.log([0.9, 0.1]).mean()])


def test_words_of_plain_tags_count_one_by_one_and_those_without_prediction_as_wrong() -> None:
    rows = Tagged(np.array([0, 1, 1, 0]), np.array([0, 1, -1, 1]), np.full(4, 0.9), np.array([0, 3, 4]), ["N", "V"])
    found = metrics.compute(["accuracy", "precision", "recall", "f1_macro"], rows)
    # N: 2 there, 1 given, 1 right. V: 2 there, 2 given, 1 right.
    assert found == pytest.approx({"accuracy": 0.5, "precision": 2 / 3, "recall": 0.5, "f1_macro": (2 / 3 + 0.5) / 2})


def test_figures_of_drawn_rows_equal_those_of_seqeval_on_those_rows() -> None:
    rows = guessed(["O", "B-LOC", "I-LOC", "B-PER", "I-PER"], 25)
    (counts,) = bootstrap.draws(len(rows), 5, seed=1)
    for name, figure in figures(NAMES, rows).items():
        drawn = [rows.take(np.repeat(np.arange(len(rows)), count)) for count in counts]
        assert figure(counts) == pytest.approx([by_seqeval(name, one) for one in drawn], abs=1e-12), name


def test_a_metric_that_is_not_for_tags_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=re.escape("'roc_auc' does not fit a classification of words with 5 tags")):
        metrics.make(["f1", "roc_auc"], KIND.empty_predictions(TAGS))


# Training, predicting, scoring


NAMED = ["O", "B-ANIMAL", "I-ANIMAL", "B-TOOL", "I-TOOL"]


def sentences(count: int, seed: int) -> dict[str, list[Any]]:
    """Spans of animals and of tools, and food, which is none."""
    draw = random.Random(seed)
    rows: dict[str, list[Any]] = {"text": [], "label": []}
    for _ in range(count):
        tasks = draw.choices(["animal", "tool", "food"], k=draw.randrange(1, 10))
        rows["text"].append([draw.choice(tiny.WORDS[task]) for task in tasks])
        first = {"animal": 1, "tool": 3, "food": 0}
        rows["label"].append(
            [first[task] + (task == before and task != "food") for before, task in pairwise([None, *tasks])]
        )
    return rows


@pytest.fixture(scope="module")
def tags(world: Path) -> Path:
    """data/ and tokens/ of tagged words, added to the world's model."""
    home = world / "tags"
    home.mkdir()
    for split, count, seed in (("train", 150, 1), ("validation", 60, 2)):
        save_rows(home / "data", sentences(count, seed), split)
    token_files.tokenize(KIND, home / "data", world / "base/tokenizer", home / "tokens", 10)
    return home


def fit_job(world: Path, tags: Path, job_dir: Path, **training: Any) -> Path:
    job = Job.read(tiny.fit_job(world, job_dir, **training))
    settings = job.settings | {"task": "token-classification", "labels": NAMED, "metrics": ["f1", "accuracy"]}
    inputs = {**job.inputs, "tokens": str(tags / "tokens")}
    Job(program=job.program, key=job.key, settings=settings, inputs=inputs).write(job_dir)
    return job_dir


@pytest.fixture(scope="module")
def fitted(world: Path, tags: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = {"gradient_accumulation_steps": 3, "checkpoint_interval_s": 0.02}
    job_dir = fit_job(world, tags, tmp_path_factory.mktemp("jobs") / "undisturbed", **wanted)
    assert finish(job_dir).state == "finished"
    return job_dir


@pytest.mark.slow
def test_training_killed_at_many_instants_ends_with_the_same_weights_and_curve(
    world: Path, tags: Path, fitted: Path, tmp_path: Path
) -> None:
    wanted = {"gradient_accumulation_steps": 3, "checkpoint_interval_s": 0.02}
    job_dir = fit_job(world, tags, tmp_path / "killed", **wanted)
    kills = [kill_when(job_dir, lambda count=count: checkpoints_written(job_dir) >= count) for count in (1, 7, 14)]
    assert finish(job_dir).state == "finished" and sum(kills) >= 2
    assert_same(job_dir, fitted)


def run_program(program: Any, job_dir: Path, inputs: dict[str, Path], **settings: Any) -> Path:
    programs_here.run(program, job_dir, inputs, task="token-classification", **settings)
    return job_dir / "output"


@pytest.fixture(scope="module")
def predicted(tags: Path, fitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict") / "job"
    inputs = {"model": fitted / "output/model", "tokens": tags / "tokens"}
    return run_program(predict, folder, inputs, **PREDICT)


def test_each_word_that_was_not_cut_has_the_tag_that_the_model_gives_its_first_token(
    tags: Path, fitted: Path, predicted: Path
) -> None:
    from training.models.loading import load_trained

    table = pq.read_table(predicted / "validation.parquet")
    rows = sentences(60, 2)
    assert table["label"].to_pylist() == rows["label"]
    model, tokenizer = (load(fitted / "output/model") for load in (lambda at: load_trained(KIND, at), load_tokenizer))
    cut = 0
    for words, given, sure in zip(rows["text"], table["prediction"].to_pylist(), table["probability"], strict=True):
        encoded = tokenizer([words], is_split_into_words=True, truncation=True, max_length=10)
        with torch.inference_mode():
            shares = model(torch.tensor(encoded["input_ids"])).logits[0].softmax(-1)
        of_word = encoded.word_ids(0)
        seen = [of_word.index(place) if place in of_word else None for place in range(len(words))]
        assert given == [None if place is None else int(shares[place].argmax()) for place in seen]
        assert [one for one in sure.as_py() if one is not None] == pytest.approx(
            [float(shares[place].max()) for place in seen if place is not None], abs=1e-5
        )
        cut += seen.count(None)
    assert cut > 0


def test_scores_count_cut_words_as_outside_and_say_so_and_show_the_worst_rows_as_spans(
    tags: Path, predicted: Path, tmp_path: Path
) -> None:
    wanted = SCORE | {"slices": ["length_bucket"]}
    inputs = {"predictions": predicted, "data": tags / "data", "tokens": tags / "tokens", "model": tags / "base"}
    (tags / "data/labels.json").write_text(json.dumps(NAMED))
    output = run_program(score, tmp_path / "score", inputs, metrics=NAMES, splits=["validation"], **wanted)
    table = pq.read_table(predicted / "validation.parquet")
    given = [[NAMED[tag or 0] for tag in row] for row in table["prediction"].to_pylist()]
    true = [[NAMED[tag] for tag in row] for row in table["label"].to_pylist()]
    found = json.loads((output / "metrics.json").read_text())["validation"]
    assert found["f1"]["value"] == pytest.approx(seqeval.f1_score(true, given), abs=1e-12)
    assert found["f1"]["low"] < found["f1"]["value"] < found["f1"]["high"]
    unseen = sum(row.count(None) for row in table["prediction"].to_pylist())
    assert [message.partition(": they")[0] for message in warnings_of(output.parent)] == [
        f"validation: {unseen} of {sum(map(len, true))} words have no prediction"
    ]
    assert (output / "log/spans_validation.png").read_bytes()[:4] == b"\x89PNG"
    with open(output / "log/predictions_sample.csv", newline="", encoding="utf-8") as file:
        display_name = list(csv.DictReader(file))
    text = sentences(60, 2)["text"]
    for one in display_name:
        words, row = text[int(one["row"])], int(one["row"])
        assert one["text"] == str(words)
        for name, tags_of_row in (("label", true[row]), ("prediction", given[row])):
            spans = (f"[{task} {' '.join(words[start : end + 1])}]" for task, start, end in get_entities(tags_of_row))
            assert one[name] == " ".join(spans)
        assert int(one["wrong_tags"]) == sum(a != b for a, b in zip(true[row], given[row], strict=True))


def test_a_champion_with_tags_in_another_order_is_compared_by_their_names(
    tags: Path, predicted: Path, tmp_path: Path
) -> None:
    theirs = ["I-TOOL", "B-OTHER", "O", "B-ANIMAL", "B-TOOL", "I-ANIMAL"]
    own = pq.read_table(predicted / "validation.parquet")
    places = [theirs.index(name) for name in NAMED]
    swapped = [[None if tag is None else places[tag] for tag in row] for row in own["prediction"].to_pylist()]
    column = own.column_names.index("prediction")
    champion = own.set_column(column, "prediction", pa.array(swapped, pa.list_(pa.int64())))
    assert KIND.remap_labels(champion, theirs, NAMED)["prediction"].to_pylist() == own["prediction"].to_pylist()
    (tmp_path / "champion").mkdir()
    nothing = pa.array([[0] * len(row) for row in swapped], pa.list_(pa.int64()))
    pq.write_table(own.set_column(column, "prediction", nothing), tmp_path / "champion/validation.parquet")
    inputs = {"predictions": predicted, "champion": tmp_path / "champion", "data": tags / "data"}
    wanted = COMPARE | {"split": "validation", "metrics": ["accuracy", "f1"]}
    output = run_program(compare, tmp_path / "compare", inputs, **wanted)
    found = json.loads((output / "comparison.json").read_text())
    words = sum(map(len, swapped))
    outside = sum(row.count(0) for row in own["label"].to_pylist())
    assert (found["method"], found["champion_value"]) == ("permutation", pytest.approx(outside / words))
    assert found["better"] and found["gained"] > found["lost"]
