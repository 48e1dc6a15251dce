"""An attacker with write access to the registry: nothing is loaded, and each attempt is named."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tasks.cache.results import Champion
from tasks.cache.stage import Work
from tasks.home import home as create_home
from tasks.registry.champions import fetch_config, find_folders, find_tokenizer
from tasks.registry.version_signatures import (
    MANIFEST,
    PROVENANCE,
    check_all_files,
    require_own_key,
    sign_version,
    verify_tags,
)
from tasks.registry.versions import FIT_TAG, SIGNED_TAG, TASK_TAG
from tasks.signatures.keys import FILE as KEY_FILE
from tasks.signatures.keys import KEY, parse_public_key, write_public_key
from tasks.signatures.trust import FILE as TRUST
from tasks.tracking.connection import MAX_LENGTH_TAG, MODEL_TAG, connect
from training.problems import UserError

NAME = "small"
TAGS = {MODEL_TAG: "m" * 64, FIT_TAG: "k" * 64, MAX_LENGTH_TAG: "32", TASK_TAG: '{"task": "seq2seq", "options": {}}'}


class Registry:
    """Versions 1 and 2 of `small`, signed, and version 3 of `other`, as an attacker sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.client = folder, connect()
        require_own_key(self.client, NAME)
        for name in (NAME, "other"):
            self.client.create_registered_model(name)
        self.register(NAME)
        self.register("other")
        self.register(NAME)

    def register(self, name: str, sign: bool = True, source: Path | None = None) -> str:
        place = source or self.folder / f"{name}-{len(list(self.folder.iterdir()))}"
        if source is None:
            (place / "model").mkdir(parents=True)
            (place / "components" / "tokenizer").mkdir(parents=True)
            (place / "MLmodel").write_text("flavors: {}\n")
            (place / "model" / "config.json").write_text(json.dumps({"model_type": "bert", "of": place.name}))
            (place / "model" / "model.safetensors").write_bytes(place.name.encode())
            (place / "components" / "tokenizer" / "tokenizer.json").write_text("{}")
        number = str(self.client.create_model_version(name, place.as_uri(), tags=TAGS).version)
        if sign:
            sign_version(self.client, name, number, None)
        return number

    def place(self, number: str, name: str = NAME) -> Path:
        return Path(self.client.get_model_version_download_uri(name, number).removeprefix("file://"))

    def tag(self, tag: str, value: str) -> None:
        self.client.set_model_version_tag(NAME, "2", tag, value)


@pytest.fixture
def registry(tracked: Path, tmp_path: Path) -> Registry:
    (tmp_path / "versions").mkdir()
    return Registry(tmp_path / "versions")


def forget(home: Path) -> None:
    """As a home that trusts the keys, and has never seen a version."""
    shutil.rmtree(home / "signatures", ignore_errors=True)


def load(number: str = "2") -> dict[str, Path]:
    """The folders of a version, as every command gets them."""
    version = connect().get_model_version(NAME, number)
    verify_tags(version)
    champion = Champion(name=NAME, version=number, model=version.tags[MODEL_TAG], key=TAGS[FIT_TAG], max_length=32)
    return find_folders(Work(f"load-{number}", Path(os.devnull), ""), champion, "NAME")


def change(path: str, content: bytes = b"evil") -> Callable[[Registry], None]:
    def attack(registry: Registry) -> None:
        (registry.place("2") / path).write_bytes(content)

    return attack


def copy_signatures(registry: Registry, source: Path) -> None:
    for file in (MANIFEST, PROVENANCE):
        shutil.copyfile(source / file, registry.place("2") / file)


def edit_bundle(file: str, edit: Callable[[Any], None]) -> Callable[[Registry], None]:
    """Changes the statement of a bundle, and leaves its signature."""

    def attack(registry: Registry) -> None:
        path = registry.place("2") / file
        bundle = json.loads(path.read_text())
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        edit(statement)
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
        path.write_text(json.dumps(bundle))

    return attack


