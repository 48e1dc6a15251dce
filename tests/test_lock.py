"""The lock, constraints.txt: what it covers, and that an environment is made of its files only."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.lock import HEADER, PYTHON, UNHASHED, read_lock, without_hashes

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "constraints.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HASHES = read_lock(LOCK)


def asked() -> Iterator[Requirement]:
    """What pyproject.toml's dependencies, extras and groups ask for, less the project itself."""
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    groups += [PROJECT["dependency-groups"]["install"], PROJECT["build-system"]["requires"]]
    for requirement in (Requirement(line) for group in groups for line in group):
        if requirement.name != project["name"]:
            yield requirement


def test_lock_has_a_version_that_fits_for_all_that_the_project_its_extras_and_its_build_ask_for() -> None:
    locked = {one: HASHES.get(canonicalize_name(one.name), ("",))[0] for one in asked()}
    assert [str(one) for one, version in locked.items() if not version or version not in one.specifier] == []


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock is of Python 3.11")
def test_lock_has_all_that_is_installed_for_the_project_and_what_the_oldest_python_needs_besides() -> None:
    wanted, found = [(one.name, one.extras) for one in asked()], set[tuple[str, str]]()
    while wanted:
        name, extras = wanted.pop()
        for extra in {"", *extras}:
            if (canonicalize_name(name), extra) in found:
                continue
            found.add((canonicalize_name(name), extra))
            try:
                needed = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # of an extra that is not installed
            requirements = [Requirement(line) for line in needed]
            for python in ({}, {"python_full_version": PYTHON}):
                where = {"extra": extra, **python}
                fitting = [one for one in requirements if one.marker is None or one.marker.evaluate(where)]
                wanted += [(one.name, one.extras) for one in fitting]
    assert len(found) > 200 and sorted({name for name, _ in found} - HASHES.keys()) == []


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock is of Python 3.11")
def test_the_oldest_python_that_the_project_allows_may_install_every_locked_package() -> None:
    assert PYTHON in SpecifierSet(PROJECT["project"]["requires-python"])
    checked, refused = 0, []
    for one in importlib.metadata.distributions():
        version, _ = HASHES.get(canonicalize_name(one.name), ("", []))
        allowed = one.metadata.get("Requires-Python", "")
        checked += one.version == version
        if one.version == version and PYTHON not in SpecifierSet(allowed):
            refused.append(f"{one.name} {version}: {allowed}")
    assert checked > 200 and refused == []


def test_all_but_torch_have_hashes_and_no_line_names_a_host_or_a_path() -> None:
    assert tuple(name for name, (_, hashes) in HASHES.items() if not hashes) == UNHASHED
    assert LOCK.startswith(HEADER)
    lines = LOCK.removeprefix(HEADER).splitlines()
    assert len(lines) == sum(1 + len(hashes) for _, hashes in HASHES.values()) > 2000
    assert not re.search(r"[/@]", "".join(lines))


def test_hashes_are_left_out_for_the_named_packages_only() -> None:
    lock = "torch==1 \\\n    --hash=sha256:a \\\n    --hash=sha256:b\ntorchvision==2 \\\n    --hash=sha256:c\n"
    assert without_hashes(lock, ("torch",)) == "torch==1\ntorchvision==2 \\\n    --hash=sha256:c\n"


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> str:
    """Writes a wheel and returns its line of the lock."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    } | files
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"]).encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def rewrite_installed(folder: Path, name: str) -> str:
    """Writes an installed package as a wheel again, and returns its line of the lock."""
    installed = importlib.metadata.distribution(name)
    files = [one for one in installed.files or () if ".." not in one.parts and one.suffix != ".pyc"]
    left_out = {"RECORD", "INSTALLER", "REQUESTED"}
    content = {one.as_posix(): Path(str(one.locate())).read_bytes() for one in files if one.name not in left_out}
    return write_wheel(folder, name, installed.version, content)


def write_project(folder: Path, wheels: Path) -> bytes:
    """Writes a project that depends on torch and on the package small, and an index of their wheels with the lock of
    these. The wheel of small is another one than the locked one, which is returned."""
    wheels.mkdir()
    folder.mkdir()
    described = '[project]\nname = "finetune-flows"\nversion = "1"\ndependencies = ["torch>=1"]\n'
    described += '[project.optional-dependencies]\ndev = ["small>=1"]\ndemo = []\n[tool.setuptools]\npy-modules = []\n'
    (folder / "pyproject.toml").write_text('[build-system]\nrequires = ["setuptools>=77"]\n' + described)
    lines = [rewrite_installed(wheels, name) for name in ("pip", "setuptools")]
    write_wheel(wheels, "torch", "2.0+cpu", {"torch.py": b""})
    lines += ["torch==2.0\n", write_wheel(wheels, "small", "1.0", {"small.py": b"written = 'by its author'\n"})]
    (folder / "constraints.txt").write_text(HEADER + "".join(lines))
    whole = (wheels / SMALL).read_bytes()
    write_wheel(wheels, "small", "1.0", {"small.py": b"written = 'by somebody else'\n"})
    return whole


SMALL = "small-1.0-py3-none-any.whl"


def make(project: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Installs the project by the Makefile."""
    shutil.copy(ROOT / "Makefile", project)
    argv = ["make", "--silent", ".venv/.installed", f"PYTHON={sys.executable}"]
    return subprocess.run(argv, cwd=project, env=environment, capture_output=True, text=True)


def build_layers(project: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Installs the project by the commands of the image that install, as a build runs them."""
    dockerfile = (ROOT / "infra" / "Dockerfile").read_text()
    runs = re.findall(r"^RUN ((?:.+\\\n)+.*)", dockerfile, re.MULTILINE)
    scripts = [re.sub(r"--mount=\S+ +(\\\n)? *", "", run) for run in runs if "pip install" in run]
    assert len(scripts) == 2
    there = f"{project / '.venv/bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
    environment = {**environment, "PATH": there, "TORCH_INDEX": "", "EXTRAS": "dev"}
    argv = ["sh", "-c", " && ".join(f"( {script} )" for script in scripts)]
    return subprocess.run(argv, cwd=project, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("install", [make, build_layers])
def test_make_and_the_image_install_the_locked_files_and_refuse_a_changed_wheel(
    tmp_path: Path, install: Callable[[Path, dict[str, str]], subprocess.CompletedProcess[str]]
) -> None:
    wheels, project = tmp_path / "wheels", tmp_path / "project"
    whole = write_project(project, wheels)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "VENV"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}

    refused = install(project, environment)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr, refused.stderr
    assert "small" in refused.stderr and not list((project / ".venv").rglob("small.py"))

    (wheels / SMALL).write_bytes(whole)
    for left in ("flows", "tasks", "training"):  # a layer that failed leaves nothing
        shutil.rmtree(project / left, ignore_errors=True)
    made = install(project, environment)
    assert made.returncode == 0, made.stderr
    (installed,) = (project / ".venv").rglob("small.py")
    assert installed.read_text() == "written = 'by its author'\n" and list((project / ".venv").rglob("torch.py"))
