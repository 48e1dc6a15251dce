"""CoNLL files in the forms that are in use become lists of words and tags, a row a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from training.data.conll_files import CONLLU
from training.data.load_rows import load
from training.problems import UserError
from training.recipe import Data
from training.recipe.tables.formats import FORMATS
from training.task_types.token_classification import TokenClassification

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER
"""
GERMEVAL = """#\tde.wikipedia.org [2009-10-17]
1\tSchartau\tB-PER\tO
2\tsagte\tO\tO

#\tn-tv.de [2005-02-26]
1\t#\tO\tO
2\tBerlin\tB-LOC\tO
"""
WNUT = "#food\tO\nin\tO\nNew York\tB-location\n\n\u3000\n@x\tO\n"
UD = """# newdoc
# text = Vámonos
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
2.1\tx\tx\tX\t_\t_\t_\t_\t_\t_

# text = Sí
1\tSí\tsí\tADV\t_\t_\t0\troot\t_\t_
"""


def read(folder: Path, content: str, name: str = "train.conll", **data: Any) -> list[tuple[list[str], list[str]]]:
    """The words and tags of the rows."""
    files = {"train": folder / name, "validation": folder / f"dev.{name}"}
    for file in files.values():
        file.write_bytes(content.encode())
    checks = dict.fromkeys(("shared_rows", "duplicates", "absent_label"), "ignore") | data.pop("checks", {})
    wanted = Data(**{"source": "conll", "path": "-", "text": ["tokens"], "label": "tags", "checks": checks} | data)
    load(wanted, TokenClassification(), {split: [str(file)] for split, file in files.items()}, folder / "out")
    names = json.loads((folder / "out" / "labels.json").read_text())
    rows = read_arrow(folder / "out" / "train.arrow").to_pylist()
    return [(row["text"], [names[place] for place in row["label"]]) for row in rows]


def problems(folder: Path) -> list[dict[str, Any]]:
    found = json.loads((folder / "out" / "log" / "report.json").read_text())["problems"]
    return [one for one in found if "dev." not in one["where"]]


def test_the_first_column_is_the_words_and_the_last_one_the_tags(tmp_path: Path) -> None:
    expected = [
        (["EU", "rejects", "German"], ["B-ORG", "O", "B-MISC"]),
        (["Peter", "Blackburn"], ["B-PER", "I-PER"]),
    ]
    assert read(tmp_path, CONLL_2003) == expected and problems(tmp_path) == []
    assert read(tmp_path, CONLL_2003.replace(" ", "\t").replace("\n", "\r\n"), "train.iob") == expected


def test_header_names_the_columns_to_choose_from(tmp_path: Path) -> None:
    names = {"header": ["words", "pos", "chunk", "ner"], "text": ["words"], "label": "pos"}
    assert read(tmp_path, CONLL_2003, **names)[1] == (["Peter", "Blackburn"], ["NNP", "NNP"])
    germeval = {"header": ["id", "word", "outer", "inner"], "text": ["word"], "label": "outer"}
    assert read(tmp_path, GERMEVAL, "train.tsv", **germeval) == [
        (["Schartau", "sagte"], ["B-PER", "O"]),
        (["#", "Berlin"], ["O", "B-LOC"]),
    ]
    with pytest.raises(UserError, match=r"has a word with 4 columns where data\.header names 2: 'EU NNP B-NP B-ORG'"):
        read(tmp_path, CONLL_2003, header=["tokens", "tags"])


def test_words_may_have_spaces_between_tabs_and_begin_with_the_sign_of_comments(tmp_path: Path) -> None:
    assert read(tmp_path, WNUT, "train.bio") == [
        (["#food", "in", "New York"], ["O", "O", "B-location"]),
        (["@x"], ["O"]),
    ]


def test_conll_u_has_its_own_columns_without_ranges_and_empty_nodes(tmp_path: Path) -> None:
    rows = read(tmp_path, UD, "train.conllu", text=["form"], label="upos")
    assert rows == [(["Vamos", "nos"], ["VERB", "PRON"]), (["Sí"], ["ADV"])] and len(CONLLU) == 10
    named = read(tmp_path, UD, "train.conll", text=["form"], label="upos", header=[*CONLLU])
    assert named == rows  # also if the recipe names the columns of a file with another suffix


def test_words_like_ranges_and_empty_nodes_stay_in_files_of_other_forms(tmp_path: Path) -> None:
    tail = "\t_" * 8
    columns = {"header": ["word", "tag", *"cdefghij"], "text": ["word"], "label": "tag"}
    rows = read(tmp_path, f"costs\tO{tail}\n3.5\tB-N{tail}\n10-12\tO{tail}\n", **columns)
    assert rows == [(["costs", "3.5", "10-12"], ["O", "B-N", "O"])]


def test_a_sentence_of_an_empty_node_alone_is_read_as_it_is(tmp_path: Path) -> None:
    rows = read(tmp_path, f"{UD}\n1.1\tx\tx\tX\t_\t_\t_\t_\t_\t_\n", "train.conllu", text=["form"], label="upos")
    assert rows[2:] == [(["x"], ["X"])]


def test_tags_in_iob1_are_read_as_iob2_with_a_warning_and_broken_iob2_stays_an_error(tmp_path: Path) -> None:
    iob1 = "EU I-ORG\nand O\nPeter I-PER\nBlackburn I-PER\nAnn B-PER\n\nParis I-LOC\n"
    assert [tags for _, tags in read(tmp_path, iob1)] == [["B-ORG", "O", "B-PER", "I-PER", "B-PER"], ["B-LOC"]]
    (warning,) = problems(tmp_path)
    assert warning["check"] == "iob1" and "is in a file with tags in IOB1, read as IOB2" in warning["message"]
    with pytest.raises(UserError, match="has an I- tag without a span before it"):
        read(tmp_path, iob1 + "\nBonn B-LOC\n")


def test_a_line_before_a_sentence_whose_tag_no_word_has_is_reported_as_a_comment(tmp_path: Path) -> None:
    sentences = "# doc-1\nA DET\ndog NOUN\n\n# doc-2\nA DET\ncat NOUN\n\n# NOUN\nA DET\n\n# #\n1 NUM\n"
    assert read(tmp_path, sentences)[0] == (["#", "A", "dog"], ["doc-1", "DET", "NOUN"])
    (warning,) = [one for one in problems(tmp_path) if one["check"] == "comment_lines"]
    assert warning["where"].endswith("train.conll row 1") and "tag of its own, 'doc-1' (2 rows" in warning["message"]


def test_a_word_without_its_tag_is_reported_by_its_sentence(tmp_path: Path) -> None:
    problems = raised_problems(read, tmp_path, CONLL_2003.replace("rejects VBZ B-VP O", "rejects"))
    found = next(one for one in problems if "dev." not in one.where)
    assert found.where.endswith("train.conll row 3") and found.check == "ragged"
    assert found.message.startswith("has a word with 1 columns where other words have 4: 'rejects': ")


def test_the_suffixes_of_conll_files_are_those_of_the_format() -> None:
    assert {".conll", ".conllu.gz", ".iob", ".bio.zst"} < {*FORMATS["conll"].suffixes}
