"""Multiple choice: tokens and losses of transformers' example, rows with different numbers of choices, its baseline."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from transformers import AutoModelForMultipleChoice, AutoTokenizer, BertConfig, BertTokenizer, PreTrainedModel

from tests.arrow import write_arrow
from training.batching.batches import TokenRows
from training.engine.predictor import Predictor
from training.evaluation.baseline import choose_rival, compute_values
from training.evaluation.choices import Choices
from training.models.loading import load_tokenizer
from training.problems import UserError
from training.recipe import Training
from training.task_types.multiple_choice import ENDINGS, MultipleChoice
from training.tokenization.encoder import load_fast_encoder

TEXT = "she opens the hood of a car and looks inside swims to shore then he sings is gone quietly ."
SWAG = [
    {
        "sent1": "she opens the hood of a car .",
        "sent2": "she",
        **dict(zip(ENDINGS, ["looks inside .", "swims to shore .", "sings .", "is gone ."], strict=True)),
        "label": 0.0,
    },
    {
        "sent1": "he swims .",
        "sent2": "then he",
        **dict(zip(ENDINGS, ["opens the hood quietly .", "sings", "is gone", "looks to shore ."], strict=True)),
        "label": 3.0,
    },
]
UNEVEN: list[dict[str, Any]] = [
    {"context": "she opens the hood", "choices": ["looks inside", "swims"], "label": 1.0},
    {"context": "he is", "choices": ["gone", "a car", "quietly", "swims to shore and sings"], "label": 2.0},
    {"context": "the car", "choices": ["sings", "is gone", "and"], "label": 0.0},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny BERT with random weights, and its tokenizer."""
    known = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TEXT.split()])}
    BertTokenizer(vocab=known).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = AutoModelForMultipleChoice.from_config(BertConfig(**sizes, vocab_size=len(known)))
        torch.nn.init.normal_(made.classifier.weight)  # differences that one sees
    made.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForMultipleChoice.from_pretrained(folder).eval()
    return loaded


def token_rows(rows: list[dict[str, Any]], folder: Path, max_length: int = 32) -> TokenRows:
    batch = pa.RecordBatch.from_pylist(rows)
    return TokenRows(
        pa.Table.from_batches([MultipleChoice().features(load_fast_encoder(folder, max_length), batch).rows])
    )


