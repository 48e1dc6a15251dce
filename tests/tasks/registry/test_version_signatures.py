"""An attacker with write access to the registry: nothing is loaded, and each attempt is named."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tasks.cache.results import PinnedVersion
from tasks.cache.stage import Work
from tasks.home import home as create_home
from tasks.registry.pinned_versions import FETCHED, fetch_config, find_folders, find_tokenizer
from tasks.registry.version_signatures import (
    MANIFEST,
    PROVENANCE,
    SignedVersion,
    _put,
    check_all_files,
    require_own_key,
    sign_own_version,
    sign_version,
    verify_tags,
)
from tasks.registry.versions import BOUND_TAGS, DRIFT_TAG, READING_TAG, SIGNED_TAG, TASK_TAG
from tasks.registry.weight_files import TrainedModel
from tasks.signatures.bundles import Statement, sign
from tasks.signatures.keys import FILE as KEY_FILE
from tasks.signatures.keys import KEY, load_signing_key, write_public_key
from tasks.signatures.trust import FILE as TRUST
from tasks.tracking.connection import FIT_TAG, FLOW_RUN_TAG, MAX_LENGTH_TAG, MODEL_TAG, MlflowFailed, connect
from tests.fork_server import NEW_PYTHON
from tests.made import NO_WEIGHTS, artifact
from tests.servers import closed_port
from training.jobs.protocol import sha256
from training.problems import UserError

NAME = "small"
TAGS = {MODEL_TAG: "m" * 64, FIT_TAG: "k" * 64, MAX_LENGTH_TAG: "32", TASK_TAG: '{"task": "seq2seq", "options": {}}'}
WEIGHTS, CONFIG, TOKENIZER = "model/model.safetensors", "model/config.json", "components/tokenizer/tokenizer.json"


class Registry:
    """A registry, and the home of its user."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.client = folder, connect()
        for name in (NAME, "other"):
            self.client.create_registered_model(name)

    def register(self, name: str = NAME, *, signed: bool = True, source: Path | None = None) -> Target:
        """A new version; without `source` one with files of its own."""
        place = source or self.folder / f"{len(list(self.folder.iterdir()))}"
        if source is None:
            for path, content in self.make_files(place.name).items():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                (place / path).write_bytes(content)
        number = str(self.client.create_model_version(name, place.as_uri(), tags=TAGS).version)
        if signed:
            sign_version(self.client, name, number, None)
        return Target(self, name, number, place)

    @staticmethod
    def make_files(of: str) -> dict[str, bytes]:
        config = json.dumps({"model_type": "bert", "of": of}).encode()
        return {"MLmodel": b"flavors: {}", CONFIG: config, WEIGHTS: NO_WEIGHTS, TOKENIZER: b"{}"}


class Target:
    """A version, as an attacker sees it."""

    def __init__(self, registry: Registry, name: str, number: str, place: Path) -> None:
        self.registry, self.client, self.name, self.number, self.place = registry, registry.client, name, number, place

    def tag(self, tag: str, value: str) -> None:
        self.client.set_model_version_tag(self.name, self.number, tag, value)

    def load(self, used: Mapping[str, str] = TAGS) -> dict[str, Path]:
        """The folders of the version, as every command gets them that has read the tags `used`."""
        verify_tags(version := self.client.get_model_version(self.name, self.number))
        champion = PinnedVersion(
            name=self.name, version=self.number, model=version.tags[MODEL_TAG], key=used[FIT_TAG], max_length=32
        )
        return find_folders(Work(f"load-{self.number}", Path(os.devnull), ""), champion, "NAME")

    def verify(self) -> SignedVersion:
        found = verify_tags(self.client.get_model_version(self.name, self.number))
        assert found is not None
        return found

    def sign(self, earlier: SignedVersion | None = None) -> SignedVersion:
        return sign_version(self.client, self.name, self.number, None, earlier=earlier)

    def read_signatures(self) -> dict[str, bytes]:
        return {file: (self.place / file).read_bytes() for file in (MANIFEST, PROVENANCE)}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, fresh_database: Path) -> Iterator[Registry]:
    """One for all tests of this module that need no empty one: small/1 and other/1 are signed."""
    folder = tmp_path_factory.mktemp("signed")
    (folder / "versions").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_HOME", str(folder / "home"))
        shutil.copyfile(fresh_database, create_home() / "mlflow.db")
        made = Registry(folder / "versions")
        require_own_key(made.client, NAME)
        made.register()
        made.register("other")
        yield made


