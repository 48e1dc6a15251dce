"""Renews constraints.txt, the lock of all packages: make lock LOCK="--upgrade-package numpy"

    python -m tests.lock [OPTIONS OF uv pip compile]

Versions in the lock stay as long as pyproject.toml allows them; `--upgrade` takes the newest of all. Each package has
the sha256 of every file of its release, so that other Pythons and machines find theirs. Settings of uv, such as
UV_DEFAULT_INDEX, name another index. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints.txt"
UV = "uv==0.13.9"
PYTHON = "3.11.0"
"""The oldest that pyproject.toml allows: a later one takes what this one takes. Debian 12 has 3.11.2."""
UNHASHED = ("torch",)
"""Packages whose builds for CPUs and for CUDA have one version and several hashes, each on an index of its own."""
HEADER = """\
# The lock: the versions that are tested together, with Python 3.11, and the sha256 of their files. pip takes no other
# files of these: pip install --constraint constraints.txt. To renew it: make lock. Torch has no hash, because indexes
# have builds of their own; the packages of its build for CUDA have. pip is not to want hashes of torch and the project:
--no-require-hashes
"""


def main(options: list[str]) -> None:
    """Writes the lock; uv's messages go to stderr."""
    with tempfile.TemporaryDirectory(prefix="finetune-lock-") as folder:
        target, locked = Path(folder) / "uv", Path(folder) / "constraints.txt"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"]
        subprocess.run([*install, str(target), UV], check=True)
        locked.write_text(LOCK.read_text().removeprefix(HEADER))
        what = ["pyproject.toml", "--all-extras", "--group", "install", "--output-file", str(locked)]
        where = ["--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
        form = ["--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url"]
        uv = [str(target / "bin/uv"), "pip", "compile", *what, *where, *form, *options]
        subprocess.run(uv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        written = LOCK.with_suffix(".new")
        written.write_text(HEADER + without_hashes(locked.read_text(), UNHASHED))
        os.replace(written, LOCK)


Locked = Mapping[str, tuple[str, list[str]]]
"""The version and the sha256 of the files of a release, by the normalized name of the package."""


def read_lock(text: str | None = None) -> Locked:
    """The lock: constraints.txt, or another text of its format."""
    text = LOCK.read_text() if text is None else text
    lines = re.findall(r"^([^\s#=]+)==(\S+)((?: \\\n    --hash=\S+)*)$", text, re.MULTILINE)
    return {name: (version, re.findall(r"--hash=sha256:([0-9a-f]{64})", hashes)) for name, version, hashes in lines}


def without_hashes(lock: str, names: tuple[str, ...]) -> str:
    """The lock with no hashes for the packages of these names."""
    for name in names:
        lock = re.sub(rf"^({re.escape(name)}==\S+)(?: \\\n    --hash=\S+)+$", r"\1", lock, flags=re.MULTILINE)
    return lock


if __name__ == "__main__":
    main(sys.argv[1:])