def run(rows: list[dict[str, Any]], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits and the loss of rows as one batch."""
    task, tokens = MultipleChoice(), token_rows(rows, folder)
    batch = task.collator(load_tokenizer(folder), 1)([tokens[number] for number in range(len(tokens))])
    logits = task.forward(load(folder), batch)["logits"]
    loss = task.loss(Training(), [], tokens, outside=False)
    assert loss is not None
    return logits, loss(logits, batch["labels"])


def as_run_swag(rows: list[dict[str, Any]], folder: Path, max_length: int = 32) -> Any:
    """The encoding of transformers' example: pairs of sent1 and "sent2 ending", those of each row together."""
    firsts = [[row["sent1"]] * len(ENDINGS) for row in rows]
    seconds = [[f"{row['sent2']} {row[ending]}" for ending in ENDINGS] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(
        [*chain(*firsts)], [*chain(*seconds)], truncation=True, max_length=max_length, padding=True, return_tensors="pt"
    )


@pytest.mark.parametrize("max_length", [32, 9])
def test_tokens_of_swags_rows_are_those_of_transformers_example_cut_too(folder: Path, max_length: int) -> None:
    theirs, own = as_run_swag(SWAG, folder, max_length), token_rows(SWAG, folder, max_length)
    masks = theirs["attention_mask"].bool().unflatten(0, (len(SWAG), len(ENDINGS)))
    for name in ("input_ids", "token_type_ids"):
        of_rows = theirs[name].unflatten(0, masks.shape[:2])
        found = [own[row][name].tolist() for row in range(len(SWAG))]
        assert found == [values[mask].tolist() for values, mask in zip(of_rows, masks, strict=True)]
    assert [own[row]["label"].tolist() for row in range(2)] == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_loss_and_logits_are_those_of_transformers_model_called_its_own_way(folder: Path) -> None:
    logits, loss = run(SWAG, folder)
    given = {name: values.unflatten(0, (len(SWAG), len(ENDINGS))) for name, values in as_run_swag(SWAG, folder).items()}
    theirs = load(folder)(**given, labels=torch.tensor([0, 3]))
    torch.testing.assert_close(logits, theirs.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(loss, theirs.loss, rtol=0, atol=1e-6)


def test_rows_with_different_numbers_of_choices_share_a_batch_without_changing_each_other(folder: Path) -> None:
    logits, loss = run(UNEVEN, folder)
    alone = [run([row], folder) for row in UNEVEN]
    for found, (of_row, _), row in zip(logits, alone, UNEVEN, strict=True):
        count = len(row["choices"])
        torch.testing.assert_close(found[:count], of_row[0], rtol=0, atol=1e-6)
        assert (found[count:] == -torch.inf).all()
    torch.testing.assert_close(loss, torch.stack([one for _, one in alone]).mean(), rtol=0, atol=1e-6)
    loss.backward()


def test_a_model_answers_with_the_place_of_the_choice_and_all_probabilities(folder: Path) -> None:
    asked = pa.RecordBatch.from_pylist([{name: row[name] for name in ("context", "choices")} for row in UNEVEN])
    records = [*Predictor(MultipleChoice(), folder, folder, 32).predict(asked)]
    for record, row, logits in zip(records, UNEVEN, run(UNEVEN, folder)[0], strict=True):
        probabilities = logits[: len(row["choices"])].softmax(dim=0)
        assert record["probabilities"] == pytest.approx(probabilities.tolist(), abs=1e-6)
        assert record["choice"] == int(probabilities.argmax())
        assert record["probability"] == record["probabilities"][record["choice"]]
    assert MultipleChoice().lines(records[0])[0].endswith(f"choice {records[0]['choice']}")


def test_labels_that_are_no_place_of_a_choice_and_rows_with_one_choice_are_named() -> None:
    rows = [
        {"context": "a", "choices": choices, "label": label}
        for choices, label in [
            (["b", "c"], 1.0),
            (["b", "c"], 0.5),
            (["b", "c"], 2.0),
            (["b", "c"], -1.0),
            (["b"], 0.0),
        ]
    ]
    found = {
        reason: mask.tolist() for _, reason, mask in MultipleChoice().row_problems(pa.RecordBatch.from_pylist(rows))
    }
    assert found == {
        reason: [number == place for number in range(len(rows))]
        for place, reason in enumerate(
            [
                "has the label 0.5, which is no whole number: it is the place of the right choice, from 0",
                "has the label 2, and its 2 choices have the places 0 to 1",
                "has the label -1, and its 2 choices have the places 0 to 1",
                "has 1 choice, and a row needs two or more",
            ],
            1,
        )
    }


def test_rows_that_an_ignored_check_keeps_are_refused_before_they_become_tokens(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.checks\.choices.*keeps a row that has the label 7"):
        token_rows([{**UNEVEN[0], "label": 7.0}], folder)


def rows_of(*chosen: tuple[list[str], int]) -> pa.Table:
    return pa.Table.from_pylist([{"context": "a", "choices": texts, "label": float(right)} for texts, right in chosen])


def test_a_first_model_must_beat_the_most_frequent_place_and_the_longest_choice(tmp_path: Path) -> None:
    often_first = rows_of((["b", "cc"], 0), (["b", "cc", "d"], 0), (["bbb", "c"], 1))
    often_longest = rows_of((["b", "cc"], 1), (["b", "cc", "ddd"], 2), (["bbb", "c"], 0), (["bb", "c"], 0))
    rows = Choices(np.array([1, 1]), np.zeros(2, np.int64), np.full((2, 3), 1 / 3), np.array([3, 2]))
    write_arrow(tmp_path / "test.arrow", rows_of((["b", "cc", "d"], 1), (["bbb", "c"], 1)))
    found = {}
    for table in (often_first, often_longest):
        write_arrow(tmp_path / "train.arrow", table)
        rival = choose_rival(MultipleChoice().baseline(tmp_path, tmp_path, tmp_path, []), "accuracy")
        answered = rival.predict(rows, "test")
        assert isinstance(answered, Choices)
        assert answered.probabilities.sum(axis=1) == pytest.approx(1) and answered.probabilities[1, 2] == 0
        found[rival.name] = compute_values(["accuracy"], answered)["accuracy"]
    assert found == {"choice 0": 0.0, "the longest choice": 0.5}


def test_figures_are_those_of_scikit_learn_and_predictions_of_different_widths_join(folder: Path) -> None:
    logits = pa.array([[0.5, 2.0], [1.0, 0.0, 3.0]], pa.list_(pa.float32()))
    predicted = MultipleChoice().metric_inputs(pa.table({"label": [1, 0], "logits": logits}), [])
    assert predicted.probabilities[0, 2] == 0 and predicted.correct.tolist() == [True, False]
    found = compute_values(["accuracy", "log_loss"], predicted)
    expected = sklearn_metrics.log_loss([1, 0], predicted.probabilities, labels=[0, 1, 2])
    assert found == {"accuracy": 0.5, "log_loss": pytest.approx(expected)}
    narrow = MultipleChoice().metric_inputs(pa.table({"label": [1], "logits": logits[:1]}), [])
    joined = narrow.concatenate(predicted)
    assert joined.probabilities.shape == (3, 3) and joined.row_scores[1] == narrow.row_scores[0]
    assert len(MultipleChoice().empty_predictions([]).concatenate(joined)) == 3
