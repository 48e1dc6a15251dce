"""What each night of a recipe adds to the registry: it trains on as many rows, but others, and registers a version.

Files that the registry shares with an artifact, by hard links, count once, as they do on the disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from tasks.registry.versions import LOGGED_PARTS
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import finetune, write_project, write_rows

WIDE = {"vocab_size": 20_000, "hidden_size": 64}
"""Most weights of this model are in its embedding, so that it is large and still trained within seconds."""
NIGHT_S = 1800.0
"""After which a run counts as hung, on a busy machine too."""
SETTLED = 3
"""Nights after which the databases have their first pages; of fewer than nine, a third."""
LEAST = 3
"""The fewest nights that can be measured: early ones are compared with late ones."""


def measure(subject: Subject) -> list[Row]:
    """The bytes that a night adds, to the weights that it has trained, and late nights to early ones."""
    folder = subject.folder / "nights"
    home, file = folder / "home", write_project(folder / "project")
    content = yaml.safe_load(file.read_text())
    recipe = content["deployments"][0]["parameters"]["recipe"]
    recipe["model"]["config"] |= WIDE
    recipe["training"]["num_train_epochs"] = 1
    recipe["release"]["gate"] = {"minimum": {"accuracy": 0.0}}
    file.write_text(yaml.safe_dump(content))
    bytes_after = []
    for night in range(subject.nights):
        write_rows(file.parent / "train.csv", 240, seed=100 + night)
        ran = finetune(home, "run", str(file), timeout_s=NIGHT_S)
        if ran.returncode != 0:
            raise RuntimeError(ran.stdout + ran.stderr)
        bytes_after.append(_registry_bytes(home))
    weights = sum(file.stat().st_size for file in home.glob(f"mlartifacts/**/{LOGGED_PARTS['model']}/*.safetensors"))
    versions = len([*home.glob("mlartifacts/**/MLmodel")])
    settled = min(SETTLED, subject.nights // 3)
    half = (subject.nights - settled) // 2
    early = (bytes_after[settled + half - 1] - bytes_after[settled - 1]) / half
    late = (bytes_after[-1] - bytes_after[-1 - half]) / half
    own = weights / versions
    return [
        Row(
            "registry: bytes of a late night / of an early one",
            late / early,
            f"{subject.nights} nights of 240 new rows each, {versions} versions; {late / 1e6:.2f} MB a night in the "
            f"second half, {early / 1e6:.2f} MB in the first",
            most=1.05,
        ),
        Row(
            "registry: bytes of a night / of its weights",
            late / own,
            f"MLflow's files and its database; weights of {own / 1e6:.2f} MB, which an artifact of the home shares",
        ),
    ]


def _registry_bytes(home: Path) -> int:
    """Of MLflow's files and its database."""
    files = [Path(at) / name for at, _, names in os.walk(home / "mlartifacts") for name in names]
    sizes = {(found.st_dev, found.st_ino): found.st_size for found in (file.stat() for file in files)}
    return sum(sizes.values()) + sum(file.stat().st_size for file in home.glob("mlflow.db*"))
