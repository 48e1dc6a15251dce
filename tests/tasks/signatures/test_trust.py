"""The file of trusted keys, and the key of the home."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from tasks.home import home as create_home
from tasks.signatures.keys import KEY, PASSWORD, load_signing_key, write_public_key
from tasks.signatures.trust import FILE, pin_own_key, read_trust
from tests.raised import raised_problems


def new_key() -> str:
    return write_public_key(generate_private_key(SECP256R1()).public_key())


def write_trust(**fields: Any) -> None:
    (create_home() / FILE).write_text(yaml.safe_dump(fields))


def test_a_key_with_two_entries_is_one_message_that_names_both(home: Path) -> None:
    key = new_key()
    entries = [{"name": "ana", "models": ["a"], "key": key}, {"name": "ben", "models": ["b"], "key": f"{key}\n"}]
    write_trust(keys=entries)
    (problem,) = raised_problems(read_trust)
    assert "'ana' and 'ben' are the same key" in problem.message and FILE in problem.where


def test_all_mistakes_in_the_file_are_named_together(home: Path) -> None:
    write_trust(unsigned="allow", kes=[], keys=[{"name": "ana", "key": "x"}, {"key": new_key(), "revoked": "soon"}])
    problems = raised_problems(read_trust)
    places = {problem.where.rpartition(": ")[2] for problem in problems}
    assert places == {"unsigned", "kes", "keys.0.key", "keys.1.name", "keys.1.revoked"}


def test_a_file_that_is_no_yaml_is_one_message(home: Path) -> None:
    (create_home() / FILE).write_text("keys: [")
    (problem,) = raised_problems(read_trust)
    assert problem.where.endswith(FILE) and "cannot be read" in problem.message


def test_a_day_of_revocation_begins_at_midnight_in_utc(home: Path) -> None:
    write_trust(keys=[{"name": "ana", "key": new_key(), "revoked": "2026-11-01"}])
    (key,) = read_trust().keys
    assert key.revoked is not None and key.revoked.isoformat() == "2026-11-01T00:00:00+00:00"


def test_a_user_without_a_name_can_sign(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    key = load_signing_key()  # the home is this user's
    monkeypatch.setattr(os, "getuid", lambda: 4_242_424)
    pin_own_key(key.public_key(), "refuse")
    assert read_trust().keys[0].name.startswith("4242424 on ")


def test_a_trust_that_people_have_edited_is_never_written_again(home: Path) -> None:
    write_trust(unsigned="warn", keys=[])
    pin_own_key(load_signing_key().public_key(), "refuse")
    assert read_trust().keys == [] and read_trust().unsigned == "warn"


def test_a_key_in_a_file_of_its_own_signs_if_its_password_is_given(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, file = generate_private_key(SECP256R1()), tmp_path / "team.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    monkeypatch.setenv(KEY, str(file))
    (problem,) = raised_problems(load_signing_key)
    assert f"its password in {PASSWORD}" in problem.message
    monkeypatch.setenv(PASSWORD, "secret")
    assert load_signing_key().private_numbers() == key.private_numbers()
    file.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    monkeypatch.delenv(PASSWORD)
    (problem,) = raised_problems(load_signing_key)
    assert "a key of another kind" in problem.message
    monkeypatch.setenv(KEY, str(tmp_path / "none.pem"))
    (problem,) = raised_problems(load_signing_key)
    assert "cannot be read (No such file or directory)" in problem.message
