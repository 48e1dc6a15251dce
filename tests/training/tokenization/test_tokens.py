"""Token ids: those of AutoTokenizer, in files that say the same for the same rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from tests.arrow import read_arrow
from tests.training.vocabularies import PAIRS, TEXTS, WORD_PIECES, word_pieces
from training.data.ipc_files import ipc_writer
from training.models.loading import load_tokenizer
from training.problems import UserError
from training.task_types.sequence_classification import SequenceClassification
from training.tokenization.token_files import TokenizeResult, TokenStatistics, tokenize, truncation_problems


def save_tokenizer(folder: Path) -> Path:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=word_pieces(), **WORD_PIECES).save_pretrained(folder)
    return folder


def save_rows(folder: Path, texts: list[str] = TEXTS, pairs: list[str] | None = None) -> Path:
    folder.mkdir()
    columns = {"text": texts} | ({"text_pair": pairs} if pairs else {})
    table = pa.table(columns | {"label": pa.array(range(len(texts)), pa.int64())})
    for split in ("train", "validation"):
        with ipc_writer(folder / f"{split}.arrow", table.schema) as writer:
            writer.write(table)
    return folder


def rows_of(out: Path) -> pa.Table:
    return read_arrow(out / "train.arrow")


def test_columns_have_their_types(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    tokenize(SequenceClassification(), save_rows(tmp_path / "data", pairs=PAIRS), folder, tmp_path / "out", 32)
    assert {column.name: str(column.type) for column in rows_of(tmp_path / "out").schema} == {
        "input_ids": "list<item: int32>",
        "token_type_ids": "list<item: int8>",
        "length": "int32",
        "label": "int64",
    }


def test_lengths_that_the_tokenizer_was_saved_with_do_not_leak(tmp_path: Path) -> None:
    data, folder = save_rows(tmp_path / "data"), save_tokenizer(tmp_path / "tokenizer")
    tokenize(SequenceClassification(), data, folder, tmp_path / "plain", 64)
    used = Tokenizer.from_file(str(folder / "tokenizer.json"))
    used.enable_padding(length=100)
    used.enable_truncation(5, strategy="only_first")
    used.save(str(folder / "tokenizer.json"))
    tokenize(SequenceClassification(), data, folder, tmp_path / "used", 64)
    assert (tmp_path / "used" / "train.arrow").read_bytes() == (tmp_path / "plain" / "train.arrow").read_bytes()


ROWS = ["the fox", "the", " ".join(["the"] * 9), " ".join(["the"] * 6)]


def report_of(out: Path) -> Any:
    return json.loads((out / "log" / "report.json").read_text())


def test_the_report_counts_tokens_and_what_was_cut(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = tokenize(
        SequenceClassification(),
        save_rows(tmp_path / "data", ROWS),
        save_tokenizer(tmp_path / "tokenizer"),
        tmp_path / "out",
        8,
        progress=lambda done, total: seen.append((done, total)),
    )
    lengths = rows_of(tmp_path / "out").column("length").to_pylist()
    assert lengths[1:] == [3, 8, 8]  # six words and two special tokens fit exactly, nine do not
    report = report_of(tmp_path / "out")
    assert report["truncated"] == {"train": 1, "validation": 1} and report["lost"] == {"train": 3, "validation": 3}
    assert report["tokens"]["train"] == sum(lengths)
    spread = report["length"]["train"]
    assert (spread["min"], spread["median"], spread["max"]) == (3, sorted(lengths)[1], 8)
    counts = dict(zip(spread["histogram"]["edges"], spread["histogram"]["counts"], strict=False))
    assert (counts[3], counts[8], sum(counts.values())) == (1, 2, 4)
    assert found == TokenizeResult(rows=8, tokens=2 * sum(lengths), truncated=2, lost=6)
    assert seen == [(4, 8), (8, 8)]


def test_cut_texts_are_reported_for_each_split_with_the_length_that_would_keep_all(tmp_path: Path) -> None:
    data, folder = save_rows(tmp_path / "data", ROWS), save_tokenizer(tmp_path / "tokenizer")
    tokenize(SequenceClassification(), data, folder, tmp_path / "warned", 8)
    report = report_of(tmp_path / "warned")
    whole = report["tokens"]["train"] + 3
    assert [(p["where"], p["check"], p["level"]) for p in report["problems"]] == [
        ("tokens.max_length", "truncated", "warning")
    ] * 2
    assert report["problems"][0]["message"] == (
        f"8 cuts 1 of 4 rows of train (25.0%) and loses 3 of {whole} tokens ({3 / whole:.1%}): 11 would keep all, "
        "if the model takes as many. If the cut is intended, set data.checks.truncated to ignore."
    )
    tokenize(SequenceClassification(), data, folder, tmp_path / "ignored", 8, "ignore")
    assert report_of(tmp_path / "ignored") == {**report, "problems": []}
    tokenize(SequenceClassification(), data, folder, tmp_path / "enough", 11, "error")
    assert report_of(tmp_path / "enough")["problems"] == []


def test_a_few_lost_tokens_of_many_are_no_warning_and_an_error_if_the_recipe_says_so() -> None:
    found = {"train": TokenStatistics(rows=9_000, tokens=84_759, truncated=1, lost=1)}
    assert [*truncation_problems(found, 128, "warning")] == []
    assert len([*truncation_problems(found, 128, "error")]) == 1
    found = {"train": TokenStatistics(rows=9_000, tokens=84_759, truncated=9, lost=99)}
    assert len([*truncation_problems(found, 128, "warning")]) == 1


def test_rows_that_are_cut_can_be_an_error_that_names_every_split(tmp_path: Path) -> None:
    data, folder = save_rows(tmp_path / "data", ROWS), save_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(UserError) as raised:
        tokenize(SequenceClassification(), data, folder, tmp_path / "out", 8, "error")
    assert [(p.check, p.level) for p in raised.value.problems] == [("truncated", "error")] * 2
    assert "of train (" in str(raised.value) and "of validation (" in str(raised.value)


def test_the_same_rows_give_the_same_bytes_however_they_are_batched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = save_rows(tmp_path / "data", [f"the fox {i} " * (i % 7 + 1) for i in range(5_003)])
    folder = save_tokenizer(tmp_path / "tokenizer")
    tokenize(SequenceClassification(), data, folder, tmp_path / "one", 16)
    monkeypatch.setattr("training.tokenization.token_files.BYTES_AT_ONCE", 999)
    tokenize(SequenceClassification(), data, folder, tmp_path / "two", 16)
    for file in ("train.arrow", "validation.arrow", "log/report.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is not readable"):
        tokenize(SequenceClassification(), save_rows(tmp_path / "data"), tmp_path / "tokenizer", tmp_path / "out", 32)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////f2FiYw=="}},
            r"json is not readable: Precomp",
        ),
        (
            {"model": {"type": "BPE", "unk_token": "[NO]", "vocab": {"a": 0}, "merges": []}},
            r"it fails on texts of the rows: Unk token `\[NO\]` not found",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "^((a+)+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "it fails on texts of the rows: Onig",
        ),
    ],
)
def test_a_tokenizer_that_fails_or_panics_is_refused(tmp_path: Path, part: dict[str, Any], message: str) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(settings | {"post_processor": None} | part))
    with pytest.raises(UserError, match=message):
        tokenize(SequenceClassification(), save_rows(tmp_path / "data", ["a" * 50 + "b"]), folder, tmp_path / "out", 32)
    if "not readable" in message:
        with pytest.raises(UserError, match="its tokenizer is not readable"):
            load_tokenizer(folder)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("by_its_class", [False, True])
def test_a_tokenizer_that_would_make_texts_a_million_times_as_long_is_refused(
    tmp_path: Path, part: str, by_its_class: bool
) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 999}
    settings[part] = {"type": "Sequence", f"{part}s": [replace, replace]}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"tokenizer\.json: .*up to 1,000,000 times as long, more than 1,000 times"):
        if by_its_class:
            load_tokenizer(folder)
        else:
            tokenize(SequenceClassification(), save_rows(tmp_path / "data"), folder, tmp_path / "out", 32)


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}] * 100 + [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2] * 100, "tokens": ["[CLS]"] * 100}},
}
WORD_PIECE = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 10**6,
    "vocab": {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "a": 3, "##a": 4},
}
ONE_CHARACTER_TO_MANY = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * 2000 + b"\0").decode()


@pytest.mark.parametrize("by_its_class", [False, True])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"post_processor": TEMPLATE}, "adds 10,000 special tokens to every text, more than 1,000"),
        ({"model": WORD_PIECE, "post_processor": None}, r"max_input_chars_per_word is 1,000,000, more than 1,000"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ONE_CHARACTER_TO_MANY}},
            "up to 2,000 times as long",
        ),
    ],
)
def test_a_tokenizer_that_makes_much_of_a_short_text_or_of_a_long_word_is_refused(
    tmp_path: Path, part: dict[str, Any], message: str, by_its_class: bool
) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(settings | part))
    with pytest.raises(UserError, match=rf"tokenizer\.json: .*{message}"):
        if by_its_class:
            load_tokenizer(folder)
        else:
            tokenize(SequenceClassification(), save_rows(tmp_path / "data"), folder, tmp_path / "out", 32)


def test_a_tokenizer_that_names_no_side_to_truncate_is_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text('{"truncation_side": "up"}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json: truncation_side 'up' is neither"):
        tokenize(SequenceClassification(), save_rows(tmp_path / "data"), folder, tmp_path / "out", 32)


def test_a_length_without_room_for_text_is_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"^tokens\.max_length: 3 leaves no room for a text and its 3 special tokens"):
        tokenize(SequenceClassification(), save_rows(tmp_path / "data", pairs=PAIRS), folder, tmp_path / "out", 3)
