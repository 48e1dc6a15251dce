"""The program that predicts: `python -m training.programs.predict JOB`, usually through `accelerate launch`.

inputs     model (the output of training.programs.fit), tokens (SPLIT.arrow, and corpus.arrow for data.corpus); base
           (the base model's folder) if prompts are answered, data (SPLIT.arrow) if turns are; folds (folds.arrow) for
           the rows of a fold
settings   PredictSettings, below
output     SPLIT.parquet, a row for each row of the split, in its order: row, label as the tokens have it, the task
           type's `predictions`, tokens (their number); and the columns of training.evaluation.preferences if
           prompts are answered, that of training.evaluation.tool_use if turns are; of a fold only its rows
result     PredictResult, below

The processes take the batches in turns, and the rows of a batch do not depend on the number of processes: one process
writes the same bytes as several with as many threads each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from training import task_types
from training.data.ipc_files import CORPUS, read_table
from training.evaluation.constant_predictions import advice, nearly_constant, read_column
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, PROGRESS_EVERY_S, Events, Job, NotInKey, Result, TaskSettings, rank
from training.task_types.task_type import AnswersPrompts, AnswersTurns, SearchesCorpus, TaskType

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.batches import TokenRows
    from training.engine.answers import Answers
    from training.engine.collation import Collate
    from training.tokenization.encoder import Encoder

DOCUMENTS_AT_ONCE = 4096
"""Documents of a corpus whose embeddings are in memory at a time."""


class ForwardSettings(TaskSettings):
    """The settings of a program that calls a model once for each row."""

    batch_size: int
    """Rows of all processes together."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    micro_batch_divisor: Annotated[int, NotInKey("its parts have the same rows")] = 1
    """Divides the batch size, so that a batch fits into memory."""

    @property
    def rows_at_once(self) -> int:
        """The rows of a batch that fits into memory."""
        return -(-self.batch_size // self.micro_batch_divisor)


class PredictResult(Result):
    """The work of a program that calls a model once for each row."""

    rows: int
    """Of all splits together."""
    rows_per_second: float


class BlocksResult(PredictResult):
    """The work of such a program whose rows are computed in blocks (training/jobs/blocks.py)."""

    computed: int
    """The rows of blocks that this run has computed; it found the others."""


class AnsweringSettings(ForwardSettings):
    """The settings of a program that may also generate answers."""

    answered_prompts: int = 0
    """Rows of each split with answers: the model's and its base model's to the prompt, or the model's in place of each
    message of the assistant, by the task type's `answers`."""


class PredictSettings(AnsweringSettings):
    """The settings of a job of this program."""

    splits: list[str]
    fold: Annotated[int | None, NotInKey("it is in the key of a fold's predictions")] = None
    """The fold of train whose rows are predicted; None for all rows of the splits."""


def main(job_dir: Path, job: Job, events: Events) -> PredictResult:
    """Predicts every row of the splits."""
    from training.batching.batches import TokenRows, rows_of_fold
    from training.distributed import ranks
    from training.engine.inference import predict
    from training.models import loading

    device = ranks.join_group()
    loading.make_deterministic()
    settings = PredictSettings.model_validate(job.settings)
    task_type = task_types.load(settings.task, settings.options)
    folder = Path(job.inputs["model"])
    tokenizer = loading.load_preprocessor(task_type, folder)
    collate = task_type.collator(tokenizer, loading.padding_multiple())
    files = {split: Path(job.inputs["tokens"]) / f"{split}.arrow" for split in settings.splits}
    if settings.fold is None:
        splits, numbers = {split: TokenRows(file) for split, file in files.items()}, None
    else:
        folds = Path(job.inputs["folds"]) / "folds.arrow"
        splits = {split: rows_of_fold(file, folds, settings.fold, held_out=True) for split, file in files.items()}
        numbers = np.flatnonzero(read_column(folds, "fold").to_numpy() == settings.fold)
    base_answers: Mapping[str, Answers] = {}
    prompts, precision = settings.answered_prompts, settings.mixed_precision
    if prompts and isinstance(task_type, AnswersPrompts):
        base = Path(job.inputs["base"])
        base_answers = _answer_by_base(task_type, base, tokenizer, splits, prompts, precision, events, device)
    network = loading.load_trained(task_type, folder).to(device)
    total, before = sum(map(len, splits.values())), 0
    whole = sum(len(rows.tokens) for rows in splits.values())
    batch_size = settings.rows_at_once
    began = time.monotonic()
    for split, rows in splits.items():
        tell = progress_of_rows(events, split, before, total)
        predictions = predict(task_type, network, rows, collate, batch_size, precision, tell)
        if rank() == 0:
            if cut := task_type.cut_texts(predictions, network):
                events.warning(
                    f"{cut} of {len(predictions)} texts generated for {split} reached options.max_new_tokens and were "
                    "cut, as metrics see them: raise it if targets are longer; else the model has not learned to end "
                    "texts."
                )
            predictions = task_type.decode(predictions, tokenizer)
        if prompts and isinstance(task_type, AnswersPrompts):
            found = answer("the model", task_type, network, tokenizer, rows, prompts, precision, split, events)
            if rank() == 0:
                predictions = base_answers[split].add_to(found.add_to(predictions), of_base=True)
        elif prompts and isinstance(task_type, AnswersTurns):
            file, encoder = Path(job.inputs["data"]) / f"{split}.arrow", task_type.load_turn_encoder(folder)
            predictions = add_turns(
                "the model", task_type, network, tokenizer, encoder, file, predictions, settings, events
            )
        if rank() == 0:
            write(job_dir / OUTPUT / f"{split}.parquet", predictions, rows, numbers)
            if nearly_constant(task_type.metric_inputs(predictions, task_type.labels_of(network.config))):
                events.warning(advice(split, weights=task_type.recipe_loss_form in ("classes", "labels")))
        before += len(rows)
    corpus = Path(job.inputs["tokens"]) / f"{CORPUS}.arrow"
    written = [job_dir / OUTPUT / f"{split}.parquet" for split in splits]
    search_corpus(task_type, network, corpus, written, collate, batch_size, precision, events)
    ranks.leave_group()
    return PredictResult(rows=whole, rows_per_second=round(whole / (time.monotonic() - began), 1))


def _answer_by_base(
    task_type: TaskType,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    splits: Mapping[str, TokenRows],
    prompts: int,
    precision: str,
    events: Events,
    device: torch.device,
) -> dict[str, Answers]:
    """The base model's answers, before the trained model is loaded."""
    from training.models import loading

    assert isinstance(task_type, AnswersPrompts)
    base = loading.load_base(task_type, folder, seed=0).to(device)
    task_type.set_end_tokens(base, tokenizer)
    return {
        split: answer("the base model", task_type, base, tokenizer, rows, prompts, precision, split, events)
        for split, rows in splits.items()
    }


def answer(
    name: str,
    task_type: TaskType,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenRows,
    prompts: int,
    precision: str,
    split: str,
    events: Events,
) -> Answers:
    """The answers of a model, called `name` in a warning if some are cut, to some prompts of a split. Every rank calls
    it and gets the same."""
    from training.engine.answers import answer_prompts

    def report(done: int, total: int) -> None:
        events.progress(phase="answer", split=split, done=done, total=total)

    assert isinstance(task_type, AnswersPrompts)
    found = answer_prompts(task_type, network, tokenizer, rows, prompts, precision, report)
    most = task_type.options.model_dump()["max_new_tokens"]
    if rank() == 0 and (cut := found.reaching(most)):
        events.warning(
            f"{cut} of {len(found.texts)} answers of {name} to prompts of {split} reached options.max_new_tokens, "
            f"{most} tokens, and were cut: their length is a lower bound. Raise it to compare lengths."
        )
    return found


def add_turns(
    name: str,
    task_type: TaskType,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    data: Path,
    predictions: pa.Table,
    settings: AnsweringSettings,
    events: Events,
) -> pa.Table:
    """The predictions for a split, with the model's answers in some of its rows, which are in the file `data`. Every
    rank calls it; rank 0 gets the result, and warns of answers that are cut."""
    from training.engine.answers import answer_turns

    split = data.stem

    def report(done: int, total: int) -> None:
        events.progress(phase="answer", split=split, done=done, total=total)

    assert isinstance(task_type, AnswersTurns)
    number, precision = settings.answered_prompts, settings.mixed_precision
    rows = read_table(data)
    answers, tokens = answer_turns(task_type, network, tokenizer, encoder, rows, number, precision, report)
    if rank() != 0:
        return predictions
    most = task_type.options.model_dump()["max_new_tokens"]
    if cut := sum(count >= most for count in tokens):
        events.warning(
            f"{cut} of {len(tokens)} answers of {name} in {split} reached options.max_new_tokens, {most} tokens, and "
            "were cut: calls in them may be incomplete. Raise it if the answers of your rows are longer; else the "
            "model has not learned to end its answers."
        )
    return predictions.append_column(task_type.turns_column, answers)


def search_corpus(
    task_type: TaskType,
    network: PreTrainedModel,
    corpus: Path,
    files: Sequence[Path],
    collate: Collate,
    batch_size: int,
    precision: str,
    events: Events,
) -> None:
    """Searches the documents of the token file `corpus`, if there is one, for the rows of files of predictions, and
    writes these again with the result. Each document is embedded once, in blocks. Every rank calls it."""
    from training.batching.batches import TokenRows
    from training.engine.inference import predict

    if not corpus.is_file() or not isinstance(task_type, SearchesCorpus):
        return
    searches = {file: task_type.corpus_search(pq.read_table(file)) for file in files} if rank() == 0 else {}
    documents = read_table(corpus)
    for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
        block = TokenRows(documents.slice(start, DOCUMENTS_AT_ONCE).combine_chunks())
        tell = progress_of_rows(events, CORPUS, start, len(documents))
        embedded = predict(task_type, network, block, collate, batch_size, precision, tell)
        for search in searches.values():
            search.add(embedded)
    for file, search in searches.items():
        pq.write_table(search.result(), file, compression="zstd")


def write(file: Path, predictions: pa.Table, rows: TokenRows, numbers: npt.NDArray[np.int64] | None = None) -> None:
    """Stores the predictions of these rows as Parquet, with the row's number in its split, from 0, and its number of
    tokens. `numbers` are those of rows that are a part of the split."""
    tokens = rows.tokens
    numbers = np.arange(len(tokens)) if numbers is None else numbers
    table = predictions.add_column(0, "row", [numbers]).append_column("tokens", [tokens])
    pq.write_table(table, file, compression="zstd")


def progress_of_rows(events: Events, split: str, before: int, total: int) -> Callable[[int], None]:
    """Returns a function that reports finished rows, at most once a second. `before`: the rows of earlier splits."""
    reported_at = 0.0

    def tell(done: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= PROGRESS_EVERY_S or before + done == total:
            reported_at = time.monotonic()
            events.progress(phase="predict", split=split, done=before + done, total=total)

    return tell


if __name__ == "__main__":
    run_program(main)
