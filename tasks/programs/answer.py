"""The program that asks a registered model, of the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.runtime.connection import failures_told
from training.program import run_program
from training.protocol import Events, Job


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Settings: model (an MLflow model URI), texts (each a text, or a pair as a list of two),
    max_length (tokens).

    Figures: answers, one a text: labels and probabilities, the likeliest first.
    """
    import mlflow

    with failures_told():
        pipeline = mlflow.transformers.load_model(job.settings["model"])
    texts = [
        text if isinstance(text, str) else {"text": text[0], "text_pair": text[1]} for text in job.settings["texts"]
    ]
    return {"answers": pipeline(texts, top_k=None, truncation=True, max_length=job.settings["max_length"])}


if __name__ == "__main__":
    run_program(main)
