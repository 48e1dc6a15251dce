"""Mixtures: the number of rows of each set, splits that are joined, and problems between sets."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.task_types import TINY
from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import labels_of, report_of, rows_of, write_json, write_parquet
from training.data.load_rows import load
from training.data.mixtures import SetSize, choose_rows, mixed_counts, round_by_largest_remainder, spread_evenly
from training.problems import Problem, UserError
from training.recipe import Data
from training.recipe.task_specification import specification
from training.tokenization.encoder import token_counter

Pairs = list[tuple[str, str]]


def pairs(name: str, count: int, labels: str = "neg pos") -> Pairs:
    """Rows whose texts tell their set and number."""
    words = labels.split()
    return [(f"{name} {number}", words[number % len(words)]) for number in range(count)]


class Sets:
    """Sets of rows in a folder, and their mixture."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[dict[str, list[str]]] = []
        self.entries: list[dict[str, Any]] = []

    def add(self, name: str, rows: dict[str, Pairs], names: list[str] | None = None, **fields: Any) -> Sets:
        """Adds a set, of JSON lines or with label names of Parquet."""
        place = self.folder / name
        place.mkdir()
        write_parquet(place, rows, names) if names else write_json(place, rows)
        suffix = "parquet" if names else "jsonl"
        self.files.append({split: [str(place / f"{split}.{suffix}")] for split in rows})
        self.entries.append({"source": "parquet" if names else "json", "path": str(place), "name": name, **fields})
        return self

    def data(self, **beside: Any) -> Data:
        return Data.model_validate({"text": ["text"], "label": "label", "mix": self.entries, **beside})

    def load(self, out: str = "out", **beside: Any) -> Path:
        load(self.data(**beside), CLASSIFICATION, self.files, self.folder / out)
        return self.folder / out

    def problems(self, **beside: Any) -> list[Problem]:
        return list(raised_problems(self.load, **beside))


@pytest.fixture
def sets(tmp_path: Path) -> Sets:
    return Sets(tmp_path)


def splits(name: str, train: int, validation: int = 2, labels: str = "neg pos") -> dict[str, Pairs]:
    return {"train": pairs(name, train, labels), "validation": pairs(f"{name} held", validation, labels)}


def mixture(
    rows: list[int], characters: list[int] | None = None, tokens: list[int] | None = None, **data: Any
) -> tuple[Data, list[SetSize]]:
    shares = data.pop("shares")
    entries = [{"source": "csv", "path": f"{index}.csv", **share} for index, share in enumerate(shares)]
    sizes = zip(rows, characters or rows, tokens or rows, strict=True)
    return Data.model_validate({"mix": entries, **data}), [SetSize(f"{i}", *size) for i, size in enumerate(sizes)]


WEIGHTS = [{"weight": 0.7}, {"weight": 0.3}]


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({"rows": [100, 30], "shares": [{}, {}]}, [100, 30]),
        ({"rows": [100, 30], "shares": [{"epochs": 0.5}, {"epochs": 2.25}]}, [50, 68]),
        ({"rows": [100, 100], "shares": WEIGHTS}, [100, 43]),
        ({"rows": [100, 30], "shares": WEIGHTS}, [70, 30]),
        ({"rows": [100, 30], "shares": WEIGHTS, "stopping_strategy": "all_exhausted"}, [100, 43]),
        ({"rows": [100, 30], "shares": [{"weight": 0.7}, {"weight": 0.3, "epochs": 2}]}, [140, 60]),
        ({"rows": [10, 10, 10], "shares": [{"weight": 1}] * 3}, [10, 10, 10]),
        ({"rows": [7, 5, 3], "shares": [{"weight": 1}] * 3, "stopping_strategy": "all_exhausted"}, [7, 7, 7]),
        # Rows of the second set are ten times as long: a tenth of them has the same characters.
        (
            {"rows": [100, 100], "characters": [500, 5000], "shares": [{"weight": 1}] * 2, "weight_by": "characters"},
            [100, 10],
        ),
        (
            {
                **{"rows": [100, 100], "characters": [500, 500], "tokens": [200, 800]},
                **{"shares": [{"weight": 1}] * 2, "weight_by": "tokens"},
            },
            [100, 25],
        ),
    ],
)
def test_the_rows_of_each_set_follow_exactly_from_weights_and_epochs(given: dict[str, Any], counts: list[int]) -> None:
    data, sizes = mixture(**given)
    assert mixed_counts(data, sizes) == counts


def test_rows_are_shared_by_the_largest_remainder_whatever_the_weights() -> None:
    draw = np.random.default_rng(1)
    for _ in range(200):
        quotas = [Fraction(int(number), 97) for number in draw.integers(0, 10_000, 5)]
        counts = round_by_largest_remainder(quotas)
        assert abs(sum(counts) - sum(quotas)) <= Fraction(1, 2)
        assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas, strict=True))


