"""Further documents that an evaluation searches beside those of its rows: the files of data.corpus, read as rows to
predict are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from training.data.casting import TaskColumns, to_batch
from training.data.file_systems import display_name
from training.data.ipc_files import CORPUS, write_table
from training.data.prediction_rows import RowReader
from training.problems import Problem, UserError
from training.recipe.reading_rules import ReadingRules
from training.recipe.task_specification import TaskSpecification

if TYPE_CHECKING:
    from training.recipe.data_fields import Data

FIELD = "data.corpus"


def load_corpus(
    data: Data, task_type: TaskSpecification, files: Sequence[str], out: Path, progress: Callable[[int, int], None]
) -> None:
    """Writes out/corpus.arrow, the texts of the files in their order, and adds their number to the report in `out`,
    with a warning if some rows have none. The filter of `data` is not applied. Raises UserError for a file that cannot
    be read, or if no document is left."""
    column = task_type.corpus_column
    assert column is not None
    names = {column: data.sets[0].columns.get(column, column)}
    reader = RowReader(cast(TaskColumns, task_type), names, rules=ReadingRules.of(data))
    documents, unusable = 0, list[str]()

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal documents
        for file in files:
            for part in reader.read(file):
                unusable.extend(
                    f"is row {problem.row} of {display_name(file)}, which {problem}"
                    for problem in part.errors
                    if problem is not None
                )
                texts = part.usable()
                documents += len(texts)
                progress(documents, documents)
                yield to_batch(cast(TaskColumns, task_type), [column], texts)

    schema = to_batch(cast(TaskColumns, task_type), [column], []).schema
    write_table(out / f"{CORPUS}.arrow", batches(), schema)
    if not documents:
        message = f"none of {len(unusable):,} rows has a text in column {names[column]!r}: name another file, or the "
        raise UserError.of("data", FIELD, f"{message}column in data.columns.{column}.")
    report = json.loads((out / "log" / "report.json").read_text(encoding="utf-8"))
    report[CORPUS] = documents
    if unusable:
        message = f"{len(unusable):,} of {documents + len(unusable):,} rows are left out; the first {unusable[0]}"
        report["problems"].append(Problem(kind="data", where=FIELD, message=message, level="warning").model_dump())
    (out / "log" / "report.json").write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
