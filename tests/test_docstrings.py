"""The demo's rows: docstrings of six libraries."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from hashlib import sha256

import pytest

from deployments.docstrings import LIBRARIES, fingerprint, rows
from training.data.sources import fingerprint as product_fingerprint
from training.data.sources import load_object


@pytest.mark.slow
def test_every_library_has_the_same_number_of_texts() -> None:
    count = Counter(row["label"] for split in ("train", "validation") for row in rows(split))
    assert set(count) == set(LIBRARIES)
    assert len(set(count.values())) == 1
    assert min(count.values()) > 1_000


def test_no_text_is_there_twice() -> None:
    texts = [row["text"] for split in ("train", "validation") for row in rows(split)]
    assert len(texts) == len(set(texts))


def test_texts_are_one_line_of_twenty_to_four_hundred_characters() -> None:
    for row in rows("validation"):
        assert 20 <= len(row["text"]) <= 400
        assert row["text"] == " ".join(row["text"].split())


def test_about_fifteen_percent_are_held_out() -> None:
    held_out, trained = len(list(rows("validation"))), len(list(rows("train")))
    assert 0.13 < held_out / (held_out + trained) < 0.17


@pytest.mark.slow
def test_any_process_draws_the_same_rows_and_imports_none_of_the_libraries() -> None:
    code = (
        "import sys\n"
        "from hashlib import sha256\n"
        "from deployments.docstrings import LIBRARIES, rows\n"
        "print(sha256(repr(rows('validation')).encode()).hexdigest())\n"
        "print(set(LIBRARIES) & set(sys.modules))\n"
    )
    # Strings hash differently in every process.
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.splitlines() == [sha256(repr(rows("validation")).encode()).hexdigest(), "set()"]


def test_another_split_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from train, validation"):
        rows("test")


def test_the_fingerprint_names_the_six_versions() -> None:
    assert product_fingerprint(load_object("deployments.docstrings:rows")) == fingerprint()
    assert [pair.split(" ")[0] for pair in fingerprint().split(", ")] == list(LIBRARIES.values())
