"""The dossier of a registered version: one zip file with its lineage, card, metrics and verdict, and the same facts as
a CycloneDX bill of materials, a Croissant data set and OpenLineage events.

The same record and card give the same bytes: entries are sorted, stored without compression, and have no times.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tasks.provenance.bill_of_materials import build_bill_of_materials
from tasks.provenance.croissant import build_croissant
from tasks.registry.lineage import damage, find_version
from tasks.registry.versions import need_model, need_version
from tasks.tracking.connection import connect, mlflow_errors
from training.problems import UserError

NO_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time of an entry in a zip file."""
REGISTERED = ("name", "version", "registered")
"""The facts of the version's state in the registry that do not change, unlike aliases and later reports."""


class Documents(NamedTuple):
    """The record and the card of a registered version."""

    name: str
    number: str
    record: Mapping[str, Any]
    """Of lineage."""
    card: str
    """Its description in the registry, Markdown."""


def _build_events(version: Documents) -> str:
    from openlineage.client.serde import Serde

    from tasks.tracking.openlineage import build_events

    return "".join(f"{Serde.to_json(event)}\n" for event in build_events(version.record))


MEMBERS: dict[str, Callable[[Documents], str]] = {
    "bom.cdx.json": lambda version: _to_json(build_bill_of_materials(version.record, version.name, version.number)),
    "card.md": lambda version: version.card,
    "croissant.json": lambda version: _to_json(build_croissant(version.record)),
    "lineage.json": lambda version: _to_json(version.record),
    "metrics.json": lambda version: _to_json(version.record.get("metrics")),
    "openlineage.jsonl": _build_events,
    "verdict.json": lambda version: _to_json(version.record.get("verdict")),
}
"""The files of a dossier, with the functions that build their texts."""


def find_documents(name: str) -> Documents:
    """The version `NAME/VERSION` or `NAME@alias`. Raises UserError and MlflowFailed like `find_version`."""
    record = find_version(name)
    registered = {key: record["registered"][key] for key in REGISTERED}
    with mlflow_errors():
        client = connect()
        model = need_model(client, registered["name"])
        card = need_version(client, model, version=registered["version"]).description or ""
    return Documents(registered["name"], registered["version"], {**record, "registered": registered}, card)


def build_dossier(version: Documents) -> bytes:
    """The zip file. Raises UserError if a package is missing or the record is damaged."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for member, build in sorted(MEMBERS.items()):
            try:
                with damage(f"{version.name}/{version.number}"):
                    text = build(version)
            except ModuleNotFoundError as error:
                message = f"{member} needs the package {error.name}: pip install 'finetune-flows[openlineage]'."
                raise UserError.of("environment", "dossier", message) from error
            archive.writestr(zipfile.ZipInfo(f"{version.name}-{version.number}/{member}", NO_TIME), text)
    return out.getvalue()


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
