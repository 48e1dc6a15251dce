"""The program that asks a registered model, of the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.runtime.connection import failures_told
from training.problems import full_disk
from training.program import run_program
from training.protocol import Events, Job
from training.rows.answered import Texts, Writer, read

BATCH_ROWS = 32


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Settings: model (an MLflow model URI), max_length (tokens), and either texts (lists of a text, or of a pair), or
    columns (of texts, in the model's order) with out, the path of what is to be written; of that the input `aside` is
    filled from the rows of the input `file`.

    Figures: answers, one a text: labels and probabilities, the likeliest first; or rows, and how many were
    unanswered for want of a text.
    """
    say = job.settings
    if "texts" in say:
        return {"answers": _answers(_pipeline(say["model"]), say["texts"], say["max_length"])}
    # All of it, before a model is loaded: what is wrong with a file is told within seconds.
    file, columns = Path(job.inputs["file"]), say["columns"]
    total = sum(len(batch.texts) for batch in read(file, columns))
    pipeline = _pipeline(say["model"])
    config, aside = pipeline.model.config, Path(job.inputs["aside"])
    done = unanswered = 0
    try:
        with Writer(aside, Path(say["out"]), [config.id2label[place] for place in range(config.num_labels)]) as writer:
            for rows, texts in read(file, columns):
                there = [place for place, text in enumerate(texts) if text is not None]
                answers: list[dict[str, float] | None] = [None] * len(texts)
                given = _answers(pipeline, [texts[place] or () for place in there], say["max_length"])
                for place, answer in zip(there, given, strict=True):
                    answers[place] = {entry["label"]: entry["score"] for entry in answer}
                writer.write(rows, answers)
                done, unanswered = done + len(texts), unanswered + len(texts) - len(there)
                events.progress(done=done, total=total)
    except OSError as error:
        if full := full_disk(aside.parent, error):
            raise full from error
        raise
    return {"rows": done, "unanswered": unanswered}


def _pipeline(model: str) -> Any:
    import mlflow

    with failures_told():
        return mlflow.transformers.load_model(model)


def _answers(pipeline: Any, texts: Sequence[Texts], max_length: int) -> list[list[dict[str, Any]]]:
    """For each text, or pair of them, the labels with their probabilities, the likeliest first."""
    # Those of like length together: a batch is as long as its longest text.
    order = sorted(range(len(texts)), key=lambda place: sum(map(len, texts[place])))
    inputs = [dict(zip(("text", "text_pair"), texts[place], strict=False)) for place in order]
    size = 1 if pipeline.tokenizer.pad_token_id is None else BATCH_ROWS
    given = pipeline(inputs, batch_size=size, top_k=None, truncation=True, max_length=max_length) if inputs else []
    found: list[Any] = [None] * len(texts)
    for place, answer in zip(order, given, strict=True):
        found[place] = answer
    return found


if __name__ == "__main__":
    run_program(main)
