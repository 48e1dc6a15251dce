"""Standard output and error that may lose their reader, as in `finetune show NAME | head`."""

from __future__ import annotations

import io
import os
import sys


class _Unread(io.FileIO):
    """A descriptor whose writes go nowhere once nobody reads them, so that the command itself goes on to its end."""

    def write(self, data: object, /) -> int:
        """As FileIO. After a broken pipe the descriptor is /dev/null, for child programs as well."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Replaces sys.stdout and sys.stderr."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller started the command with it closed
            continue
        stream.flush()
        lines = stream.line_buffering
        buffer = io.BufferedWriter(_Unread(stream.fileno(), "w", closefd=False))
        again = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=lines)
        setattr(sys, name, again)
