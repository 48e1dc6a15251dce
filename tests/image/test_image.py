"""`make image` before it builds: the engine that it needs, and pip's settings as secrets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.image import __main__ as image
from tests.image.pip_settings import CERTIFICATES, PipSettings, read_pip_settings

WITH_PASSWORD = "https://user:word@example.org/simple"


def test_without_an_engine_nothing_is_built_and_the_message_has_the_command_that_installs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["image"])
    assert image.main() == 2
    printed = capsys.readouterr()
    assert "apt-get install buildah" in printed.err and printed.out == ""


def test_variables_come_before_files_as_for_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://example.org/file\ntimeout = 7\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", WITH_PASSWORD)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "9")
    settings = read_pip_settings()
    assert settings.values["index-url"] == WITH_PASSWORD
    assert settings.values["timeout"] == "9"


def test_files_of_the_secrets_are_for_this_user_only_and_name_the_mounted_certificates(tmp_path: Path) -> None:
    secrets = PipSettings({"index-url": WITH_PASSWORD, "cert": "/own/ca.pem"}).write_secrets(tmp_path)
    assert secrets["certificates"] == Path("/own/ca.pem")
    assert secrets["pip.conf"].stat().st_mode & 0o777 == 0o600
    assert secrets["pip.conf"].read_text() == f"[global]\nindex-url = {WITH_PASSWORD}\ncert = {CERTIFICATES}\n"


def test_folder_of_a_local_index_is_the_one_around_it(tmp_path: Path) -> None:
    for name in ("simple", "wheels"):
        (tmp_path / name).mkdir()
    settings = PipSettings({"extra-index-url": f"file://{tmp_path}/simple", "find-links": f"{tmp_path}/wheels"})
    assert settings.folders == [str(tmp_path), str(tmp_path / "wheels")]
    assert PipSettings({"index-url": "https://example.org/simple"}).folders == []
