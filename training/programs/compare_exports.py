"""The program that compares exports with their model on the same rows: `python -m training.programs.compare_exports
JOB`.

inputs     model (the trained model's folder), exports (the output of training.programs.export_model), data
           (SPLIT.arrow, and SPLIT.groups.arrow if rows have groups), tokens (SPLIT.arrow), predictions (SPLIT.parquet
           of training.programs.predict)
settings   CompareExportsSettings, below
output     FORMAT/SPLIT.parquet    the predictions of each export, as training.programs.predict writes the model's
           log/exports.json        the result; a speed is another one each time
result     by format: training.evaluation.scores.ComparedExport
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from pydantic_core import to_jsonable_python

from training import task_types
from training.data.ipc_files import CORPUS, read_labels
from training.evaluation.constant_predictions import sample_evenly
from training.evaluation.row_groups import Groups
from training.evaluation.scores import ComparedExport
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job
from training.programs.compare import CompareSettings, compare_models
from training.programs.predict import progress_of_rows, write
from training.programs.score import read_predictions
from training.recipe.tables.exports import EXPORTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.batching.batches import TokenRows

Report = Callable[[int], None]
TIMED_ROWS = 256
"""Rows of the split, evenly spread, on which the speeds are measured."""
MOST_OTHER_TOKENS = 0.01
"""The share of rows that the tokenizer of an export may read otherwise, such as texts in an unusual Unicode form."""
ROUNDS = 3
"""Timed passes over these rows, of export and model in turn; the median counts."""


class CompareExportsSettings(CompareSettings):
    """The settings of a job of this program. `margin` is negative: the loss that an export may have, with a minus."""

    exports: list[str]
    """Formats."""
    reported: list[str] = Field(default_factory=list)
    """Metrics whose values are given besides."""
    batch_size: int
    """Rows in one forward pass."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    """The number format in which the model's own speed is measured."""


def main(job_dir: Path, job: Job, events: Events) -> dict[str, ComparedExport]:
    """Predicts the split with each export, compares, and measures. Returns the results by format."""
    from training.batching.batches import TokenRows
    from training.engine.inference import predict
    from training.evaluation.metrics import compute
    from training.models import loading

    loading.make_deterministic()
    settings = CompareExportsSettings.model_validate(job.settings)
    task_type, split = task_types.load(settings.task, settings.options), settings.split
    folder, exports = Path(job.inputs["model"]), Path(job.inputs["exports"])
    tokenizer = loading.load_preprocessor(task_type, folder)
    collate = task_type.collator(tokenizer, loading.padding_multiple())
    network = loading.load_trained(task_type, folder)
    labels = read_labels(Path(job.inputs["data"]))
    rows = TokenRows(Path(job.inputs["tokens"]) / f"{split}.arrow")
    timed = sample(rows)
    file = Path(job.inputs["predictions"]) / f"{split}.parquet"
    old = read_predictions(task_type, file, labels, without=f"{CORPUS}_")  # exports do not embed it
    precision = "no" if settings.mixed_precision == "fp16" else settings.mixed_precision  # on CPUs it has no speed

    def predict_with(model: Any, some: TokenRows, precision: str = "no", report: Report = _no_report) -> Any:
        return predict(task_type, model, some, collate, settings.batch_size, precision, report)

    found: dict[str, ComparedExport] = {}
    groups = Groups.read(Path(job.inputs["data"]), split, old)
    for number, name in enumerate(settings.exports):
        module = importlib.import_module(f"training.models.{EXPORTS[name].module}")
        model = module.open_export(name, exports, network.config)
        report = progress_of_rows(events, split, number * len(rows), len(settings.exports) * len(rows))
        predictions = task_type.decode(predict_with(model, rows, report=report), tokenizer)
        file = job_dir / OUTPUT / name / f"{split}.parquet"
        file.parent.mkdir()
        write(file, predictions, rows)
        new = read_predictions(task_type, file, labels)
        comparison = compare_models(new, old, settings, groups=groups)
        other_tokens = count_other_tokens(model.tokenize, tokenizer, timed) if hasattr(model, "tokenize") else None
        seconds = measure_in_turn(partial(predict_with, model, timed), partial(predict_with, network, timed, precision))
        found[name] = ComparedExport(
            bytes=EXPORTS[name].size_in(exports),
            runtime=model.runtime,
            rows_per_second=round(len(timed) / seconds[0], 1) if getattr(model, "is_timed", True) else None,
            torch_rows_per_second=round(len(timed) / seconds[1], 1),
            torch_precision=precision,
            tokens_per_row=round(float(timed.tokens.mean()), 1) if task_type.generates_text else None,
            released=comparison.better and (other_tokens or 0) <= MOST_OTHER_TOKENS * len(timed),
            other_tokens=other_tokens,
            metrics=compute(settings.reported, new),
            model_metrics=compute(settings.reported, old),
            comparison=comparison,
        )
    (job_dir / OUTPUT / "log").mkdir()
    (job_dir / OUTPUT / "log" / "exports.json").write_text(json.dumps(to_jsonable_python(found), indent=1))
    return found


def sample(rows: TokenRows) -> TokenRows:
    """TIMED_ROWS of the rows, evenly spread; all if there are fewer."""
    from training.batching.batches import TokenRows

    if "row" in rows.table.column_names:  # several feature rows of a row stay together
        return TokenRows(rows.table.slice(0, TIMED_ROWS))
    return TokenRows(rows.table.take(sample_evenly(len(rows), TIMED_ROWS)))


def count_other_tokens(
    tokenize: Callable[[str], list[int]], tokenizer: PreTrainedTokenizerBase, rows: TokenRows
) -> int:
    """The rows whose text has other tokens by `tokenize` than by the model's tokenizer."""
    texts = [tokenizer.decode(rows[number]["input_ids"]) for number in range(len(rows))]
    return sum(tokenize(text) != tokenizer(text, add_special_tokens=False).input_ids for text in texts)


def measure_in_turn(*works: Callable[[], object]) -> list[float]:
    """The median seconds of each of the works, which take turns after a first pass of each that is not timed."""
    seconds: list[list[float]] = [[] for _ in works]
    for round_number in range(1 + ROUNDS):
        for found, work in zip(seconds, works, strict=True):
            began = time.perf_counter()
            work()
            if round_number:
                found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in seconds]


def _no_report(done: int) -> None:
    """Reports nothing."""


if __name__ == "__main__":
    run_program(main)
