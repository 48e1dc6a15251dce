"""Dossiers: a version's facts in standard formats, accepted by their validators, in the same bytes."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from mlcroissant import Dataset

from tasks.provenance.bill_of_materials import build_bill_of_materials
from tasks.provenance.croissant import build_croissant
from tasks.provenance.dossier import MEMBERS, Documents, build_dossier
from training.jobs.protocol import sha256
from training.problems import UserError

FILE = {"path": "/rows/train.csv", "sha256": "e" * 64, "size_bytes": 120}
SCORE = {"value": 0.8, "low": 0.7, "high": 0.9}
LOCK = {
    **{"data_hub": None, "data_files": {"train": [FILE]}, "data_fingerprint": None, "data_sets": {}},
    **{"model_hub": {"name": "me/base@main", "commit": "b" * 40}, "model_version": None, "model_files": {}},
    **{"started_from": None, "teacher_hub": None, "teacher_files": {}},
    "teacher_version": {"name": "big", "version": "2", "model": "f" * 64, "max_length": 9, "task": "t"},
}


def record(**lock: Any) -> dict[str, Any]:
    """A lineage record with the values that the formats read."""
    columns = [
        {"name": "text", "type": "string", "source": "review"},
        {"name": "label", "type": "int64", "source": "stars"},
    ]
    numbers = {"train_rows": 120, "test_rows": 9, "labels": 2, "warnings": 0}
    return {
        "recipe": {
            "name": "reviews",
            "task": "sequence-classification",
            "data": {"mix": None, "source": "csv", "path": "/rows"},
            "release": {"hub": {"license": "apache-2.0"}},
        },
        "lock": LOCK | lock,
        "rows": {"figures": numbers, "labels": ["bad", "good"], "digest": "d" * 64, "columns": columns},
        "model": {"digest": "a" * 64, "files": {"model.safetensors": {"bytes": 9, "sha256": "c" * 64}}},
        "metrics": {"test": {"accuracy": SCORE, "f1": {"value": None, "low": None, "high": None}}},
        "verdict": {"decision": "promote", "reason": "it is better.", "checks": [], "warnings": ["few rows."]},
        "version": {"name": "reviews", "version": "3"},
        "code": {"digest": "9" * 64, "files": {"training/programs/fit.py": "1"}, "git": None},
        "libraries": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        "project": {"finetune-flows": "0.1.0", "python": "3.11.7"},
        "stages": [],
        "run": {
            **{"flow_run_id": "5e1cfb2f-e411-4c04-84d8-9099e8ea2870", "state": "completed"},
            **{"began": "2026-11-27T00:00:00+00:00", "written": "2026-11-27T00:01:00+00:00"},
        },
    }


def bill(**lock: Any) -> dict[str, Any]:
    """The bill of materials of version 3, which CycloneDX's validator accepts."""
    return valid_bill(build_bill_of_materials(record(**lock), "reviews", "3"))


def valid_bill(found: dict[str, Any]) -> dict[str, Any]:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(found))
    assert error is None, error
    return found


