"""The dossier of a registered version: one zip file with its lineage, card, metrics and verdict, the same facts as a
CycloneDX bill of materials, a Croissant data set and OpenLineage events, and how to check it and make the model again.

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


class Member(NamedTuple):
    """A file of a dossier."""

    content: str
    """For its readers."""
    build: Callable[[Documents], str]


def _build_readme(version: Documents) -> str:
    name, record = f"{version.name}/{version.number}", version.record
    files = "".join(f"| `{file}` | {one.content} |\n" for file, one in sorted(MEMBERS.items()))
    trained = record.get("model") or {}
    model = "".join(f"| `{file}` | `{one['sha256']}` |\n" for file, one in trained.get("files", {}).items())
    environment, libraries = record.get("environment") or {}, record.get("libraries") or {}
    hardware = ", ".join(str(environment[part]) for part in ("device", "system") if environment.get(part))
    code = ""
    if git := (record.get("code") or {}).get("git"):
        changes = " with changes" if git["dirty"] else ""
        code = f" The run was started in a repository at commit {git['commit']}{changes}."
    return README.format(
        name=name,
        title=f"{version.name} version {version.number}",
        files=files,
        model=model,
        code=code,
        hardware=hardware or "hardware that is not recorded",
        libraries=", ".join(f"{library} {number}" for library, number in sorted(libraries.items())),
    )


README = """# Dossier of {title}

| file | content |
| --- | --- |
{files}
## Was it changed?

If the dossier is signed, its signature is beside the zip file: FILE.zip.sigstore.json. `finetune verify` checks it by
the keys of `trust.yaml`; without the project, OpenSSF's command (`pip install model-signing`) does by the public key of
the one who signed:

    finetune verify FILE.zip
    model_signing verify key FILE.zip --signature FILE.zip.sigstore.json --public_key KEY.pub

## Make the model again

In a home that has this registry, or with `MLFLOW_TRACKING_URI` set to its server:

    finetune reproduce {name}

It trains on the recorded rows and compares the bytes of the model. If the recipe names code, it lists that code and
asks for `--run-code`.{code} The same bytes need the same hardware ({hardware}) and libraries: {libraries}.

| file of the model | sha256 |
| --- | --- |
{model}
## Write the dossier again

In the same place:

    finetune dossier {name} --out FILE.zip

It has the same bytes unless a later run gave the version another description.
"""

MEMBERS: dict[str, Member] = {
    "README.md": Member("this text", _build_readme),
    "bom.cdx.json": Member(
        "a bill of materials: CycloneDX 1.6",
        lambda version: _to_json(build_bill_of_materials(version.record, version.name, version.number)),
    ),
    "card.md": Member("the version's description in the registry", lambda version: version.card),
    "croissant.json": Member(
        "the rows, their files and digests: Croissant 1.0", lambda version: _to_json(build_croissant(version.record))
    ),
    "lineage.json": Member(
        "all inputs of all stages: recipe, rows, code, libraries, hardware", lambda version: _to_json(version.record)
    ),
    "metrics.json": Member("the metrics with their intervals", lambda version: _to_json(version.record.get("metrics"))),
    "openlineage.jsonl": Member("the events of the run: OpenLineage", _build_events),
    "verdict.json": Member(
        "the decision of the gate and its checks", lambda version: _to_json(version.record.get("verdict"))
    ),
}


def find_documents(name: str) -> Documents:
    """The version `NAME/VERSION` or `NAME@alias`. Raises UserError and MlflowFailed like `find_version`."""
    record = find_version(name)
    registered = {key: record["registered"][key] for key in REGISTERED}
    with mlflow_errors():
        client = connect()
        model = need_model(client, registered["name"])
        version = need_version(client, model, version=registered["version"])
    return Documents(
        registered["name"],
        registered["version"],
        {**record, "registered": registered},
        version.description or "",
    )


def build_dossier(version: Documents) -> bytes:
    """The zip file. Raises UserError if a package is missing or the record is damaged."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for member, one in sorted(MEMBERS.items()):
            try:
                with damage(f"{version.name}/{version.number}"):
                    text = one.build(version)
            except ModuleNotFoundError as error:
                message = f"{member} needs the package {error.name}: pip install 'finetune-flows[openlineage]'."
                raise UserError.of("environment", "dossier", message) from error
            archive.writestr(zipfile.ZipInfo(f"{version.name}-{version.number}/{member}", NO_TIME), text)
    return out.getvalue()


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
