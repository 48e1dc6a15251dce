"""The bill of materials of a registered version as CycloneDX 1.6 (ML-BOM): the model with its metrics, base model,
teacher, rows, code and libraries, from the lineage record."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.cache.results import Lock, PinnedCommit, PinnedFile, PinnedVersion
from tasks.home import without_credentials

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
MODEL = "model"
"""The reference of the version among the components."""
FRAMEWORKS = ("torch", "transformers")


def build_bill_of_materials(record: Mapping[str, Any], name: str, version: str) -> dict[str, Any]:
    """The bill of version `NAME/VERSION` as JSON values. Equal records give equal bills."""
    lock = Lock.model_validate(record.get("lock") or {})
    rows = [*_list_rows(record, lock)]
    materials = [
        *_list_models("base model", lock.start, lock.model_hub, lock.model_files),
        *_list_models("teacher", lock.teacher_version, lock.teacher_hub, lock.teacher_files),
        *rows,
        *_list_code(record),
        *_list_libraries(record),
    ]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, "/".join([record["run"]["flow_run_id"], name, version]))
    project = (record.get("project") or {}).get("finetune-flows")
    return {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "timestamp": record["run"]["written"],
            "tools": {"components": [{"type": "application", "name": "finetune-flows", **_version(project)}]},
            "component": _describe_version(record, name, version, [one["bom-ref"] for one in rows]),
        },
        "components": materials,
        "dependencies": [{"ref": MODEL, "dependsOn": [one["bom-ref"] for one in materials]}],
    }


def _describe_version(record: Mapping[str, Any], name: str, version: str, rows: list[str]) -> dict[str, Any]:
    recipe, verdict, model = record["recipe"], record.get("verdict") or {}, record.get("model") or {}
    found: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": MODEL,
        "name": name,
        "version": version,
        "properties": _properties({"digest": model.get("digest"), "verdict": verdict.get("decision")}),
        "components": _list_files({one: file["sha256"] for one, file in (model.get("files") or {}).items()}, MODEL),
        "modelCard": {
            "modelParameters": {"task": recipe["task"], "datasets": [{"ref": one} for one in rows]},
            "quantitativeAnalysis": {"performanceMetrics": [*_list_metrics(record.get("metrics") or {})]},
            "considerations": {"technicalLimitations": list(verdict.get("warnings", []))},
        },
    }
    if hub := recipe["release"].get("hub"):
        found["licenses"] = [{"license": {"name": hub["license"]}}]
    return found


def _list_metrics(metrics: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for split, scores in metrics.items():
        for metric, score in scores.items():
            if score["value"] is not None:
                found: dict[str, Any] = {"type": metric, "value": str(score["value"]), "slice": split}
                if score.get("low") is not None and score.get("high") is not None:
                    bounds = {"lowerBound": str(score["low"]), "upperBound": str(score["high"])}
                    found["confidenceInterval"] = bounds
                yield found


def _list_models(
    title: str, version: PinnedVersion | None, hub: PinnedCommit | None, files: Mapping[str, PinnedFile]
) -> Iterator[dict[str, Any]]:
    """A registered version, a repository of the Hub, or files; nothing for a model made from a configuration."""
    found: dict[str, Any] = {"type": "machine-learning-model", "bom-ref": title, "description": title}
    if version is not None:
        name = {"name": version.name, "version": version.version}
        yield found | name | {"properties": _properties({"digest": version.model})}
    elif hub is not None:
        repository, _, _ = hub.name.partition("@")
        purl = f"pkg:huggingface/{repository}@{hub.commit}"
        yield found | {"name": repository, "version": hub.commit, "purl": purl}
    elif files:
        listed = _list_files({name: file.sha256 for name, file in files.items()}, title)
        yield found | {"name": "a model in a folder", "components": listed}


def _list_rows(record: Mapping[str, Any], lock: Lock) -> Iterator[dict[str, Any]]:
    """The sets of rows, each with the digests of its files. The properties count all rows of the run."""
    rows = record.get("rows") or {}
    counts = (rows.get("figures") or {}) | {"digest": rows.get("digest")}
    for number, (section, pinned) in enumerate(lock.by_section(record["recipe"]["data"])):
        reference, name = f"rows {number}", without_credentials(section["path"])
        listed = {without_credentials(file.path): file.sha256 for files in pinned.files.values() for file in files}
        found: dict[str, Any] = {
            "type": "data",
            "bom-ref": reference,
            "name": name,
            "data": [{"type": "dataset", "name": name}],
            "properties": _properties({"source": section["source"], **counts, "fingerprint": pinned.fingerprint}),
            "components": _list_files(listed, reference),
        }
        if pinned.hub is not None:
            found["version"] = pinned.hub.commit
        yield found


def _list_files(digests: Mapping[str, str], above: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "bom-ref": f"{above}/{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for name, digest in sorted(digests.items())
    ]


def _list_code(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if code := record.get("code"):
        git, digest = code.get("git") or {}, code.get("digest")
        facts = {"digest": digest, "files": len(code["files"]), "dirty": git.get("dirty")}
        yield {
            "type": "application",
            "bom-ref": "code",
            "name": "code of the stages",
            **_version(git.get("commit") or digest),
            "properties": _properties(facts),
        }


def _list_libraries(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, version in (record.get("libraries") or {}).items():
        # The recorded version of PyTorch may have a local part, `+cpu`, which a package URL escapes.
        purl = f"pkg:generic/python@{version}" if name == "python" else f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
        yield {
            "type": "framework" if name in FRAMEWORKS else "library",
            "bom-ref": f"library {name}",
            "name": name,
            "version": version,
            "purl": purl,
        }


def _version(version: str | None) -> dict[str, str]:
    return {"version": version} if version else {}


def _properties(values: Mapping[str, Any]) -> list[dict[str, str]]:
    named: Iterable[tuple[str, Any]] = ((name, value) for name, value in values.items() if value is not None)
    return [{"name": f"finetune:{name}", "value": str(value)} for name, value in named]
