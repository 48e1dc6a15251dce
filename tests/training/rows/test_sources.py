"""Finding files and callables before anything is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from training.problems import UserError
from training.recipe import Data
from training.rows.sources import find_files, fingerprint, load_object


def data(path: Path | str, source: str = "csv", splits: dict[str, str] | None = None) -> Data:
    return Data(source=source, path=str(path), text=["text"], label="label", splits=splits)  # type: ignore[arg-type]


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names(found: dict[str, list[Path]]) -> dict[str, list[str]]:
    return {split: [file.name for file in files] for split, files in found.items()}


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_the_files_of_a_folder_are_known_by_their_names(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "train.csv", f"{name}.csv", "test.csv", "train.parquet", "readme.csv")
    assert names(find_files(data(tmp_path))) == {
        "train": ["train.csv"],
        "validation": [f"{name}.csv"],
        "test": ["test.csv"],
    }


def test_the_test_split_may_be_missing(tmp_path: Path) -> None:
    touch(tmp_path, "train.jsonl", "dev.json")
    assert list(find_files(data(tmp_path, "json"))) == ["train", "validation"]


def test_shards_belong_to_their_split_in_order(tmp_path: Path) -> None:
    shards = [f"train-0000{number}-of-00002.parquet" for number in (1, 0)]
    touch(tmp_path, *shards, "validation.parquet")
    assert names(find_files(data(tmp_path, "parquet")))["train"] == sorted(shards)


def test_a_split_is_named_by_file_by_stem_or_by_glob(tmp_path: Path) -> None:
    touch(tmp_path, "a.csv", "b.csv", "old/c-1.csv", "old/c-2.csv")
    splits = {"train": "a", "validation": "b.csv", "test": "old/c-*.csv"}
    assert names(find_files(data(tmp_path, splits=splits))) == {
        "train": ["a.csv"],
        "validation": ["b.csv"],
        "test": ["c-1.csv", "c-2.csv"],
    }


def test_a_glob_limits_the_files_known_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "en/train.csv", "en/dev.csv", "de/train.csv")
    found = find_files(data(tmp_path / "en" / "*.csv"))
    assert found["train"] == [tmp_path / "en" / "train.csv"]


def test_files_are_absolute_when_the_recipe_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "rows/train.csv", "rows/dev.csv")
    monkeypatch.chdir(tmp_path)
    assert find_files(data("rows"))["train"] == [tmp_path / "rows" / "train.csv"]


def test_missing_splits_are_all_named_with_what_is_there(tmp_path: Path) -> None:
    touch(tmp_path, "training.csv")
    with pytest.raises(UserError) as raised:
        find_files(data(tmp_path))
    train, validation = raised.value.problems
    assert "looked for train, train.csv" in train.message
    assert "there is training.csv" in train.message
    assert "Did you mean 'training'?" in train.message
    assert "validation.csv" in validation.message
    assert "dev.csv" in validation.message


def test_a_named_file_that_is_missing_is_named_by_its_field(tmp_path: Path) -> None:
    touch(tmp_path, "train.csv", "dev.csv")
    with pytest.raises(UserError) as raised:
        find_files(data(tmp_path, splits={"train": "train", "validation": "dew"}))
    (problem,) = raised.value.problems
    assert problem.where == "data.splits.validation"
    assert "Did you mean 'dev'?" in problem.message


def test_a_path_that_does_not_exist_names_the_nearest(tmp_path: Path) -> None:
    touch(tmp_path, "reviews/train.csv")
    with pytest.raises(UserError, match="Did you mean 'reviews'"):
        find_files(data(tmp_path / "review"))


def test_two_files_for_one_split_are_not_guessed_between(tmp_path: Path) -> None:
    touch(tmp_path, "train.csv", "val.csv", "dev.csv")
    with pytest.raises(UserError, match=r"could be any of .*val\.csv.*data\.splits\.validation"):
        find_files(data(tmp_path))


@pytest.fixture
def my_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working directory that no test has imported before."""
    module = tmp_path / f"my_rows_{tmp_path.name.replace('-', '_')}.py"
    module.write_text("def rows(split):\n    return []\nrows.fingerprint = lambda: 'v1'\nmany = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


def test_a_callable_of_the_working_directory_is_found(my_rows: Path) -> None:
    rows = load_object(f"{my_rows.stem}:rows")
    assert rows("train") == []
    assert fingerprint(rows) == "v1"


def test_a_callable_without_a_fingerprint_has_none() -> None:
    assert fingerprint(len) is None


def test_the_working_directory_shadows_no_library(my_rows: Path) -> None:
    load_object(f"{my_rows.stem}:rows")
    assert sys.path.index(str(my_rows.parent)) == len(sys.path) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: name, "write module:function"),
        (lambda name: f"{name[:-1]}:rows", "Did you mean"),
        (lambda name: f"{name}:row", "has no 'row': it has rows.* Did you mean 'rows'"),
        (lambda name: f"{name}:many", "must be callable"),
    ],
)
def test_a_wrong_callable_says_what_is_wrong(my_rows: Path, change: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_object(change(my_rows.stem))  # type: ignore[operator]
    assert raised.value.problems[0].where == "data.path"


def test_a_module_that_fails_says_why(my_rows: Path) -> None:
    broken = my_rows.with_name(f"{my_rows.stem}_broken.py")
    broken.write_text("import no_such_library\n")
    with pytest.raises(UserError, match=r"importing .* failed: No module named 'no_such_library'"):
        load_object(f"{broken.stem}:rows")


def test_pinning_needs_no_heavy_library() -> None:
    heavy = "{'pyarrow', 'numpy', 'torch', 'transformers', 'datasets', 'tokenizers'}"
    code = f"import sys, training.rows.sources; print(sorted({heavy} & set(sys.modules)))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"


def test_a_fingerprint_that_fails_is_the_users_mistake() -> None:
    def rows(split: str) -> list[dict[str, str]]:
        return []

    def failing() -> str:
        raise ZeroDivisionError("by zero")

    rows.fingerprint = failing  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="ZeroDivisionError: by zero"):
        fingerprint(rows)
