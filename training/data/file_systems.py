"""File systems behind paths and URLs, and their errors as problems of the user.

fsspec is imported for URLs only, so local files do not pay for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.local_files import shown_path
from training.problems import NETWORK, UserError, nearest, on_one_line, server_error
from training.recipe.credentials import remove_secrets, variables_for

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

WEB_CONNECT_S, WEB_SILENT_S = 20.0, 60.0
PIECE_BYTES = 2**20
"""The bytes of one read."""
REMOTE_BLOCK_BYTES = 8 * 2**20
"""The bytes of one request to a remote file system."""

# Errors of botocore that fsspec does not translate.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")


def is_url(file: str) -> bool:
    """Whether this is a URL for fsspec, such as `s3://bucket/rows.csv`, rather than a path."""
    return "://" in file


def local_path(file: str) -> str:
    """Returns the path of a `file://` URL; anything else as it is."""
    return file.partition("://")[2] if protocol(file) in ("file", "local") else file


def protocol(url: str) -> str:
    """Returns `s3` for `s3://bucket/rows.csv`; an empty text for a path."""
    return url.partition("://")[0].lower() if is_url(url) else ""


def is_web(url: str) -> bool:
    """Whether the URL is on a web server, which lists no folders and may take parameters."""
    return protocol(url) in ("http", "https")


def name_of(file: str) -> str:
    """Returns `train.csv` for `s3://bucket/train.csv` and for `https://host/train.csv?version=2`."""
    return (file.partition("?")[0] if is_web(file) else file).rpartition("/")[2]


def display_name(file: Path | str) -> str:
    """Returns a file's name in messages: a URL without its secrets; a path relative to the working directory if it is
    below it, else in full. It is on one line."""
    if is_url(str(file)):
        return on_one_line(remove_secrets(str(file)))
    return shown_path(file)


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a URL, and the path there.

    Raises UserError if the protocol is unknown or its package is missing.
    """
    if protocol(url) == "data":
        raise UserError.of(
            "data", display_name(url)[:100], "has the rows in itself: write them to a file, and name it."
        )
    if "::" in url:
        raise UserError.of(
            "data", display_name(url), "names a file inside an archive: unpack the archive, and name the file itself."
        )
    from fsspec import available_protocols
    from fsspec.core import url_to_fs

    try:
        with as_user_error(url):
            system_and_path: tuple[AbstractFileSystem, str] = url_to_fs(url, **_timeouts(url))
        return system_and_path
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or "").partition(".")[0]
        install = f"install the package {package} (pip install {package})" if package else str(error)
        raise UserError.of("data", display_name(url), f"{protocol(url)}:// cannot be read here: {install}.") from error
    except (ValueError, TypeError, AttributeError) as error:  # the last two for one that needs more than a URL
        name, protocols = protocol(url), available_protocols()
        if name in protocols:
            raise UserError.of("data", display_name(url), f"is no URL that can be read: {error}.") from error
        choices = f"choose from s3, gs, https, ….{nearest(name, protocols)}"
        raise UserError.of("data", display_name(url), f"{name!r} is no protocol that can be read: {choices}") from error


def _timeouts(url: str) -> dict[str, Any]:
    """Returns the timeouts of a web server. The default of its client is five minutes for a whole file."""
    if not is_web(url):
        return {}
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=WEB_CONNECT_S, sock_read=WEB_SILENT_S)
    return {"client_kwargs": {"timeout": timeout}}


@contextlib.contextmanager
def as_user_error(file: str) -> Iterator[None]:
    """Turns errors of a file or its file system in the block into UserError, with the next step."""
    try:
        yield
    except (UserError, ImportError):
        raise
    except Exception as error:
        problem = _describe_remote_error(file, error) if is_url(file) else _describe_local_error(file, error)
        if problem is None:
            raise
        raise problem from error


def _describe_local_error(file: str, error: Exception) -> UserError | None:
    if isinstance(error, FileNotFoundError):
        return UserError.of(
            "data", display_name(file), "does not exist (any more): name a file that is in data.path or data.splits."
        )
    if isinstance(error, PermissionError):
        return UserError.of(
            "data", display_name(file), "may not be read by this user: change its permissions, or name another file."
        )
    if isinstance(error, OSError):
        return UserError.of("data", display_name(file), f"cannot be read: {error.strerror or error}.")
    return None


def _describe_remote_error(url: str, error: Exception) -> UserError | None:
    """Returns the user's problem behind an error of a remote file system; None if the error is a bug."""
    if not isinstance(error, OSError) and type(error).__module__ == "builtins":
        return None
    root = _root_cause(error)
    status = getattr(root, "status", None)  # HTTP: fsspec raises FileNotFoundError for any failure
    missing = isinstance(error, FileNotFoundError) and (
        isinstance(root, FileNotFoundError) or not isinstance(root, OSError)
    )
    if status in (404, 410) or (status is None and missing):
        return UserError.of("data", display_name(url), "does not exist: check the URL in data.path or data.splits.")
    is_refused = isinstance(error, PermissionError) or status in (401, 403)
    if is_refused or type(error).__name__ in _NO_CREDENTIALS:
        message = f"access is refused ({_describe_cause(error)}): set credentials that may read it in the environment: "
        return UserError.of("data", display_name(url), f"{message}{variables_for(url)}.")
    next_step = "check the network, then run the same command again."
    if server_error(error):
        next_step = "the fault is the server's. Run the same command again later."
    return UserError.of(NETWORK, display_name(url), f"cannot be read ({_describe_cause(error)}): {next_step}")


def _root_cause(error: BaseException) -> BaseException:
    """Returns the first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _describe_cause(error: BaseException) -> str:
    """Returns the first line of the root cause."""
    root = _root_cause(error)
    words = str(root).strip().partition("\n")[0].rstrip(".")
    return remove_secrets(f"{type(root).__name__}: {words}".removesuffix(": "))


def open_url(url: str, *, random_access: bool = False) -> tuple[Any, int | None]:
    """Opens a URL with fsspec, for sequential reading or (slower) for random access. Returns the file, and its size or
    None. Raises the file system's own errors: see `as_user_error`."""
    system, path = filesystem(url)
    if not is_web(url) or random_access:
        file = system.open(path, "rb", block_size=REMOTE_BLOCK_BYTES)
        return file, getattr(file, "size", None)
    # Some web servers do not serve parts of a file, and one response is read faster than many.
    size = system.info(path)["size"]
    return system.open(path, "rb", block_size=0, size=size), size


def read_pieces(url: str) -> Iterator[bytes]:
    """Yields the stored bytes of a URL. Raises UserError if they cannot be read."""
    with as_user_error(url), contextlib.closing(open_url(url)[0]) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
