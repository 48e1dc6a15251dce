"""Signatures of manifests in a bucket: write access to it is not enough to place an artifact or a checkpoint.

A signed manifest has the field `signature`: an in-toto statement in a bundle (tasks/signatures/bundles.py) about the
manifest's name in the bucket and the digest of its other fields. A home signs what it has made, and verifies what it
fetches, by the key and the trust.yaml that it has for versions. Only keys that may sign versions of every name sign
manifests, since no registered name belongs to an artifact. A home without trust.yaml and named key does neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from tasks.cache.digests import digest_of
from tasks.home import home_path
from tasks.signatures import keys
from tasks.signatures.bundles import BadSignature, ForeignKey, Statement, Subject, sign, verify
from tasks.signatures.trust import pin_own_key, read_trust, trust_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

FIELD = "signature"
PREDICATE_TYPE = "urn:finetune-flows:shared-manifest:v1"
_TIME = TypeAdapter(AwareDatetime)


class Doubt(NamedTuple):
    """Why a manifest is not trusted."""

    reason: str
    refused: bool
    """Whether it must not be used."""


def sign_manifest(name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, JSON values, with the signature of this home; unchanged if the home signs none.

    Args:
        name: of the manifest in the bucket.
        manifest: what this home has made.

    Raises UserError for a key or a trust.yaml that cannot be read.
    """
    key = _find_key()
    if key is None:
        return {**manifest}
    statement = Statement(
        subject=[Subject(name=name, digest={"sha256": digest_of(manifest)})],
        predicateType=PREDICATE_TYPE,
        predicate={"signedOn": datetime.now(UTC).isoformat(timespec="milliseconds")},
    )
    return {**manifest, FIELD: sign(statement, key).decode()}


def _find_key() -> EllipticCurvePrivateKey | None:
    """The key of this home, if it may sign manifests. None is made for that."""
    if keys.KEY not in os.environ and not (home_path() / keys.FILE).is_file():
        return None
    key = keys.load_signing_key()
    if keys.KEY in os.environ:
        pin_own_key(key.public_key(), "warn")
    own = read_trust().by_id.get(keys.key_id(key.public_key()))
    return key if own and own.may_sign_artifacts and not own.is_revoked(datetime.now(UTC)) else None


def find_doubt(name: str, manifest: Mapping[str, Any], signature: object) -> Doubt | None:
    """Why a fetched manifest is not trusted; None for one that a trusted key has signed, and in a home without trust.

    Args:
        name: of the manifest in the bucket.
        manifest: its fields but the signature.
        signature: that field; None without one.

    Raises UserError for a trust.yaml that cannot be read.
    """
    if not trust_file().is_file():
        return None
    trust = read_trust()
    is_strict = trust.unsigned == "refuse"
    if signature is None:
        return Doubt("has no signature", is_strict)
    trusted = {key.id: key for key in trust.keys if key.may_sign_artifacts}
    try:
        signer, statement = verify(str(signature).encode(), {id_: key.public for id_, key in trusted.items()})
        subject = Subject(name=name, digest={"sha256": digest_of(manifest)})
        if statement.predicate_type != PREDICATE_TYPE or statement.subject != [subject]:
            raise BadSignature("it is the signature of something else")
        if trusted[signer].is_revoked(_TIME.validate_python(statement.predicate.get("signedOn"))):
            raise BadSignature(f"the key {signer[:12]} of {trusted[signer].name!r} was revoked")
    except ForeignKey as error:
        return Doubt(f"is signed by the key {error.key[:12]}, which {trust_file()} does not trust", is_strict)
    except (BadSignature, ValidationError) as error:
        return Doubt(f"has a signature that cannot be trusted: {error}", refused=True)
    return None
