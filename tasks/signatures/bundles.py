"""Signed statements: in-toto statements in DSSE envelopes in Sigstore's bundles, as OpenSSF's model_signing has them.

`model_signing` verifies the bundle of a manifest. It is not imported here: that takes ten times as long as to import
all else that verification needs.

The formats: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md,
https://github.com/secure-systems-lab/dsse/blob/v1.0.2/protocol.md, https://docs.sigstore.dev/about/bundle/ and
https://github.com/sigstore/model-transparency.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from tasks.signatures.keys import hash_for, key_id

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

_PAYLOAD_TYPE = "application/vnd.in-toto+json"
MANIFEST_TYPE = "https://model_signing/signature/v1.0"
"""The predicate type of a manifest of a model's files."""


class BadSignature(Exception):
    """A bundle whose signature or content cannot be trusted, with the reason."""


class ForeignKey(BadSignature):
    """A bundle that was signed by a key that is not given."""

    def __init__(self, key: str) -> None:
        super().__init__(f"it is signed by the key {key[:12]}")
        self.key = key


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, strict=True, defer_build=True)


class _Signature(_Part):
    sig: str
    keyid: str = ""


class _Envelope(_Part):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"] = "application/vnd.in-toto+json"
    signatures: list[_Signature] = Field(min_length=1, max_length=1)


class _PublicKey(_Part):
    hint: str


class _Material(_Part):
    public_key: _PublicKey
    tlog_entries: list[Any] = []


class _Bundle(_Part):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"] = (
        "application/vnd.dev.sigstore.bundle.v0.3+json"
    )
    verification_material: _Material
    dsse_envelope: _Envelope


class Subject(BaseModel):
    """What a statement is about."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: str
    digest: dict[str, str]


class Statement(BaseModel):
    """An in-toto statement."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(default="https://in-toto.io/Statement/v1", alias="_type")
    subject: list[Subject] = Field(min_length=1)
    predicate_type: str = Field(alias="predicateType")
    predicate: dict[str, Any]


def sign(statement: Statement, key: EllipticCurvePrivateKey) -> bytes:
    """The bundle of a signed statement, JSON."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    payload = statement.model_dump_json(by_alias=True).encode()
    signature = key.sign(_pre_authentication(payload), ECDSA(hash_for(key.public_key())))
    bundle = _Bundle(
        verification_material=_Material(public_key=_PublicKey(hint=key_id(key.public_key()))),
        dsse_envelope=_Envelope(payload=_encode(payload), signatures=[_Signature(sig=_encode(signature))]),
    )
    return bundle.model_dump_json(by_alias=True).encode()


def verify(bundle: bytes, keys: Mapping[str, EllipticCurvePublicKey]) -> tuple[str, Statement]:
    """The id of the key that signed a bundle, and its statement, verified.

    `keys` are the trusted ones by id. Raises ForeignKey for a signature by another key, and BadSignature.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    try:
        parsed = _Bundle.model_validate_json(bundle)
        payload = base64.b64decode(parsed.dsse_envelope.payload, validate=True)
        signature = base64.b64decode(parsed.dsse_envelope.signatures[0].sig, validate=True)
    except (ValidationError, ValueError) as error:
        raise BadSignature("it is cut off, or no bundle of a signature") from error
    hint = parsed.verification_material.public_key.hint
    if (key := keys.get(hint)) is None:
        raise ForeignKey(hint)
    try:
        key.verify(signature, _pre_authentication(payload), ECDSA(hash_for(key)))
    except InvalidSignature as error:
        raise BadSignature(f"it is not by the key {hint[:12]} that it names, or was changed since") from error
    try:
        return hint, Statement.model_validate_json(payload)
    except ValidationError as error:
        raise BadSignature("it signs something else than an in-toto statement") from error


def build_manifest(name: str, files: Mapping[str, str], ignored: Collection[str]) -> Statement:
    """The statement of model_signing about a folder of this name.

    Args:
        files: sha256 by path below the folder.
        ignored: paths that the manifest does not cover.
    """
    resources = [{"name": path, "algorithm": "sha256", "digest": files[path]} for path in sorted(files, key=_parts)]
    return Statement(
        subject=[Subject(name=name, digest={"sha256": _digest_of_all(resources)})],
        predicateType=MANIFEST_TYPE,
        predicate={
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": sorted(ignored),
            },
            "resources": resources,
        },
    )


def read_manifest(statement: Statement) -> dict[str, str]:
    """The files of a manifest: sha256 by path. Raises BadSignature if it is none, or contradicts itself."""
    try:
        resources = statement.predicate["resources"]
        files = {entry["name"]: entry["digest"] for entry in resources}
        kinds = {statement.predicate_type, statement.predicate["serialization"]["method"]}
        kinds |= {entry["algorithm"] for entry in resources}
        same = statement.subject[0].digest == {"sha256": _digest_of_all(resources)}
    except (LookupError, TypeError, ValueError) as error:
        raise BadSignature("it signs something else than a manifest of files") from error
    if kinds != {MANIFEST_TYPE, "files", "sha256"} or not same or len(files) != len(resources):
        raise BadSignature("it signs something else than a manifest of files with their sha256")
    return files


def _digest_of_all(resources: Collection[Mapping[str, str]]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(entry["digest"]) for entry in resources)).hexdigest()


def _parts(path: str) -> list[str]:
    """The order of model_signing, which sorts paths by their parts."""
    return path.split("/")


def _pre_authentication(payload: bytes) -> bytes:
    """The signed bytes of an envelope: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()
