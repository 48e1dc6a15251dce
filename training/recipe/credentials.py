"""Credentials in URLs: found by the names of parameters and by the form of values, and removed before display.

A recipe is stored by MLflow, Prefect and the run's record, so a URL in it must not hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import unquote

_PASSWORD = re.compile(r"(?<=://)[^@/]*:(?!\d+/)[^@]*@")  # the secret may hold slashes; a port is none
_SECRET_NAME = re.compile(
    r"signature|token|secret|passw|credential|access.?key|api.?key|bearer|session|jwt|private.?key"
    r"|^(sig|pwd|pass|auth.*|key|rlkey|code|access|sas|sid|otp|ticket|hmac|cookie|login)$",
    re.IGNORECASE,
)
# Parameters whose values look random and identify a file: a version of an object, a digest.
_PUBLIC_NAME = re.compile(r"version|generation|revision|commit|etag|md5|sha\d|checksum|digest|hash|id$", re.IGNORECASE)
# Tokens that begin with their issuer's name, and JSON Web Tokens.
_ISSUED = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{10,}|gh[oprsu]_[A-Za-z0-9]{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}|npm_[A-Za-z0-9]{20,}"
    r"|sk-[\w-]{16,}|[rs]k_(?:live|test)_\w{10,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|ya29\.[\w-]{10,}|pypi-[\w-]{16,}|dop_v1_\w{16,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*)"
)
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")  # digests, commits, UUIDs
_FEWEST_MIXED, _FEWEST_LOWER = 20, 32
"""Shortest tokens, in characters: random text of both cases and digits, and of one case and digits."""


# Variables from which the clients of file systems read credentials.
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)",
    "hf": "HF_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_VARIABLES |= {"s3a": _VARIABLES["s3"], "gcs": _VARIABLES["gs"], "abfs": _VARIABLES["az"]}


def variables_for(url: str) -> str:
    """The environment variables from which the client for this URL reads credentials, in words."""
    protocol = url.partition("://")[0].lower()
    if protocol in ("http", "https"):
        name = f"FSSPEC_{protocol.upper()}"
        return f"""{name}='{{"headers": {{"Authorization": "Bearer …"}}}}', or '{{"params": {{"key": "…"}}}}'"""
    return _VARIABLES.get(protocol, f"FSSPEC_{protocol.upper()}, as fsspec reads it")


def secret_in(url: str) -> str | None:
    """The part of a URL that is a credential, without its value; None if no part is."""
    if "://" not in url:
        return None
    host, path, parameters = _split_url(url)
    user = host.rpartition("@")[0]
    web = url.lower().startswith(("http://", "https://"))
    if _PASSWORD.search(url) or (web and "@" in host) or _is_token(user):
        return "a user's name or password"
    for name, value in parameters:
        if value and (_SECRET_NAME.search(name) or _ISSUED.search(value)):
            return f"the parameter {name}" if name else "a token behind #"
        if not _PUBLIC_NAME.search(name) and _is_token(value):
            return f"the parameter {name}" if name else "a token behind #"
    return "a token in its path" if any(map(_is_token, path.split("/"))) else None


def without_secrets(url: str) -> str:
    """The URL without credentials."""
    if not secret_in(url):
        return url
    plain = re.split(r"[?#;]", re.sub(r"://[^@/]*@", "://", _PASSWORD.sub("", url)), maxsplit=1)[0]
    return "/".join("…" if _is_token(part) else part for part in plain.split("/"))


def _split_url(url: str) -> tuple[str, str, list[tuple[str, str]]]:
    """The host, the path, and the parameters behind `?`, `;` and `#` with their values; a value alone has no name."""
    below = url.partition("://")[2]
    host, _, rest = below.partition("/")
    if "?" in host or "#" in host:  # no path
        host, rest = re.split(r"(?=[?#])", below, maxsplit=1)
    path, *behind = re.split(r"[?#;&]", rest)
    pairs = [one.partition("=") for one in behind if one]
    return host, unquote(path), [(unquote(a) if eq else "", unquote(b if eq else a)) for a, eq, b in pairs]


def _is_token(text: str) -> bool:
    """Whether a text looks like a token: of a known issuer, or long and random, and no digest."""
    if _ISSUED.search(text):
        return True
    return any(map(_is_random, _split_parts(text)))


def _split_parts(text: str) -> Iterator[str]:
    """The parts between punctuation, and the parts joined, because base64 tokens may contain - and _."""
    parts = re.split(r"[^A-Za-z0-9]+", text)
    yield from parts
    for whole in re.split(r"[^A-Za-z0-9_+=-]+", text):
        yield "".join(part for part in re.split(r"[_+=-]", whole) if not _HEX.fullmatch(part))


def _is_random(text: str) -> bool:
    # Words and numbers change between upper case, lower case and digits now and then; random characters all the time.
    changes = sum(_class(a) != _class(b) for a, b in pairwise(text)) / max(1, len(text) - 1)
    classes = set(map(_class, text))
    if _HEX.fullmatch(text):
        return False
    if len(classes) == 3:
        return len(text) >= _FEWEST_MIXED and changes >= 0.4
    return len(classes) == 2 and "0" in classes and len(text) >= _FEWEST_LOWER and changes >= 0.25


def _class(character: str) -> str:
    return "0" if character.isdigit() else "A" if character.isupper() else "a"
