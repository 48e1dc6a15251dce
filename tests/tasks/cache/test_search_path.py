"""A key names the file that the program of a job imports, however Python comes to find it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools.command.editable_wheel as editable_wheel

ROOT = Path(__file__).parents[3]
LOOK = """
import json, subprocess, sys
from pathlib import Path
from tasks.cache.code import code_behind, library_versions, users_code
from tasks.environment_variables import environment
from training.jobs.user_code import CodeField
from training.jobs.protocol import Job, read_outcome

job = Path("job")
Job(program="look", key="k", settings={}, inputs={}).write(job)
program = '''
import importlib
from training.jobs.program import run_program
run_program(lambda *given: {"file": importlib.import_module("mine.rows").__file__})
'''
subprocess.run([sys.executable, "-c", program, str(job)], env=environment({}), check=True)
here = CodeField("data", "data.path", "my_rows:load", "a function", callable).load("mine.rows:load")
modules, distributions = users_code({"data.path": "mine.rows:load"})
code = code_behind(modules)
print(json.dumps({
    "program": read_outcome(job).result["file"],
    "here": sys.modules[here.__module__].__file__,
    "key": {name: str(source.file) for name, source in code.files.items()},
    "digests": code.digests,
    "versions": library_versions(distributions),
}))
"""


class Ground:
    """A working directory, and an environment of Python whose libraries are those of this one and its own."""

    def __init__(self, folder: Path) -> None:
        self.work, self.elsewhere = folder / "work", folder / "elsewhere"
        for made in (self.work, self.elsewhere):
            made.mkdir()
        (self.work / "look.py").write_text(LOOK)
        venv.create(folder / "env", symlinks=True)
        (self.libraries,) = (folder / "env").glob("lib/python*/site-packages")
        (here,) = (entry for entry in sys.path if entry.endswith("site-packages"))
        (self.libraries / "a.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        self.python = str(folder / "env" / "bin" / "python")
        self.env = {**os.environ, "FINETUNE_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}

    def look(self, *started: str) -> dict[str, Any]:
        """The modules that a flow's process and a program of a job import, and those that a key counts."""
        run = subprocess.run(
            [self.python, *(started or ("-m", "look"))], cwd=self.work, env=self.env, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        return dict(json.loads(run.stdout))


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def write(folder: Path, body: str = "1", name: str = "mine") -> Path:
    """A package with a module; gives the module's file."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    file = folder / name / "rows.py"
    file.write_text(f"def load():\n    return {body}\n")
    return file


def on_pythonpath(ground: Ground) -> Path:
    ground.env["PYTHONPATH"] += f"{os.pathsep}{ground.elsewhere}"
    return write(ground.elsewhere)


def editable_by_path(ground: Ground) -> Path:
    (ground.libraries / "__editable__.mine-1.0.pth").write_text(f"{ground.elsewhere}\n")
    return write(ground.elsewhere)


def editable_by_hook(ground: Ground) -> Path:
    hook = editable_wheel._finder_template("mine", {"mine": str(ground.elsewhere / "source")}, {})
    (ground.libraries / "__editable___mine_finder.py").write_text(hook)
    line = "import __editable___mine_finder; __editable___mine_finder.install()\n"
    (ground.libraries / "__editable__.mine.pth").write_text(line)
    return write(ground.elsewhere, name="source")


def namespace_package(ground: Ground) -> Path:
    (ground.libraries / "mine").mkdir()
    (ground.libraries / "mine" / "other.py").write_text("")
    file = write(ground.work)
    (file.parent / "__init__.py").unlink()
    return file


def in_the_working_directory(ground: Ground) -> Path:
    return write(ground.work)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [on_pythonpath, editable_by_path, editable_by_hook, namespace_package, in_the_working_directory]
)
def test_an_edit_of_the_module_that_a_program_imports_changes_the_key(
    ground: Ground, place: Callable[[Ground], Path]
) -> None:
    file = place(ground)
    before = ground.look()
    assert before["program"] == before["here"] == before["key"]["mine/rows.py"] == str(file)
    file.write_text("def load():\n    return 2\n")
    after = ground.look("look.py")  # started otherwise, which is no difference
    assert after["key"] == before["key"]
    assert after["digests"]["mine/rows.py"] != before["digests"]["mine/rows.py"]


def test_a_module_in_an_archive_counts_by_its_source(ground: Ground) -> None:
    archive = ground.elsewhere / "mine.zip"
    ground.env["PYTHONPATH"] += f"{os.pathsep}{archive}"
    digests = []
    for body in ("1", "1  # a comment", "2"):
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("mine/__init__.py", "")
            packed.writestr("mine/rows.py", f"def load():\n    return {body}\n")
        seen = ground.look()
        assert seen["program"] == seen["here"] == f"{archive}/mine/rows.py"
        digests.append(seen["digests"]["mine/rows.py"])
    assert digests[0] == digests[1] != digests[2]


TRAP = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
TRIES = """
import importlib.util
try:
    import optional
except ImportError:
    assert importlib.util.find_spec("optional") is None
def again():
    try:
        import optional
    except ImportError:
        return "absent"
"""


def test_a_file_of_the_working_directory_is_imported_only_by_modules_there(ground: Ground) -> None:
    (ground.libraries / "tries.py").write_text(TRIES)
    write(ground.work).write_text(
        "import helper, tries\n"
        "def load():\n"
        "    import later\n"
        "    return later.tries.again()\n"
        "assert load() == 'absent'\n"
    )
    (ground.work / "helper.py").write_text("X = 1\n")
    (ground.work / "later.py").write_text("import tries\n")
    for name in ("optional", "sitecustomize", "usercustomize"):
        (ground.work / f"{name}.py").write_text(TRAP)
    seen = ground.look("look.py")
    assert seen["program"] == seen["here"] == str(ground.work / "mine" / "rows.py")
    assert set(seen["key"]) == {"mine/rows.py", "helper.py", "later.py"}
    assert not [*ground.work.glob("*.ran")]


def test_a_module_of_the_working_directory_that_imports_an_optional_package_finds_it_there(ground: Ground) -> None:
    write(ground.work).write_text("import optional\ndef load():\n    return optional\n")
    (ground.work / "optional.py").write_text(TRAP)
    assert "optional.py" in ground.look("look.py")["key"]
    assert (ground.work / "optional.ran").exists()


@pytest.mark.parametrize("started", [("-m", "look"), ("look.py",)])
def test_a_package_installed_and_checked_out_is_the_installed_one(ground: Ground, started: tuple[str, ...]) -> None:
    installed = write(ground.libraries)
    (ground.libraries / "mine-1.5.dist-info").mkdir()
    (ground.libraries / "mine-1.5.dist-info" / "METADATA").write_text("Name: mine\nVersion: 1.5\n")
    (ground.libraries / "mine-1.5.dist-info" / "RECORD").write_text("mine/rows.py,,\n")
    write(ground.work, "2")  # the checkout
    seen = ground.look(*started)
    assert seen["program"] == seen["here"] == str(installed)
    assert seen["key"] == {} and seen["versions"]["mine"] == "1.5"


@pytest.mark.parametrize("folder", ["site-packages", "checkout"])
def test_an_installed_project_shadows_neither_pythonpath_nor_python_and_a_checkout_comes_first(
    tmp_path: Path, folder: str
) -> None:
    project, named = tmp_path / folder, tmp_path / "named"
    (project / "training" / "jobs").mkdir(parents=True)
    shutil.copy(ROOT / "training" / "jobs" / "search_path.py", project / "training" / "jobs")
    look = f"""
import json, os, sys
sys.path.append({str(project)!r})
from training.jobs.search_path import search_path, start_variables
print(json.dumps([sys.path, search_path(), start_variables()["PYTHONPATH"].split(os.pathsep)]))
"""
    env = {**os.environ, "PYTHONPATH": str(named), "PYTHONSAFEPATH": "1"}
    env.pop("FINETUNE_SEARCH_PATH", None)
    argv = [sys.executable, "-S", "-c", look]
    run = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    given, searched, handed_over = json.loads(run.stdout)
    assert given[0] == str(named) and given[-1] == str(project) and len(given) > 3
    if folder == "site-packages":
        assert searched == [*given, str(tmp_path)] and handed_over == [str(named)]
    else:
        assert searched == [str(project), *given[:-1], str(tmp_path)] and handed_over == [str(project), str(named)]
