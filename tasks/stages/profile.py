"""Stages: the profile of a registered version, which is its observation of its own validation rows, and the same
observation of new rows.

The profile is made at the first drift report on a version, and not by the run that registers it: most versions are
never asked about, and a profile takes as long as a prediction. Its rows stay in the store with the version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.input_files import require_unchanged
from tasks.cache.refs import PinnedFile, Ref
from tasks.cache.stage import Inputs, Work, stage
from tasks.jobs.child import run_child
from tasks.jobs.commands import python_argv
from tasks.registry.champions import find_folders
from tasks.registry.monitored import Monitored, label_names
from training import task_types
from training.recipe.drift import Drift
from training.recipe.monitoring_settings import ObserveSettings

PROGRAM = "training.programs.observe"


def profile_inputs(version: Monitored, section: Drift, rows: Ref) -> Inputs:
    """The model, the rows of the judged split, and the number of rows."""
    upstream = {"load_data": rows.parts[f"{version.split}.arrow"], "labels": rows.parts["labels.json"]}
    return _inputs(version, section, {"upstream": {"fit": version.champion.model, **upstream}})


@stage(profile_inputs)
def profile(work: Work, version: Monitored, section: Drift, rows: Ref) -> Mapping[str, Any]:
    """Observes rows of the split that was judged."""
    labels = label_names(rows)
    return _observe(work, version, section, {"rows": rows.path / f"{version.split}.arrow"}, labels=labels)


def observe_inputs(version: Monitored, section: Drift, files: Sequence[PinnedFile]) -> Inputs:
    """The model, the content of the files, and the number of rows."""
    digests, names = [pin.sha256 for pin in files], {"files": ", ".join(pin.path for pin in files)}
    values = {"upstream": {"fit": version.champion.model}, "files": digests, "columns": version.columns}
    return _inputs(version, section, values, ["training.data.prediction_files"], names)


@stage(observe_inputs)
def observe(work: Work, version: Monitored, section: Drift, files: Sequence[PinnedFile]) -> Mapping[str, Any]:
    """Observes new rows."""
    figures = _observe(work, version, section, {}, files=[pin.path for pin in files])
    require_unchanged(files)
    return figures


def _inputs(
    version: Monitored,
    section: Drift,
    values: Mapping[str, Any],
    readers: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Inputs:
    task_type = task_types.load(version.task, version.options)
    return Inputs(
        {
            "task": version.task,
            "options": version.options,
            "tokens": {"max_length": version.champion.max_length},
            "max_rows": section.max_rows,
            **values,
        },
        code=[PROGRAM, *readers, *task_types.code_modules(version.task)],
        named=task_types.user_code(version.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
        names=names or {},
    )


def _observe(
    work: Work,
    version: Monitored,
    section: Drift,
    rows: Mapping[str, Path],
    labels: Sequence[str] = (),
    files: Sequence[str] = (),
) -> Mapping[str, Any]:
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
            files=list(files),
        ),
        inputs={**find_folders(work, version.champion, "NAME"), **rows},
    )
