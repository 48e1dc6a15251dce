"""The program that logs a trained model to MLflow, registers it, and asks the registered copy.

The server is the one that MLFLOW_TRACKING_URI names: its URL may hold a password, which job.json must not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.runtime.tracking import failures_told
from training.protocol import Events, Job, run_program


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Logs the model as safetensors under the MLflow run, registers it, reloads it and compares its answers.

    Settings: experiment, run_id, registry, task, max_length (tokens), tags, requirements, probes
    (texts with the probabilities that were stored for them), tolerance (of a probability). Inputs: model, a folder.
    Figures: version. Raises RuntimeError, the version deleted again, where the reloaded model answers otherwise;
    MlflowFailed where MLflow does not do its part.
    """
    events.progress(done=0, total=3)
    with failures_told():
        return {"version": _log_and_register(job, events)}


def _log_and_register(job: Job, events: Events) -> str:
    import mlflow
    from mlflow.models import Model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    say = job.settings
    mlflow.set_experiment(say["experiment"])
    folder = job.inputs["model"]
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    info = Model.log(
        artifact_path=None,
        name=say["registry"],
        flavor=mlflow.transformers,
        run_id=say["run_id"],
        registered_model_name=say["registry"],
        transformers_model={"model": model, "tokenizer": tokenizer},
        task=say["task"],
        # A served model cuts long texts as training did.
        model_config={"truncation": True, "max_length": say["max_length"]},
        # Named, not inferred: inferring loads the model once more in yet another process.
        pip_requirements=say["requirements"],
    )
    version = str(info.registered_model_version)
    events.progress(done=1, total=3)
    client = mlflow.MlflowClient()
    try:
        _compare(mlflow.transformers.load_model(f"models:/{say['registry']}/{version}"), say)
    except BaseException:
        client.delete_model_version(say["registry"], version)
        raise
    events.progress(done=2, total=3)
    for name, value in say["tags"].items():
        client.set_model_version_tag(say["registry"], version, name, value)
    return version


def _compare(pipeline: Any, say: dict[str, Any]) -> None:
    texts = [probe["inputs"] for probe in say["probes"]]
    answers = pipeline(texts, top_k=None, truncation=True, max_length=say["max_length"])
    for probe, answer in zip(say["probes"], answers, strict=True):
        given = {entry["label"]: entry["score"] for entry in answer}
        for label, stored in probe["probabilities"].items():
            if abs(given[label] - stored) > say["tolerance"]:
                raise RuntimeError(
                    f"the registered model gives {label!r} {given[label]:.4f} for {probe['inputs']!r}, "
                    f"and {stored:.4f} was stored when it was evaluated"
                )


if __name__ == "__main__":
    run_program(main)
