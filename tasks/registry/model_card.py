"""The model card on the Hub and the description in the registry, from the facts of the run; no stage.

Neither changes from one run to the next while the model, its rows and its recipe stay the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tasks.cache import store
from tasks.cache.refs import Lock, Ref, Verdict
from tasks.hub.client import repository_url
from tasks.tracking.reports import find_worst_groups, format_markdown, make_printable, tabulate_scores
from training import task_types
from training.recipe import Recipe

CURVES = "loss.png"
"""The plot of the loss curve, under `log/` in an artifact of `fit`, and in the repository."""
LIBRARY = "transformers"
_AVERAGES = ("_macro", "_micro", "_weighted")


def build_card(
    recipe: Recipe, lock: Lock, data: Ref, trained: Ref, predictions: Ref, scores: Ref, verdict: Verdict
) -> str:
    """The model card, Markdown with its metadata in front."""
    from huggingface_hub import ModelCardData

    hub = recipe.release.hub
    assert hub is not None
    metadata = ModelCardData(
        license=hub.license,
        library_name=LIBRARY,
        pipeline_tag=task_types.load(**recipe.task_and_options).hub_task,
        base_model=recipe.model.path if lock.model_hub else None,
        datasets=[recipe.data.path] if lock.data_hub else None,
        tags=list(hub.tags) or None,
        metrics=sorted({_convert_metric(metric) for metrics in scores.figures.values() for metric in metrics}),
        model_name=hub.repo.partition("/")[2],
        eval_results=_build_results(recipe, lock, scores),
    )
    sections = [
        f"# {hub.repo.partition('/')[2]}",
        *_build_sections(recipe, lock, data, trained, predictions, scores, verdict),
        f"## Training\n\n{_describe_training(trained)}\n\n![Loss and evaluation by optimizer step]({CURVES})",
        f"## How to reproduce\n\n{_build_reproduction(recipe, lock, trained)}",
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def build_description(
    recipe: Recipe, lock: Lock, data: Ref, trained: Ref, predictions: Ref, scores: Ref, verdict: Verdict
) -> str:
    """The same without recipe and plot: the description of a version in the registry."""
    return "\n\n".join(_build_sections(recipe, lock, data, trained, predictions, scores, verdict))


def _build_sections(
    recipe: Recipe, lock: Lock, data: Ref, trained: Ref, predictions: Ref, scores: Ref, verdict: Verdict
) -> Iterator[str]:
    labels = json.loads((data.path / "labels.json").read_text())
    yield _build_introduction(recipe, lock, labels, trained)
    yield f"## Figures\n\n{format_figures(recipe, scores)}"
    yield f"## Data\n\n{_describe_rows(recipe, lock, data)}"
    yield f"## Limits\n\n{_describe_limits(recipe, predictions, scores, labels, verdict)}"


def _build_introduction(recipe: Recipe, lock: Lock, labels: list[str], trained: Ref) -> str:
    if champion := lock.started_from:
        base = f"version {champion.version} of `{champion.name}`, which was the champion"
    elif lock.model_hub:
        url = repository_url("model", str(recipe.model.path))
        base = f"[{recipe.model.path}]({url}) at commit `{lock.model_hub.commit}`"
    else:
        base = "a model made from a configuration" if recipe.model.source == "scratch" else "a model in a folder"
    names = ", ".join(_format_code(label) for label in labels[:20]) + (", …" if len(labels) > 20 else "")
    sentence = task_types.load(**recipe.task_and_options).card_sentence.format(
        text="pair of texts" if len(recipe.data.text or ()) > 1 else "text",
        labels=f"{len(labels)} labels: {names}",
    )
    return f"{sentence}. Fine-tuned from {base}.\n\nDigest of the model: `{trained.parts['model']}`."


def format_figures(recipe: Recipe, scores: Ref) -> str:
    """The metrics of each split with their intervals, as a table."""
    table = tabulate_scores(scores.figures)
    judged: dict[str, str] = {recipe.judged_split: f"**{recipe.judged_split}** (judged)"}
    return format_markdown([{**row, "split": judged.get(row["split"], row["split"])} for row in table])


def _describe_rows(recipe: Recipe, lock: Lock, data: Ref) -> str:
    if lock.data_hub:
        place = f"[{recipe.data.path}]({repository_url('dataset', recipe.data.path)})"
        origin = f"{place} at commit `{lock.data_hub.commit}`" + (
            f", configuration `{recipe.data.config}`" if recipe.data.config else ""
        )
    elif lock.data_files:
        pinned = [f"`{pin.sha256[:12]}`" for files in lock.data_files.values() for pin in files]
        more = f" and {len(pinned) - 10} more" if len(pinned) > 10 else ""
        origin = f"Files ({recipe.data.source}) with SHA-256 {', '.join(pinned[:10])}{more}"
    else:
        origin = f"The Python object `{recipe.data.path}`" + (
            f", which says of itself: {lock.data_fingerprint}" if lock.data_fingerprint else ""
        )
    counts = {name.removesuffix("_rows"): n for name, n in data.figures.items() if name.endswith("_rows")}
    rows = ", ".join(f"{split} {n:,}" for split, n in counts.items())
    return f"{origin}.\n\nRows: {rows}. Digest of the rows: `{data.digest}`."


def _describe_limits(recipe: Recipe, predictions: Ref, scores: Ref, labels: list[str], verdict: Verdict) -> str:
    said = [*_describe_worst_label(recipe, predictions, labels)]
    groups = find_worst_groups(recipe, scores.path)
    said += [
        f"Worst by {_format_code(make_printable(name))} is {_format_code(group)}." for name, group in groups.items()
    ]
    said.append(f"Texts are cut after {recipe.tokens.max_length} tokens.")
    said.append("On rows unlike these, nothing was measured.")
    return "\n\n".join([" ".join(said), *(f"Warning: {warning}" for warning in verdict.own_warnings)])


def _describe_worst_label(recipe: Recipe, predictions: Ref, labels: list[str]) -> Iterator[str]:
    """The label with the lowest recall, if each row has one label."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    split = recipe.judged_split
    file = predictions.path / f"{split}.parquet"
    schema = pq.read_schema(file)
    there = [schema.field(name).type for name in ("label", "prediction") if name in schema.names]
    if len(there) < 2 or not all(map(pa.types.is_integer, there)):
        return
    table = pq.read_table(file, columns=["label", "prediction"])
    truth, given = table["label"].to_numpy(), table["prediction"].to_numpy()
    rows = np.bincount(truth, minlength=len(labels))
    right = np.bincount(truth[truth == given], minlength=len(labels))
    shares = {i: right[i] / rows[i] for i in range(len(labels)) if rows[i]}
    worst = min(shares, key=lambda i: (shares[i], i))
    found = f"{right[worst]:,} of its {rows[worst]:,} rows of {split} are right ({shares[worst]:.1%})"
    yield f"The label that it recognises worst is {_format_code(labels[worst])}: {found}."


