"""The program that logs a trained model to MLflow, asks the logged copy, and registers it.

The server is the one that MLFLOW_TRACKING_URI names: its URL may hold a password, which job.json must not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.runtime.connection import failures_told
from training.absent import absent
from training.program import run_program
from training.protocol import Events, Job


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Logs the model as safetensors under the MLflow run, reloads it, compares its answers and registers it.

    Settings: experiment, run_id, registry, task, max_length (tokens), tags, requirements, probes (inputs, `text` and
    perhaps `text_pair`, with the probabilities that were stored for them), examples (how many probes the model
    keeps as examples), tolerance (of a probability). Inputs: model, a folder.
    Figures: version. Raises RuntimeError, and registers nothing, where the reloaded model answers otherwise;
    MlflowFailed where MLflow does not do its part.
    """
    events.progress(done=0, total=3)
    # Where deepspeed is installed, transformers would look for an engine of it: 2 seconds.
    with failures_told(), absent("deepspeed"):
        return {"version": _log_and_register(job, events)}


def _log_and_register(job: Job, events: Events) -> str:
    import mlflow
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, Schema
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    say = job.settings
    mlflow.set_experiment(say["experiment"])
    folder = job.inputs["model"]
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    inputs = [probe["inputs"] for probe in say["probes"]]
    info = Model.log(
        artifact_path=None,
        name=say["registry"],
        flavor=mlflow.transformers,
        run_id=say["run_id"],
        transformers_model={"model": model, "tokenizer": tokenizer},
        task=say["task"],
        # A served model cuts long texts as training did.
        model_config={"truncation": True, "max_length": say["max_length"]},
        # By name: of texts without one, MLflow takes those that look like values of Python's for these values.
        signature=ModelSignature(
            inputs=Schema([ColSpec("string", name) for name in inputs[0]]),
            outputs=Schema([ColSpec("string", "label"), ColSpec("double", "score")]),
        ),
        input_example=inputs[: say["examples"]],
        validate_serving_input=False,  # below, and held against what is known
        # Named, not inferred: inferring loads the model once more in yet another process.
        pip_requirements=say["requirements"],
    )
    events.progress(done=1, total=3)
    _compare(mlflow.pyfunc.load_model(info.model_uri), say)
    events.progress(done=2, total=3)
    # Last, and with its tags at once: a run that goes on after a kill knows a version by them, or makes another.
    return str(mlflow.register_model(info.model_uri, say["registry"], tags=say["tags"]).version)


def _compare(served: Any, say: dict[str, Any]) -> None:
    """Raises RuntimeError where the model, as a server would load it, answers otherwise than was stored."""
    inputs = [probe["inputs"] for probe in say["probes"]]
    answers = served.get_raw_model()(inputs, top_k=None, truncation=True, max_length=say["max_length"])
    for probe, answer in zip(say["probes"], answers, strict=True):
        given = {entry["label"]: entry["score"] for entry in answer}
        for label, stored in probe["probabilities"].items():
            if abs(given[label] - stored) > say["tolerance"]:
                raise RuntimeError(
                    f"the registered model gives {label!r} {given[label]:.4f} for {probe['inputs']!r}, "
                    f"and {stored:.4f} was stored when it was evaluated"
                )
    scores = served.predict(inputs)["score"]
    for answer, score in zip(answers, scores, strict=True):
        if abs(answer[0]["score"] - score) > say["tolerance"]:
            raise RuntimeError("the registered model, asked as MLflow serves it, answers otherwise than by itself")


if __name__ == "__main__":
    run_program(main)
