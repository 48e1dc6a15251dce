"""Bills of materials of environments: CycloneDX's validator accepts them, and they have the lock's hashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.lock import UNHASHED, read_lock
from tests.sbom import bill

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_bill_of_this_environment_is_valid_and_has_the_locks_hash_of_every_package(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("a.json", "b.json"))
    for out in (first, second):
        subprocess.run([sys.executable, "-m", "tests.sbom", "--out", out], cwd=ROOT, check=True, capture_output=True)
    assert first.read_bytes() == second.read_bytes()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(first.read_text()) is None
    found = {one["name"].lower(): one for one in json.loads(first.read_text())["components"]}
    lock = read_lock()
    version, hashes = lock["pydantic"]
    assert found["pydantic"]["hashes"] == [{"alg": "SHA-256", "content": one} for one in hashes]
    assert (found["pydantic"]["purl"], found["pydantic"]["licenses"]) == (
        f"pkg:pypi/pydantic@{version}",
        [{"expression": "MIT"}],
    )
    asked = [name for name in ("torch", "transformers", "mlflow", "prefect", "numpy") if "hashes" not in found[name]]
    assert asked == [*UNHASHED]


def test_the_bill_of_an_image_has_debians_packages_and_no_hash_of_a_version_that_is_not_locked() -> None:
    packages = [
        {"type": "deb", "name": "libc6", "version": "2.36-9+deb12u10"},
        {"type": "pypi", "name": "Some_Thing", "version": "2.0", "licence": "BSD"},
        {"type": "pypi", "name": "torch", "version": "2.13.0+cpu"},
    ]
    found = bill.build(packages, "localhost/finetune:1", {"some-thing": ("1.0", ["a" * 64]), "torch": ("2.13.0", [])})
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(found)) is None
    assert found["metadata"]["component"]["type"] == "container"
    assert [one["purl"] for one in found["components"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10",
        "pkg:pypi/some-thing@2.0",
        "pkg:pypi/torch@2.13.0%2Bcpu",
    ]
    assert not any("hashes" in one for one in found["components"])
