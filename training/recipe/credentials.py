"""Credentials in URLs, detected by parameter names and by the form of values, and removed before display.

A recipe is stored by MLflow, Prefect and the run's record, so a URL in it must not hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import unquote

_PASSWORD = re.compile(r"(?<=://)[^@/]*:(?!\d+/)[^@]*@")  # a secret may contain slashes; a port is no secret
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
_MIN_MIXED_LENGTH, _MIN_LOWER_LENGTH = 20, 32
"""Minimum length of a token, in characters: of random text with both cases and digits, or with one case and digits."""


# Variables from which the clients of file systems read credentials.
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)",
    "hf": "HF_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_VARIABLES |= {"s3a": _VARIABLES["s3"], "gcs": _VARIABLES["gs"], "abfs": _VARIABLES["az"]}


def variables_for(url: str) -> str:
    """Describes the environment variables from which the client for this URL reads credentials."""
    protocol = url.partition("://")[0].lower()
    if protocol in ("http", "https"):
        name = f"FSSPEC_{protocol.upper()}"
        return f"""{name}='{{"headers": {{"Authorization": "Bearer …"}}}}', or '{{"params": {{"key": "…"}}}}'"""
    return _VARIABLES.get(protocol, f"FSSPEC_{protocol.upper()}, as fsspec reads it")


def find_secret(url: str) -> str | None:
    """Returns a description of the part of a URL that is a credential, without its value; None if no part is."""
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


def describe_secret(url: str, stored: str) -> str | None:
    """Returns what is wrong with a URL that holds a credential, without its value, and what to do; None if it holds
    none. `stored` names what has the URL, in the plural."""
    if (secret := find_secret(url)) is None:
        return None
    message = f"holds {secret}, and {stored} are stored and shown: set credentials in the environment instead: "
    return f"{message}{variables_for(url)}."


def remove_secrets(url: str) -> str:
    """Returns the URL without credentials."""
    if not find_secret(url):
        return url
    plain = re.split(r"[?#;]", re.sub(r"://[^@/]*@", "://", _PASSWORD.sub("", url)), maxsplit=1)[0]
    return "/".join("…" if _is_token(part) else part for part in plain.split("/"))


def _split_url(url: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns the host, the path, and the parameters behind `?`, `;` and `#` as names and values; a bare value has the
    empty name."""
    address = url.partition("://")[2]
    host, _, rest = address.partition("/")
    if "?" in host or "#" in host:  # no path
        host, rest = re.split(r"(?=[?#])", address, maxsplit=1)
    path, *parameters = re.split(r"[?#;&]", rest)
    pairs = [parameter.partition("=") for parameter in parameters if parameter]
    return host, unquote(path), [(unquote(a) if equals else "", unquote(b if equals else a)) for a, equals, b in pairs]


def _is_token(text: str) -> bool:
    """Whether a text looks like a token: of a known issuer, or long and random but not a digest."""
    if _ISSUED.search(text):
        return True
    return any(map(_is_random, _split_parts(text)))


def _split_parts(text: str) -> Iterator[str]:
    """Yields the parts between punctuation, then these parts joined, because base64 tokens may contain - and _."""
    parts = re.split(r"[^A-Za-z0-9]+", text)
    yield from parts
    for token in re.split(r"[^A-Za-z0-9_+=-]+", text):
        yield "".join(part for part in re.split(r"[_+=-]", token) if not _HEX.fullmatch(part))


def _is_random(text: str) -> bool:
    # Words and numbers rarely change between upper case, lower case and digits; random characters often do.
    changes = sum(_class(a) != _class(b) for a, b in pairwise(text)) / max(1, len(text) - 1)
    classes = set(map(_class, text))
    if _HEX.fullmatch(text):
        return False
    if len(classes) == 3:
        return len(text) >= _MIN_MIXED_LENGTH and changes >= 0.4
    return len(classes) == 2 and "0" in classes and len(text) >= _MIN_LOWER_LENGTH and changes >= 0.25


def _class(character: str) -> str:
    return "0" if character.isdigit() else "A" if character.isupper() else "a"
