"""An attacker with write access to the bucket places nothing in homes that refuse what no trusted key has signed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from tasks.cache import store
from tasks.cache.results import Artifact
from tasks.home import home as create_home
from tasks.shared_store.bucket import Bucket
from tasks.shared_store.bucket_remote import BucketRemote
from tasks.shared_store.shared_artifacts import SharedStore, manifest_name
from tasks.shared_store.signed_manifests import FIELD
from tasks.signatures.bundles import build_manifest, sign
from tasks.signatures.keys import load_signing_key, write_public_key
from tasks.signatures.trust import FILE as TRUST
from tasks.signatures.trust import pin_own_key

KEY, OTHER = "k" * 40, "o" * 40
UseHome = Callable[..., Path]


@pytest.fixture
def use_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseHome:
    """Makes a home, by its name, that of all that follows; with a key, or with another home's trust."""

    def use(name: str, *, signs: bool = False, trust: Path | None = None, **fields: Any) -> Path:
        monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / name))
        folder = create_home()
        if signs and not (folder / TRUST).exists():
            pin_own_key(load_signing_key().public_key(), "refuse")
        if trust is not None:
            content = yaml.safe_load((trust / TRUST).read_text())
            content["unsigned"] = fields.pop("unsigned", content["unsigned"])
            content["keys"][0] |= fields
            (folder / TRUST).write_text(yaml.safe_dump(content))
        return folder

    return use


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    (tmp_path / "bucket").mkdir()
    return Bucket(f"file://{tmp_path}/bucket")


def make(weights: bytes = b"weights", key: str = KEY) -> Artifact:
    with store.filling("fit", key) as aside:
        (aside / "model").mkdir()
        (aside / "model" / "weights").write_bytes(weights)
        return store.publish(aside, "fit", key, {"training.seed": 1}, {"loss": 0.25})


def place(bucket: Bucket, weights: bytes = b"weights", key: str = KEY) -> Artifact:
    """Makes an artifact and uploads it, as a run does."""
    ref = make(weights, key)
    remote = BucketRemote(bucket)
    remote.upload(ref, made=True)
    assert remote.end_run(wait=True) == []
    return ref


def find(bucket: Bucket) -> tuple[Artifact | None, list[str]]:
    """The artifact as a run finds it, and the run's warnings."""
    remote = BucketRemote(bucket)
    return remote.find("fit", KEY), remote.end_run(wait=True)


def edit(bucket: Bucket, change: Callable[[dict[str, Any]], object], key: str = KEY) -> None:
    fields = json.loads(bucket.read(manifest_name("fit", key)))
    change(fields)
    bucket.write(manifest_name("fit", key), json.dumps(fields).encode())


def test_what_one_home_has_made_is_used_where_its_key_is_trusted_and_stored_without_its_signature(
    bucket: Bucket, use_home: UseHome
) -> None:
    first = use_home("first", signs=True)
    ref = place(bucket)
    manifest = (ref.path / store.MANIFEST).read_bytes()
    use_home("second", trust=first)
    assert find(bucket) == (ref, [])
    assert (ref.path / store.MANIFEST).read_bytes() == manifest


def replace_unsigned(bucket: Bucket, use_home: UseHome) -> None:
    bucket.remove(manifest_name("fit", KEY))
    use_home("attacker")
    place(bucket, b"evil")


def replace_signed_by_other_key(bucket: Bucket, use_home: UseHome) -> None:
    bucket.remove(manifest_name("fit", KEY))
    use_home("attacker", signs=True)
    place(bucket, b"evil")


def keep_signature(bucket: Bucket, use_home: UseHome) -> None:
    """The attacker's manifest with the signature of the former one."""
    signature = json.loads(bucket.read(manifest_name("fit", KEY)))[FIELD]
    replace_unsigned(bucket, use_home)
    edit(bucket, lambda fields: fields.update({FIELD: signature}))


def give_other_key(bucket: Bucket, use_home: UseHome) -> None:
    """A signed artifact under the key of another one."""
    use_home("first")
    place(bucket, b"other", OTHER)
    edit(bucket, lambda fields: fields["ref"].update(key=KEY), OTHER)
    fields = json.loads(bucket.read(manifest_name("fit", OTHER)))
    fields["digest"] = store._digest_of_manifest(fields)
    bucket.write(manifest_name("fit", KEY), json.dumps(fields).encode())


def use_signature_of_version(bucket: Bucket, use_home: UseHome) -> None:
    use_home("first")
    bundle = sign(build_manifest("small", {"model/weights": "a" * 64}, []), load_signing_key()).decode()
    edit(bucket, lambda fields: fields.update({FIELD: bundle}))