@pytest.fixture
def target(registry: Registry) -> Iterator[Target]:
    """A signed version of this test alone. The user's trust is restored at the end."""
    found, trust = registry.register(), create_home() / TRUST
    before = trust.read_bytes()
    yield found
    trust.write_bytes(before)


def fetched() -> Path:
    """The folder of the versions that the home has fetched."""
    return create_home() / "artifacts" / FETCHED


def forget() -> None:
    """As a home that trusts the keys, and has never seen a version."""
    shutil.rmtree(create_home() / "signatures", ignore_errors=True)


Attack = Callable[[Target], object]


def change(path: str, content: bytes = b"evil") -> Attack:
    def attack(target: Target) -> None:
        (target.place / path).parent.mkdir(parents=True, exist_ok=True)
        (target.place / path).write_bytes(content)

    return attack


def remove(*paths: str) -> Attack:
    return lambda target: [(target.place / path).unlink() for path in paths]


def copy_from(name: str, *files: str) -> Attack:
    """Takes these files from version 1 of a name."""

    def attack(target: Target) -> None:
        source = Path(target.client.get_model_version_download_uri(name, "1").removeprefix("file://"))
        for file in files:
            shutil.copyfile(source / file, target.place / file)

    return attack


def edit_bundle(file: str, edit: Callable[[Any], object]) -> Attack:
    def attack(target: Target) -> None:
        bundle = json.loads((target.place / file).read_text())
        edit(bundle)
        (target.place / file).write_text(json.dumps(bundle))

    return attack


def edit_statement(file: str, edit: Callable[[Any], object]) -> Attack:
    """Changes the statement of a bundle, and leaves its signature."""

    def edit_payload(bundle: Any) -> None:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        edit(statement)
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()

    return edit_bundle(file, edit_payload)


def sign_something_else(file: str, edit: Callable[[Any], object]) -> Attack:
    """A statement of another content, or for another purpose, that somebody had signed by a trusted key."""

    def attack(target: Target) -> None:
        bundle = json.loads((target.place / file).read_text())
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        edit(statement)
        (target.place / file).write_bytes(sign(Statement.model_validate(statement), load_signing_key()))

    return attack


def sign_by_other_key(target: Target) -> None:
    """The attacker has a home with a key and a trust of its own."""
    other = generate_private_key(SECP256R1())
    file = target.registry.folder.parent / "other.pem"
    file.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    trust = create_home() / TRUST
    kept = trust.read_text()
    trust.unlink()
    change(WEIGHTS)(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, str(file))
        target.sign()
    trust.write_text(kept)


def pass_off(target: Target) -> None:
    """Signs by another key, and names the trusted one."""
    trusted = json.loads((target.place / MANIFEST).read_text())["verificationMaterial"]
    sign_by_other_key(target)
    for file in (MANIFEST, PROVENANCE):
        edit_bundle(file, lambda bundle: bundle.update(verificationMaterial=trusted))(target)


def link_weights(target: Target) -> None:
    (target.place / WEIGHTS).rename(target.place.parent.parent / "elsewhere")
    (target.place / WEIGHTS).symlink_to(target.place.parent.parent / "elsewhere")
    (target.place.parent.parent / "elsewhere").write_bytes(b"evil")


def link_folder(target: Target) -> None:
    (target.place / "model").rename(elsewhere := target.place.parent.parent / f"elsewhere-{target.number}")
    (target.place / "model").symlink_to(elsewhere)
    (elsewhere / "model.safetensors").write_bytes(b"evil")


def make_pipe(target: Target) -> None:
    (target.place / MANIFEST).unlink()
    os.mkfifo(target.place / MANIFEST)


def make_endless(target: Target) -> None:
    os.truncate(target.place / PROVENANCE, 2**40)


def link_secret(target: Target) -> None:
    (target.place / PROVENANCE).unlink()
    (target.place / PROVENANCE).symlink_to(create_home() / KEY_FILE)


def strip(target: Target) -> None:
    remove(MANIFEST, PROVENANCE)(target)
    target.client.delete_model_version_tag(target.name, target.number, SIGNED_TAG)
    change(WEIGHTS)(target)


