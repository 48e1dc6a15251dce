"""Files in a request, as browsers' forms and `curl -F file=@cat.jpg` send them: multipart/form-data (RFC 7578).

Each file is a row of a model that reads images.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from typing import Any, NamedTuple

from tasks.serving.responses import RequestRefused, refuse
from training.problems import visible

FORM = "multipart/form-data"
"""The content type of such a request."""


class UploadedFile(NamedTuple):
    """A file of a form."""

    name: str
    """As the client calls it."""
    content: bytes

    def as_row(self, column: str) -> dict[str, Any]:
        """The row with the file in this column, as rows of JSON have it."""
        return {column: base64.b64encode(self.content).decode()}


def read_files(content_type: str, body: bytes) -> list[UploadedFile]:
    """The files of a form, in order. Raises RequestRefused for a body that is no form, or has no file."""
    of_request = Message()
    of_request["Content-Type"] = content_type
    boundary = of_request.get_boundary()
    if not boundary:
        raise refuse("Content-Type", f"{FORM} needs a boundary.")
    files = [*_parse(boundary.encode("latin-1", "replace"), body)]
    if not files:
        raise refuse("body", "has no file: send each image as a file of the form, `curl -F file=@cat.jpg`.")
    return files


def _parse(boundary: bytes, body: bytes) -> Iterator[UploadedFile]:
    # A part begins after a line with the boundary, and ends before the next one.
    _preamble, *parts = re.split(rb"(?:^|\r\n)--" + re.escape(boundary) + rb"(?=--|[ \t]*\r\n)", body)
    if not parts or not parts[-1].startswith(b"--"):
        raise refuse("body", f"is no {FORM}, or its end is missing.")
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        if not separator:
            raise refuse("body", f"is no {FORM}: a part has no end of its headers.")
        headers = HeaderParser().parsestr(head.decode("utf-8", "replace").lstrip())
        name = headers.get_filename()
        field = headers.get_param("name", "", "Content-Disposition")
        if name is None:
            raise refuse(visible(str(field)) or "body", "is no file, and the form takes files alone.")
        yield UploadedFile(name, content)


def require_usable(files: list[UploadedFile], errors: list[str | None]) -> None:
    """Raises RequestRefused, with a line for each file that has an error."""
    problems = {visible(file.name): error for file, error in zip(files, errors, strict=True) if error}
    if problems:
        raise RequestRefused(
            400, "\n".join(f"{name}: {error}." for name, error in problems.items()), next(iter(problems))
        )