def test_the_chosen_rows_depend_on_the_seed_and_rows_that_are_added_displace_few() -> None:
    hashes = np.random.default_rng(0).integers(0, 2**63, 1000).astype(np.uint64)
    chosen = choose_rows(hashes, 300, seed=0)
    assert chosen.sum() == 300 and (choose_rows(hashes, 300, seed=0) == chosen).all()
    assert 60 < (chosen & choose_rows(hashes, 300, seed=1)).sum() < 120  # 90 by chance
    added = choose_rows(np.append(hashes, hashes[:50] + np.uint64(1)), 300, seed=0)[:1000]
    assert not (added & ~chosen).any() and added.sum() > 270


def test_every_part_of_a_mixture_has_the_shares_of_the_whole() -> None:
    order = spread_evenly([700, 200, 100])
    assert np.bincount(order).tolist() == [700, 200, 100]
    for start in range(0, 1000, 100):
        assert np.abs(np.bincount(order[start : start + 100], minlength=3) - [70, 20, 10]).max() <= 1


def test_the_rows_of_a_mixture_are_the_promised_ones_by_counts_and_texts(sets: Sets) -> None:
    sets.add("ours", splits("ours", 40), epochs=0.5).add("theirs", splits("theirs", 8), epochs=2.5)
    out = sets.load()
    seen = Counter(row["text"] for row in rows_of(out))
    ours = {text: n for text, n in seen.items() if text.startswith("ours")}
    theirs = {text: n for text, n in seen.items() if text.startswith("theirs")}
    assert len(ours) == 20 and set(ours.values()) == {1}
    assert len(theirs) == 8 and sorted(theirs.values()) == [2, 2, 2, 2, 3, 3, 3, 3]
    known = dict(pairs("ours", 40) + pairs("theirs", 8))
    names = json.loads((out / "labels.json").read_text())
    assert all(known[row["text"]] == names[row["label"]] for row in rows_of(out))
    assert [row["text"] for row in rows_of(out, "validation")] == [
        f"{n} held {i}" for n in ("ours", "theirs") for i in (0, 1)
    ]
    report = report_of(out)
    assert report["rows"] == {"train": 40, "validation": 4} and sum(report["labels"]["train"].values()) == 40
    assert [(one["dataset"], one["rows"], one["mixed"], one["passes"], one["share"]) for one in report["mixture"]] == [
        ("ours", 40, 20, 0.5, 0.5),
        ("theirs", 8, 20, 2.5, 0.5),
    ]
    assert report["problems"] == []  # repeated rows of a set are no duplicates


