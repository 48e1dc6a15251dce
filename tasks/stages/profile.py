"""Stages: the profile of a registered version, which is its observation of its own validation rows, and the same
observation of new rows.

The profile is made at the first drift report on a version, and not by the run that registers it: most versions are
never asked about, and a profile takes as long as a prediction. Its rows stay in the store with the version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.refs import Ref
from tasks.cache.stage import Inputs, Work, stage
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import run_child
from tasks.jobs.commands import python_argv
from tasks.prediction.sample import Sample
from tasks.registry.champions import find_folders
from tasks.registry.monitored import Monitored, label_names
from training import task_types
from training.recipe.drift import Drift
from training.recipe.monitoring_settings import ObserveSettings

PROGRAM = "training.programs.observe"
BATCH_ROWS = 32
"""Rows in one forward pass. If memory runs out, batches are halved."""


def profile_inputs(version: Monitored, section: Drift, rows: Ref) -> Inputs:
    """The model, the rows of the judged split, and the number of rows."""
    upstream = {"load_data": rows.parts[f"{version.split}.arrow"], "labels": rows.parts["labels.json"]}
    return _inputs(version, section, {"upstream": {"fit": version.champion.model, **upstream}})


@stage(profile_inputs)
def profile(work: Work, version: Monitored, section: Drift, rows: Ref) -> Mapping[str, Any]:
    """Observes rows of the split that was judged."""
    labels = label_names(rows)
    return _observe(work, version, section, {"rows": rows.path / f"{version.split}.arrow"}, labels=labels)


def observe_inputs(version: Monitored, section: Drift, sample: Sample) -> Inputs:
    """The model, and the sample of the rows."""
    rows = {"columns": list(version.columns), "sample": sample.digest, "total": sample.total}
    return _inputs(version, section, {"upstream": {"fit": version.champion.model}, "rows": rows})


@stage(observe_inputs)
def observe(work: Work, version: Monitored, section: Drift, sample: Sample) -> Mapping[str, Any]:
    """Observes a sample of new rows."""
    with tempfile.TemporaryDirectory(prefix="finetune-") as aside:
        file = Path(aside) / "sample.jsonl"
        sample.write(file)
        figures = _observe(work, version, section, {"sample": file})
    return {**figures, "rows": sample.total}


def _inputs(version: Monitored, section: Drift, values: Mapping[str, Any]) -> Inputs:
    task_type = task_types.load(version.task, version.options)
    return Inputs(
        {
            "task": version.task,
            "options": version.options,
            "tokens": {"max_length": version.champion.max_length},
            "max_rows": section.max_rows,
            **values,
        },
        code=[PROGRAM, *task_types.code_modules(version.task)],
        named=task_types.user_code(version.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
    )


def _observe(
    work: Work, version: Monitored, section: Drift, rows: Mapping[str, Path], labels: Sequence[str] = ()
) -> Mapping[str, Any]:
    folders = find_folders(work, version.champion, "NAME")
    batches = BatchDivision(
        BATCH_ROWS,
        folders["model"],
        program=PROGRAM,
        max_length=version.champion.max_length,
        mixed_precision="no",
        options=version.options,
    )
    return run_child(
        work,
        PROGRAM,
        python_argv(PROGRAM),
        settings=ObserveSettings(
            task=version.task,
            options=version.options,
            columns=version.columns,
            max_length=version.champion.max_length,
            max_rows=section.max_rows,
            labels=list(labels),
            batch_size=BATCH_ROWS,
        ),
        inputs={**folders, **rows},
        batches=batches,
    )
