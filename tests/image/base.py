"""A base image without a registry: Debian 12 with its Python 3.11, made by debootstrap."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.image.engines import Engine

SUITE = "bookworm"
TAG = f"localhost/finetune-base:{SUITE}"
PACKAGES = "ca-certificates,python3,python3-venv"


def find_missing() -> str | None:
    """What debootstrap needs here; None if nothing is missing."""
    if shutil.which("debootstrap") is None:
        return "BASE=debootstrap needs debootstrap: apt-get install debootstrap"
    return None if os.getuid() == 0 else "BASE=debootstrap needs root, as debootstrap does: run it with sudo."


def make_base(engine: Engine) -> bool:
    """Makes the base image unless it is here. Returns whether it was made."""
    if engine.has_image(TAG):
        return False
    with tempfile.TemporaryDirectory(prefix="finetune-base-") as folder:
        log = Path(folder) / "log"
        root = Path(folder) / "root"
        argv = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
        with open(log, "wb") as file:
            status = subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT).returncode
        if status:
            raise RuntimeError("debootstrap failed:\n" + "\n".join(log.read_text().splitlines()[-5:]))
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        engine.import_root(TAG, root)
    return True
