"""Programs of jobs, run in the process of a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic_core import to_jsonable_python

from training.jobs.protocol import EVENTS, OUTPUT, Events, Job, read_events

PREDICT = {"splits": ["validation"], "batch_size": 16, "micro_batch_divisor": 1, "mixed_precision": "no"}
SCORE = {"slices": [], "each": [], "named": {}, "fewest_rows": 10, "most_groups": 50}
COMPARE: dict[str, Any] = {
    **{"split": "test", "champion": "small/1", "metrics": ["accuracy"], "figure": "accuracy"},
    **{"less_is_better": [], "margin": 0.0, "confidence": 0.95, "warnings": []},
}
"""Settings of the programs besides the task."""


def run(program: ModuleType, job_dir: Path, inputs: Mapping[str, Path], **settings: Any) -> dict[str, Any]:
    """The result of the program as JSON values. Its files are in job_dir/output."""
    (job_dir / OUTPUT).mkdir(parents=True, exist_ok=True)
    paths = {name: str(path) for name, path in inputs.items()}
    job = Job(program=program.__name__, key=job_dir.name, settings=settings, inputs=paths)
    result: dict[str, Any] = to_jsonable_python(program.main(job_dir, job, Events(job_dir / EVENTS)))
    return result


def folders(home: Path, *names: str) -> dict[str, Path]:
    """Folders of `home` as inputs of these names."""
    return {name: home / name for name in names}


def warnings_of(job_dir: Path) -> list[str]:
    return [event["message"] for event in read_events(job_dir / EVENTS, 0, ["warning"])[0]]
