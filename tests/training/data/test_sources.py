"""Finding files and callables before anything is read."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.raised import raised_problems
from training.data.file_systems import display_name
from training.data.sources import find_split_files, fingerprint, is_rows, load_object
from training.local_files import find_foreign
from training.problems import UserError
from training.recipe import Data


def find_files(data: Data) -> dict[str, list[str]]:
    """The files of each split."""
    return {split: [found.file for found in files] for split, files in find_split_files(data)[0].items()}


def data(path: Path | str, source: str = "csv", splits: dict[str, Any] | None = None) -> Data:
    return Data(source=source, path=str(path), text=["text"], label="label", splits=splits)  # type: ignore[arg-type]


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {split: [Path(file).name for file in files] for split, files in found.items()}


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_the_files_of_a_folder_are_known_by_their_names(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "train.csv", f"{name}.csv", "test.csv", "train.parquet", "readme.csv")
    assert names(find_files(data(tmp_path))) == {
        "train": ["train.csv"],
        "validation": [f"{name}.csv"],
        "test": ["test.csv"],
    }
    assert [file.name for file in find_split_files(data(tmp_path))[1]] == ["readme.csv"]
    assert find_split_files(data(tmp_path, splits={"train": "train"}))[1] == []


@pytest.mark.parametrize("path", ["", "*.csv"])
def test_a_file_name_that_is_no_text_is_refused_before_rows_are_read(tmp_path: Path, path: str) -> None:
    (tmp_path / "train.csv").touch()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/mails \xff.csv")).touch()
    with pytest.raises(UserError) as refused:
        find_files(data(tmp_path / path))
    (problem,) = refused.value.problems
    assert problem.where == f"{tmp_path}/mails \\xff.csv" and problem.message == "its name is not in UTF-8: rename it."


@pytest.mark.parametrize("path", ["", "*.csv"])
def test_a_pipe_with_the_name_of_a_split_is_not_passed_over(tmp_path: Path, path: str) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,b\n")
    os.mkfifo(tmp_path / "validation.csv")
    found, _, _ = find_split_files(Data(source="csv", path=str(tmp_path / path)))
    (pipe,) = found["validation"]
    assert "is a pipe, a socket or a device" in str(find_foreign([pipe.file])[0])


def test_a_file_name_adds_no_line_to_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = "a\ntraining.loss: all is well\r\x1b[2K\t.csv"
    monkeypatch.chdir(tmp_path)
    escaped = r"a\ntraining.loss: all is well\r\x1b[2K\t.csv"
    assert display_name(tmp_path / forged) == escaped and "\n" not in display_name("s3://bucket/a\nb.csv")
    touch(tmp_path, forged)
    for source, splits in (("csv", {"train": "other"}), ("parquet", None)):
        (problem,) = raised_problems(find_split_files, data(tmp_path, source, splits))
        assert escaped in problem.message and not {"\n", "\t"} & set(problem.message)


def test_validation_and_test_may_be_missing(tmp_path: Path) -> None:
    touch(tmp_path, "train.jsonl", "dev.json")
    assert list(find_files(data(tmp_path, "json"))) == ["train", "validation"]
    (tmp_path / "dev.json").unlink()
    assert list(find_files(data(tmp_path, "json"))) == ["train"]
    assert list(find_files(data(tmp_path, "json", {"train": "train"}))) == ["train"]


@pytest.mark.parametrize(
    ("source", "suffixes"),
    [
        ("csv", [".csv", ".tsv", ".csv.gz", ".tsv.zst"]),
        ("json", [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.zst"]),
        ("parquet", [".parquet", ".pq"]),
        ("arrow", [".arrow", ".feather", ".ipc"]),
    ],
)
def test_each_source_has_its_suffixes_packed_or_not(tmp_path: Path, source: str, suffixes: list[str]) -> None:
    for suffix in suffixes:
        folder = touch(tmp_path / suffix, f"train{suffix}", f"dev{suffix}", "train.txt", f"._train{suffix}")
        expected = {"train": [f"train{suffix}"], "validation": [f"dev{suffix}"]}
        assert names(find_files(data(folder, source))) == expected
        assert names(find_files(data(folder, source, {"train": "train", "validation": "dev"}))) == expected


@pytest.mark.parametrize("path", [".", "reviews-1.csv", "*.csv", "reviews-*"])
def test_files_whose_names_name_no_split_are_train(tmp_path: Path, path: str) -> None:
    touch(tmp_path, "reviews-1.csv", "reviews-2.csv.gz", "text.csv", "latest.csv", "notes.txt", "reviews-notes.txt")
    assert (
        names(find_files(data(tmp_path / path)))["train"]
        == {
            ".": ["latest.csv", "reviews-1.csv", "reviews-2.csv.gz", "text.csv"],
            "reviews-1.csv": ["reviews-1.csv"],
            "*.csv": ["latest.csv", "reviews-1.csv", "text.csv"],
            "reviews-*": ["reviews-1.csv", "reviews-2.csv.gz"],
        }[path]
    )


@pytest.mark.parametrize(
    "name",
    [
        "training",
        "trian",
        "tran",
        "validate",
        "validaton",
        "eval",
        "tset",
        "reviews-test",
        "Dev_2024",
        "test1",
        "holdout",
    ],
)
def test_a_file_that_may_be_meant_as_a_split_is_not_merged_into_train(tmp_path: Path, name: str) -> None:
    touch(tmp_path, f"{name}.csv", "more.csv")
    with pytest.raises(UserError, match=rf"no train file in .*there is .*{name}\.csv.*Name it in data\.splits\.train"):
        find_files(data(tmp_path))


@pytest.mark.parametrize("name", ["reviews_train.csv", "sts-dev.csv", "test.csv", "comments.txt", "old-train"])
def test_a_file_that_is_named_is_taken_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name, "other.csv")
    assert find_files(data(tmp_path / name)) == {"train": [str(tmp_path / name)]}
    named = data(tmp_path, splits={"train": name, "validation": "other.csv"})
    assert find_files(named) == {"train": [str(tmp_path / name)], "validation": [str(tmp_path / "other.csv")]}


def test_a_folder_with_files_of_another_kind_alone_names_them(tmp_path: Path) -> None:
    touch(tmp_path, "reviews.xlsx", "README.txt")
    with pytest.raises(UserError, match=r"no such file, only README.txt, reviews.xlsx \(reviews.xlsx is a spread"):
        find_files(data(tmp_path))


def test_a_folder_with_rows_in_its_folders_alone_names_them_and_the_glob(tmp_path: Path) -> None:
    for name in ("2024", "2025", "_tmp"):
        (tmp_path / name).mkdir()
        touch(tmp_path / name, "rows.csv")
    with pytest.raises(UserError) as refused:
        find_files(data(tmp_path))
    message = refused.value.problems[0].message
    assert "2 folders in it are not read (2024, 2025): to read all folders, give" in message
    assert f"{tmp_path.name}/**/*." in message


def test_a_held_out_file_alone_is_not_train(tmp_path: Path) -> None:
    touch(tmp_path, "dev.csv", "more.csv")
    with pytest.raises(UserError, match="no train file in"):
        find_files(data(tmp_path))


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


def test_a_split_may_have_several_files_and_globs_each_taken_once(tmp_path: Path) -> None:
    touch(tmp_path, "b.csv", "a-1.csv", "a-2.csv", "c.csv")
    splits = {"train": ["b", "a-*.csv", str(tmp_path / "a-1.csv")], "validation": ["c"]}
    found = find_files(data(tmp_path, splits=splits))
    assert names(found) == {"train": ["b.csv", "a-1.csv", "a-2.csv"], "validation": ["c.csv"]}


def test_a_file_of_two_splits_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.csv", "b.csv")
    with pytest.raises(UserError, match=r"data\.splits\.validation: .*b\.csv is in train as well"):
        find_files(data(tmp_path, splits={"train": "*.csv", "validation": "b.csv"}))


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path: Path) -> None:
    folder = touch(tmp_path, "old [2026]/train [v2].csv", "old [2026]/train v.csv", "old [2026]/dev.csv") / "old [2026]"
    url = f"memory://{uuid.uuid4()}/old [2026]"
    for name in ("train [v2].csv", "train v.csv", "dev.csv"):
        fsspec.filesystem("memory").pipe_file(f"{url}/{name}", b"")
    for there in (str(folder), url):
        assert names(find_files(data(f"{there}/train [v2].csv"))) == {"train": ["train [v2].csv"]}
        for name in ("train [v2].csv", f"{there}/train [v2].csv", "train [v2]", ["train [v2].csv"]):
            found = names(find_files(data(there, splits={"train": name, "validation": "dev"})))
            assert found == {"train": ["train [v2].csv"], "validation": ["dev.csv"]}
    globbed = data(folder / "*.csv", splits={"train": "train [ v]*.csv", "validation": f"{folder}/d*.csv"})
    assert names(find_files(globbed)) == {"train": ["train v.csv"], "validation": ["dev.csv"]}
    (folder / "train [v2].csv").unlink()
    (folder / "train 1.csv").touch()
    assert names(find_files(data(folder, splits={"train": "train [1-9].csv"}))) == {"train": ["train 1.csv"]}


def test_a_glob_limits_the_files_known_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "en/train.csv", "en/dev.csv", "de/train.csv")
    found = find_files(data(tmp_path / "en" / "*.csv"))
    assert found["train"] == [str(tmp_path / "en" / "train.csv")]


def test_files_are_absolute_when_the_recipe_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "rows/train.csv", "rows/dev.csv")
    monkeypatch.chdir(tmp_path)
    assert find_files(data("rows"))["train"] == [str(tmp_path / "rows" / "train.csv")]


def test_a_missing_train_file_is_reported_with_the_files_that_exist(tmp_path: Path) -> None:
    touch(tmp_path, "training.csv")
    (train,) = raised_problems(find_files, data(tmp_path))
    assert "looked for train, train.csv" in train.message
    assert "there is training.csv" in train.message
    assert "Did you mean 'training'?" in train.message


def test_a_named_file_that_is_missing_is_named_by_its_field(tmp_path: Path) -> None:
    touch(tmp_path, "train.csv", "dev.csv")
    (problem,) = raised_problems(find_files, data(tmp_path, splits={"train": "train", "validation": "dew"}))
    assert problem.where == "data.splits.validation"
    assert "Did you mean 'dev'?" in problem.message


def test_every_named_file_that_is_missing_is_reported(tmp_path: Path) -> None:
    touch(tmp_path, "train.csv")
    problems = raised_problems(find_files, data(tmp_path, splits={"train": ["train", "trian"], "test": "best"}))
    assert [problem.where for problem in problems] == ["data.splits.train[1]", "data.splits.test"]


def test_a_path_that_does_not_exist_names_the_nearest(tmp_path: Path) -> None:
    touch(tmp_path, "reviews/train.csv")
    with pytest.raises(UserError, match="Did you mean 'reviews'"):
        find_files(data(tmp_path / "review"))


def test_two_files_for_one_split_are_not_guessed_between(tmp_path: Path) -> None:
    touch(tmp_path, "train.csv", "val.csv", "dev.csv")
    with pytest.raises(UserError, match=r"could be any of .*val\.csv.*data\.splits\.validation"):
        find_files(data(tmp_path))


# Elsewhere


@pytest.fixture
def folder() -> str:
    """A folder with some files, reached by URL."""
    folder = f"memory://{uuid.uuid4().hex}/rows"
    for name in ("train.csv", "dev.csv.gz", "more/a-1.csv", "more/a-2.csv", "notes.txt"):
        fsspec.filesystem("memory").pipe(f"{folder}/{name}", b"text,label\n")
    return folder


@pytest.mark.parametrize(
    ("path", "splits", "expected"),
    [
        ("", None, {"train": ["train.csv"], "validation": ["dev.csv.gz"]}),
        ("/", None, {"train": ["train.csv"], "validation": ["dev.csv.gz"]}),
        ("/train.csv", None, {"train": ["train.csv"]}),
        ("/more", None, {"train": ["more/a-1.csv", "more/a-2.csv"]}),
        ("/**/a-*.csv", None, {"train": ["more/a-1.csv", "more/a-2.csv"]}),
        ("/*", None, {"train": ["train.csv"], "validation": ["dev.csv.gz"]}),
        ("", {"train": "more/a-*.csv", "test": ["train", "dev"]},
         {"train": ["more/a-1.csv", "more/a-2.csv"], "test": ["train.csv", "dev.csv.gz"]}),
    ],
)  # fmt: skip
def test_files_elsewhere_are_found_as_those_here(folder: str, path: str, splits: Any, expected: Any) -> None:
    found = find_files(data(folder + path, splits=splits))
    assert found == {split: [f"{folder}/{file}" for file in files] for split, files in expected.items()}


def test_one_split_may_lie_here_and_another_elsewhere(tmp_path: Path, folder: str) -> None:
    touch(tmp_path, "test.csv")
    splits = {"train": f"{folder}/train", "test": f"file://{tmp_path}/test.csv"}
    assert find_files(data(tmp_path, splits=splits)) == {
        "train": [f"{folder}/train.csv"],
        "test": [str(tmp_path / "test.csv")],
    }


@pytest.mark.parametrize("path", ["/none", "/none.csv"])
def test_a_url_that_does_not_exist_is_reported(folder: str, path: str) -> None:
    with pytest.raises(UserError, match=rf"{folder}{path}: does not exist: check the URL"):
        find_files(data(folder + path))


def test_a_split_that_is_missing_elsewhere_is_reported_with_the_files_that_exist(folder: str) -> None:
    with pytest.raises(UserError, match=rf"no test file in {folder}: .* there is dev.csv.gz, train.csv.*Did you mean"):
        find_files(data(folder, splits={"train": "train", "test": "trein"}))


def test_a_file_inside_another_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match="names a file inside an archive: unpack the archive"):
        find_files(data(f"zip://a.csv::{folder}/a.zip"))


@pytest.mark.parametrize(
    "url", ["github://owner/rows.csv", "dir:///rows.csv", "generic:///rows.csv", "data:,a", "data://a"]
)
def test_a_url_whose_file_system_needs_more_than_the_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"is no URL that can be read|has the rows in itself|does not exist"):
        find_files(data(url))


def test_credentials_are_not_shown() -> None:
    assert display_name("s3://key:hush/hush@bucket/rows.csv") == "s3://bucket/rows.csv"
    assert display_name("https://host/rows.csv?sig=hush") == "https://host/rows.csv"
    assert display_name("https://host/rows.csv?version=2") == "https://host/rows.csv?version=2"


# Objects of Python


@pytest.fixture
def my_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working directory that no test has imported before."""
    module = tmp_path / f"my_rows_{tmp_path.name.replace('-', '_')}.py"
    module.write_text(
        "def rows(split):\n    return []\nrows.fingerprint = lambda: 'v1'\n"
        "many, text, listed, by_split = 3, 'abc', [{}], {'train': []}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


def test_a_callable_of_the_working_directory_is_found(my_rows: Path) -> None:
    rows = load_object(f"{my_rows.stem}:rows")
    assert rows("train") == []
    assert fingerprint(rows) == "v1"


def test_rows_themselves_and_a_mapping_of_splits_are_taken_as_well(my_rows: Path) -> None:
    listed, by_split = load_object(f"{my_rows.stem}:listed"), load_object(f"{my_rows.stem}:by_split")
    assert (listed, by_split) == ([{}], {"train": []})
    assert is_rows(listed) and not is_rows(by_split)
    assert fingerprint(listed) is None


def test_a_data_set_of_torch_or_of_the_hub_is_rows() -> None:
    class Torch:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, place: int) -> dict[str, str]:
            return {}

    assert is_rows(Torch()) and not is_rows(Torch)
    import datasets

    assert is_rows(datasets.Dataset.from_dict({"text": ["a"]}))
    assert not is_rows(datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]})))