def _format_code(text: str) -> str:
    """The text in a fence of more backticks than it has in a row: of the user's rows, it may hold anything."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if "`" not in text else f"{fence} {text} {fence}"


def _describe_training(trained: Ref) -> str:
    figures = trained.figures
    said = f"{figures['steps']:,} optimizer steps, {figures['epochs']:g} epochs"
    return f"{said}; mean loss {figures['train_loss']:.4f}."


def _build_reproduction(recipe: Recipe, lock: Lock, trained: Ref) -> str:
    made = store.inputs_of("fit", trained.key) or {}
    versions = {name.removeprefix("library."): v for name, v in made.items() if name.startswith("library.")}
    versions["finetune-flows"] = importlib.metadata.version("finetune-flows")
    entry = {
        "name": recipe.name,
        "entrypoint": "flows.finetune:finetune",
        "parameters": {"recipe": pin_recipe(recipe, lock)},
    }
    document = yaml.safe_dump({"deployments": [entry]}, sort_keys=False, allow_unicode=True)
    return (
        "Save this as `recipe.yaml`; `finetune run recipe.yaml` trains the same model from the same rows, byte for "
        f"byte where the hardware and the versions are the same.\n\n```yaml\n{document}```\n\n"
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}."
    )


def pin_recipe(recipe: Recipe, lock: Lock) -> dict[str, Any]:
    """The recipe's fields that differ from their defaults, with names and `auto` resolved."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    for section, pin in (("data", lock.data_hub), ("model", lock.model_hub)):
        if pin is not None:
            values[section]["revision"] = pin.commit
    resolved = {"num_processes": lock.num_processes, "mixed_precision": lock.mixed_precision}
    return {**values, "compute": {**values.get("compute", {}), **resolved}}


def _build_results(recipe: Recipe, lock: Lock, scores: Ref) -> list[Any]:
    """The metrics for the card's metadata, with their intervals; values that are no numbers are left out."""
    from huggingface_hub import EvalResult

    data = recipe.data
    return [
        EvalResult(
            task_type=task_types.load(**recipe.task_and_options).hub_task,
            dataset_type=data.path if lock.data_hub else data.source,
            dataset_name=data.path if lock.data_hub else recipe.name,
            dataset_config=data.config,
            dataset_split=split,
            dataset_revision=lock.data_hub.commit if lock.data_hub else None,
            metric_type=_convert_metric(metric),
            metric_name=metric,
            metric_value=value,
            metric_args=_build_interval(figure),
        )
        for split, metrics in scores.figures.items()
        for metric, figure in metrics.items()
        if (value := _keep_finite(figure["value"])) is not None
    ]


def _convert_metric(metric: str) -> str:
    """The Hub's name of a metric: f1 for f1_macro."""
    return next((metric.removesuffix(end) for end in _AVERAGES if metric.endswith(end)), metric)


def _build_interval(figure: Mapping[str, Any]) -> dict[str, float] | None:
    low, high = _keep_finite(figure["low"]), _keep_finite(figure["high"])
    return None if low is None or high is None else {"confidence": 0.95, "low": low, "high": high}


def _keep_finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
