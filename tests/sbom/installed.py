"""Prints the packages of the Python that runs it, and those of Debian, as JSON. Standard library only: it runs in
containers of the image too."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess


def list_packages() -> list[dict[str, str]]:
    """Each package with its type of package URL (`pypi`, `deb`), name and version, and its licence if it names one."""
    return sorted(
        [*_list_python(), *_list_debian()], key=lambda one: (one["type"], one["name"].lower(), one["version"])
    )


def _list_python() -> list[dict[str, str]]:
    return [
        {"type": "pypi", "name": one.metadata["Name"], "version": one.version, **_licence(one.metadata)}
        for one in importlib.metadata.distributions()
    ]


def _licence(metadata: importlib.metadata.PackageMetadata) -> dict[str, str]:
    """An SPDX expression, or else the words of the package; a whole text of a licence is none."""
    values = {key: metadata.get_all(key) or [""] for key in ("License-Expression", "License", "Classifier")}
    if expression := values["License-Expression"][0]:
        return {"expression": expression}
    classified = [line.rpartition(" :: ")[2] for line in values["Classifier"] if line.startswith("License ::")]
    name = ", ".join(one for one in classified if one != "OSI Approved") or values["License"][0].strip()
    return {"licence": name} if name and "\n" not in name and name != "UNKNOWN" else {}


def _list_debian() -> list[dict[str, str]]:
    if shutil.which("dpkg-query") is None:
        return []
    shown = "--showformat=${db:Status-Abbrev}\t${Package}\t${Version}\n"
    lines = subprocess.run(["dpkg-query", "--show", shown], check=True, capture_output=True, text=True).stdout
    found = [line.split("\t") for line in lines.splitlines() if line.startswith("ii")]
    return [{"type": "deb", "name": name, "version": version} for _, name, version in found]


if __name__ == "__main__":
    print(json.dumps(list_packages()))
