"""Keys that sign versions and manifests: the home's own, made at the first signature, or one that the user names.

    <home>/signature.pem    the home's private key, on the curve P-256, mode 0600
    <home>/trust.yaml       whose public keys are trusted: tasks/signatures/trust.py

| variable | meaning |
|---|---|
| FINETUNE_SIGNATURE_KEY | another file with a private key in PEM, on the curve P-256, P-384 or P-521 |
| FINETUNE_SIGNATURE_PASSWORD | its password, if it has one |
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.home import create_secret, home
from training.problems import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

KEY = "FINETUNE_SIGNATURE_KEY"
PASSWORD = "FINETUNE_SIGNATURE_PASSWORD"
FILE = "signature.pem"
_HASHES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The hash that goes with each curve, as Sigstore's bundles prescribe."""
_CURVES = "an elliptic curve key on P-256, P-384 or P-521"


def load_signing_key() -> EllipticCurvePrivateKey:
    """The private key of FINETUNE_SIGNATURE_KEY, or else the home's own, created if missing. Raises UserError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

    if not (named := os.environ.get(KEY)):
        file = home() / FILE
        if not file.exists():
            new = generate_private_key(SECP256R1())
            create_secret(file, new.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    else:
        file = Path(named).expanduser()
    password = os.environ.get(PASSWORD) if named else None
    try:
        key = load_pem_private_key(file.read_bytes(), password.encode() if password else None)
    except OSError as error:
        raise UserError.of("signature", KEY, f"{file} cannot be read ({error.strerror}): name another file.") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        message = f"{file} is no private key in PEM that opens here: name {_CURVES}, and its password in {PASSWORD}."
        raise UserError.of("signature", KEY, message) from error
    if not isinstance(key, EllipticCurvePrivateKey) or key.curve.name not in _HASHES:
        raise UserError.of("signature", KEY, f"{file} is a key of another kind: name {_CURVES}.")
    return key


def parse_public_key(text: str) -> EllipticCurvePublicKey:
    """The public key of a text in PEM. Raises ValueError for any other text."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(text.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"is no public key in PEM: write {_CURVES}") from error
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise ValueError(f"is a key of another kind: write {_CURVES}")
    return key


def write_public_key(key: EllipticCurvePublicKey) -> str:
    """The public key in PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def key_id(key: EllipticCurvePublicKey) -> str:
    """The sha256 of a public key in PEM, hex: by it, a bundle names the key that signed it."""
    return hashlib.sha256(write_public_key(key).encode()).hexdigest()


def hash_for(key: EllipticCurvePublicKey) -> HashAlgorithm:
    """The hash of signatures by this key."""
    from cryptography.hazmat.primitives import hashes

    made: HashAlgorithm = getattr(hashes, _HASHES[key.curve.name])()
    return made