def sign_by_other_key(registry: Registry) -> None:
    """The attacker has a home with a key and a trust of its own."""
    other = generate_private_key(SECP256R1())
    file = registry.folder.parent / "other.pem"
    file.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    before = create_home() / TRUST
    kept = before.read_text()
    before.unlink()
    os.environ[KEY] = str(file)
    try:
        (registry.place("2") / "model" / "model.safetensors").write_bytes(b"evil")
        sign_version(registry.client, NAME, "2", None)
    finally:
        del os.environ[KEY]
        before.write_text(kept)


def link_weights(registry: Registry) -> None:
    weights = registry.place("2") / "model" / "model.safetensors"
    weights.rename(registry.folder / "elsewhere")
    weights.symlink_to(registry.folder / "elsewhere")
    (registry.folder / "elsewhere").write_bytes(b"evil")


def remove(*paths: str) -> Callable[[Registry], None]:
    def attack(registry: Registry) -> None:
        for path in paths:
            (registry.place("2") / path).unlink()

    return attack


def strip(registry: Registry) -> None:
    remove(MANIFEST, PROVENANCE)(registry)
    registry.client.delete_model_version_tag(NAME, "2", SIGNED_TAG)
    (registry.place("2") / "model" / "model.safetensors").write_bytes(b"evil")


def swap_halves(registry: Registry) -> None:
    shutil.copyfile(registry.place("1") / MANIFEST, registry.place("2") / MANIFEST)


ATTACKS: dict[str, tuple[Callable[[Registry], object], str]] = {
    "weights changed": (change("model/model.safetensors"), "model.safetensors has changed since it was signed"),
    "config changed": (change("model/config.json", b'{"model_type": "evil"}'), "config.json has changed"),
    "tokenizer changed": (change("components/tokenizer/tokenizer.json"), "tokenizer.json has changed"),
    "weights added": (change("model/model-00002.safetensors"), "model-00002.safetensors was added"),
    "code added": (change("model/modeling_evil.py"), "modeling_evil.py was added"),
    "pickle added": (change("model/pytorch_model.bin"), "pytorch_model.bin was added"),
    "file missing": (remove("model/config.json"), "config.json is missing"),
    "weights are a link": (link_weights, "model/model.safetensors "),
    "manifest cut off": (change(MANIFEST, b'{"mediaType": "appl'), "cut off"),
    "manifest missing": (remove(MANIFEST), f"{MANIFEST} is missing"),
    "provenance missing": (remove(PROVENANCE), f"{PROVENANCE} is missing"),
    "provenance is no bundle": (change(PROVENANCE, b"[]"), "cut off, or no bundle"),
    "statement edited": (
        edit_bundle(PROVENANCE, lambda statement: statement["predicate"].update(finetune_tags={})),
        "not by the key",
    ),
    "manifest edited": (
        edit_bundle(MANIFEST, lambda statement: statement["predicate"].update(resources=[])),
        "not by the key",
    ),
    "signature of another name": (
        lambda registry: copy_signatures(registry, registry.place("1", "other")),
        "it is the signature of other/1",
    ),
    "signature of another version": (
        lambda registry: copy_signatures(registry, registry.place("1")),
        "it is the signature of small/1",
    ),
    "manifest of another version": (swap_halves, f"{MANIFEST} is of another model"),
    "signed by another key": (sign_by_other_key, "does not trust for small"),
    "signatures removed": (strip, "it is not signed"),
    "tag of the model changed": (lambda registry: registry.tag(MODEL_TAG, "e" * 64), "finetune.model_digest"),
    "tag of the task changed": (lambda registry: registry.tag(TASK_TAG, '{"task": "evil:Code"}'), "finetune.task"),
    "tag of the artifact changed": (lambda registry: registry.tag(FIT_TAG, "e" * 64), "finetune.fit.key"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_a_signed_version_is_refused_by_name_and_nothing_is_loaded(
    registry: Registry, name: str, tracked: Path
) -> None:
    assert set(load()) == {"model", "tokenizer"}
    shutil.rmtree(create_home() / "jobs")
    attack, reason = ATTACKS[name]
    attack(registry)
    forget(create_home())
    with pytest.raises(UserError) as raised:
        load()
    (problem,) = raised.value.problems
    assert reason in f"{problem.where} {problem.message}"
    assert not list((create_home() / "jobs").glob("*/champion"))


def test_an_old_version_that_is_registered_again_is_refused(registry: Registry) -> None:
    number = registry.register(NAME, sign=False, source=registry.place("1"))
    registry.client.set_model_version_tag(NAME, number, SIGNED_TAG, "k")
    with pytest.raises(UserError, match="it is the signature of small/1"):
        load(number)


def test_parts_of_a_version_that_are_fetched_alone_are_verified(registry: Registry, tmp_path: Path) -> None:
    champion = Champion(name=NAME, version="2", model=TAGS[MODEL_TAG], key=TAGS[FIT_TAG], max_length=32)
    for path in ("model/config.json", "components/tokenizer/tokenizer.json"):
        (registry.place("2") / path).write_text('{"evil": 1}')
    with pytest.raises(UserError, match=r"config.json has changed"):
        fetch_config(champion, "NAME")
    with pytest.raises(UserError, match=r"tokenizer.json has changed"):
        find_tokenizer(champion, tmp_path / "tokenizer", "NAME")


def set_trust(**fields: object) -> None:
    file = create_home() / TRUST
    trust = yaml.safe_load(file.read_text())
    trust["keys"][0] |= fields
    file.write_text(yaml.safe_dump(trust))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"revoked": "2020-01-01"}, "was revoked on 2020-01-01"), ({"models": ["team-*"]}, "does not trust for small")],
)
def test_a_key_that_is_revoked_or_trusted_for_other_names_is_refused(
    registry: Registry, fields: dict[str, object], reason: str
) -> None:
    set_trust(**fields)
    with pytest.raises(UserError, match=reason):
        load()


