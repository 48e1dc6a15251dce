"""pip's settings of this machine, for the build of an image: indexes, certificates and local folders."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

TAKEN = ("index-url", "extra-index-url", "find-links", "trusted-host", "no-index", "proxy", "timeout", "cert")
CERTIFICATES = "/run/secrets/certificates.pem"
"""As the Dockerfile mounts it."""


@dataclass(frozen=True)
class PipSettings:
    """Settings that a build mounts as secrets, since the URL of an index may have a password."""

    values: dict[str, str]

    @property
    def folders(self) -> list[str]:
        """Local folders that the settings name; of an index the folder around it, which often has the files."""
        found = []
        for option in ("index-url", "extra-index-url", "find-links"):
            for place in self.values.get(option, "").split():
                path = Path(urlsplit(place).path if place.startswith("file:") else place)
                folder = path if option == "find-links" else path.parent
                if path.is_absolute() and path.is_dir() and str(folder) not in found:
                    found.append(str(folder))
        return found

    def write_secrets(self, folder: Path) -> dict[str, Path]:
        """Writes the files of the secrets, and returns them by the names that the Dockerfile has."""
        secrets, values = {}, dict(self.values)
        if "cert" in values:
            secrets["certificates"] = Path(values["cert"])
            values["cert"] = CERTIFICATES
        if values:
            lines = [f"{option} = {' '.join(value.split())}" for option, value in values.items()]
            secrets["pip.conf"] = folder / "pip.conf"
            secrets["pip.conf"].touch(mode=0o600)
            secrets["pip.conf"].write_text("\n".join(["[global]", *lines, ""]))
        return secrets


def read_pip_settings() -> PipSettings:
    """The settings of this Python's pip; variables of the environment come before files, as pip has it."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    values: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2].removeprefix("default-")
        if option in TAKEN:
            values[option] = str(ast.literal_eval(value))
    return PipSettings(values)