def move_source(target: Target) -> None:
    """The database names the folder of version 1, with its valid signature."""
    uri = target.client.get_model_version_download_uri(NAME, "1")
    with sqlite3.connect(create_home() / "mlflow.db") as database:
        where = (uri, uri, NAME, target.number)
        database.execute("UPDATE model_versions SET source=?, storage_location=? WHERE name=? AND version=?", where)


def set_trust(**fields: object) -> None:
    file = create_home() / TRUST
    trust = yaml.safe_load(file.read_text())
    trust["keys"][0] |= fields
    file.write_text(yaml.safe_dump(trust))


def replace_trusted_key(target: Target) -> None:
    set_trust(key=write_public_key(generate_private_key(SECP256R1()).public_key()))


def set_in(*path: str, value: object) -> Callable[[Any], None]:
    """Sets a value inside of a statement or bundle."""

    def edit(whole: Any) -> None:
        for name in path[:-1]:
            whole = whole[name]
        whole[path[-1]] = value

    return edit


def append_signature(bundle: Any) -> None:
    bundle["dsseEnvelope"]["signatures"] *= 2


def cut_signature(bundle: Any) -> None:
    (signature,) = bundle["dsseEnvelope"]["signatures"]
    signature["sig"] = base64.b64encode(base64.b64decode(signature["sig"])[:-8]).decode()


def use_md5(statement: Any) -> None:
    statement["predicate"]["resources"][0]["algorithm"] = "md5"


def drop_resource(statement: Any) -> None:
    del statement["predicate"]["resources"][0]


