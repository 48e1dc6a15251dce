"""The provenance of a version: an in-toto statement in the form of SLSA's provenance, from the record of its run.

https://slsa.dev/spec/v1.1/provenance. The fields that begin with `finetune_` are this project's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from tasks.cache.digests import digest_of
from tasks.registry.lineage import RECIPE_WITHOUT_DEFAULTS
from tasks.signatures.bundles import Statement, Subject
from training.problems import UserError

PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:finetune-flows:run:v1"
_RECORDED = ("lock", "training", "libraries")
"""Parts of the record that are signed as they are."""
_DIGESTED = ("recipe", RECIPE_WITHOUT_DEFAULTS, *_RECORDED, "model", "environment", "metrics", "out_of_fold", "code")
"""Parts of which the digest is signed: all that a reproduction reads, and that the end of the run does not change."""
_STAGES = ("load_data", "load_model", "load_unlabelled", "mine_negatives", "teacher_outputs")
"""Stages whose artifacts a reproduction may take from a store, by their keys in the record."""


def build_provenance(
    version: str,
    digest: Mapping[str, str],
    files: str,
    signer: str,
    tags: Mapping[str, str],
    exports: Mapping[str, str],
    record: Mapping[str, Any] | None,
) -> Statement:
    """The statement about a version, `NAME/NUMBER`.

    Args:
        digest: of the manifest of its files.
        files: the digest of their names and contents.
        signer: the id of the key that signs it.
        tags: those of the version by which it is used.
        exports: sha256 of its exports by path.
        record: the lineage of its run; None if no run registered it.
    """
    known = record or {}
    run = known.get("run", {})
    metadata = {"invocationId": run.get("flow_run_id"), "startedOn": run.get("began")}
    metadata["finishedOn"] = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Statement(
        subject=[
            Subject(name=version, digest=dict(digest)),
            *(Subject(name=path, digest={"sha256": sha256}) for path, sha256 in sorted(exports.items())),
        ],
        predicateType=PREDICATE_TYPE,
        predicate={
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"recipe": known.get(RECIPE_WITHOUT_DEFAULTS)},
                "internalParameters": {name: known.get(name) for name in _RECORDED},
                "resolvedDependencies": list(_list_dependencies(known)),
            },
            "runDetails": {
                "builder": {"id": f"urn:finetune-flows:key:{signer}", "version": known.get("project")},
                "metadata": {name: value for name, value in metadata.items() if value},
            },
            "finetune_files": files,
            "finetune_tags": dict(tags),
            "finetune_record": None if record is None else _digest_parts(record),
            "finetune_model": known.get("model"),
            "finetune_metrics": known.get("metrics"),
            "finetune_verdict": known.get("verdict"),
        },
    )


def _list_dependencies(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows, the code and the base model, each with its digest."""
    lock = record.get("lock") or {}
    if rows := record.get("rows"):
        yield {"name": "rows", "digest": {"sha256": rows["digest"]}}
    if code := record.get("code"):
        yield {"name": "code", "digest": {"sha256": code["digest"]}}
        if code.get("git"):
            yield {"name": "git", "digest": {"gitCommit": code["git"]["commit"]}}
    if hub := lock.get("model_hub"):
        yield {"name": "base model", "digest": {"gitCommit": hub["commit"]}}
    for name in ("model_version", "started_from", "teacher_version"):
        if version := lock.get(name):
            yield {"name": f"{name} {version['name']}/{version['version']}", "digest": {"sha256": version["model"]}}
    for name, file in (lock.get("model_files") or {}).items():
        yield {"name": f"base model {name}", "digest": {"sha256": file["sha256"]}}


def _digest_parts(record: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the parts of a record that a reproduction reads."""
    keys = {stage["name"]: stage["key"] for stage in record["stages"] if stage["key"] and stage["name"] in _STAGES}
    return {part: digest_of(record.get(part)) for part in _DIGESTED} | {"stages": digest_of(keys)}


def require_signed_record(record: Mapping[str, Any], signed: Mapping[str, Any], name: str) -> None:
    """Raises UserError if the record of a version differs from the one that its signed provenance is of."""
    parts = signed.get("finetune_record")
    if parts is None:
        message = f"{name} was signed without a record of its run: if you know its origin, sign it again."
        raise UserError.of("signature", name, message)
    here = _digest_parts(record)
    if changed := sorted(part for part in here.keys() | parts.keys() if here.get(part) != parts.get(part)):
        message = f"the record of {name} was changed since it was signed, in {', '.join(changed)}: restore lineage.json"
        raise UserError.of("signature", name, f"{message} of its MLflow run, or use another version.")
