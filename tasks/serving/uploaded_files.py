"""Files in a request, as browsers' forms and `curl -F file=@cat.jpg` send them: multipart/form-data (RFC 7578).

Each file is a row of a model that reads images.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tasks.serving.responses import RequestRefused, refuse
from training.problems import visible

FORM = "multipart/form-data"
"""The content type of such a request."""
_HEAD_BYTES = 4096
"""The headers of a part, or the content type, have no more."""
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(r'[;\s]name="([^"]*)"', re.IGNORECASE)
_FILE = re.compile(r'[;\s]filename="((?:[^"\\]|\\.)*)"|[;\s]filename=([^\s;"]+)', re.IGNORECASE)


class UploadedFile(NamedTuple):
    """A file of a form."""

    name: str
    """As the client calls it."""
    content: bytes

    def as_row(self, column: str) -> dict[str, Any]:
        """The row with the file in this column, as rows of JSON have it."""
        return {column: base64.b64encode(self.content).decode()}


def read_files(content_type: str, body: bytes, most: int) -> list[UploadedFile]:
    """The files of a form, in order. Raises RequestRefused for a body that is no form, has no file, or more than
    `most`."""
    boundary = _BOUNDARY.search(content_type[:_HEAD_BYTES])
    if not boundary:
        raise refuse("Content-Type", f"{FORM} needs a boundary.")
    files = [*_parse((boundary[1] or boundary[2]).encode("latin-1", "replace"), body, most)]
    if not files:
        raise refuse("body", "has no file: send each image as a file of the form, `curl -F file=@cat.jpg`.")
    return files


def _parse(boundary: bytes, body: bytes, most: int) -> Iterator[UploadedFile]:
    # A part begins after a line with the boundary, and ends before the next one.
    _preamble, *parts = re.split(rb"(?:^|\r\n)--" + re.escape(boundary) + rb"(?=--|[ \t]*\r\n)", body)
    if not parts or not parts[-1].startswith(b"--"):
        raise refuse("body", f"is no {FORM}, or its end is missing.")
    if len(parts) - 1 > most:
        raise refuse("body", f"has {len(parts) - 1:,} files, and a request takes at most {most:,}.")
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        if not separator or len(head) > _HEAD_BYTES:
            raise refuse("body", f"is no {FORM}: a part has no end of its headers within {_HEAD_BYTES:,} bytes.")
        headers = head.decode("utf-8", "replace")
        found, field = _FILE.search(headers), _NAME.search(headers)
        if not found:
            raise refuse(visible(field[1] if field else "") or "body", "is no file, and the form takes files alone.")
        yield UploadedFile(found[1] if found[2] is None else found[2], content)


def require_usable(files: Sequence[UploadedFile], errors: Sequence[str | None]) -> None:
    """Raises RequestRefused, with a line for each file that has an error. Files may have the same name."""
    wrong = [
        (f"file {number} ({visible(file.name)})", error)
        for number, (file, error) in enumerate(zip(files, errors, strict=True), 1)
        if error
    ]
    if wrong:
        raise RequestRefused(400, "\n".join(f"{name}: {error}." for name, error in wrong), wrong[0][0])
