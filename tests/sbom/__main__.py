"""Writes the bill of materials of this environment, or of an image: make sbom SBOM="--image localhost/finetune"

    python -m tests.sbom [--image IMAGE [--engine NAME]] [--out FILE]

CycloneDX 1.6 as JSON. Equal packages give equal bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.image.engines import Container, find_engine
from tests.lock import read_lock
from tests.sbom import bill, installed

SCRIPT = Path(installed.__file__).read_text()


def list_in_image(image: str, engine_name: str | None) -> list[dict[str, str]]:
    """The packages of an image, which a container of it lists."""
    engine = find_engine(engine_name)
    with tempfile.TemporaryDirectory(prefix="finetune-sbom-") as folder:
        container = Container(engine, image, "finetune-sbom", Path(folder), {})
        try:
            status, printed = container.run("python", "-c", SCRIPT)
        finally:
            container.remove()
    if status:
        raise RuntimeError(f"{image} lists no packages:\n{printed[-2000:]}")
    listed: list[dict[str, str]] = json.loads(printed.splitlines()[-1])
    return listed


def main() -> None:
    """Writes the file, and prints its name and the number of packages."""
    parser = argparse.ArgumentParser(prog="make sbom", description="the packages of this environment or of an image")
    parser.add_argument("--image", help="an image that is here (default: this environment)")
    parser.add_argument("--engine", choices=("docker", "podman", "buildah"), help="default: the first that is usable")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("build/sbom.cdx.json"), help="(%(default)s)")
    options = parser.parse_args()
    try:
        packages = list_in_image(options.image, options.engine) if options.image else installed.list_packages()
    except (LookupError, RuntimeError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from error
    found: dict[str, Any] = bill.build(packages, options.image, read_lock())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    hashed = sum("hashes" in one for one in found["components"])
    print(f"{options.out}  {len(found['components'])} packages, {hashed} with hashes", file=sys.stderr)


if __name__ == "__main__":
    main()
