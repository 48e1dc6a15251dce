"""The pages of docs/how-to/data can be followed: their files are written, their commands run, their output compared.

`python -m tests.test_data_pages` follows them in order and writes today's output into them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.cli.main import main
from tests.arrow import read_arrow
from tests.fork_server import search_path_of_shell
from tests.s3 import KEYS, S3
from training.data.load_rows import load as load_rows
from training.recipe import Data, load, parse
from training.task_types.sequence_classification import SequenceClassification

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "how-to" / "data"
# The order of the table of contents, in which one page continues with the files of another.
FILES = [FOLDER / f"{name}.md" for name in re.findall(r"^[\w-]+$", (FOLDER / "index.md").read_text(), re.MULTILINE)]
PAGES = {file: file.read_text() for file in FILES}

# <!-- guide: run --> and the block below it
BLOCK = re.compile(r"(<!-- guide: ([^\n]+) -->\n```\w*\n)(.*?)(?=```\n)", re.DOTALL)


class Reader:
    """Follows pages in the working directory: each block by its first word, such as `run`."""

    def __init__(self, s3: S3 | None = None) -> None:
        self._s3, self._code = s3, 0
        self.acts: dict[str, Callable[..., str]] = {
            "file": self.file,
            "data": self.data,
            "parse": self.parse,
            "run": self.run,
        }

    def follow(self, block: re.Match[str]) -> str:
        """The block with the real output of its commands in place of the shown one."""
        act, *arguments = block[2].split()
        return block[1] + self.acts[act](block[3], *arguments)

    def file(self, content: str, name: str, encoding: str = "utf-8") -> str:
        """Writes a file."""
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode(encoding))
        return content

    def data(self, content: str, name: str) -> str:
        """Writes the part of a recipe that is shown into its file."""
        document = yaml.safe_load(Path(name).read_text())
        document["deployments"][0]["parameters"]["recipe"] |= yaml.safe_load(content)
        Path(name).write_text(yaml.safe_dump(document))
        return content

    def parse(self, content: str) -> str:
        """Parses the shown part of a recipe."""
        parse({**load(Path("reviews.yaml")).model_dump(), **yaml.safe_load(content)})
        return content

    def run(self, content: str, bucket: str = "") -> str:
        """Types the commands."""
        for file in Path("reviews").iterdir() if self._s3 and bucket else ():
            self._s3.put(str(file), file.read_bytes())
        commands = [line for line in content.splitlines() if line.startswith("$ ")]
        return "".join(f"{line}\n{self._typed(line.removeprefix('$ '))}" for line in commands)

    def _typed(self, command: str) -> str:
        if command == "echo $?":
            return f"{self._code}\n"
        if command.startswith("export "):
            os.environ.update(pair.split("=", 1) for pair in shlex.split(command)[1:])
            return ""
        if not command.startswith("finetune "):
            env = {**os.environ, "PATH": search_path_of_shell()}
            done = subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.PIPE, text=True, env=env)
            return done.stdout
        command, _, into = command.partition(" > ")
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
            self._code = main(shlex.split(command)[1:])
        return "" if into else printed.getvalue()


def follow(folder: Path) -> dict[Path, str]:
    """The pages with today's output of their commands, run in the folder."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(folder)
        patch.delenv("FINETUNE_HOME", raising=False)
        patch.setattr(sys, "path", [*sys.path])  # rows of a page's own module are found here
        stack.callback(sys.modules.pop, "my_tickets", None)
        s3 = S3()
        stack.callback(s3.stop)
        s3.reached(patch, **dict.fromkeys(KEYS, ""))  # which a page exports
        reader = Reader(s3)
        return {file: BLOCK.sub(reader.follow, page) for file, page in PAGES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages are followed."""
    return tmp_path_factory.mktemp("guide")


@pytest.fixture(scope="module")
def followed(folder: Path) -> dict[Path, str]:
    return follow(folder)


def test_the_commands_print_what_the_pages_show_and_their_recipes_are_valid(followed: dict[Path, str]) -> None:
    assert len(PAGES) == 12
    for file, page in PAGES.items():
        assert followed[file].splitlines() == page.splitlines()


def test_rows_that_are_added_move_no_row_between_the_splits(
    folder: Path, followed: dict[Path, str], tmp_path: Path
) -> None:
    before = texts(folder, tmp_path / "before", "january.csv")
    after = texts(folder, tmp_path / "after", "january.csv", "february.csv")
    assert before["validation"] and len(after["train"]) > len(before["train"])
    assert before["train"] <= after["train"] and before["validation"] <= after["validation"]


def texts(folder: Path, out: Path, *months: str) -> dict[str, set[str]]:
    """The texts of each split, as the pages' recipe cuts them."""
    data = load(folder / "reviews.yaml").data.model_copy(update={"filter": None, "checks": {"blank_text": "warning"}})
    load_rows(data, SequenceClassification(), {"train": [str(folder / "reviews" / month) for month in months]}, out)
    return {split: set(read_arrow(out / f"{split}.arrow")["text"].to_pylist()) for split in ("train", "validation")}


def test_every_field_of_the_data_is_on_one_of_the_pages() -> None:
    text = "\n".join(PAGES.values())
    assert [name for name in Data.model_fields if not re.search(rf"\b{name}\b", text)] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for file, page in follow(Path(made)).items():
            file.write_text(page)
