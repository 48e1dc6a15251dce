"""The signature of a dossier, in FILE.sigstore.json beside it, which OpenSSF's model_signing verifies too.

Its subject is NAME/VERSION, which `finetune verify` prints: a file of another name has the dossier of that version.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from tasks.provenance.dossier import Documents
from tasks.registry.version_signatures import require_own_key
from tasks.signatures.bundles import BadSignature, ForeignKey, build_manifest, read_manifest, sign, verify
from tasks.signatures.trust import Trust, TrustedKey, read_trust, trust_file
from tasks.tracking.connection import connect, mlflow_errors
from training.jobs.protocol import sha256
from training.problems import UserError

SUFFIX = ".sigstore.json"
"""Added to the name of a dossier for the file with its signature."""
_WHOLE = "."
"""The path of the one file of a manifest, as model_signing has it."""
_SIGNED_ON = "signedOn"
_TIME = TypeAdapter(AwareDatetime)
_TRUST_IT = "If it is a colleague's, add it to the keys there, as their trust.yaml has it."


class SignedDossier(NamedTuple):
    """A dossier whose signature is by a trusted key."""

    name: str
    number: str
    key: TrustedKey
    signed_at: datetime
    is_unchanged: bool
    """Whether it has the signed bytes."""


def sign_dossier(version: Documents, dossier: bytes) -> bytes:
    """The signature of a dossier by the key of this home. Raises MlflowFailed, and UserError if trust.yaml does not
    trust the key for this name."""
    with mlflow_errors():
        key = require_own_key(connect(), version.name)
    name, digest = f"{version.name}/{version.number}", hashlib.sha256(dossier).hexdigest()
    manifest = build_manifest(name, {_WHOLE: digest}, ignored=())
    manifest.predicate[_SIGNED_ON] = datetime.now(UTC).isoformat(timespec="milliseconds")
    return sign(manifest, key)


def check_dossier(file: Path) -> SignedDossier:
    """Verifies the signature beside a dossier by the keys of trust.yaml. Raises UserError if one of the two files is
    missing, and for a signature that cannot be trusted."""
    try:
        bundle, digest = file.with_name(file.name + SUFFIX).read_bytes(), sha256(file)
    except OSError as error:
        message = f"{error.filename} cannot be read ({error.strerror}): a dossier and its signature are two files, "
        message += f"FILE and FILE{SUFFIX}, which `finetune dossier` writes."
        raise UserError.of("signature", str(file), message) from error
    try:
        return _verify(bundle, digest, read_trust())
    except ForeignKey as error:
        message = f"is signed by the key {error.key[:12]}, which {trust_file()} does not trust. {_TRUST_IT}"
        raise UserError.of("signature", str(file), message) from error
    except BadSignature as error:
        message = f"has a signature that cannot be trusted: {error}. Get both files again from their author."
        raise UserError.of("signature", str(file), message) from error


def _verify(bundle: bytes, digest: str, trust: Trust) -> SignedDossier:
    """Raises BadSignature."""
    signer, statement = verify(bundle, {key.id: key.public for key in trust.keys})
    name, _, number = statement.subject[0].name.rpartition("/")
    key, files = trust.by_id[signer], read_manifest(statement)
    try:
        signed_at = _TIME.validate_python(statement.predicate.get(_SIGNED_ON))
    except ValidationError as error:
        raise BadSignature("it is not the signature of a dossier") from error
    if not key.may_sign(name):
        raise BadSignature(f"{trust_file()} does not trust the key {signer[:12]} of {key.name!r} for {name}")
    if key.is_revoked(signed_at):
        raise BadSignature(f"the key {signer[:12]} of {key.name!r} was revoked on {key.revoked:%Y-%m-%d %H:%M} UTC")
    return SignedDossier(name, number, key, signed_at, is_unchanged=files == {_WHOLE: digest})
