"""Signed statements: those of OpenSSF's model_signing are read as our own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, SECP521R1, generate_private_key

from tasks.signatures.bundles import BadSignature, ForeignKey, build_manifest, read_manifest, sign, verify
from tasks.signatures.keys import key_id, parse_public_key

BUNDLE = Path(__file__).with_name("signed_by_model_signing.json")
"""What `model_signing sign key` of model-signing 1.1.1 made of a folder with these files."""
FILES = {"model-b.txt": "three", "MLmodel": "two", "model/ä.txt": "four", "model/config.json": "one"}
PUBLIC = """\
-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAExm8uo5STJZlIOeoLWbSYGMvr59xG
rlOzRS5WbDp2R8uSLSZn0RGmQfkpMZ/Was+wjLAz0aJGs8kxZVgGFWiYLA==
-----END PUBLIC KEY-----
"""
DIGESTS = {path: hashlib.sha256(f"{text}\n".encode()).hexdigest() for path, text in FILES.items()}


def test_a_bundle_that_model_signing_has_made_is_verified_and_names_each_file() -> None:
    key = parse_public_key(PUBLIC)
    signer, statement = verify(BUNDLE.read_bytes(), {key_id(key): key})
    assert signer == key_id(key) and read_manifest(statement) == DIGESTS
    assert build_manifest("gm", DIGESTS, []).subject == statement.subject


def test_every_single_changed_character_of_a_bundle_is_noticed_or_harmless() -> None:
    key, content = parse_public_key(PUBLIC), BUNDLE.read_bytes()
    for place in range(0, len(content), 7):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        try:
            _, statement = verify(changed, {key_id(key): key})
        except BadSignature:
            continue
        assert read_manifest(statement) == DIGESTS


@pytest.mark.parametrize("curve", [SECP256R1, SECP384R1, SECP521R1])
def test_a_key_on_each_curve_signs_and_another_key_does_not_verify_it(curve: type[SECP256R1]) -> None:
    key, other = generate_private_key(curve()), generate_private_key(curve()).public_key()
    bundle = sign(build_manifest("m", DIGESTS, []), key)
    own = key.public_key()
    assert read_manifest(verify(bundle, {key_id(own): own})[1]) == DIGESTS
    with pytest.raises(ForeignKey):
        verify(bundle, {key_id(other): other})
    with pytest.raises(BadSignature, match="not by the key"):
        verify(bundle, {key_id(own): other})
