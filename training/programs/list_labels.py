"""The program that lists labels that are probably wrong: `python -m training.programs.list_labels JOB`.

inputs     predictions (train.parquet: those of each training row by a model that has not seen it), data (train.arrow,
           labels.json); other (test.arrow, labels.json) if another source has labels of these rows, too
settings   ListLabelsSettings, below
output     review.csv     the rows to look at, the surest first, then those that the other source labels otherwise,
                          then texts with different labels: the file that data.corrections reads after somebody has
                          filled the column `decision`
           labels.json    the result
result     training.evaluation.scores.SuspectLabels
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from training import task_types
from training.data.corrections import row_names, spell_label, write_review
from training.data.duplicates import Hashes, hash_rows
from training.data.ipc_files import read_batches, read_labels
from training.evaluation.label_errors import Suspects, find_outliers, find_suspects, find_wrong_tags, two_outcomes
from training.evaluation.predictions import Floats, ManyLabels, Numbers, OneLabel, Predictions, Rows
from training.evaluation.scores import ErrorShare, SuspectLabels, SuspectRow
from training.evaluation.tagged_words import Tagged
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.problems import UserError
from training.programs.score import read_inputs, read_predictions
from training.recipe.source_columns import StoredColumn

SPLIT, OTHER = "train", "test"
"""The split of the rows, and the name of the split with the rows of another source."""
MOST_SHOWN = 50
"""The suspects in the result."""
CERTAIN = 0.99
"""The probability from which a label is certain to a model."""
LONGEST_TEXT = 5_000
"""Characters of a text in the review file: a spreadsheet refuses cells of more than 32,767."""


class ListLabelsSettings(TaskSettings):
    """The settings of a job of this program."""

    columns: list[str]
    """The columns that the model reads."""
    decided: list[str]
    """The names of rows that people have decided on."""


def main(job_dir: Path, job: Job, events: Events) -> SuspectLabels:
    """Lists the rows. Raises UserError for a task type without labels."""
    settings = ListLabelsSettings.model_validate(job.settings)
    task_type, data = task_types.load(settings.task, settings.options), Path(job.inputs["data"])
    names = read_labels(data)
    predicted = read_predictions(task_type, Path(job.inputs["predictions"]) / f"{SPLIT}.parquet", names)
    if not isinstance(predicted, OneLabel | ManyLabels | Tagged | Numbers):
        message = f"{settings.task!r} has no labels that can be wrong: leave its rows to the checks of data.checks."
        raise UserError.of("recipe", "task", message)
    hashes, labels = _read_rows(data / f"{SPLIT}.arrow", settings.columns, names)
    decided = np.isin(hashes, np.array([int(name[1:], 16) for name in settings.decided], np.uint64))
    rows = np.flatnonzero(~decided)  # (N,) the stored row of each row that is looked at
    predicted, hashes, labels = predicted.take(rows), hashes[rows], [labels[row] for row in rows.tolist()]
    is_first, others = _first_of_equal(hashes, labels), _read_other(job, settings.columns)
    suspects, conflicts = _list_suspects(predicted, is_first), _find_conflicts(hashes, labels)
    known = {*hashes[suspects.rows].tolist()}
    differing = [
        row
        for row, value in enumerate(hashes.tolist())
        if is_first[row] and value not in known and others.get(value, labels[row]) != labels[row]
    ]
    known |= {*hashes[differing].tolist()}
    conflicting = [row for row in conflicts if int(hashes[row]) not in known]
    shown = np.concatenate([suspects.rows, np.array([*differing, *conflicting], np.int64)])
    suggestions = [*suspects.suggestions, *(others[int(hashes[row])] for row in differing)]
    suggestions += [_spell_prediction(predicted, row) for row in conflicting]
    chances = [*suspects.chances, *[None] * (len(differing) + len(conflicting))]
    texts = [_join_texts(one, settings.columns) for one in read_inputs(data / f"{SPLIT}.arrow", rows[shown])]
    described = [
        SuspectRow(row=name, text=text, label=labels[row], suggestion=suggestion, chance=chance)
        for row, name, text, suggestion, chance in zip(
            shown.tolist(), row_names(hashes[shown]), texts, suggestions, chances, strict=True
        )
    ]
    certain = _certain_rows(predicted)
    result = SuspectLabels(
        rows=len(rows),
        decided=int(decided.sum()),
        suspects=len(suspects.rows),
        share=suspects.share,
        noise=suspects.noise,
        conflicts=len(conflicts),
        differing=_count_differing(hashes, labels, others) if "other" in job.inputs else None,
        repeats=int((~is_first).sum()),
        known=None if certain is None else int((certain & is_first).sum()),
        first=described[: min(MOST_SHOWN, len(suspects.rows))],
    )
    output = job_dir / OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    write_review(([one.row, one.text, one.label, one.suggestion, ""] for one in described), output / "review.csv")
    (output / "labels.json").write_text(result.model_dump_json(indent=1), encoding="utf-8")
    return result


class _SuspectRows(NamedTuple):
    """The rows whose label is probably wrong, each once, the surest first."""

    rows: Rows  # (R,)
    suggestions: list[str]
    """As data.corrections spells labels."""
    chances: list[float | None]
    """That the label is wrong; None for numbers."""
    share: ErrorShare | None
    noise: float | None


def _list_suspects(
    predicted: OneLabel | ManyLabels | Tagged | Numbers, is_first: npt.NDArray[np.bool_]
) -> _SuspectRows:
    """Finds them among rows of which `is_first` is true."""
    if isinstance(predicted, Numbers):
        outliers = find_outliers(predicted.references, predicted.predictions)
        rows = outliers[is_first[outliers]]
        suggestions = [_spell_prediction(predicted, row) for row in rows.tolist()]
        return _SuspectRows(rows, suggestions, [None] * len(rows), None, None)
    suspects, of_suspects, places = _find_suspects(predicted, is_first)
    found = _by_row(predicted, suspects, of_suspects, places)
    return _SuspectRows(*found, suspects.share(of_suspects), suspects.noise)


def _read_rows(file: Path, inputs: Sequence[str], names: Sequence[str]) -> tuple[Hashes, list[str]]:
    """The hash of each stored row's inputs, and its label as data.corrections spells it."""
    columns = [StoredColumn(name, name, "text", "data") for name in inputs]
    hashes, labels = [np.zeros(0, np.uint64)], list[str]()
    for batch in read_batches(file):
        hashes.append(hash_rows(batch, columns))
        labels += (spell_label(_name_labels(label, names)) for label in batch.column("label").to_pylist())
    return np.concatenate(hashes), labels