ATTACKS: dict[str, tuple[Callable[[Bucket, UseHome], object], str]] = {
    "replaced": (replace_unsigned, "has no signature"),
    "signature removed": (lambda bucket, _: edit(bucket, lambda fields: fields.pop(FIELD)), "has no signature"),
    "replaced and signed by another key": (replace_signed_by_other_key, "does not trust"),
    "replaced, with the former signature": (keep_signature, "the signature of something else"),
    "result edited": (
        lambda bucket, _: edit(
            bucket,
            lambda fields: (
                fields["ref"].update(result={"loss": 0.0}),
                fields.update(digest=store._digest_of_manifest(fields)),
            ),
        ),
        "the signature of something else",
    ),
    "an artifact of another key": (give_other_key, "the signature of something else"),
    "signature of a version": (use_signature_of_version, "the signature of something else"),
    "signature cut off": (
        lambda bucket, _: edit(bucket, lambda fields: fields.update({FIELD: fields[FIELD][:-40]})),
        "cut off",
    ),
    "signature is a number": (lambda bucket, _: edit(bucket, lambda fields: fields.update({FIELD: 1})), "cut off"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_bucket_places_nothing_and_is_named(bucket: Bucket, use_home: UseHome, name: str) -> None:
    first = use_home("first", signs=True)
    place(bucket)
    attack, reason = ATTACKS[name]
    attack(bucket, use_home)
    use_home("second", trust=first)
    found, (warning,) = find(bucket)
    assert found is None and store.find("fit", KEY) is None
    assert f"are not used, and made here: fit {KEY[:16]}" in warning and reason in warning


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"revoked": "2020-01-01"}, "was revoked"),
        ({"models": ["small"]}, "does not trust"),
        ({"key": write_public_key(generate_private_key(SECP256R1()).public_key())}, "does not trust"),
    ],
)
def test_an_artifact_by_a_key_that_is_revoked_or_not_for_all_names_is_not_used(
    bucket: Bucket, use_home: UseHome, fields: dict[str, Any], reason: str
) -> None:
    first = use_home("first", signs=True)
    place(bucket)
    use_home("second", trust=first, **fields)
    found, (warning,) = find(bucket)
    assert found is None and reason in warning


def test_a_home_that_warns_uses_what_is_unsigned_but_no_signature_that_does_not_fit(
    bucket: Bucket, use_home: UseHome
) -> None:
    first = use_home("first", signs=True)
    ref = place(bucket)
    edit(bucket, lambda fields: fields.pop(FIELD))
    second = use_home("second", trust=first, unsigned="warn")
    found, (warning,) = find(bucket)
    assert found == ref and "are used unverified: fit kkkkkkkkkkkkkkkk has no signature" in warning
    shutil.rmtree(second / "artifacts")
    edit(bucket, lambda fields: fields.update({FIELD: "x"}))
    assert find(bucket)[0] is None


def test_a_home_without_trust_signs_and_verifies_nothing(bucket: Bucket, use_home: UseHome) -> None:
    first = use_home("first")
    ref = place(bucket)
    assert FIELD not in json.loads(bucket.read(manifest_name("fit", KEY)))
    assert not (first / "signature.pem").exists() and not (first / TRUST).exists()
    use_home("second")
    assert find(bucket) == (ref, [])


def test_a_home_does_not_sign_what_it_has_fetched_unverified(bucket: Bucket, use_home: UseHome) -> None:
    use_home("attacker")
    place(bucket, b"evil")
    first = use_home("first", signs=True)
    use_home("first", trust=first, unsigned="warn")
    ref, _ = find(bucket)
    assert ref is not None
    bucket.remove(manifest_name("fit", KEY))
    later = BucketRemote(bucket)
    later.upload(ref, made=False)
    later.end_run(wait=True)
    assert FIELD not in json.loads(bucket.read(manifest_name("fit", KEY)))


def test_what_was_fetched_in_place_of_what_a_killed_run_has_made_is_not_signed(
    bucket: Bucket, use_home: UseHome
) -> None:
    first = use_home("first", signs=True)
    (first / "uploads").mkdir()
    (first / "uploads" / f"fit.{KEY}").write_text(make().digest)
    make(b"evil")
    remote = BucketRemote(bucket)
    remote.deliver_earlier()
    assert remote.end_run(wait=True) == []
    assert FIELD not in json.loads(bucket.read(manifest_name("fit", KEY)))


def test_what_a_killed_run_has_made_is_signed_by_the_next(bucket: Bucket, use_home: UseHome) -> None:
    first = use_home("first", signs=True)
    ref = make()
    (first / "uploads").mkdir()
    (first / "uploads" / f"fit.{KEY}").write_text(ref.digest)
    remote = BucketRemote(bucket)
    remote.upload(ref, made=False)  # it is cached in the next run
    assert remote.end_run(wait=True) == []
    use_home("second", trust=first)
    assert find(bucket) == (ref, [])


def test_a_refused_artifact_that_stands_does_not_keep_the_upload_of_the_own_one_waiting(
    bucket: Bucket, use_home: UseHome
) -> None:
    first = use_home("first", signs=True)
    use_home("attacker")
    place(bucket, b"evil")
    use_home("second", trust=first)
    assert find(bucket)[0] is None
    own = make()
    end = SharedStore(bucket).upload("fit", KEY, made=own.digest)
    assert end.standing_digest != end.digest
