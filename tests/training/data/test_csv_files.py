"""CSV files as people have them: quotation marks that are only marks, no header, rows that end early."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION, Lines
from training.data.csv_quote_problems import QuotedFields
from training.data.load_rows import load
from training.problems import Problem, UserError
from training.recipe import Data


def run(folder: Path, rows: str | bytes, name: str = "train.csv", **data: Any) -> list[str]:
    """The texts of the training rows; validation has the same rows, and its warnings are ignored below."""
    files = {"train": folder / name, "validation": folder / f"validation{Path(name).suffix}"}
    for file in files.values():
        file.write_bytes(rows.encode() if isinstance(rows, str) else rows)
    checks = dict.fromkeys(("duplicates", "shared_rows"), "ignore") | data.pop("checks", {})
    recipe = Data(**{"source": "csv", "path": "-", "text": ["text"], "label": "label", "checks": checks} | data)
    load(recipe, CLASSIFICATION, {split: [str(file)] for split, file in files.items()}, folder / "out")
    found: list[str] = read_arrow(folder / "out" / "train.arrow")["text"].to_pylist()
    return found


def warnings_of(folder: Path) -> dict[str | None, Problem]:
    """The warnings of the report by check, with places as seen from the folder."""
    report = json.loads((folder / "out" / "log" / "report.json").read_text())
    found = [Problem(**problem) for problem in report["problems"] if "validation." not in problem["where"]]
    return {p.check: p.model_copy(update={"where": p.where.removeprefix(f"{folder}/")}) for p in found}


def errors(folder: Path, rows: str | bytes, name: str = "train.csv", **data: Any) -> list[str]:
    problems = raised_problems(run, folder, rows, name, **data)
    found = [f"{p.where}: {p.message}".replace(f"{folder}/", "") for p in problems if p.level == "error"]
    return [one for one in found if "validation." not in one]


MARKS = [f'"Line {n}" they said' if n % 7 == 3 else f"line {n}" for n in range(40)]
LABELS = ["pos" if n % 2 else "neg" for n in range(40)]
TSV = "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in zip(MARKS, LABELS, strict=True))


def test_quotation_marks_that_a_reader_removes_are_reported_with_their_rows(tmp_path: Path) -> None:
    assert run(tmp_path, TSV, "train.tsv") == [text.replace('"', "") for text in MARKS]
    problem = warnings_of(tmp_path)["stray_quotes"]
    assert problem.where == "train.tsv row 5" and problem.level == "warning"
    assert """text: '"Line 3" they said' (6 rows like this: 5, 12, 19, …): if they do, set data.quoting: none""" in (
        problem.message
    )


def test_without_quoting_every_mark_and_every_line_stays(tmp_path: Path) -> None:
    assert run(tmp_path, TSV, "train.tsv", quoting="none") == MARKS
    assert warnings_of(tmp_path) == {}
    header = '"text\tlabel\n'
    assert (
        run(tmp_path, header + TSV.partition("\n")[2], "train.tsv", quoting="none", rename={'"text': "text"}) == MARKS
    )


def test_a_tab_separated_file_of_a_program_that_quotes_is_no_suspect(tmp_path: Path) -> None:
    rows = ['say ""no"" twice', "a\tb", "plain"]
    always = '"text"\t"label"\n' + "".join(f'"{text}"\t"pos"\n' for text in rows) + '"x"\t"neg"\n'
    assert run(tmp_path, always, "train.tsv") == ['say "no" twice', "a\tb", "plain", "x"]
    assert warnings_of(tmp_path) == {}
    where_needed = 'text\tlabel\n"say ""no"" twice"\tpos\n"a\tb"\tpos\nplain\tneg\n'
    assert run(tmp_path, where_needed, "train.tsv") == ['say "no" twice', "a\tb", "plain"]
    assert warnings_of(tmp_path) == {}


@pytest.mark.parametrize("start", ["", "sep=\t\n"])
def test_a_quoted_tab_separated_file_without_a_header_is_no_suspect(tmp_path: Path, start: str) -> None:
    text = start + '"one"\t"pos"\n"two"\t"neg"\n"three"\t"pos"\n'
    assert run(tmp_path, text, "train.tsv", header=["text", "label"]) == ["one", "two", "three"]
    assert warnings_of(tmp_path) == {}


@pytest.mark.parametrize("first", ['"one"\tpos', '"one" and\t"pos"'])
def test_a_first_row_with_stray_marks_shows_no_program_that_quotes(tmp_path: Path, first: str) -> None:
    run(tmp_path, first + '\n"two"\tneg\n', "train.tsv", header=["text", "label"])
    assert "(2 rows like this: 1, 2)" in warnings_of(tmp_path)["stray_quotes"].message


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_that_a_quotation_mark_swallows_are_an_error(tmp_path: Path, end: str) -> None:
    lines = [f"line {n}\t{'pos' if n % 2 else 'neg'}" for n in range(520)]
    lines[19] = '"' + lines[19]
    lines[519] = '"' + lines[519]
    text = end.join(["text\tlabel", *lines]) + end
    found = errors(tmp_path, text, "train.tsv")
    assert len(found) == 1
    assert found[0].startswith("train.tsv row 21: has a quoted field with lines that look like rows: 501 lines, ")
    assert "set data.quoting: none" in found[0]
    assert len(run(tmp_path, text, "train.tsv", quoting="none")) == 520
    assert len(run(tmp_path, text, "train.tsv", checks={"merged_rows": "warning"})) == 20
    assert warnings_of(tmp_path)["line_breaks"].message.startswith(
        "spans 501 lines; the file has 521 lines, and only 21 rows"
    )


def test_a_stray_mark_that_swallows_rows_of_a_comma_separated_file_is_an_error(tmp_path: Path) -> None:
    lines = [f"line {n},{'pos' if n % 2 else 'neg'}" for n in range(520)]
    lines[19] = '"' + lines[19]
    lines[519] = '"' + lines[519]
    (found,) = errors(tmp_path, "\n".join(["text,label", *lines]))
    assert found.startswith("train.csv row 21: has a quoted field with lines that look like rows: 501 lines, ")


@pytest.mark.parametrize(("name", "mark"), [("train.csv", ""), ("train.tsv", '"')])
def test_a_quoted_letter_with_one_delimiter_in_each_line_is_no_error(tmp_path: Path, name: str, mark: str) -> None:
    delimiter = "," if name == "train.csv" else "\t"
    letter = "Dear Ms Smith,\n" + f"thank you{delimiter} and so on\n" * 8 + "Yours"
    header = f"{mark}text{mark}{delimiter}{mark}label{mark}"
    text = f'{header}\n"{letter}"{delimiter}pos\ntwo{delimiter}neg\n'
    assert run(tmp_path, text, name) == [letter, "two"]
    assert {check: problem.level for check, problem in warnings_of(tmp_path).items()} == {"line_breaks": "warning"}


def test_a_quotation_mark_that_is_never_closed_is_an_error_where_all_fits(tmp_path: Path) -> None:
    text = 'label,text\npos,one\nneg,"two\npos,three\nneg,four\n'
    found = errors(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith("train.csv row 3: has a quotation mark that is never closed: 3 lines, ")


def test_line_breaks_within_texts_are_reported_with_their_rows(tmp_path: Path) -> None:
    text = 'text,label\n"one\nmore",pos\ntwo,neg\n"three\r\nand, more",pos\n'
    assert run(tmp_path, text) == ["one\nmore", "two", "three\r\nand, more"]
    problem = warnings_of(tmp_path)["line_breaks"]
    assert problem.where == "train.csv row 2" and "(2 rows like this: 2, 4)" in problem.message
    assert run(tmp_path, text, checks={"line_breaks": "ignore"}) and warnings_of(tmp_path) == {}


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_findings_do_not_depend_on_where_a_piece_of_the_file_ends(delimiter: str) -> None:
    data = b'a\tb\r\n"x ""y"" z"\tp\r\n\r\n"lost" marks\tq\n"two\r\nlines"\t"r"\n"open\tend\n'.replace(
        b"\t", delimiter.encode()
    )

    class Pieces:
        closed = False

        def __init__(self, size: int) -> None:
            self.size, self.place = size, 0

        def read(self, size: int = -1, /) -> bytes:
            self.place += self.size
            return data[self.place - self.size : self.place]

        def close(self) -> None: ...

    def found(size: int) -> list[tuple[int, str, str]]:
        fields = QuotedFields(Pieces(size), delimiter, 2, 2)
        while fields.read():
            pass
        return [(problem.row, problem.check, problem.value) for problem in fields.take_row_problems()]

    whole = found(1000)
    assert [(row, check) for row, check, _ in whole] == [
        (4, "stray_quotes"),
        (5, "line_breaks"),
        *([(5, "stray_quotes")] if delimiter == "\t" else []),
        (6, "merged_rows"),
    ]
    for size in range(1, len(data)):
        assert found(size) == whole, size


def test_a_row_with_two_suspicious_fields_is_reported_once(tmp_path: Path) -> None:
    run(tmp_path, 'text\tlabel\tmore\n"a" b\tpos\t"c" d\n"e"\tneg\tf\n', "train.tsv")
    assert "(2 rows like this: 2, 3)" in warnings_of(tmp_path)["stray_quotes"].message


def test_a_limit_leaves_out_warnings_about_later_rows(tmp_path: Path) -> None:
    run(tmp_path, TSV, "train.tsv", limit=8)
    assert "(" not in warnings_of(tmp_path)["stray_quotes"].message.partition("data.quoting")[0].partition("said'")[2]


def test_a_quoted_file_as_pandas_and_python_write_it_is_read_without_a_word(tmp_path: Path) -> None:
    rows = [[f'he said "{n}", and left', "pos" if n % 2 else "neg"] for n in range(30)]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *rows])
    assert run(tmp_path, (tmp_path / "t.csv").read_bytes()) == [text for text, _ in rows]
    assert warnings_of(tmp_path) == {}


# Headers


def test_a_table_without_a_header_is_read_by_the_recipes_names(tmp_path: Path) -> None:
    assert run(tmp_path, "one,pos\ntwo,neg\n", header=["text", "label"]) == ["one", "two"]
    assert warnings_of(tmp_path) == {}
    found = errors(tmp_path, "one,pos\ntwo\n\nthree,neg,more\n ,pos\nfour,neg\n", header=["text", "label"])
    assert [one.partition(":")[0] for one in found] == ["train.csv row 2", "train.csv row 4", "train.csv row 5"]
    assert "has 3 fields where data.header names 2" in found[1]


@pytest.mark.slow
def test_rows_may_lack_the_last_fields_if_the_recipe_does_not_use_them(tmp_path: Path) -> None:
    names = ["id", "label", "text", "source", "page"]
    lines = [f"{n}\tpos\tline {n}" + "\tbook\t7" * (n % 3 == 0) + "\tnote" * (n % 3 == 1) for n in range(25_000)]
    lines[-1] = lines[-1].replace("pos", "neg")
    assert run(tmp_path, "\n".join(lines), "train.tsv", header=names) == [f"line {n}" for n in range(25_000)]
    lines[7] = "7\tpos"
    lines[70] = "70\tpos\t"
    found = errors(tmp_path, "\n".join(lines), "train.tsv", header=names)
    assert [one.partition(":")[0] for one in found] == ["train.tsv row 8", "train.tsv row 71"]
    with_header = "\t".join(names) + "\n" + "\n".join(lines[:5])
    assert "has 4 fields where the header has 5" in " ".join(errors(tmp_path, with_header, "train.tsv"))


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("A stirring film,0.8", "'0.8' is a number"),
        ("one,one", "'one' is listed twice"),
        ("word " * 30 + ",x", "has 150 characters"),
    ],
)
def test_a_first_row_that_looks_like_data_is_reported_if_a_column_is_missing(
    tmp_path: Path, first: str, why: str
) -> None:
    (found,) = errors(tmp_path, f"{first}\nanother,pos\n")
    assert found.startswith("data.header: the first row of train.csv looks like data, not like names") and why in found
    assert "If the table has no header, name its 2 columns, such as data.header: [text, label]." in found


def test_a_first_row_without_any_wanted_column_is_shown(tmp_path: Path) -> None:
    found = errors(tmp_path, "A stirring film,pos\nanother,neg\n")
    assert found[0].startswith("data.text: train.csv has no column 'text': it has A stirring film, pos.")
    assert "names none of the recipe's columns: 'A stirring film', 'pos'. If the table has no header" in found[2]


def test_names_for_the_values_of_the_first_row_do_not_hide_it(tmp_path: Path) -> None:
    rename = {"A stirring film": "text", "pos": "label"}
    run(tmp_path, "A stirring film,pos\nanother,neg\none more,pos\n", rename=rename)
    problem = warnings_of(tmp_path)["header_row"]
    assert problem.where == "train.csv row 1" and "'pos', the name of its column 2, is a label of rows below" in (
        problem.message
    )
    assert "data.header" in problem.message


def test_numbered_columns_of_a_data_frame_are_names(tmp_path: Path) -> None:
    run(tmp_path, ",0,1\n0,one,a\n1,two,b\n", rename={"0": "text", "1": "label"})
    assert warnings_of(tmp_path) == {}
    run(tmp_path, "id,1\none,a\ntwo,b\n", rename={"id": "text", "1": "label"})
    assert "'1' is a number" in warnings_of(tmp_path)["header_row"].message


@pytest.mark.parametrize(
    ("text", "rename"),
    [
        ("text,spam\nwin now,spam\nhello,ham\n", {"spam": "label"}),
        ("text,2020\none,a\ntwo,b\n", {"2020": "label"}),
        ("text,2019,2020\none,x,2020\ntwo,x,2021\n", {"2020": "label"}),
        (",0,1\n0,one,1\n1,two,0\n", {"0": "text", "1": "label"}),
    ],
)
def test_a_name_that_is_also_a_label_or_a_year_is_a_name(tmp_path: Path, text: str, rename: dict[str, str]) -> None:
    run(tmp_path, text, rename=rename)
    assert warnings_of(tmp_path) == {}


@pytest.mark.parametrize("first", ["7", "great"])
def test_a_label_in_the_header_next_to_another_value_looks_like_data(tmp_path: Path, first: str) -> None:
    run(tmp_path, f"{first},pos\none,neg\ntwo,pos\ngreat,neg\n", rename={first: "text", "pos": "label"})
    assert "looks like data" in warnings_of(tmp_path)["header_row"].message


def test_a_year_next_to_a_number_is_a_value(tmp_path: Path) -> None:
    run(tmp_path, "text,7,2020\none,1,a\ntwo,2,b\n", rename={"2020": "label"})
    assert "'2020' is a number" in warnings_of(tmp_path)["header_row"].message


def test_header_lines_within_a_file_are_reported_with_their_rows(tmp_path: Path) -> None:
    table = "text,label\n" + "one,pos\ntwo,neg\n\n" * 3000
    assert set(run(tmp_path, table * 3)) == {"one", "two"}
    problem = warnings_of(tmp_path)["header_row"]
    assert problem.where == "train.csv row 9002" and problem.level == "warning"
    assert problem.message == (
        "repeats the header (2 rows like this: 9002, 18003): left out; if it is a row of data, set "
        "data.checks.header_row: ignore."
    )
    assert set(run(tmp_path, table * 3, checks={"header_row": "ignore"})) == {"one", "two", "text"}


@pytest.mark.parametrize("header", ["mail,team", '"mail","team"'])
def test_files_that_were_joined_with_their_byte_order_marks_are_read_as_one(tmp_path: Path, header: str) -> None:
    names = {"text": ["mail"], "label": "team"}
    first, second = (f"\N{ZERO WIDTH NO-BREAK SPACE}{header}\n{row},pos\nmore {row},neg\n" for row in ("a", "b"))
    assert run(tmp_path, first + second, **names) == ["a", "more a", "b", "more b"]
    assert warnings_of(tmp_path)["header_row"].message.startswith("repeats the header: left out")
    headless = (f"\N{ZERO WIDTH NO-BREAK SPACE}{row},pos\nmore {row},neg\n" for row in ("a", '"b, c"'))
    names["header"] = ["mail", "team"]
    (found,) = errors(tmp_path, "".join(headless), **names)
    assert "row 3: has 3 fields where data.header names 2" in found
    assert run(tmp_path, first.partition("\n")[2] + "\N{ZERO WIDTH NO-BREAK SPACE}b,pos\n", **names)[-1] == "b"
    assert "header_row" not in warnings_of(tmp_path)


def test_a_header_of_another_file_with_other_columns_is_reported(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, "text,label\none,pos\ntwo,neg\nlabel,text\npos,three\n")
    assert "train.csv row 4: is a header with the columns in another order, so the rows behind it have wrong" in found
    run(tmp_path, "text,label\none,pos\ntwo,neg\n\N{ZERO WIDTH NO-BREAK SPACE}mail,pos\nthree,pos\n")
    problem = warnings_of(tmp_path)["header_row"]
    assert (
        problem.where == "train.csv row 4" and "begins with a byte order mark, as the first row of" in problem.message
    )


def test_a_header_within_a_file_is_no_text_where_one_column_of_several_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,text\n1,one\n2,two\nid,text\n3,three\n")
    data = Data(source="csv", path="-", text=["text"], checks={"shared_rows": "ignore"})
    load(data, Lines(), {key: [str(tmp_path / "rows.csv")] for key in ("train", "validation")}, tmp_path / "out")
    found = read_arrow(tmp_path / "out" / "train.arrow")["text"].to_pylist()
    assert found == ["one", "two", "three"]


@pytest.mark.parametrize("first", ["text,label", "sentence,label"])
def test_a_header_that_is_read_as_a_row_is_reported(tmp_path: Path, first: str) -> None:
    assert len(run(tmp_path, f"\n{first}\none,pos\ntwo,neg\n", header=["text", "label"])) == 3
    problem = warnings_of(tmp_path)["header_row"]
    assert problem.where == "train.csv row 2" and "if it is a header, remove data.header" in problem.message


def test_a_first_row_with_a_label_like_its_columns_name_is_a_row(tmp_path: Path) -> None:
    names = {"header": ["text", "spam"], "label": "spam"}
    run(tmp_path, "win now,spam\nhello,ham\nmore,spam\n", **names)
    assert warnings_of(tmp_path) == {}


@pytest.mark.parametrize("hint", ["sep=;\n", '"sep=;"\r\n', "SEP=;\n\n"])
def test_the_delimiter_of_excels_first_line_is_taken(tmp_path: Path, hint: str) -> None:
    text = hint + "text;label\none, two;pos\n ;pos\nthree;neg\n"
    assert run(tmp_path, text, checks={"blank_text": "warning"}) == ["one, two", "three"]
    row = 3 + text[: text.index("text")].count("\n")
    assert warnings_of(tmp_path)["blank_text"].where == f"train.csv row {row}"
    assert run(tmp_path, f"{hint}one, two;pos\nthree;neg\n", header=["text", "label"]) == ["one, two", "three"]


def test_a_delimiter_that_contradicts_the_first_line_is_reported(tmp_path: Path) -> None:
    text = "sep=;\ntext;label\none;pos\ntwo;neg\n"
    assert run(tmp_path, text, delimiter=";") == ["one", "two"]
    (found,) = errors(tmp_path, text, delimiter=",")
    assert found == "data.delimiter: ',' contradicts the first line of train.csv, 'sep=;': set it to null."


@pytest.mark.parametrize("text", ["DESC:manner How did serfdom  end ?\n", '__label__x He said, "no" to\tit\n'])
def test_with_maxsplit_only_the_first_delimiters_separate_columns(tmp_path: Path, text: str) -> None:
    fields = {"delimiter": " ", "maxsplit": 1, "quoting": "none", "header": ["label", "text"]}
    label, _, rest = text.rstrip("\n").partition(" ")
    assert run(tmp_path, text + "NUM:date When is it ?\n", **fields) == [rest, "When is it ?"]
    assert set(json.loads((tmp_path / "out" / "labels.json").read_text())) == {label, "NUM:date"}
    found = errors(tmp_path, text + "alone\nb c\n", **fields)
    assert "row 2: has 1 fields where data.header names 2" in found[0]
    three = {"delimiter": ",", "maxsplit": 2, "quoting": "none"}
    assert run(tmp_path, "id,label,text\n1,a,x, y, z\n2,b,w\n", **three) == ["x, y, z", "w"]


def test_maxsplit_holds_across_the_pieces_in_which_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.decoding.PIECE_BYTES", 5)
    fields = {"delimiter": " ", "maxsplit": 1, "quoting": "none", "header": ["label", "text"]}
    assert run(tmp_path, "a one two three\nb four five six\n", **fields) == ["one two three", "four five six"]


@pytest.mark.slow
@pytest.mark.parametrize("length", [2_500_000, 7_000_000])
def test_a_line_that_is_too_long_is_a_row_of_the_check_long_text(tmp_path: Path, length: int) -> None:
    for quoting, name in (("none", "train.csv"), ("json", "train.jsonl")):
        long = "x" * length
        if quoting == "none":
            rows = f"text,label\none,a\n{long},b\ntwo,b\n{long},a\n"
            fields: dict[str, Any] = {"quoting": "none"}
        else:
            values = [("one", "a"), (long * 8, "b"), ("two", "b"), (long * 8, "a")]
            rows = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in values)
            fields = {"source": "json"}
        found = errors(tmp_path, rows, name, **fields)
        number = 3 if quoting == "none" else 2
        assert len(found) == 1 and f"{name} row {number}: has " in found[0] and f"{number}, {number + 2})" in found[0]
        assert run(tmp_path, rows, name, checks={"long_text": "warning"}, **fields) == ["one", "two"]
        assert warnings_of(tmp_path)["long_text"].message.endswith("left out.")


def test_documents_that_a_task_type_cuts_may_be_longer(tmp_path: Path) -> None:
    class Documents(Lines):
        takes_documents = True

    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 1_000_000}) + "\n")
    data = Data(source="json", path="-", text=["text"], checks={"shared_rows": "ignore"})
    pinned = {split: [str(tmp_path / "rows.jsonl")] for split in ("train", "validation")}
    load(data, Documents(), pinned, tmp_path / "out")
    with pytest.raises(UserError, match=r"has a text of more than 1,000,000 bytes in column 'text' \(2 rows"):
        load(data, Lines(), pinned, tmp_path / "out")


@pytest.mark.parametrize("empty", [b"", b"\xef\xbb\xbf", b"\n\n", b"sep=;\n", b"text,label\n"])
@pytest.mark.parametrize("header", [None, ["text", "label"]])
def test_a_file_without_rows_among_others_is_a_warning_with_its_name(
    tmp_path: Path, empty: bytes, header: list[str] | None
) -> None:
    if header and empty.startswith(b"text"):
        empty = b""
    rows = "one,pos\ntwo,neg\nthree,pos\n"
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv")]
    for file, content in zip(files, (empty, rows if header else f"text,label\n{rows}", empty), strict=True):
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    checks = dict.fromkeys(("duplicates", "shared_rows"), "ignore")
    recipe = Data(source="csv", path="-", text=["text"], label="label", header=header, checks=checks)
    found = load(recipe, CLASSIFICATION, {"train": files, "validation": files[1:2]}, tmp_path / "out")
    assert found.train_rows == 3
    problem = warnings_of(tmp_path)["empty_file"]
    assert problem.where == "a.csv" and "2 files like this: " in problem.message and "c.csv" in problem.message
    problems = raised_problems(
        load, recipe, CLASSIFICATION, {"train": files[:1], "validation": files[1:2]}, tmp_path / "none"
    )
    (only,) = problems
    assert only.check == "no_rows" and "a.csv" in only.message