def test_a_callable_without_a_fingerprint_has_none() -> None:
    assert fingerprint(len) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: name, "is no module:name: write"),
        (lambda name: f"{name[:-1]}:rows", "Did you mean"),
        (lambda name: f"{name}:row", "has no 'row': it has rows.* Did you mean 'rows'"),
        (
            lambda name: f"{name}:many",
            "of type int: it must be a function of a split's name, a mapping .* or rows with",
        ),
        (lambda name: f"{name}:text", "of type str: it must be"),
    ],
)
def test_a_wrong_callable_is_refused_with_the_reason(my_rows: Path, change: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_object(change(my_rows.stem))  # type: ignore[operator]
    assert raised.value.problems[0].where == "data.path"


def test_a_module_that_fails_is_reported_with_its_error(my_rows: Path) -> None:
    broken = my_rows.with_name(f"{my_rows.stem}_broken.py")
    broken.write_text("import no_such_library\n")
    with pytest.raises(UserError, match=r"importing .* failed: No module named 'no_such_library'"):
        load_object(f"{broken.stem}:rows")


def test_finding_files_here_needs_no_heavy_library(tmp_path: Path) -> None:
    heavy = "{'fsspec', 'pyarrow', 'numpy', 'torch', 'transformers', 'datasets', 'tokenizers'}"
    code = (
        "import sys; from training.recipe import Data; from training.data.sources import find_split_files;"
        "data = Data(source='csv', path=sys.argv[1], text=['text'], label='label'); find_split_files(data);"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    touch(tmp_path, "train.csv")
    seen = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"


def test_a_fingerprint_that_fails_is_the_users_mistake() -> None:
    def rows(split: str) -> list[dict[str, str]]:
        return []

    def failing() -> str:
        raise ZeroDivisionError("by zero")

    rows.fingerprint = failing  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="ZeroDivisionError: by zero"):
        fingerprint(rows)
