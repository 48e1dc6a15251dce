"""The program that predicts the current rows with the champion: `python -m training.programs.predict_champion JOB`,
usually through `accelerate launch`.

inputs     model, tokenizer (the champion's folders, which may be one), data (SPLIT.arrow, and labels.json
           with the current labels)
settings   PredictChampionSettings, below
output     SPLIT.parquet, as training.programs.predict writes it, with the current labels
result     PredictChampionResult, below
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from training import task_types
from training.data.ipc_files import CORPUS, read_labels
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, NotInKey, rank
from training.models.repository_files import read_json
from training.problems import UserError
from training.programs.predict import (
    AnsweringSettings,
    PredictResult,
    add_turns,
    answer,
    progress_of_rows,
    search_corpus,
    write,
)
from training.task_types.task_type import AnswersPrompts, TaskType
from training.tokenization import token_files
from training.tokenization.transformers_encoder import load_encoder_of


class PredictChampionResult(PredictResult):
    """With the differences between the labels of the champion and of the rows."""

    unknown: list[str]
    """Labels that the champion does not have."""
    dropped: list[str]
    """Labels that only it has."""


class PredictChampionSettings(AnsweringSettings):
    """The settings of a job of this program."""

    split: str
    champion: Annotated[str, NotInKey("it names the model in messages")]
    """NAME/VERSION"""
    max_length: int
    """Tokens a row."""


def main(job_dir: Path, job: Job, events: Events) -> PredictChampionResult:
    """Tokenizes and predicts every row of the split."""
    from training.batching.batches import TokenRows
    from training.distributed import ranks
    from training.engine.inference import predict
    from training.models import loading

    device = ranks.join_group()
    loading.make_deterministic()
    settings = PredictChampionSettings.model_validate(job.settings)
    split, data = settings.split, Path(job.inputs["data"])
    labels = read_labels(data)
    task_type = task_types.load(settings.task, settings.options)
    folder, tokenizer = Path(job.inputs["model"]), Path(job.inputs["tokenizer"])
    require_task(task_type, settings.task, folder, settings.champion)

    def tell_tokens(done: int, total: int) -> None:
        events.progress(phase="tokenize", split=split)

    encoder = load_encoder_of(task_type, tokenizer, folder, settings.max_length)
    if rank() == 0:
        advice = f"This is the template of {settings.champion}, which is compared on the same rows: take these out, or "
        advice += "train from it (model.start_from: champion)."
        tokens = job_dir / "tokens"
        token_files.write_tokens(
            task_type, data, encoder, tokens, "ignore", tell_tokens, splits=[split, CORPUS], refusal_advice=advice
        )
    ranks.barrier()
    rows = TokenRows(job_dir / "tokens" / f"{split}.arrow")
    its_tokenizer = loading.load_preprocessor(task_type, tokenizer, folder)
    collate = task_type.collator(its_tokenizer, loading.padding_multiple())
    network = loading.load_trained(task_type, folder).to(device)
    batch_size = settings.rows_at_once
    began = time.monotonic()
    tell = progress_of_rows(events, split, 0, len(rows))
    predictions = predict(task_type, network, rows, collate, batch_size, settings.mixed_precision, tell)
    own = task_type.labels_of(network.config)
    if rank() == 0:
        predictions = task_type.remap_labels(task_type.decode(predictions, its_tokenizer), own, labels)
    prompts, name = settings.answered_prompts, settings.champion
    if prompts and isinstance(task_type, AnswersPrompts):
        precision = settings.mixed_precision
        found = answer(name, task_type, network, its_tokenizer, rows, prompts, precision, split, events)
        predictions = found.add_to(predictions) if rank() == 0 else predictions
    elif prompts:
        file = data / f"{split}.arrow"
        predictions = add_turns(name, task_type, network, its_tokenizer, encoder, file, predictions, settings, events)
    written, corpus = job_dir / OUTPUT / f"{split}.parquet", job_dir / "tokens" / f"{CORPUS}.arrow"
    if rank() == 0:
        write(written, predictions, rows)
    search_corpus(task_type, network, corpus, [written], collate, batch_size, settings.mixed_precision, events)
    ranks.leave_group()
    return PredictChampionResult(
        rows=len(rows.tokens),
        rows_per_second=round(len(rows.tokens) / (time.monotonic() - began), 1),
        unknown=[name for name in labels if name not in own],
        dropped=[name for name in own if name not in labels],
    )


def require_task(
    task_type: TaskType,
    name: str,
    folder: Path,
    model: str,
    role: str = "champion",
    where: str = "release.registry",
    advice: str = "name another registry, or give its alias to another version.",
) -> None:
    """Raises UserError for the recipe's field `where` if the folder's model was trained for another task: transformers
    would load it with a head of random weights."""
    config = read_json(folder / "config.json")
    architectures, made_for = config.get("architectures") or [], config.get("problem_type")
    wanted, message = task_type.config_fields(()).get("problem_type"), None
    if not _loaded_by(task_type.auto_class, config.get("model_type")) & {*architectures}:
        message = (
            f"{model} is {', '.join(architectures) or 'of no known type'}, and a {role} of {name} must be a model for "
            f"that: {advice}"
        )
    elif made_for not in (None, wanted):
        message = f"{model} was trained for {made_for}, and a {role} of {name} must be for {wanted}: {advice}"
    if message is not None:
        raise UserError.of(where.partition(".")[0], where, message)


def _loaded_by(auto_class: str, model_type: str | None) -> set[str]:
    """The model classes that one of transformers' auto classes loads for this model type."""
    import transformers

    named = getattr(transformers, auto_class)._model_mapping._model_mapping.get(model_type, ())
    return {named} if isinstance(named, str) else {*named}


if __name__ == "__main__":
    run_program(main)