def _read_other(job: Job, columns: Sequence[str]) -> dict[int, str]:
    """The other source's label of each text, by the hash; empty without another source."""
    if "other" not in job.inputs:
        return {}
    folder = Path(job.inputs["other"])
    hashes, labels = _read_rows(folder / f"{OTHER}.arrow", columns, read_labels(folder))
    return dict(zip(hashes.tolist(), labels, strict=True))


def _count_differing(hashes: Hashes, labels: Sequence[str], others: dict[int, str]) -> int:
    found = {*zip(hashes.tolist(), labels, strict=True)}
    return sum(others.get(value, label) != label for value, label in found)


def _name_labels(label: Any, names: Sequence[str]) -> Any:
    if isinstance(label, list):
        return [names[one] for one in label]
    return names[label] if names else label


def _first_of_equal(hashes: Hashes, labels: Sequence[str]) -> npt.NDArray[np.bool_]:
    """(N,) whether no earlier row has the same inputs and label."""
    seen, found = set[tuple[int, str]](), np.zeros(len(labels), bool)
    for row, key in enumerate(zip(hashes.tolist(), labels, strict=True)):
        found[row] = key not in seen
        seen.add(key)
    return found


def _find_conflicts(hashes: Hashes, labels: Sequence[str]) -> list[int]:
    """The first row of each text that has different labels in different rows."""
    kinds = Counter(value for value, _ in {*zip(hashes.tolist(), labels, strict=True)})
    first = dict(reversed([*zip(hashes.tolist(), range(len(labels)), strict=True)]))
    return sorted(first[value] for value, count in kinds.items() if count > 1)