def test_a_bill_of_materials_has_model_base_teacher_rows_code_libraries_and_metrics() -> None:
    found = bill()
    model = found["metadata"]["component"]
    licence = [{"license": {"name": "apache-2.0"}}]
    assert (model["name"], model["version"], model["licenses"]) == ("reviews", "3", licence)
    assert [one["hashes"][0]["content"] for one in model["components"]] == ["c" * 64]
    assert model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"] == [
        {
            "type": "accuracy",
            "value": "0.8",
            "slice": "test",
            "confidenceInterval": {"lowerBound": "0.7", "upperBound": "0.9"},
        }
    ]
    assert model["modelCard"]["considerations"]["technicalLimitations"] == ["few rows."]
    parts = {one["bom-ref"]: one for one in found["components"]}
    assert {*parts} == {"base model", "teacher", "rows 0", "code", "library python", "library torch"}
    assert parts["base model"]["purl"] == f"pkg:huggingface/me/base@{'b' * 40}"
    assert (parts["teacher"]["name"], parts["teacher"]["version"]) == ("big", "2")
    assert parts["rows 0"]["components"][0]["hashes"] == [{"alg": "SHA-256", "content": "e" * 64}]
    assert {"name": "finetune:train_rows", "value": "120"} in parts["rows 0"]["properties"]
    assert parts["library torch"]["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert found["dependencies"] == [{"ref": "model", "dependsOn": [*parts]}]


def test_a_bill_of_materials_of_rows_of_the_hub_and_of_a_model_from_scratch_is_valid() -> None:
    hub = {"name": "me/rows@main", "commit": "d" * 40}
    found = bill(data_hub=hub, data_files={}, model_hub=None, teacher_version=None)
    assert [one["bom-ref"] for one in found["components"]][:2] == ["rows 0", "code"]
    assert found["components"][0]["version"] == "d" * 40


def valid_data_set(found: dict[str, Any], folder: Path) -> Dataset:
    """The data set as mlcroissant reads it, without an error."""
    file = folder / "croissant.json"
    file.write_text(json.dumps(found))
    dataset = Dataset(file)
    assert not dataset.metadata.ctx.issues.errors
    return dataset


def test_mlcroissant_reads_the_rows_of_each_file_of_a_run_from_the_files(tmp_path: Path) -> None:
    files = {}
    for split, rows in {"train": "review,stars\n'a, b',good\nc,bad\n", "test": "review,stars\nd,good\n"}.items():
        path = tmp_path / f"{split}.csv"
        path.write_text(rows.replace("'", '"'))
        files[split] = [{"path": str(path), "sha256": sha256(path), "size_bytes": path.stat().st_size}]
    dataset = valid_data_set(build_croissant(record(data_files=files)), tmp_path)
    assert [one.name for one in dataset.metadata.record_sets] == ["train.csv", "test.csv"]
    assert "120" in dataset.metadata.description
    read = [
        [
            (row["rows-0/0" if part == 0 else "rows-1/0"], row[f"rows-{part}/1"])
            for row in dataset.records(f"rows-{part}")
        ]
        for part in (0, 1)
    ]
    assert read == [[(b"a, b", b"good"), (b"c", b"bad")], [(b"d", b"good")]]


def test_a_file_whose_bytes_have_changed_is_noticed_by_mlcroissant(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("review,stars\nc,bad\n")
    files = {"train": [{"path": str(path), "sha256": "e" * 64, "size_bytes": None}]}
    dataset = valid_data_set(build_croissant(record(data_files=files)), tmp_path)
    with pytest.raises(Exception, match=r"Download|sha256"):
        list(dataset.records("rows-0"))


@pytest.mark.parametrize(
    ("lock", "sources"),
    [
        ({"data_hub": {"name": "me/rows@main", "commit": "d" * 40}, "data_files": {}}, ["me/rows"]),
        ({"data_files": {}, "data_fingerprint": "f"}, []),
        ({"data_files": {"train": [FILE, FILE | {"path": "s3://me:secret@rows/a.conll"}]}}, ["train.csv", "a.conll"]),
    ],
    ids=["the Hub", "Python", "no columns"],
)
def test_rows_that_are_no_files_with_columns_are_a_valid_data_set(
    tmp_path: Path, lock: dict[str, Any], sources: list[str]
) -> None:
    found = build_croissant(record(**lock))
    dataset = valid_data_set(found, tmp_path)
    assert [one.name for one in dataset.metadata.distribution] == sources
    assert len(dataset.metadata.record_sets) == ("train.csv" in sources)
    assert "secret" not in json.dumps(found)


def test_a_mixture_lists_the_files_of_all_of_its_sets(tmp_path: Path) -> None:
    sets = {name: {"files": {"train": [FILE | {"path": f"/{name}/train.csv"}]}} for name in ("ours", "theirs")}
    mixed = record(data_files={}, data_sets=sets)
    mixed["recipe"]["data"] = {"mix": [{"source": "csv", "path": "/ours"}, {"source": "csv", "path": "/theirs"}]}
    dataset = valid_data_set(build_croissant(mixed), tmp_path)
    assert [one.content_url for one in dataset.metadata.distribution] == ["/ours/train.csv", "/theirs/train.csv"]
    parts = valid_bill(build_bill_of_materials(mixed, "reviews", "3"))["components"]
    assert [one["name"] for one in parts if one["type"] == "data"] == ["/ours", "/theirs"]


def dossier_of(found: dict[str, Any]) -> dict[str, str]:
    """The files of a dossier by name."""
    archive = zipfile.ZipFile(io.BytesIO(build_dossier(Documents("reviews", "3", found, "# Card\n"))))
    return {name.removeprefix("reviews-3/"): archive.read(name).decode() for name in archive.namelist()}


def test_the_same_version_gives_a_dossier_of_the_same_bytes() -> None:
    first, second = (build_dossier(Documents("reviews", "3", record(), "# Card\n")) for _ in range(2))
    assert first == second
    files = dossier_of(record())
    assert [*files] == sorted(MEMBERS)
    assert files["card.md"] == "# Card\n"
    assert json.loads(files["verdict.json"])["decision"] == "promote"
    assert [json.loads(line)["eventType"] for line in files["openlineage.jsonl"].splitlines()] == ["START", "COMPLETE"]


OPTIONAL = sorted(record().keys() - {"recipe", "run"})


@pytest.mark.parametrize("missing", [[name] for name in OPTIONAL] + [OPTIONAL], ids=lambda names: names[-1])
def test_a_record_of_an_earlier_version_of_the_project_without_some_values_gives_valid_files(
    tmp_path: Path, missing: list[str]
) -> None:
    files = dossier_of({name: value for name, value in record().items() if name not in missing})
    valid_bill(json.loads(files["bom.cdx.json"]))
    valid_data_set(json.loads(files["croissant.json"]), tmp_path)
    assert len(files["openlineage.jsonl"].splitlines()) == 2


@pytest.mark.parametrize("lacking", ["data_sets", "teacher_version", "data_fingerprint", "started_from"])
def test_a_lock_of_an_earlier_version_of_the_project_gives_the_same_files(lacking: str) -> None:
    earlier = record()
    earlier["lock"] = {name: value for name, value in earlier["lock"].items() if name != lacking}
    files = dossier_of(earlier)
    assert lacking == "teacher_version" or files["bom.cdx.json"] == dossier_of(record())["bom.cdx.json"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("recipe", {}), ("lock", {"data_files": 3}), ("metrics", {"test": 3}), ("rows", [1]), ("stages", [{}])],
)
def test_a_damaged_record_is_one_message_and_no_traceback(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=r"the lineage\.json of reviews/3 is damaged"):
        dossier_of(record() | {name: value})


def test_a_missing_package_is_one_message_with_the_next_step(without_openlineage: None) -> None:
    message = r"openlineage\.jsonl needs the package openlineage\S*: pip install 'finetune-flows\[openlineage\]'"
    with pytest.raises(UserError, match=message):
        dossier_of(record())
