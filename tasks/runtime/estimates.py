"""What a child program found out about work that has not begun, remembered by what it hangs on.

<home>/estimates/<digest>.json    the program's figures
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.runtime import settings
from tasks.runtime.digests import digest_of
from tasks.runtime.launch import require_finished, run_job
from training.protocol import Job, write_atomically

STALL_TIMEOUT_S = 600.0


def estimate(job: Job, argv: Sequence[str], env: Mapping[str, str], hangs_on: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the job's program: those remembered for the same JSON values, else it runs.

    Raises UserError for the user's mistakes and launch.JobFailed for everything else.
    """
    file = settings.home() / "estimates" / f"{digest_of(dict(hangs_on))[:40]}.json"
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError):  # not remembered, or not to be read any more
        pass
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        job.write(Path(folder))
        ended = run_job(Path(folder), argv, env=env, on_events=lambda _: None, stall_timeout_s=STALL_TIMEOUT_S)
    found = dict(require_finished(ended).figures)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomically(file, json.dumps(found, indent=1).encode())
    return found