def _find_suspects(
    predicted: OneLabel | ManyLabels | Tagged, is_first: npt.NDArray[np.bool_]
) -> tuple[Suspects, Rows, Rows]:
    """The suspects; (S,) the row of each; and (S,) its label among those of the row, or its word among all words."""
    if isinstance(predicted, OneLabel):
        rows = places = np.arange(len(predicted))
        found = find_suspects(predicted.references, predicted.probabilities)
    elif isinstance(predicted, ManyLabels):
        rows, places = np.divmod(np.arange(predicted.references.size), predicted.references.shape[1])
        references = predicted.references.ravel().astype(np.int64)
        found = find_suspects(references, two_outcomes(predicted.probabilities.ravel()))
    else:
        places = np.flatnonzero(~np.isnan(predicted.probabilities))
        rows = predicted.rows[places]
        tags, own = predicted.references[places], predicted.predictions[places]
        found = find_wrong_tags(tags, own, predicted.probabilities[places], len(predicted.labels))
    found = found.take(is_first[rows[found.entries]])
    return found, rows[found.entries], places[found.entries]


def _by_row(
    predicted: Predictions, suspects: Suspects, rows: Rows, places: Rows
) -> tuple[Rows, list[str], list[float | None]]:
    """The rows of the suspects, each once, the surest first; the label that each should have, as data.corrections
    spells it; and the chance that its label is wrong."""
    entries = dict[int, list[int]]()
    for entry, row in enumerate(rows.tolist()):
        entries.setdefault(row, []).append(entry)
    chances = {row: 1 - float(np.prod(1 - suspects.chances[of_row])) for row, of_row in entries.items()}
    order = sorted(entries, key=lambda row: -chances[row])  # of equal ones the first, which is the surest
    spelt = [_spell_suggestion(predicted, row, suspects, entries[row], places) for row in order]
    return np.array(order, np.int64), spelt, [round(chances[row], 4) for row in order]


def _spell_suggestion(
    predicted: Predictions, row: int, suspects: Suspects, entries: Sequence[int], places: Rows
) -> str:
    if isinstance(predicted, OneLabel):
        return predicted.labels[suspects.suggestions[entries[0]]]
    if isinstance(predicted, ManyLabels):
        has = predicted.references[row].copy()
        has[places[entries]] ^= True
        return spell_label([predicted.labels[label] for label in np.flatnonzero(has).tolist()])
    assert isinstance(predicted, Tagged)
    start, end = predicted.starts[row : row + 2].tolist()
    tags = predicted.references[start:end].copy()
    tags[places[entries] - start] = predicted.predictions[places[entries]]
    return spell_label([predicted.labels[tag] for tag in tags.tolist()])


def _spell_prediction(predicted: Predictions, row: int) -> str:
    """The model's label of a row."""
    if isinstance(predicted, OneLabel):
        return predicted.labels[predicted.predictions[row]]
    if isinstance(predicted, ManyLabels):
        return spell_label([predicted.labels[label] for label in np.flatnonzero(predicted.predictions[row]).tolist()])
    if isinstance(predicted, Numbers):
        return spell_label(float(f"{predicted.predictions[row]:.4g}"))
    assert isinstance(predicted, Tagged)
    start, end = predicted.starts[row : row + 2].tolist()
    return spell_label([predicted.labels[tag] for tag in predicted.predictions[start:end].tolist()])


def _certain_rows(predicted: Predictions) -> npt.NDArray[np.bool_] | None:
    """(N,) whether the label is certain to the model; None for numbers."""
    if isinstance(predicted, Numbers):
        return None
    if isinstance(predicted, OneLabel):
        return np.asarray(predicted.row_scores >= CERTAIN)
    if isinstance(predicted, ManyLabels):
        return np.asarray(predicted.row_scores >= np.log(CERTAIN))
    assert isinstance(predicted, Tagged)
    least: Floats = np.ones(len(predicted))
    np.minimum.at(least, predicted.rows, np.nan_to_num(predicted.probabilities))
    return np.asarray(predicted.correct & (least >= CERTAIN))


def _join_texts(inputs: dict[str, Any], columns: Sequence[str]) -> str:
    values = [inputs[name] for name in columns if inputs[name] is not None]
    text = " | ".join(" ".join(value) if isinstance(value, list) else str(value) for value in values)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


if __name__ == "__main__":
    run_program(main)