def test_the_same_mixture_has_the_same_bytes_and_another_seed_other_rows(sets: Sets) -> None:
    sets.add("ours", splits("ours", 40), weight=1).add("theirs", splits("theirs", 9), weight=1)
    files = [
        (sets.load(out, mix_seed=seed) / "train.arrow").read_bytes() for out, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert files[0] == files[1] != files[2]


def test_weights_by_tokens_count_the_texts_of_each_set_by_its_tokenizer_without_special_tokens(
    sets: Sets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.tokenization.encoder._BATCH_TEXTS", 3)
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    # Both have 6 characters a row: in 1 token, and in 3.
    words = [(f"word{n:02}", ["neg", "pos"][n % 2]) for n in range(30)]
    letters = [(f"a {n // 10} {n % 10:02}", ["neg", "pos"][n % 2]) for n in range(30)]
    for name, rows in (("words", words), ("letters", letters)):
        sets.add(name, {"train": rows, "validation": pairs(f"{name} held", 2)}, weight=1)
    data = sets.data(weight_by="tokens")
    load(data, CLASSIFICATION, sets.files, tmp_path / "out", count_tokens=token_counter(tmp_path))
    table = report_of(tmp_path / "out")["mixture"]
    assert [(one["rows"], one["characters"], one["tokens"]) for one in table] == [(30, 180, 30), (30, 180, 90)]
    assert [(one["mixed"], one["token_share"]) for one in table] == [(30, 0.5), (10, 0.5)]
    assert [one["mixed"] for one in report_of(sets.load("other", weight_by="characters"))["mixture"]] == [30, 30]
    with pytest.raises(UserError, match=r"^data\.weight_by: 'tokens' are counted by tokenizer\.json, .* choose char"):
        token_counter(tmp_path / "words")


def test_a_mixture_of_more_rows_than_a_block_holds_has_all_of_them(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("training.data.mixtures", "training.data.ipc_files", "training.data.json_files"):
        monkeypatch.setattr(f"{module}.BLOCK_ROWS", 7, raising=False)
    sets.add("ours", splits("ours", 50), epochs=1.3).add("theirs", splits("theirs", 23), epochs=2)
    seen = Counter(row["text"].split()[0] for row in rows_of(sets.load()))
    assert seen == {"ours": 65, "theirs": 46}


def test_each_set_has_its_own_validation_rows_or_holds_some_out_and_each_row_knows_its_set(sets: Sets) -> None:
    sets.add("ours", splits("ours", 40, validation=5)).add("theirs", {"train": pairs("theirs", 60)})
    out = sets.load(validation_size=0.2, test_size=0.1)
    train = {row["text"] for row in rows_of(out)}
    for split in ("validation", "test"):
        texts = [row["text"] for row in rows_of(out, split)]
        named = read_arrow(out / f"{split}.slices.arrow")["dataset"].to_pylist()
        assert [text.split()[0] for text in texts] == named and set(named) == {"ours", "theirs"}
        assert train.isdisjoint(texts)
    assert json.loads((out / "slices.json").read_text())["kept"] == ["dataset"]
    rows = report_of(out)["mixture"]
    assert rows[0]["validation"] == 5 and rows[1]["rows"] + rows[1]["validation"] + rows[1]["test"] == 60


def test_a_column_that_only_one_set_has_is_missing_in_the_rows_of_the_others(tmp_path: Path) -> None:
    for name, head, row in (("a", "text,label", "one,pos"), ("b", "text,label,dataset,genre", "two,neg,x,drama")):
        (tmp_path / name).mkdir()
        for split in ("train", "validation"):
            (tmp_path / name / f"{split}.csv").write_text(f"{head}\n{split} {row}\n")
    entries = [{"source": "csv", "path": str(tmp_path / name)} for name in "ab"]
    files = [{s: [str(tmp_path / name / f"{s}.csv")] for s in ("train", "validation")} for name in "ab"]
    data = Data.model_validate(
        {"text": ["text"], "label": "label", "mix": entries, "checks": {"disjoint_labels": "ignore"}}
    )
    load(data, CLASSIFICATION, files, tmp_path / "out")
    assert read_arrow(tmp_path / "out" / "validation.slices.arrow").to_pylist() == [
        {"dataset": "a", "genre": None},
        {"dataset": "b", "genre": "drama"},
    ]


def test_labels_are_joined_by_name_in_whatever_order_the_sets_number_them(sets: Sets) -> None:
    numbered = {s: [(text, 0 if label == "pos" else 1) for text, label in rows] for s, rows in splits("b", 6).items()}
    sets.add("a", splits("a", 6, labels="neg pos new")).add("b", numbered, names=["pos", "neg"])  # type: ignore[arg-type]
    out = sets.load(checks={"different_labels": "ignore"})
    known = dict(pairs("a", 6, "neg pos new") + pairs("b", 6))
    assert labels_of(out) == [known[row["text"]] for row in rows_of(out)]
    assert json.loads((out / "labels.json").read_text()) == ["neg", "new", "pos"]


def test_labels_that_all_sets_number_keep_the_order_of_the_first_set(sets: Sets) -> None:
    for name, names in (("a", ["pos", "neg"]), ("b", ["neg", "odd"])):
        rows = {s: [(f"{name} {s} {n}", n % 2) for n in range(6)] for s in ("train", "validation")}
        sets.add(name, rows, names=names)  # type: ignore[arg-type]
    out = sets.load(checks={"different_labels": "ignore"})
    assert json.loads((out / "labels.json").read_text()) == ["pos", "neg", "odd"]


def test_rows_with_an_unknown_label_are_left_out_before_rows_are_counted(sets: Sets) -> None:
    sets.add("a", splits("a", 9, labels="neg pos odd"), epochs=1.5).add("b", splits("b", 4))
    out = sets.load(label_names=["neg", "pos"], checks={"unknown_label": "warning", "different_labels": "ignore"})
    assert Counter(row["text"].split()[0] for row in rows_of(out)) == {"a": 9, "b": 4}
    assert Counter(Counter(row["text"] for row in rows_of(out)).values()) == {2: 3, 1: 3 + 4}
    assert [(one["rows"], one["mixed"]) for one in report_of(out)["mixture"]] == [(6, 9), (4, 4)]


def test_problems_between_sets_are_found_and_name_both(sets: Sets) -> None:
    ours, theirs = splits("ours", 6), splits("theirs", 6)
    theirs["train"][1] = ("ours 2", "pos")  # a text of the other set, with another label
    theirs["validation"][0] = ("ours 3", "pos")  # training rows of one set are test rows of the other
    out = sets.add("ours", ours).add("theirs", theirs).load()
    found = {problem["check"]: f"{problem['where']}: {problem['message']}" for problem in report_of(out)["problems"]}
    assert set(found) == {"duplicates", "conflicting_labels", "shared_rows"}
    for check, place in (("duplicates", "train.jsonl row 2"), ("conflicting_labels", "train.jsonl row 2")):
        assert found[check].startswith("theirs: ") and f"theirs/{place}" in found[check]
    assert "theirs/validation.jsonl row 1" in found["shared_rows"]
    assert all("of ours: " in message and "ours/train.jsonl" in message for message in found.values())


def test_sets_whose_labels_have_nothing_in_common_are_refused_and_named(sets: Sets) -> None:
    sets.add("ours", splits("ours", 6)).add("theirs", splits("theirs", 6, labels="negative positive"))
    (problem,) = [problem for problem in sets.problems() if problem.level == "error"]
    assert (problem.check, problem.where) == ("disjoint_labels", "data.mix[1]")
    assert problem.message.startswith(
        "the labels of 'theirs' ('negative', 'positive') and of 'ours' ('neg', 'pos') have none in common: spell them"
    )
    out = sets.load(checks={"disjoint_labels": "ignore"})
    assert json.loads((out / "labels.json").read_text()) == ["neg", "negative", "pos", "positive"]


def test_a_set_that_lacks_labels_of_another_is_named_and_one_with_a_single_label_is_no_error(sets: Sets) -> None:
    out = sets.add("ours", splits("ours", 6)).add("theirs", splits("theirs", 6, labels="pos")).load()
    found = [(one["check"], one["where"], one["message"]) for one in report_of(out)["problems"]]
    assert found == [("different_labels", "data.mix[1]", "'theirs' has no row of 'neg', which another set has.")]


def test_problems_of_all_sets_are_reported_together_by_their_fields_and_rows(sets: Sets) -> None:
    sets.add("ours", {"train": [("", "pos"), ("b", "neg")]}).add("theirs", splits("theirs", 6), text=["body"])
    found = {problem.where: problem.message for problem in sets.problems()}
    assert "has no text in column 'text'" in found[f"ours: {sets.files[0]['train'][0]} row 1"]
    assert "has no column 'body'" in found["data.mix[1].text"]


def test_a_label_whose_rows_are_not_in_the_mixture_is_reported(sets: Sets) -> None:
    ours = {"train": [(f"ours {n}", "rare" if n == 7 else "pos") for n in range(50)], "validation": pairs("x", 2)}
    sets.add("ours", ours, epochs=0.1).add("theirs", splits("theirs", 6))
    data = sets.load(mix_seed=1)
    assert "rare" not in labels_of(data)
    found = [one["message"] for one in report_of(data)["problems"] if one["check"] == "absent_label"]
    assert found[-1].startswith("the train split has no row of 'rare'") and len(found) == 2


def test_a_share_without_a_row_and_a_mixture_out_of_proportion_are_refused(sets: Sets) -> None:
    sets.add("ours", splits("ours", 20), weight=0.999).add("theirs", splits("theirs", 20), weight=0.001)
    (problem,) = sets.problems()
    assert (problem.where, problem.message) == (
        "data.mix[1].weight",
        "'theirs' has a share of 20 rows in which there is not one: raise it.",
    )
    (problem,) = sets.problems(stopping_strategy="all_exhausted")
    assert problem.message.startswith("the mixture would have 20,000 rows, made of 40: lower the weights")


@pytest.mark.parametrize("task", TINY)
def test_rows_of_every_task_type_are_those_of_its_sets_as_often_as_they_are_passed(task: str, tmp_path: Path) -> None:
    task_type, draw = specification(TINY[task].task or task, TINY[task].options), random.Random(1)
    files, alone, columns = [], [], TINY[task].data
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for split, count in (("train", 30), ("validation", 9)):
            lines = [json.dumps(TINY[task].row(draw)) for _ in range(count)]
            (tmp_path / name / f"{split}.jsonl").write_text("\n".join(lines))
        files.append({s: [str(tmp_path / name / f"{s}.jsonl")] for s in ("train", "validation")})
        data = Data.model_validate({"source": "json", "path": name, **columns})
        load(data, task_type, files[-1], tmp_path / f"{name}-alone")
        alone.append(Counter(json.dumps(row) for row in rows_of(tmp_path / f"{name}-alone")))
    mix = [{"source": "json", "path": "a", "epochs": 2}, {"source": "json", "path": "b"}]
    load(Data.model_validate({**columns, "mix": mix}), task_type, files, tmp_path / "mixed")
    mixed = Counter(json.dumps(row) for row in rows_of(tmp_path / "mixed"))
    assert mixed == alone[0] + alone[0] + alone[1] and mixed.total() == 2 * alone[0].total() + alone[1].total()