def test_a_key_that_is_revoked_later_still_vouches_for_what_it_signed_before(registry: Registry) -> None:
    set_trust(revoked="2999-01-01")
    assert load()


def test_a_version_from_before_signatures_is_warned_of_and_a_later_unsigned_one_is_refused(
    tracked: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "versions").mkdir()
    registry = Registry.__new__(Registry)
    registry.folder, registry.client = tmp_path / "versions", connect()
    registry.client.create_registered_model(NAME)
    registry.register(NAME, sign=False)
    registry.register(NAME)
    assert load("1") and "small/1 is used without a signature: it is not signed" in caplog.text
    registry.register(NAME, sign=False)
    with pytest.raises(UserError, match=r"it is not signed, and small/2 was signed"):
        load("3")
    assert yaml.safe_load((create_home() / TRUST).read_text())["unsigned"] == "warn"


def test_a_new_home_has_a_private_key_that_only_its_user_reads_and_refuses_what_is_unsigned(registry: Registry) -> None:
    assert (create_home() / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load((create_home() / TRUST).read_text())["unsigned"] == "refuse"


@pytest.mark.parametrize("path", ["", "model/model.safetensors", "MLmodel", "model/added.txt"])
def test_the_model_signing_command_gives_the_same_answer(registry: Registry, path: str, tmp_path: Path) -> None:
    if path:
        (registry.place("2") / path).write_bytes(b"evil")
    trust = yaml.safe_load((create_home() / TRUST).read_text())
    public = tmp_path / "key.pub"
    public.write_text(write_public_key(parse_public_key(trust["keys"][0]["key"])))
    words = ["verify", "key", str(registry.place("2")), "--signature", str(registry.place("2") / MANIFEST)]
    argv = [sys.executable, "-m", "model_signing", *words, "--public_key", str(public)]
    theirs = subprocess.run(argv, capture_output=True, text=True, check=False)
    signed = verify_tags(registry.client.get_model_version(NAME, "2"))
    assert signed is not None
    assert (theirs.returncode == 0) == (check_all_files(signed) == []) == (path == ""), theirs.stderr
