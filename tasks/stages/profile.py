"""Stages: the profile of a registered version, which is its observation of its own validation rows, and the same
observation of new rows.

The profile is made at the first drift report on a version, and not by the run that registers it: most versions are
never asked about, and a profile takes as long as a prediction. Its rows stay in the store with the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tasks.cache.results import Artifact
from tasks.cache.stage import Work
from tasks.jobs.job import Files, StageJob, files_of, stage
from tasks.prediction.drift_samples import Sample
from tasks.registry.monitored_versions import MonitoredVersion
from tasks.registry.pinned_versions import files_of_version
from training import task_types
from training.programs.observe import SAMPLE, ObserveResult, ObserveSettings
from training.recipe.fields import Drift

PROGRAM = "training.programs.observe"
BATCH_ROWS = 32
"""Rows in one forward pass. If memory runs out, batches are halved."""


@stage(ObserveResult)
def profile(version: MonitoredVersion, section: Drift, rows: Artifact) -> StageJob:
    """Observes rows of the split that was judged.

    The model and its calibration, the rows of the judged split, and the number of rows.
    """
    split = version.split
    return _observe(version, section, {"rows": files_of(rows, ["labels.json", f"{split}.arrow"])}, split=split)


@stage(ObserveResult)
def observe(version: MonitoredVersion, section: Drift, sample: Sample) -> StageJob:
    """Observes a sample of new rows.

    The model and its calibration, and the sample of the rows.
    """

    def write(work: Work) -> Path:
        folder = work.job / "sample"
        folder.mkdir(exist_ok=True)
        sample.write(folder / SAMPLE)
        return folder

    return _observe(version, section, {"sample": Files(write, {"rows": sample.digest})}, read=sample.total)


def _observe(
    version: MonitoredVersion,
    section: Drift,
    rows: Mapping[str, Files],
    split: str | None = None,
    read: int | None = None,
) -> StageJob:
    task_type = task_types.load(version.task, version.options)
    return StageJob(
        PROGRAM,
        ObserveSettings(
            task=version.task,
            options=version.options,
            columns=version.columns,
            max_length=version.pinned.max_length,
            max_rows=section.max_rows,
            split=split,
            rows=read,
            batch_size=BATCH_ROWS,
            calibration=version.calibration,
        ),
        reads={**files_of_version(version.pinned, "NAME"), **rows},
        code=task_types.code_modules(version.task),
        users_code=task_types.user_code(version.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
        batches=version.divide_batches(PROGRAM, BATCH_ROWS),
    )
