"""The tutorial, "Leave a fine-tuning service" and "Write a task type" can be followed: files are written, commands run,
output compared.

`python -m tests.test_followed_pages [PAGE…]` follows all, or these, to the end and writes today's output into them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.flows.small import command
from tests.servers import closed_port
from tests.test_data_pages import BLOCK, Reader
from training.task_types.task_type import TaskType

ROOT = Path(__file__).parents[1]
TASK_TYPE_PAGE = ROOT / "docs" / "how-to" / "own-task-type.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
SERVICE = ROOT / "docs" / "how-to" / "leave-a-service.md"
EXAMPLE = ROOT / "deployments" / "examples" / "ordinal_regression.py"
MODULES = ("mine", "ordinal_regression", "stars")


class Follower(Reader):
    """Follows one of the pages; whole runs only if `runs`, each in a process of its own."""

    def __init__(self, *, runs: bool) -> None:
        super().__init__()
        self._runs = runs
        self.acts |= {"part": self.part, "drill": self.drill, "serve": self.serve}

    def part(self, content: str) -> str:
        """Looks it up in the example's file, where a method is indented."""
        file = EXAMPLE.read_text()
        assert content in file or textwrap.indent(content, "    ") in file
        return content

    def drill(self, content: str) -> str:
        """Types the commands, which take long."""
        if not self._runs:
            return content
        return "".join(self._shell(line) for line in content.splitlines() if line.startswith("$ "))

    def serve(self, content: str) -> str:
        """Types the first command, which starts a server, and the others while it runs."""
        if not self._runs:
            return content
        first, *others = (line for line in content.splitlines() if line.startswith("$ "))
        port = closed_port()
        arguments = [*shlex.split(first)[2:], "--port", str(port)]
        server = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert server.stdout
            printed = f"{first}\n"
            while not printed.endswith("'\n"):  # the end of the command that it prints
                printed += server.stdout.readline()
            printed = printed.replace(f"{Path.cwd()}/", "")
            for line in others:
                printed += f"\n{self._shell(line.replace(':8000', f':{port}'))}\n"
        finally:
            server.terminate()
            server.wait()
        return printed.replace(f":{port}", ":8000")

    def _shell(self, line: str) -> str:
        shell = f"finetune() {{ {sys.executable} -c '{command()[2]}' \"$@\"; }}; {line.removeprefix('$ ')}"
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return f"{line}\n{done.stdout.replace(f'{Path.cwd()}/', '')}"


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """In the folder, with the variables of a user of this checkout."""
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


def without_figures(text: str) -> list[str]:
    """The lines, but for figures, places, bars and how long things take."""
    lines = [re.sub(r"\S*/artifacts/\S*|[\d.,]+|[█░]+", "#", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines if "░" not in line]


def followed(page: Path, *, runs: bool) -> str:
    return BLOCK.sub(Follower(runs=runs).follow, page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", [TASK_TYPE_PAGE, TUTORIAL, SERVICE], ids=lambda page: str(page.stem))
def test_the_steps_before_a_run_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    with in_folder(tmp_path):
        assert followed(page, runs=False).splitlines() == page.read_text().splitlines()
    if page == TASK_TYPE_PAGE:
        assert (tmp_path / "ordinal_regression.py").read_bytes() == EXAMPLE.read_bytes()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("page", "answer"),
    [(TASK_TYPE_PAGE, "\n  4  (above"), (TUTORIAL, '{"label":"shipping"')],
    ids=["task type", "tutorial"],
)
def test_every_step_of_the_page_can_be_followed_to_the_answer_of_the_registered_model(
    page: Path, answer: str, tmp_path: Path
) -> None:
    with in_folder(tmp_path):
        text = followed(page, runs=True)
    assert without_figures(text) == without_figures(page.read_text())
    assert answer in text


def test_the_page_names_all_that_a_task_type_has_to_have() -> None:
    wanted = {f"`{name}`" for name in TaskType.__abstractmethods__}
    assert wanted <= set(re.findall(r"`\w+`", "".join(re.findall(r"\*\*(.*?)\*\*", TASK_TYPE_PAGE.read_text()))))


MISTAKES = {
    "a class that is not there": ("class Mine: ...", "task: 'mine' has no 'Ordinal': it has none."),
    "a file that does not compile": ("x = (\n", "task: importing 'mine' failed: SyntaxError"),
    "an import that fails": ("\nx = 1 / 0\n", "task: importing 'mine' failed: ZeroDivisionError: division by zero ("),
    "another class": (
        "class Ordinal: ...",
        "task: 'mine:Ordinal' is the class Ordinal: it must be a subclass",
    ),
    "a class without its names": (
        "from training.task_types.task_type import TaskType\n"
        "class Ordinal(TaskType):\n    columns = {}\n    hub_task = 'x'\n",
        "task: 'mine:Ordinal' lacks `auto_class`, `card_sentence`: declare them in the class.",
    ),
    "a class without methods": (
        "from training.task_types.task_type import TaskType\nclass Ordinal(TaskType):\n    columns = {}\n"
        "    hub_task = card_sentence = auto_class = 'x'\n"
        "    class Options(TaskType.Options):\n        smoothing: float = 0\n",
        "task: 'mine:Ordinal' cannot be made: Can't instantiate abstract class Ordinal with",
    ),
    "checks that fail": (
        "    def row_problems(self, rows):\n        return [1 / 0]\n",
        "`row_problems` failed in {file} line 5: Zero",
    ),
    "a check without a name": (
        "    def row_problems(self, rows):\n        yield 'odd', 'is odd', [True] * rows.num_rows\n",
        "task: `row_problems` of Ordinal yields an unknown check 'odd': add it to its `checks`.",
    ),
    "a method by its former name": (
        "    def faults(self, rows):\n        return iter(())\n",
        "task: `faults` of 'mine:Ordinal' would not be called: it is `row_problems` now.",
    ),
    "features that fail": (
        "    def features(self, encoder, rows):\n        return {}['x']\n",
        "task: `features` failed in {file} line 5: KeyError: 'x'",
    ),
}
BASE = "from ordinal_regression import OrdinalRegression\n\nclass Ordinal(OrdinalRegression):\n"


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_task_type_of_ones_own_is_one_message(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_unchecked: None
) -> None:
    from flows.cli.main import main

    content, message = MISTAKES[case]
    with in_folder(tmp_path):
        for block in BLOCK.finditer(TASK_TYPE_PAGE.read_text()):
            if block[2].startswith("file "):
                Path(block[2].split()[1]).write_text(block[3])
        Path("ordinal_regression.py").write_bytes(EXAMPLE.read_bytes())
        recipe = Path("stars.yaml")
        recipe.write_text(recipe.read_text().replace("ordinal_regression:OrdinalRegression", "mine:Ordinal"))
        Path("mine.py").write_text((BASE if content.startswith("    ") else "") + content)
        assert main(["check", "stars.yaml"]) != 0
    output = capsys.readouterr()
    assert message.format(file=tmp_path / "mine.py") in output.out + output.err
    assert "Traceback" not in output.out + output.err


if __name__ == "__main__":
    for page in [Path(name).resolve() for name in sys.argv[1:]] or [TASK_TYPE_PAGE, TUTORIAL, SERVICE]:
        with tempfile.TemporaryDirectory() as made, in_folder(Path(made)):
            os.environ.setdefault("PREFECT_HOME", f"{made}/prefect")
            page.write_text(followed(page, runs=True))