ATTACKS: dict[str, tuple[Attack, str]] = {
    # files
    "weights changed": (change(WEIGHTS), "model.safetensors has changed since it was signed"),
    "config changed": (change(CONFIG, b'{"model_type": "evil"}'), "config.json has changed"),
    "tokenizer changed": (change(TOKENIZER), "tokenizer.json has changed"),
    "weights added": (change("model/model-00002.safetensors"), "model-00002.safetensors was added"),
    "code added": (change("model/modeling_evil.py"), "modeling_evil.py was added"),
    "pickle added": (change("model/pytorch_model.bin"), "pytorch_model.bin was added"),
    "adapter added": (change("model/adapter_model.safetensors"), "adapter_model.safetensors was added"),
    "chat template added": (change("components/tokenizer/chat_template.jinja"), "chat_template.jinja was added"),
    "another folder is loaded instead": (
        change("artifacts/model/config.json"),
        "artifacts/model/config.json was added",
    ),
    "file missing": (remove(CONFIG), "config.json is missing"),
    "weights are a link": (link_weights, f"{WEIGHTS} "),
    # bundles
    "manifest cut off": (change(MANIFEST, b'{"mediaType": "appl'), "cut off"),
    "manifest empty": (change(MANIFEST, b""), "cut off"),
    "manifest missing": (remove(MANIFEST), f"{MANIFEST} is missing"),
    "provenance missing": (remove(PROVENANCE), f"{PROVENANCE} is missing"),
    "manifest is a pipe": (make_pipe, f"{MANIFEST} is a pipe"),
    "provenance is a link to a secret of the user": (link_secret, f"{PROVENANCE} lies in the home"),
    "provenance of a terabyte": (make_endless, f"{PROVENANCE} has more than"),
    "provenance is no bundle": (change(PROVENANCE, b"[]"), "cut off, or no bundle"),
    "provenance of deep lists": (change(PROVENANCE, b"[" * 100_000), "cut off, or no bundle"),
    "signature cut off": (edit_bundle(MANIFEST, cut_signature), "not by the key"),
    "two signatures": (edit_bundle(MANIFEST, append_signature), "no bundle of a signature"),
    "another type of payload": (
        edit_bundle(MANIFEST, set_in("dsseEnvelope", "payloadType", value="text/plain")),
        "no bundle of a signature",
    ),
    "manifest edited": (edit_statement(MANIFEST, drop_resource), "not by the key"),
    "tags of the provenance edited": (
        edit_statement(PROVENANCE, set_in("predicate", "finetune_tags", value={})),
        "not by the key",
    ),
    # replays
    "signature of another name": (copy_from("other", MANIFEST, PROVENANCE), "it is the signature of other/1"),
    "signature of another version": (copy_from(NAME, MANIFEST, PROVENANCE), "it is the signature of small/1"),
    "manifest of another version": (copy_from(NAME, MANIFEST), f"{MANIFEST} is of another model"),
    "all of another version": (
        copy_from(NAME, WEIGHTS, CONFIG, TOKENIZER, MANIFEST, PROVENANCE),
        "it is the signature of small/1",
    ),
    "the folder of another version": (move_source, "it is the signature of small/1"),
    "provenance as the manifest": (
        lambda target: shutil.copyfile(target.place / PROVENANCE, target.place / MANIFEST),
        "something else than a manifest",
    ),
    # keys
    "signed by another key": (sign_by_other_key, "does not trust for small"),
    "signed by another key in the name of the trusted one": (pass_off, "not by the key"),
    "signatures removed": (strip, "it is not signed"),
    "key revoked": (lambda target: set_trust(revoked="2020-01-01"), "was revoked on 2020-01-01"),
    "key trusted for other names": (lambda target: set_trust(models=["team-*"]), "does not trust for small"),
    "key replaced": (replace_trusted_key, "does not trust for small"),
    # statements that a trusted key has signed for another purpose
    "another algorithm": (sign_something_else(MANIFEST, use_md5), "files with their sha256"),
    "digests of parts of files": (
        sign_something_else(MANIFEST, set_in("predicate", "serialization", "method", value="shards")),
        "files with their sha256",
    ),
    "another type of predicate": (
        sign_something_else(PROVENANCE, set_in("predicateType", value="https://in-toto.io/attestation/scai")),
        "it is the signature of",
    ),
    "a manifest that contradicts its digest": (sign_something_else(MANIFEST, drop_resource), "files with their sha256"),
    "no time of the signature": (
        sign_something_else(PROVENANCE, set_in("predicate", "runDetails", value={})),
        "another content than this release writes",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_a_signed_version_is_refused_by_name_and_nothing_is_loaded(target: Target, name: str) -> None:
    assert set(target.load()) == {"model", "tokenizer"}
    shutil.rmtree(fetched())
    attack, reason = ATTACKS[name]
    attack(target)
    forget()
    with pytest.raises(UserError) as raised:
        target.load()
    (problem,) = raised.value.problems
    assert reason in f"{problem.where} {problem.message}"
    assert not list(fetched().glob("*"))


def test_a_version_is_fetched_once_and_what_becomes_of_mlflows_files_later_changes_nothing(target: Target) -> None:
    first, kept = target.load()["model"], target.verify().files[WEIGHTS]
    change(WEIGHTS)(target)
    assert target.load()["model"] == first and sha256(first / Path(WEIGHTS).name) == kept
    set_trust(revoked="2020-01-01")
    with pytest.raises(UserError, match="was revoked"):
        target.load()


def test_a_fetched_version_that_was_changed_on_the_disk_is_fetched_again(target: Target) -> None:
    weights = target.load()["model"] / Path(WEIGHTS).name
    weights.write_bytes(b"damaged")
    assert target.load()["model"] / Path(WEIGHTS).name == weights
    assert sha256(weights) == target.verify().files[WEIGHTS]
    weights.write_bytes(b"damaged")
    change(WEIGHTS)(target)
    with pytest.raises(UserError, match=r"model\.safetensors has changed since it was signed"):
        target.load()


def test_a_folder_that_is_a_link_out_of_the_version_is_refused(target: Target) -> None:
    link_folder(target)
    with pytest.raises(MlflowFailed, match="resolved path is outside the artifact directory"):
        target.load()


def test_every_tag_by_which_a_version_is_used_is_signed_and_a_report_of_drift_is_not(target: Target) -> None:
    for tag in BOUND_TAGS:
        target.tag(tag, "evil")
        with pytest.raises(UserError, match=f"its tag {tag} has changed since it was signed"):
            verify_tags(target.client.get_model_version(NAME, target.number))
        if tag in TAGS:
            target.tag(tag, TAGS[tag])
        else:
            target.client.delete_model_version_tag(NAME, target.number, tag)
    target.client.delete_model_version_tag(NAME, target.number, TASK_TAG)
    with pytest.raises(UserError, match=f"its tag {TASK_TAG} has changed"):
        target.load()
    target.tag(TASK_TAG, TAGS[TASK_TAG])
    target.tag(DRIFT_TAG, "{}")
    assert target.load()


def test_weights_that_are_the_artifacts_own_file_are_refused_where_either_name_was_written_to(
    registry: Registry,
) -> None:
    trained = artifact("fit", {f"model/{Path(path).name}": text for path, text in Registry.make_files("0").items()})
    target = registry.register(signed=False)
    (target.place / WEIGHTS).unlink()
    os.link(trained.path / WEIGHTS, target.place / WEIGHTS)
    tags = {MODEL_TAG: trained.parts["model"], FIT_TAG: trained.key}
    for tag, value in tags.items():
        target.tag(tag, value)
    target.sign()
    assert target.load(tags)["model"] == trained.path / "model"
    change(WEIGHTS)(target)
    with pytest.raises(UserError, match=r"model\.safetensors has changed since it was signed"):
        target.load(tags)


def test_an_old_version_that_is_registered_again_is_refused(registry: Registry) -> None:
    first = Path(registry.client.get_model_version_download_uri(NAME, "1").removeprefix("file://"))
    again = registry.register(signed=False, source=first)
    again.tag(SIGNED_TAG, "k")
    with pytest.raises(UserError, match="it is the signature of small/1"):
        again.load()


def test_a_registered_model_that_takes_the_name_of_another_is_refused(empty_registry: Registry) -> None:
    ours, other = empty_registry.register(), empty_registry.register("other")
    assert ours.load() and other.load()
    empty_registry.client.rename_registered_model(NAME, "former")
    empty_registry.client.rename_registered_model("other", NAME)
    shutil.rmtree(fetched())
    with pytest.raises(UserError, match=r"config\.json has changed since it was signed"):
        ours.load()
    forget()
    with pytest.raises(UserError, match="it is the signature of other/1"):
        ours.load()


def test_parts_of_a_version_that_are_fetched_alone_are_verified(target: Target, tmp_path: Path) -> None:
    champion = PinnedVersion(name=NAME, version=target.number, model=TAGS[MODEL_TAG], key=TAGS[FIT_TAG], max_length=32)
    for path in (CONFIG, TOKENIZER):
        (target.place / path).write_text('{"evil": 1}')
    with pytest.raises(UserError, match=r"config.json has changed"):
        fetch_config(champion, "NAME")
    with pytest.raises(UserError, match=r"tokenizer.json has changed"):
        find_tokenizer(champion, tmp_path / "tokenizer", "NAME")


def test_every_file_is_verified_on_request_also_those_that_are_not_loaded(target: Target) -> None:
    signed = verify_tags(target.client.get_model_version(NAME, target.number))
    assert signed is not None and check_all_files(signed) == []
    change("MLmodel")(target)
    change("code/evil.py")(target)
    remove(TOKENIZER)(target)
    (target.place / "conda.yaml").symlink_to("MLmodel")
    expected = [f"{TOKENIZER} is missing", "MLmodel has changed", "code/evil.py was added", "conda.yaml is a link"]
    found, steps = zip(*(problem.split(" since it was signed. ") for problem in check_all_files(signed)), strict=True)
    assert list(found) == expected
    assert "--force fit" in steps[0] and all(step.startswith("Delete the version") for step in steps[1:])


def test_no_file_is_restored_in_a_folder_outside_of_the_home(home: Path, tmp_path: Path) -> None:
    (own := tmp_path / "config.json").write_text("{}")
    with pytest.raises(OSError, match="not in this home"):
        _put(own, tmp_path / "elsewhere", "model/config.json")
    assert not (tmp_path / "elsewhere").exists()


def ask_model_signing(target: Target) -> bool:
    """Whether the command of OpenSSF, with the public key alone, verifies the version."""
    (key := target.registry.folder.parent / "team.pub").write_text(
        yaml.safe_load((create_home() / TRUST).read_text())["keys"][0]["key"]
    )
    argv = [Path(NEW_PYTHON).with_name("model_signing"), "verify", "key", target.place]
    argv += ["--signature", target.place / MANIFEST, "--public_key", key]
    asked = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in asked.stderr
    return asked.returncode == 0


@pytest.mark.slow
def test_the_verifier_of_model_signing_gives_the_same_answer(target: Target) -> None:
    signed = verify_tags(target.client.get_model_version(NAME, target.number))
    assert signed is not None and check_all_files(signed) == [] and ask_model_signing(target)
    before = (target.place / CONFIG).read_bytes()
    change(CONFIG)(target)
    assert check_all_files(signed)[0].startswith(f"{CONFIG} has changed") and not ask_model_signing(target)
    (target.place / CONFIG).write_bytes(before)
    change("model/pytorch_model.bin")(target)
    assert check_all_files(signed)[0].startswith("model/pytorch_model.bin was added") and not ask_model_signing(target)
    remove("model/pytorch_model.bin")(target)
    edit_statement(MANIFEST, drop_resource)(target)
    assert not ask_model_signing(target)


def test_an_export_that_was_changed_or_added_since_is_refused(registry: Registry, tmp_path: Path) -> None:
    (file := tmp_path / "model.onnx").write_bytes(b"onnx")
    exports = {"export/model.onnx": "0e2f0a4e2bcf4ca0a1bb7b6ee9b7e8d9f6ab4a6a4bd1d9d4a7c0b8a2a9c0d1e2"}
    target = registry.register(signed=False)
    signed = sign_version(target.client, NAME, target.number, None, exports=exports)
    with pytest.raises(UserError, match=r"its file export/model\.onnx has changed since it was signed"):
        signed.require_export("export/model.onnx", file)
    with pytest.raises(UserError, match=r"its file export/other\.onnx was added since it was signed"):
        signed.require_export("export/other.onnx", file)


def test_an_older_signature_of_a_version_never_replaces_a_newer_one(target: Target) -> None:
    """A run has corrected the longest text, and signed the version anew; the attacker puts the former back."""
    earlier, former = target.read_signatures(), verify_tags(target.client.get_model_version(NAME, target.number))
    target.tag(MAX_LENGTH_TAG, "64")
    target.sign(former)
    newer = target.read_signatures()
    for file, content in earlier.items():
        (target.place / file).write_bytes(content)
    assert target.load()
    target.tag(MAX_LENGTH_TAG, "32")
    with pytest.raises(UserError, match=f"its tag {MAX_LENGTH_TAG} has changed since it was signed"):
        target.load()
    (kept,) = create_home().glob(f"signatures/*/{NAME}/{target.number}")
    assert {file: (kept / file).read_bytes() for file in newer} == newer


def test_a_version_whose_signature_was_removed_is_refused_only_where_none_is_kept(target: Target) -> None:
    remove(MANIFEST, PROVENANCE)(target)
    assert target.load()
    forget()
    with pytest.raises(UserError, match=f"{MANIFEST} is missing"):
        target.load()


def test_a_registry_that_does_not_answer_is_no_missing_signature(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    version = target.client.get_model_version(NAME, target.number)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(MlflowFailed):
        verify_tags(version)


def test_a_key_that_is_revoked_later_still_vouches_for_what_it_signed_before(target: Target) -> None:
    set_trust(revoked="2999-01-01")
    assert target.load()


def sign_by_run(target: Target, trained: TrainedModel, is_new: bool = False, record: Any = None, **latest: str) -> str:
    """As a run that has computed the tags of TAGS."""
    origin = {tag: TAGS[tag] for tag in (MODEL_TAG, FIT_TAG)} | {FLOW_RUN_TAG: "this-run"}
    tags = origin, {tag: TAGS[tag] for tag in (MAX_LENGTH_TAG, TASK_TAG)} | latest
    of = target.client, NAME, target.number, record
    return sign_own_version(*of, is_new=is_new, tags=tags, trained=trained, exports={})


@pytest.fixture
def trained(tmp_path: Path) -> TrainedModel:
    (folder := tmp_path / "trained").mkdir()
    files = {Path(path).name: content for path, content in Registry.make_files("0").items() if path != "MLmodel"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return TrainedModel(folder, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()})


@pytest.fixture
def unsigned(registry: Registry, trained: TrainedModel) -> Target:
    """A version of the model that was trained here."""
    found = registry.register(signed=False)
    found.tag(FLOW_RUN_TAG, "this-run")
    shutil.copyfile(trained.folder / "config.json", found.place / CONFIG)
    return found


def test_a_run_signs_what_it_trained_and_signs_anew_what_it_changes(unsigned: Target, trained: TrainedModel) -> None:
    assert sign_by_run(unsigned, trained, is_new=True) == "" and unsigned.load()
    first = unsigned.read_signatures()
    assert sign_by_run(unsigned, trained) == "" and unsigned.read_signatures() == first
    unsigned.tag(READING_TAG, "[]")
    assert sign_by_run(unsigned, trained, **{READING_TAG: "[]"}) == "" and unsigned.load()
    assert unsigned.read_signatures() != first


def test_a_run_does_not_sign_a_tag_that_somebody_else_has_set(unsigned: Target, trained: TrainedModel) -> None:
    unsigned.tag(READING_TAG, '{"evil": true}')
    warning = sign_by_run(unsigned, trained)
    assert f"small/{unsigned.number} stays unsigned" in warning and READING_TAG in warning
    assert not (unsigned.place / MANIFEST).exists()
    unsigned.client.delete_model_version_tag(NAME, unsigned.number, READING_TAG)
    assert sign_by_run(unsigned, trained) == ""
    unsigned.tag(READING_TAG, '{"evil": true}')
    with pytest.raises(UserError, match=f"its tag {READING_TAG} has changed since it was signed"):
        sign_by_run(unsigned, trained)


def test_a_run_signs_what_an_earlier_run_of_this_home_has_left_unsigned_and_no_other_runs_version(
    unsigned: Target, trained: TrainedModel
) -> None:
    unsigned.tag(FLOW_RUN_TAG, "killed-run")
    record = {"run": {"flow_run_id": "killed-run"}, "model": {"digest": TAGS[MODEL_TAG]}, "stages": []}
    assert f"has set its tag {FLOW_RUN_TAG}" in sign_by_run(unsigned, trained, record=record)
    left = create_home() / "runs" / "killed-run" / "lineage.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    other = record | {"model": {"digest": "e" * 64}}
    assert f"has set its tag {FLOW_RUN_TAG}" in sign_by_run(unsigned, trained, record=other)
    assert sign_by_run(unsigned, trained, record=record) == "" and unsigned.load()


@pytest.mark.parametrize("path", [CONFIG, TOKENIZER, "model/added.safetensors", "model/added.py"])
def test_a_run_refuses_to_sign_a_version_that_differs_from_the_model_that_it_trained(
    unsigned: Target, trained: TrainedModel, path: str
) -> None:
    (unsigned.place / path).write_text("{}  ")
    with pytest.raises(UserError, match="differs from the model that was trained here"):
        sign_by_run(unsigned, trained, is_new=True)
    assert not (unsigned.place / MANIFEST).exists()


def test_files_that_have_changed_since_a_version_was_signed_are_not_signed_again(
    unsigned: Target, trained: TrainedModel
) -> None:
    sign_by_run(unsigned, trained, is_new=True)
    change("MLmodel")(unsigned)
    unsigned.tag(READING_TAG, "[]")
    with pytest.raises(UserError, match="its file MLmodel has changed since it was signed"):
        sign_by_run(unsigned, trained, **{READING_TAG: "[]"})


@pytest.fixture
def empty_registry(tracked: Path, tmp_path: Path) -> Registry:
    """A registry without versions, and a home without keys."""
    (tmp_path / "versions").mkdir()
    return Registry(tmp_path / "versions")


def test_a_version_from_before_signatures_is_warned_of_once_and_a_later_unsigned_one_is_refused(
    empty_registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    before = empty_registry.register(signed=False)
    empty_registry.register()
    assert before.load() and before.load()
    assert caplog.text.count("small/1 is used without a signature: it is not signed") == 1
    later = empty_registry.register(signed=False)
    with pytest.raises(UserError, match=r"it is not signed, and small/2 was signed"):
        later.load()
    sign_by_other_key(later)  # as another home of a team does
    assert later.load()
    assert yaml.safe_load((create_home() / TRUST).read_text())["unsigned"] == "warn"


def test_a_home_without_trust_warns_of_a_version_that_others_signed_and_makes_no_key(
    empty_registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = empty_registry.register()
    for name in (KEY_FILE, TRUST):
        (create_home() / name).unlink()
    forget()
    assert target.load() and "trust.yaml does not trust for small" in caplog.text
    assert not (create_home() / TRUST).exists() and not (create_home() / KEY_FILE).exists()


def test_a_new_home_has_a_private_key_that_only_its_user_reads_and_refuses_what_is_unsigned(
    empty_registry: Registry,
) -> None:
    require_own_key(empty_registry.client, NAME)
    assert (create_home() / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load((create_home() / TRUST).read_text())["unsigned"] == "refuse"
