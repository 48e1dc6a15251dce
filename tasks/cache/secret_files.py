"""Files with secrets in the home, readable by their user alone."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path

from tasks.cache import settings
from tasks.cache.locks import FlockManager
from training.jobs.protocol import fsync


def create_secret(file: Path, content: bytes) -> Path:
    """Creates the file with mode 0600 if it is missing, or empty after a power cut. Returns the file."""
    locks, holder = FlockManager(settings.home() / "locks"), f"{os.getpid()}-{threading.get_ident()}"
    locks.acquire_lock(file.name, holder)
    try:
        if not file.exists() or not file.stat().st_size:
            aside = file.with_name(f".{file.name}-new")
            aside.unlink(missing_ok=True)  # left by a killed process
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            aside.rename(file)
            fsync(file.parent)
    finally:
        locks.release_lock(file.name, holder)
    return file


def ray_token() -> Path:
    """The file with the token of Ray clusters that this project starts; created if missing. Ray's own, in the user's
    home, would be readable for others, and would change which clusters the user starts."""
    return create_secret(settings.home() / "ray.token", secrets.token_hex(32).encode())


def seal_key() -> Path:
    """The file with the key that seals this home's checkpoints; created if missing."""
    return create_secret(settings.home() / "seal.key", secrets.token_bytes(32))
