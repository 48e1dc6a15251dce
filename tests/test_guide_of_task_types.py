"""The guide "A task type of your own" can be followed: its files are written, its commands run, its output compared.

`python -m tests.test_guide_of_task_types` follows all of it and writes what the commands print now into it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.flows.small import command
from tests.test_guide import BLOCK, Reader
from training.task_types.task_type import TaskType

ROOT = Path(__file__).parents[1]
FILE = ROOT / "training" / "README.md"
EXAMPLE = ROOT / "deployments" / "examples" / "question_answering.py"
MODULES = ("mine", "question_answering", "moves")


class Follower(Reader):
    """Somebody who follows this guide; whole runs only where told to, each in a process of its own."""

    def __init__(self, *, runs: bool) -> None:
        super().__init__()
        self._runs = runs
        self.acts |= {"part": self.part, "drill": self.drill}

    def part(self, content: str) -> str:
        """Looks it up in the example's file, where a method is indented."""
        file = EXAMPLE.read_text()
        assert content in file or textwrap.indent(content, "    ") in file
        return content

    def drill(self, content: str) -> str:
        """Types the commands, which take long."""
        if not self._runs:
            return content
        said = []
        for line in (line for line in content.splitlines() if line.startswith("$ ")):
            shell = f"finetune() {{ {sys.executable} -c '{command()[2]}' \"$@\"; }}; {line.removeprefix('$ ')}"
            told = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=900)
            assert told.returncode == 0, told.stdout + told.stderr
            said.append(f"{line}\n{told.stdout.replace(f'{Path.cwd()}/', '')}")
        return "".join(said)


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """In the folder, as somebody who has this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("FINETUNE_HOME", raising=False)
        patch.setenv("CHECKOUT", str(ROOT))
        patch.setenv("PYTHONPATH", str(ROOT))
        for name in MODULES:  # also before: other tests have modules of these names
            sys.modules.pop(name, None)
        yield
    for name in MODULES:
        sys.modules.pop(name, None)


def chapter() -> str:
    found = re.search(r"^## A task type of your own\n.*?(?=^## )", FILE.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found[0]


def told(text: str) -> list[str]:
    """The lines, but for figures, places, bars and how long things take."""
    lines = [re.sub(r"\S*/artifacts/\S*|[\d.,]+|[█░]+", "#", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines if "░" not in line]


def test_the_steps_before_a_run_print_what_the_guide_shows(tmp_path: Path) -> None:
    with in_folder(tmp_path):
        assert BLOCK.sub(Follower(runs=False).follow, chapter()).splitlines() == chapter().splitlines()
    assert (tmp_path / "question_answering.py").read_bytes() == EXAMPLE.read_bytes()


@pytest.mark.drill
def test_every_step_of_the_guide_can_be_followed_to_the_answer_of_the_registered_model(tmp_path: Path) -> None:
    with in_folder(tmp_path):
        followed = BLOCK.sub(Follower(runs=True).follow, chapter())
    assert told(followed) == told(chapter())
    assert "\n  New York  (from" in followed


def test_the_guide_names_all_that_a_kind_has_to_have() -> None:
    wanted = {f"`{name}`" for name in TaskType.__abstractmethods__}
    assert wanted <= set(re.findall(r"`\w+`", "".join(re.findall(r"\*\*(.*?)\*\*", chapter()))))


MISTAKES = {
    "a class that is not there": ("class Mine: ...", "task: 'mine' has no 'Extractive': it has none."),
    "a file that does not compile": ("x = (\n", "task: importing 'mine' failed: SyntaxError"),
    "an import that fails": ("\nx = 1 / 0\n", "task: importing 'mine' failed: ZeroDivisionError: division by zero ("),
    "another class": (
        "class Extractive: ...",
        "task: 'mine:Extractive' is the class Extractive: it must be a subclass",
    ),
    "a class without its names": (
        "from training.task_types.task_type import TaskType\n"
        "class Extractive(TaskType):\n    columns = {}\n    hub_task = 'x'\n",
        "task: 'mine:Extractive' does not say all of itself: give it `auto_class`, `does`.",
    ),
    "a class without methods": (
        "from training.task_types.task_type import TaskType\nclass Extractive(TaskType):\n    columns = {}\n"
        "    hub_task = does = auto_class = 'x'\n"
        "    class Options(TaskType.Options):\n        stride: int = 1\n        max_answer_tokens: int = 1\n",
        "task: 'mine:Extractive' cannot be made: Can't instantiate abstract class Extractive with",
    ),
    "checks that fail": (
        "    def faults(self, rows):\n        return [1 / 0]\n",
        "`faults` failed in {file} line 5: Zero",
    ),
    "a check without a name": (
        "    def faults(self, rows):\n        yield 'odd', 'is odd', [True] * rows.num_rows\n",
        "task type: `faults` of Extractive tells of a check 'odd': name it in its `checks`.",
    ),
    "features that fail": (
        "    def features(self, encoder, rows):\n        return {}['x']\n",
        "task type: `features` failed in {file} line 5: KeyError: 'x'",
    ),
}
BASE = "from question_answering import ExtractiveQA\n\nclass Extractive(ExtractiveQA):\n"


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_kind_of_ones_own_is_one_message(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_unchecked: None
) -> None:
    from flows.cli.main import main

    content, message = MISTAKES[case]
    with in_folder(tmp_path):
        for block in BLOCK.finditer(chapter()):
            if block[2].startswith("file "):
                Path(block[2].split()[1]).write_text(block[3])
        Path("question_answering.py").write_bytes(EXAMPLE.read_bytes())
        recipe = Path("moves.yaml")
        recipe.write_text(recipe.read_text().replace("question_answering:ExtractiveQA", "mine:Extractive"))
        Path("mine.py").write_text((BASE if content.startswith("    ") else "") + content)
        assert main(["check", "moves.yaml"]) != 0
    said = capsys.readouterr()
    assert message.format(file=tmp_path / "mine.py") in said.out + said.err
    assert "Traceback" not in said.out + said.err


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, in_folder(Path(made)):
        os.environ.setdefault("PREFECT_HOME", f"{made}/prefect")
        before, after = chapter(), BLOCK.sub(Follower(runs=True).follow, chapter())
        FILE.write_text(FILE.read_text().replace(before, after))
