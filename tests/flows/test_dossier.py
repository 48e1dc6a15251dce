"""The dossier of a version that a run has registered."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from mlcroissant import Dataset

from flows.cli.main import main
from tasks.signatures.keys import write_public_key
from tests.flows.small import FinishedRun
from tests.fork_server import NEW_PYTHON


@pytest.fixture
def version(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinishedRun:
    """The finished run, in a home of this test."""
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    return FinishedRun(home, finished.file, finished.result, finished.printed)


def test_the_dossier_of_a_version_is_written_again_in_the_same_bytes_also_from_mlflow_alone(
    version: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / f"{number}.zip" for number in range(3))
    assert main(["dossier", "small/1", "--out", str(first)]) == 0
    assert "sha256" in capsys.readouterr().out
    assert main(["dossier", "small@champion", "--out", str(second)]) == 0
    shutil.rmtree(version.home / "runs")
    assert main(["dossier", "small/1", "--out", str(third)]) == 0
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_the_files_of_a_dossier_are_valid_and_lead_to_the_rows_of_the_run(version: FinishedRun, tmp_path: Path) -> None:
    file, out = tmp_path / "small.zip", tmp_path / "small"
    assert main(["dossier", "small/1", "--out", str(file)]) == 0
    with zipfile.ZipFile(file) as archive:
        archive.extractall(out)
    folder = out / "small-1"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str((folder / "bom.cdx.json").read_text()) is None
    record = json.loads((folder / "lineage.json").read_text())
    weights = {
        one["name"] for one in json.loads((folder / "bom.cdx.json").read_text())["metadata"]["component"]["components"]
    }
    assert weights == {*record["model"]["files"]}

    readme, members = (folder / "README.md").read_text(), [*folder.iterdir()]
    assert {name for name in readme.split("`")[1::2] if (folder / name).is_file()} == {one.name for one in members}
    assert "    finetune reproduce small/1\n" in readme and "    finetune dossier small/1 --out FILE.zip\n" in readme
    assert all(f"| `{name}` | `{file['sha256']}` |" in readme for name, file in record["model"]["files"].items())

    dataset = Dataset(folder / "croissant.json")
    assert not dataset.metadata.ctx.issues.errors
    for rows in dataset.metadata.record_sets:
        with (version.file.parent / rows.name).open(newline="") as table:
            expected = [(row["text"], row["label"]) for row in csv.DictReader(table)]
        read = [tuple(value.decode() for value in row.values()) for row in dataset.records(rows.id)]
        assert read == expected
    assert {rows.name for rows in dataset.metadata.record_sets} == {"train.csv", "validation.csv"}

    events = [json.loads(line) for line in (folder / "openlineage.jsonl").read_text().splitlines()]
    stages = [stage["name"] for stage in version.result["stages"]]
    assert [event["job"]["name"] for event in events if event["eventType"] != "START"] == [
        *(f"small.{stage}" for stage in stages), "small",
    ]  # fmt: skip
    starts = {event["job"]["name"]: event["eventTime"] for event in events if event["eventType"] == "START"}
    assert starts["small.fit"] < starts["small.score"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("small", "write NAME/VERSION, such as small/1"),
        ("small/9", "'small' has no version '9'"),
    ],
)
def test_a_name_that_is_no_version_is_one_message(
    version: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main(["dossier", name, "--out", str(tmp_path / "out.zip")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.zip").exists()


def ask_model_signing(home: Path, dossier: Path, file: Path) -> bool:
    """Whether the command of OpenSSF, with the home's public key alone, verifies a dossier."""
    key = dossier.with_suffix(".pub")
    key.write_text(yaml.safe_load((home / "trust.yaml").read_text())["keys"][0]["key"])
    argv = [Path(NEW_PYTHON).with_name("model_signing"), "verify", "key", dossier, "--signature", file]
    asked = subprocess.run([*map(str, argv), "--public_key", str(key)], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in asked.stderr
    return asked.returncode == 0


def test_a_dossier_is_signed_and_one_that_was_changed_is_refused_by_name_also_by_model_signing(
    version: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.zip"
    signature = tmp_path / "small.zip.sigstore.json"
    assert main(["dossier", "small/1", "--out", str(file)]) == 0
    assert str(signature) in capsys.readouterr().out
    assert main(["verify", str(file)]) == 0 and ask_model_signing(version.home, file, signature)
    assert "dossier of small version 1" in capsys.readouterr().out

    file.write_bytes(file.read_bytes().replace(b"accuracy", b"accuracX"))
    assert main(["verify", str(file)]) == 1 and not ask_model_signing(version.home, file, signature)
    assert f"{file} has changed since it was signed as the dossier of small/1" in capsys.readouterr().err


def revoke(home: Path) -> None:
    edit_key(home, revoked="2020-01-01")


def trust_for_others(home: Path) -> None:
    edit_key(home, models=["other"])


def trust_another(home: Path) -> None:
    other = generate_private_key(SECP256R1()).public_key()
    edit_key(home, key=write_public_key(other))


def edit_key(home: Path, **values: Any) -> None:
    trust = yaml.safe_load((home / "trust.yaml").read_text())
    trust["keys"][0] |= values
    (home / "trust.yaml").write_text(yaml.safe_dump(trust))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (revoke, "was revoked on 2020-01-01"),
        (trust_for_others, "for small"),
        (trust_another, "does not trust"),
    ],
)
def test_a_dossier_by_a_key_that_is_not_trusted_is_refused(
    version: FinishedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    message: str,
) -> None:
    file = tmp_path / "small.zip"
    assert main(["dossier", "small/1", "--out", str(file)]) == 0
    change(version.home)
    assert main(["verify", str(file)]) == 2
    refused = capsys.readouterr().err
    assert message in refused and str(file) in refused


def test_a_home_without_a_trusted_key_writes_a_dossier_without_a_signature(
    version: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.zip"
    signature = tmp_path / "small.zip.sigstore.json"
    assert main(["dossier", "small/1", "--out", str(file)]) == 0
    signed = file.read_bytes()
    trust_for_others(version.home)
    capsys.readouterr()
    assert main(["dossier", "small/1", "--out", str(file)]) == 0
    assert "Not signed: " in capsys.readouterr().out
    assert file.read_bytes() == signed and not signature.exists()


def test_a_dossier_with_the_signature_of_a_version_or_none_is_refused(
    version: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.zip"
    signature = tmp_path / "small.zip.sigstore.json"
    assert main(["dossier", "small/1", "--out", str(file)]) == 0
    (kept,) = version.home.glob("signatures/*/small/1")
    for name, message in (("model.sig", "not the signature of a dossier"), ("provenance.sigstore.json", "manifest")):
        signature.write_bytes((kept / name).read_bytes())
        assert main(["verify", str(file)]) == 2
        assert message in capsys.readouterr().err
    signature.unlink()
    assert main(["verify", str(file)]) == 2
    assert f"{signature} cannot be read (No such file or directory)" in capsys.readouterr().err
