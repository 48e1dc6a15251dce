"""The bill of materials of installed packages as CycloneDX 1.6."""

from __future__ import annotations

import json
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.lock import Locked

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "finetune-flows"


def build(packages: Iterable[Mapping[str, str]], image: str | None, lock: Locked) -> dict[str, Any]:
    """The bill as JSON values.

    Args:
        packages: what is installed, as `installed.list_packages` has it.
        image: the name of the image; None for an environment.
        lock: the version and the sha256 of each package; one that is installed in this version gets them.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    components = [_describe(one, lock) for one in packages if canonicalize_name(one["name"]) != PROJECT]
    about: dict[str, Any] = {"type": "application", "name": PROJECT, "version": project["version"]}
    about["licenses"] = [{"license": {"id": project["license"]}}]
    if image is not None:
        about = {"type": "container", "name": image}
    about["bom-ref"] = "subject"
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([about, components]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": about},
        "components": components,
        "dependencies": [{"ref": "subject", "dependsOn": [one["bom-ref"] for one in components]}],
    }


def _describe(package: Mapping[str, str], lock: Locked) -> dict[str, Any]:
    name, version = package["name"], package["version"]
    path = canonicalize_name(name) if package["type"] == "pypi" else f"debian/{quote(name)}"
    purl = f"pkg:{package['type']}/{path}@{quote(version, safe='.-~')}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if "expression" in package:
        found["licenses"] = [{"expression": package["expression"]}]
    elif "licence" in package:
        found["licenses"] = [{"license": {"name": package["licence"]}}]
    if package["type"] == "pypi":
        locked, hashes = lock.get(canonicalize_name(name), ("", []))
        if hashes and locked == Version(version).public:
            found["hashes"] = [{"alg": "SHA-256", "content": one} for one in hashes]
    return found
